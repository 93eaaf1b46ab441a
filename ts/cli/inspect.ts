import { constants } from 'node:buffer'
import { totalmem } from 'node:os'

import { Allocator, cuda, UnimallocError, whyNoCuda } from 'unimalloc'

import { FILL_PTX } from './kernel.js'
import { cudaVersion } from './text.js'
import { packageVersion } from './version.js'

/** Whether a thing works: with `limited` it does, differently or on a condition that `words` names. */
export type State = 'yes' | 'limited' | 'no'

export interface Capability {
  name: string
  state: State
  words: string
  /** The state is a defect: on a machine such as this it should work. */
  defect: boolean
}

/** What `doctor --json` prints. */
export interface Report {
  unimalloc: string
  /** There is nothing to mend. */
  ok: boolean
  /** What should work here, or was asked for, and does not; one sentence each. */
  problems: string[]
  /** Who asked for a GPU, in words: then a machine without one is not in order. */
  gpuRequiredBy: string | null
  runtime: { name: string; version: string; platform: string; arch: string; libc: string | null }
  native: { loaded: boolean; error: string | null }
  cuda: { usable: boolean; reason: string | null; driver: string | null; devices: cuda.DeviceInfo[] }
  backend: { taken: string | null; why: string }
  /** Bytes; null where there is no limit. */
  limits: { processBytes: number | null; hostBytes: number; largestArrayBytes: number }
  capabilities: Capability[]
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}

function runtime(): Report['runtime'] {
  const versions = process.versions as Record<string, string | undefined>
  const name = versions['bun'] ? 'bun' : versions['deno'] ? 'deno' : 'node'
  return {
    name,
    version: versions[name] ?? process.version,
    platform: process.platform,
    arch: process.arch,
    libc: process.platform === 'linux' ? linuxLibrary(name) : null,
  }
}

function linuxLibrary(runtimeName: string): string {
  // Looking up the names of open connections can take seconds. (Newer than the oldest Node's types.)
  Object.assign(process.report, { excludeNetwork: true })
  const { header } = process.report.getReport() as unknown as { header?: { glibcVersionRuntime?: string } }
  if (header?.glibcVersionRuntime) return `glibc ${header.glibcVersionRuntime}`
  // Deno and Bun have parts of the report only.
  return runtimeName === 'node' ? 'musl' : 'unknown'
}

/** Whether the engine itself reads `using`; TypeScript and bundlers translate it everywhere. */
function readsUsing(): boolean {
  try {
    // oxlint-disable-next-line typescript/no-implied-eval, no-new-func -- the only way to ask the parser; nothing runs
    return Boolean(new Function('{ using nothing = null }'))
  } catch {
    return false
  }
}

/** Runs one trial; what it throws is the reason why not. */
async function attempt(name: string, trial: () => Promise<Omit<Capability, 'name'>> | Omit<Capability, 'name'>) {
  try {
    return { name, ...(await trial()) }
  } catch (error) {
    return { name, state: 'no' as const, words: messageOf(error), defect: true }
  }
}

const yes = (words: string) => ({ state: 'yes' as const, words, defect: false })
const limited = (words: string) => ({ state: 'limited' as const, words, defect: false })
const no = (words: string) => ({ state: 'no' as const, words, defect: false })

function tryArrays(backend: 'host' | 'cuda-unified') {
  const own = new Allocator({ backend })
  try {
    const array = own.alloc(Float32Array, 4096)
    array[4095] = 1.5
    const right = array[0] === 0 && array[4095] === 1.5 && array.pointer % 256n === 0n
    array.free()
    if (!right || own.stats().currentCount !== 0)
      throw new Error('the array did not hold what was written; please report this')
  } finally {
    own[Symbol.dispose]()
  }
}

async function tryKernel(device: cuda.DeviceInfo) {
  const array = new Allocator({ backend: 'cuda-unified' }).alloc(Float32Array, 1000)
  const code = cuda.compile(FILL_PTX)
  try {
    code.kernel('fill_f32').launch({ threads: array.length, args: [array, { u32: array.length }, { f32: 2.5 }] })
    await cuda.synchronize()
    if (!array.every((value) => value === 2.5))
      throw new Error('a kernel ran and its result is not in the array; please report this')
  } finally {
    code[Symbol.dispose]()
    array.free()
  }
  return device.concurrentManagedAccess
    ? yes('a kernel wrote into an array and the CPU read it there')
    : limited('works, but the CPU may not touch unified memory while a kernel runs: every launch waits for its kernel')
}

function tryCompiler() {
  try {
    cuda.compile('extern "C" __global__ void nothing() {}')[Symbol.dispose]()
    return yes('NVRTC is here')
  } catch (error) {
    if (error instanceof UnimallocError && error.code === 'CUDA_UNAVAILABLE') return no(error.message)
    throw error
  }
}

