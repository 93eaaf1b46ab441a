import { disposableEverywhere, dispose } from '../dispose.js'
import { invalid, show, typed, UnimallocError } from '../errors.js'
import { name } from '../naming.js'
import { native } from '../native.js'
import type { Native } from '../native.js'
import { needsGpu, onGpu } from './needs-gpu.js'
import { checkKeys, count } from '../options.js'
import { checkReceivers } from '../receivers.js'
import { packArguments } from './arguments.js'
import type { KernelArgument } from './arguments.js'
import { defaultStream, settled, Stream } from './stream.js'
import { streamHandle } from './stream-handle.js'

type NativeModule = ReturnType<Native['moduleCompile']>
type NativeKernel = ReturnType<Native['moduleKernel']>

/** How many in each direction: x, then y and z, 1 where left out. */
export type Dim = number | readonly [x: number, y?: number, z?: number]

/** How to compile. Unknown keys are errors. */
export interface CompileOptions {
  /** Index of the device that the code is for. Default 0. */
  device?: number
  /** What the compiler's messages call the source. */
  name?: string
  /** Flags of NVRTC, as `--use_fast_math`. PTX text takes none. */
  flags?: string[]
}

/** How to launch. Unknown keys are errors. */
export type LaunchOptions = {
  /** One for each parameter of the kernel. */
  args: readonly KernelArgument[]
  /** Threads of a block. Default: what fills the device best. */
  block?: Dim
  /** Bytes of dynamic shared memory of a block. Default 0. */
  sharedBytes?: number
  /** Default {@link defaultStream}, or the default stream of the kernel's device. */
  stream?: Stream
  /**
   * Do not wait for the kernel on a device where the CPU may not touch unified memory meanwhile. The program then must touch none
   * before the stream is synchronised: an access ends the process.
   */
  unsafeConcurrent?: boolean
} & (
  | {
      /** Blocks. */
      grid: Dim
    }
  | {
      /** Threads in all: rounded up to whole blocks, so that the kernel must check its index. */
      threads: Dim
    }
)

/** Code on a device. Its kernels keep it loaded. */
export interface Module extends Disposable {
  /** The kernel of that name: one declared `extern "C" __global__`, or one that no other overloads. */
  kernel(name: string): Kernel
}

/** A function that runs on the device. */
export interface Kernel {
  /**
   * Queues the kernel and returns. Arrays among the arguments stay alive until it is done. The number and the sizes of the
   * arguments are checked where the driver can say what the kernel takes.
   */
  launch(config: LaunchOptions): void
}

/** Compiles CUDA C++ by NVRTC, or loads PTX text, and blocks the thread meanwhile. `COMPILE_FAILED` has the compiler's log. */
export function compile(source: string, options: CompileOptions = {}): Module {
  const { device, name, flags } = checkCompile('compile', source, options)
  return new LoadedModule(onGpu(() => typed(() => native().moduleCompile(source, device, name, flags))))
}

/** As {@link compile}, without blocking the event loop. */
export async function compileAsync(source: string, options: CompileOptions = {}): Promise<Module> {
  const { device, name, flags } = checkCompile('compileAsync', source, options)
  try {
    return new LoadedModule(await settled(native().moduleCompileAsync(source, device, name, flags)))
  } catch (error) {
    throw needsGpu(error)
  }
}

function checkCompile(what: string, source: unknown, options: CompileOptions): Required<CompileOptions> {
  if (typeof source !== 'string' || source.trim() === '') {
    throw invalid(`${what}: the source is ${show(source)}; pass CUDA C++ or PTX as text`)
  }
  checkKeys(what, options, ['device', 'name', 'flags'])
  const { device = 0, name = '', flags = [] } = options
  if (typeof name !== 'string') throw invalid(`${what}: name is ${show(name)}; pass text`)
  if (!Array.isArray(flags) || flags.some((flag) => typeof flag !== 'string')) {
    throw invalid(`${what}: flags are ${show(flags)}; pass an array of text, as ['--use_fast_math']`)
  }
  return { device: count(`${what}: device`, device, 65535), name, flags }
}

class LoadedModule implements Module {
  #module: NativeModule | null

