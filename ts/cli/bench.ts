import { performance } from 'node:perf_hooks'

import { Allocator, cuda } from 'unimalloc'

import type { BackendChoice } from './arguments.js'
import { EXIT } from './exit.js'
import type { ExitCode } from './exit.js'
import { FILL_PTX } from './kernel.js'
import { bytes, seconds, styled, table } from './text.js'

const SIZES = [64, 1024, 16 * 1024, 256 * 1024, 4 * 1024 * 1024]
const BATCHES = 9
/** Long enough for the clock, short enough that a batch is seldom interrupted. */
const BATCH_SECONDS = 0.01

interface Row {
  bytes: number
  allocUnsafe: number
  alloc: number
  buffer: number
  typedArray: number
}

const median = (values: number[]) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)] as number

/** Seconds of one call: the median of batches, with the event loop turning between them so that buffers are released. */
async function time(call: () => void): Promise<number> {
  const batch = (count: number) => {
    const started = performance.now()
    for (let index = 0; index < count; index++) call()
    return (performance.now() - started) / 1000
  }
  // The first calls map memory and are interpreted, which takes longer than a batch.
  for (const end = performance.now() + 2000 * BATCH_SECONDS; performance.now() < end;) call()
  await new Promise(setImmediate)
  let count = 1
  for (let spent = batch(1); spent < BATCH_SECONDS && count < 1e7; spent = batch(count)) {
    count = Math.ceil(count * Math.min(10, (1.2 * BATCH_SECONDS) / Math.max(spent, 1e-7)))
    await new Promise(setImmediate)
  }
  const times: number[] = []
  for (let index = 0; index < BATCHES; index++) {
    times.push(batch(count) / count)
    await new Promise(setImmediate)
  }
  return median(times)
}

async function pairs(memory: Allocator): Promise<Row[]> {
  const rows: Row[] = []
  for (const size of SIZES) {
    rows.push({
      bytes: size,
      allocUnsafe: await time(() => memory.allocUnsafe(Float32Array, size / 4).free()),
      alloc: await time(() => memory.alloc(Float32Array, size / 4).free()),
      buffer: await time(() => void Buffer.allocUnsafe(size)),
      typedArray: await time(() => void new Float32Array(size / 4)),
    })
  }
  return rows
}

/** Write 4 KiB, run a kernel over it, read it back: what a call into the GPU costs at least. */
async function roundTrip(memory: Allocator): Promise<number> {
  const array = memory.alloc(Float32Array, 1024)
  const code = cuda.compile(FILL_PTX)
  const kernel = code.kernel('fill_f32')
  let value = 0
  const spent = await time(() => {
    value = (value + 1) % 1000
    array.fill(-1)
    kernel.launch({ threads: 1024, args: [array, { u32: 1024 }, { f32: value }] })
    cuda.defaultStream.synchronizeBlocking()
    if (array[1023] !== value) throw new Error('the kernel ran and its result is not in the array; please report this')
  })
  code[Symbol.dispose]()
  array.free()
  return spent
}

export async function bench({ backend, json }: { backend: BackendChoice; json: boolean }): Promise<ExitCode> {
  const memory = new Allocator(backend === 'auto' ? {} : { backend })
  try {
    const rows = await pairs(memory)
    const trip = memory.backend === 'cuda-unified' ? await roundTrip(memory) : null
    if (json) {
      console.log(JSON.stringify({ backend: memory.backend, unit: 'seconds', pairs: rows, roundTrip: trip }, null, 2))
      return EXIT.ok
    }
    console.log(`${styled('bold', 'One allocation and its free')}, on the backend ${memory.backend}\n`)
    const head = ['size', 'allocUnsafe', 'alloc', 'Buffer.allocUnsafe', 'new Float32Array']
    const cells = rows.map((row) => [
      bytes(row.bytes),
      ...[row.allocUnsafe, row.alloc, row.buffer, row.typedArray].map((value) => seconds(value)),
    ])
    console.log(table(head, cells))
    console.log(
      "\nNode's own two have no free: what the garbage collector does for them is in the figures only in part.",
    )
    if (trip !== null) console.log(`\nRound trip (write 4 KiB, run a kernel, read it back): ${seconds(trip)}`)
    return EXIT.ok
  } finally {
    memory[Symbol.dispose]()
  }
}