async function gpuCapabilities(reason: string | null, device: cuda.DeviceInfo | undefined): Promise<Capability[]> {
  const names = ['memory that the GPU sees', 'kernels', 'CUDA C++ at run time', 'more memory than the GPU has']
  if (reason !== null || device === undefined) {
    const words = ['no usable GPU, see above', 'the same', 'the same', 'the same']
    return names.map((name, index) => ({ name, ...no(words[index] as string) }))
  }
  const [memory, kernels, compiler, oversubscription] = names as [string, string, string, string]
  return [
    await attempt(memory, () => {
      tryArrays('cuda-unified')
      return yes('allocated, written, read and freed')
    }),
    await attempt(kernels, () => tryKernel(device)),
    await attempt(compiler, tryCompiler),
    await attempt(oversubscription, () =>
      device.canOversubscribe
        ? yes('pages move on demand; raise UNIMALLOC_MAX_BYTES to go beyond what is free')
        : no('this device backs all unified memory from the start'),
    ),
  ]
}

/** Who asks for a GPU, if anyone does. */
function gpuRequiredBy(option: boolean): string | null {
  if (option) return '--require-gpu'
  return process.env['UNIMALLOC_BACKEND'] === 'cuda-unified' ? 'UNIMALLOC_BACKEND=cuda-unified' : null
}

/** Looks at everything, and tries what can be tried. Never throws: what fails is in the report. */
export async function inspect({ requireGpu }: { requireGpu: boolean }): Promise<Report> {
  const report: Report = {
    unimalloc: packageVersion(),
    ok: false,
    problems: [],
    gpuRequiredBy: gpuRequiredBy(requireGpu),
    runtime: runtime(),
    native: { loaded: false, error: null },
    cuda: { usable: false, reason: null, driver: null, devices: [] },
    backend: { taken: null, why: 'the native part is missing' },
    limits: { processBytes: null, hostBytes: totalmem(), largestArrayBytes: constants.MAX_LENGTH },
    capabilities: [],
  }
  const { capabilities, problems } = report
  try {
    report.cuda.reason = whyNoCuda()
    report.native.loaded = true
  } catch (error) {
    report.native.error = messageOf(error)
    problems.push(report.native.error)
    return report
  }
  if (report.cuda.reason === null) {
    try {
      report.cuda.devices = cuda.devices()
    } catch (error) {
      report.cuda.reason = messageOf(error)
      problems.push(report.cuda.reason)
    }
  }
  const [device] = report.cuda.devices
  report.cuda.usable = report.cuda.reason === null && device !== undefined
  if (report.gpuRequiredBy !== null && !report.cuda.usable) {
    problems.push(
      `a GPU was asked for, by ${report.gpuRequiredBy}, and none is usable: ${report.cuda.reason ?? 'there is no device'}`,
    )
  }
  if (device) report.cuda.driver = cudaVersion(device.driverVersion)

  try {
    const own = new Allocator()
    report.backend = { taken: own.backend, why: whyThisBackend(own.backend) }
    // The ceiling is looked at when memory is asked for.
    own.alloc(Uint8Array, 1).free()
    const { limitBytes } = own.stats()
    report.limits.processBytes = Number.isFinite(limitBytes) ? limitBytes : null
    own[Symbol.dispose]()
  } catch (error) {
    report.backend = { taken: null, why: messageOf(error) }
    const saidAlready = problems.length > 0 && error instanceof UnimallocError && error.code === 'CUDA_UNAVAILABLE'
    if (!saidAlready) problems.push(messageOf(error))
  }

  capabilities.push(
    await attempt('arrays in native memory', () => {
      tryArrays('host')
      return yes('allocated, written, read and freed on the host')
    }),
    ...(await gpuCapabilities(report.cuda.reason, device)),
    {
      name: 'arrays beyond 4 GiB',
      ...(constants.MAX_LENGTH > 2 ** 32
        ? yes('this engine has them')
        : no('this engine stops at 4 GiB: use several arrays')),
    },
    {
      name: 'the keyword `using`',
      ...(readsUsing() ? yes('this engine reads it') : limited('through TypeScript or a bundler; else call free()')),
    },
  )
  for (const { name, words, defect } of capabilities) {
    if (defect && !problems.includes(words)) problems.push(`${name}: ${words}`)
  }
  report.ok = problems.length === 0
  return report
}

function whyThisBackend(taken: string): string {
  const asked = process.env['UNIMALLOC_BACKEND']
  if (asked && asked !== 'auto') return `UNIMALLOC_BACKEND=${asked}`
  return taken === 'host' ? 'no GPU is usable' : 'there is a usable GPU'
}