  static {
    name(this, 'Module')
    disposableEverywhere(this.prototype)
    checkReceivers(this, 'module', (value) => #module in value)
  }

  constructor(module: NativeModule) {
    this.#module = module
  }

  kernel(name: string): Kernel {
    const module = this.#module
    if (module === null) throw new UnimallocError('DISPOSED', 'the module was disposed: compile it again')
    if (typeof name !== 'string' || name === '')
      throw invalid(`kernel: the name is ${show(name)}; pass the kernel's name`)
    return new LoadedKernel(typed(() => native().moduleKernel(module, name)))
  }

  [dispose](): void {
    this.#module = null
  }
}

let said = false

/** Who measures should know why nothing overlaps; who does not can go on as on any other device. */
function sayThatLaunchesWait(): void {
  if (said) return
  said = true
  process.emitWarning(
    'launch waits for each kernel on this device: the CPU may touch no unified memory while one runs. ' +
      'If your program touches none before it synchronises the stream, pass unsafeConcurrent: true.',
    { code: 'UNIMALLOC_LAUNCH_WAITS' },
  )
}

const LAUNCH_KEYS = ['args', 'block', 'sharedBytes', 'stream', 'unsafeConcurrent', 'grid', 'threads'] as const
const MAX_DIM = 2 ** 32 - 1

class LoadedKernel implements Kernel {
  readonly #kernel: NativeKernel
  readonly #device: number

  static {
    name(this, 'Kernel')
    checkReceivers(this, 'kernel', (value) => #kernel in value)
  }

  constructor(kernel: NativeKernel) {
    this.#kernel = kernel
    this.#device = typed(() => native().kernelDevice(kernel))
  }

  launch(config: LaunchOptions): void {
    checkKeys('launch', config, LAUNCH_KEYS)
    const options = config as LaunchOptions & { grid?: Dim; threads?: Dim }
    const { args, sharedBytes = 0, unsafeConcurrent = false } = options
    if (typeof unsafeConcurrent !== 'boolean') {
      throw invalid(`launch: unsafeConcurrent is ${show(unsafeConcurrent)}; pass true or false`)
    }
    const stream = streamHandle(options.stream ?? streamOf(this.#device))
    const shared = count('launch: sharedBytes', sharedBytes, MAX_DIM)
    const shape = this.#shape(options, shared)
    const { kinds, values, held } = packArguments(args)
    const launch = () => native().kernelLaunch(this.#kernel, stream, shape, kinds, values, held, unsafeConcurrent)
    if (typed(launch)) sayThatLaunchesWait()
  }

  /** Grid and block in x, y, z, then bytes of shared memory. */
  #shape(options: { grid?: Dim; threads?: Dim; block?: Dim }, shared: number): Uint32Array {
    const { grid, threads, block } = options
    if ((grid === undefined) === (threads === undefined)) {
      throw invalid('launch: pass either grid, in blocks, or threads, in all')
    }
    if (threads === undefined) {
      const blocks = dim('launch: grid', grid as Dim)
      return Uint32Array.of(...blocks, ...this.#block(block, 1, shared), shared)
    }
    const all = dim('launch: threads', threads)
    const dimensions = all[2] > 1 ? 3 : all[1] > 1 ? 2 : 1
    const size = this.#block(block, dimensions, shared)
    const blocks = all.map((value, axis) => Math.ceil(value / (size[axis] as number)))
    return Uint32Array.of(...blocks, ...size, shared)
  }

  #block(block: Dim | undefined, dimensions: number, shared: number): Triple {
    if (block !== undefined) {
      const given = dim('launch: block', block)
      if (given.includes(0))
        throw invalid(`launch: block is ${given.join(' x ')}; every direction has at least 1 thread`)
      return given
    }
    const size = typed(() => native().kernelSuggestedBlock(this.#kernel, shared))
    return spread(size, dimensions)
  }
}

type Triple = [number, number, number]

/** A block of at most `size` threads in one to three dimensions: rows of a warp, so that neighbours read neighbours. */
function spread(size: number, dimensions: number): Triple {
  if (dimensions === 1) return [size, 1, 1]
  const x = Math.min(32, size)
  const rest = Math.floor(size / x)
  if (dimensions === 2) return [x, rest, 1]
  const z = Math.min(4, rest)
  return [x, Math.floor(rest / z), z]
}

function dim(what: string, value: Dim): Triple {
  const parts: readonly unknown[] = typeof value === 'number' ? [value] : Array.isArray(value) ? value : [value]
  if (parts.length < 1 || parts.length > 3) throw invalid(`${what} has ${parts.length} numbers; pass one to three`)
  const [x, y, z] = [0, 1, 2].map((axis) =>
    axis > 0 && parts[axis] === undefined ? 1 : count(`${what}[${axis}]`, parts[axis], MAX_DIM),
  )
  return [x as number, y as number, z as number]
}

const streams = new Map<number, Stream>()

/** The default stream of a device. */
function streamOf(device: number): Stream {
  if (device === 0) return defaultStream
  let stream = streams.get(device)
  if (stream === undefined) streams.set(device, (stream = new Stream({ device })))
  return stream
}
