import { accessSync, constants, statSync, writeFileSync } from 'node:fs'
import { dirname, resolve } from 'node:path'
import { performance } from 'node:perf_hooks'

import { Allocator, cuda, UnimallocError, whyNoCuda } from 'unimalloc'

import type { BackendChoice } from './arguments.js'
import { EXIT, Failure } from './exit.js'
import type { ExitCode } from './exit.js'
import { encodePng } from './png.js'
import { KERNEL, paint, seed, step, worstDifference } from './reaction.js'
import type { Dish } from './reaction.js'
import { bytes, facts, seconds, styled } from './text.js'

/** After so many steps the state is compared with an independent computation. */
const CHECKED_STEPS = 40
const TOLERANCE = 1e-3

type Layer = ReturnType<typeof layer>
const layer = (memory: Allocator, { width, height }: Dish) => memory.allocUnsafe(Float32Array, width * height)

interface Side {
  words: string
  dish: Dish
  steps: number
  advance(from: [Layer, Layer], to: [Layer, Layer]): void
  settle(): Promise<void>
  dispose(): void
}

function hostSide(words: string): Side {
  const dish = { width: 384, height: 256 }
  return {
    words,
    dish,
    steps: 3600,
    advance: ([u, v], [uNext, vNext]) => step(dish, u, v, uNext, vNext),
    settle: async () => {},
    dispose: () => {},
  }
}

function deviceSide(): Side {
  const code = cuda.compile(KERNEL)
  const kernel = code.kernel('gray_scott')
  const dish = { width: 1152, height: 768 }
  const [width, height] = [{ i32: dish.width }, { i32: dish.height }]
  return {
    words: `${cuda.devices()[0]?.name}, by a kernel`,
    dish,
    steps: 9000,
    advance: ([u, v], [uNext, vNext]) =>
      kernel.launch({ threads: [dish.width, dish.height], block: [32, 8], args: [u, v, uNext, vNext, width, height] }),
    settle: () => cuda.synchronize(),
    dispose: () => code[Symbol.dispose](),
  }
}

/** The GPU where the arrays are its, unless its compiler is missing: then the CPU works in the GPU's memory. */
function chooseSide(memory: Allocator): Side {
  if (memory.backend === 'host') return hostSide('CPU, in JavaScript')
  try {
    return deviceSide()
  } catch (error) {
    if (!(error instanceof UnimallocError && error.code === 'CUDA_UNAVAILABLE')) throw error
    return hostSide(`CPU, in JavaScript, since the kernel cannot be compiled: ${error.message}`)
  }
}

function progress(done: number): void {
  if (process.stderr.isTTY) process.stderr.write(done < 1 ? `\r  growing ${Math.floor(done * 100)} %` : '\r\x1b[K')
}

async function grow(memory: Allocator, side: Side) {
  const { dish, steps } = side
  let from: [Layer, Layer] = [layer(memory, dish), layer(memory, dish)]
  let to: [Layer, Layer] = [layer(memory, dish), layer(memory, dish)]
  seed(dish, from[0], from[1])
  let worst = Number.NaN
  let spent = 0
  for (let done = 0; done < steps;) {
    const batch = done === 0 ? CHECKED_STEPS : Math.min(200, steps - done)
    const started = performance.now()
    for (let index = 0; index < batch; index++) {
      side.advance(from, to)
      ;[from, to] = [to, from]
    }
    await side.settle()
    spent += performance.now() - started
    // The CPU reads the array that was computed, where it lies.
    if (done === 0) worst = worstDifference(dish, CHECKED_STEPS, from[1])
    done += batch
    progress(done / steps)
  }
  return { v: from[1], worst, spent: spent / 1000 }
}

/** Refuses a name for the picture that it cannot have: better now than after the work. */
function checkWritable(path: string): void {
  const folder = dirname(path)
  if (!statSync(folder, { throwIfNoEntry: false })?.isDirectory()) {
    throw new Failure(`--out: there is no folder ${folder}; make it, or choose another name for the picture`)
  }
  const there = statSync(path, { throwIfNoEntry: false })
  if (there?.isDirectory()) throw new Failure(`--out: ${path} is a folder; choose another name for the picture`)
  try {
    accessSync(there === undefined ? folder : path, constants.W_OK)
  } catch (error) {
    throw new Failure(`--out: ${path} may not be written by this user; choose another name for the picture`, {
      cause: error,
    })
  }
}

export async function demo({ backend, out }: { backend: BackendChoice; out: string }): Promise<ExitCode> {
  const path = resolve(out)
  checkWritable(path)
  // A name on the command line wins over UNIMALLOC_BACKEND, as an option in code does.
  const memory = new Allocator(backend === 'auto' ? {} : { backend })
  const side = chooseSide(memory)
  try {
    const { v, worst, spent } = await grow(memory, side)
    const { width, height } = side.dish
    const pixels = memory.allocUnsafe(Uint8Array, 3 * width * height)
    paint(v, pixels)
    writeFileSync(path, encodePng(pixels, width, height))
    const right = worst <= TOLERANCE
    const { peakBytes, totalCount } = memory.stats()
    const why = memory.backend === 'host' && backend === 'auto' ? ` (${whyNoCuda() ?? 'UNIMALLOC_BACKEND'})` : ''
    console.log(
      facts([
        ['memory', `${memory.backend}${why}`],
        ['computed on', side.words],
        ['dish', `${width} × ${height}, ${side.steps} steps in ${seconds(spent)}`],
        ['arrays', `${totalCount}, ${bytes(peakBytes)} in all; none was copied`],
        [
          'check',
          right
            ? styled('green', `as computed independently, to ${worst.toExponential(0)}`)
            : styled('red', `WRONG: differs from the independent computation by ${worst}`),
        ],
        ['picture', path],
      ]),
    )
    return right ? EXIT.ok : EXIT.failed
  } finally {
    memory[Symbol.dispose]()
    side.dispose()
  }
}
