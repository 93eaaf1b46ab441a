// Blocks of a magazine that the GPU uses, against a stand-in driver.
import anyTest from 'ava'
import type { ExecutionContext } from 'ava'

import { fakeCudaDirectory } from './helpers/fake-cuda.js'
import { showsOver } from './helpers/shows.js'

const directory = fakeCudaDirectory()
const test = directory === null ? anyTest.skip : anyTest.serial
const show = showsOver(directory)

/** Runs the body of an async function in a process with the stand-in driver; what it shows must be this. */
function shows(t: ExecutionContext, body: string, expected: unknown[][]): Promise<void> {
  return show(
    t,
    `
    const { Worker } = require('node:worker_threads')
    const { allocator } = require('unimalloc')
    const module = cuda.compile(SOURCE)
    const fill = (array, value, stream) => module.kernel('fill_f32').launch({ threads: array.length, args: [array, { u32: array.length }, { f32: value }], stream })
    const spin = (ms, stream) => module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: ms }], stream })
    const own = new Allocator({ backend: 'cuda-unified' })
    // What waits for a stream is taken up when somebody looks: more than once, if the stream has yet to pass.
    const settled = async (allocator) => { for (let i = 0; i < 200 && allocator.stats().pendingBytes > 0; i++) await new Promise((go) => setTimeout(go, 5)); return allocator.stats().pendingBytes }
    ${body}`,
    expected,
  )
}

test('a kernel reads and writes a block of the magazine; so does one that gets a part of it', async (t) => {
  await shows(
    t,
    `
    const [array, neighbour] = [own.allocUnsafe(Float32Array, 100), own.allocUnsafe(Float32Array, 100).fill(1)]
    fill(array, 3)
    await cuda.synchronize()
    show(array.every((value) => value === 3), neighbour.every((value) => value === 1), array.buffer === neighbour.buffer)
    fill(array.subarray(50), 4)
    await cuda.synchronize()
    show(array[49], array[50], array[99])
    array.free(); neighbour.free()
    show(own.stats().currentCount, await settled(own))`,
    [
      [true, true, true],
      [3, 4, 4],
      [0, 0],
    ],
  )
})

test('freed while a kernel uses it, a block is pending, and its memory is used again only afterwards', async (t) => {
  await shows(
    t,
    `
    const array = own.allocUnsafe(Float32Array, 1000)
    const address = array.pointer
    spin(600)
    fill(array, 9)
    array.free()
    show(array.freed, own.stats().currentCount, own.stats().currentBytes, own.stats().pendingBytes, own.stats().requestedBytes)
    show(code(() => array.free()), code(() => own.free(new Uint8Array(array.buffer, array.byteOffset, 4))), code(() => pointerOf(array)))
    const others = Array.from({ length: 300 }, () => own.allocUnsafe(Float32Array, 1000).fill(0))
    show(others.some((other) => other.pointer === address))
    await cuda.synchronize()
    show(others.every((other) => other.every((value) => value === 0)), await settled(own))
    for (const other of others) other.free()
    show(own.stats().currentBytes)`,
    [[true, 0, 0, 4096, 0], ['DOUBLE_FREE', 'DOUBLE_FREE', 'INVALID_ARGUMENT'], [false], [true, 0], [0]],
  )
})

test('a view of a block that was launched frees it as well; the limit counts what is pending', async (t) => {
  await shows(
    t,
    `
    const small = new Allocator({ backend: 'cuda-unified', maxBytes: 4096 })
    const array = small.allocUnsafe(Float32Array, 1000)
    spin(40)
    fill(array, 2)
    small.free(new DataView(array.buffer, array.byteOffset, 8))
    show(array.freed, small.stats().pendingBytes)
    // Waits for the kernel, because nothing else makes room.
    const next = small.allocUnsafe(Float32Array, 1000)
    show(next.length, small.stats().pendingBytes, small.stats().currentBytes)`,
    [
      [true, 4096],
      [1000, 0, 4096],
    ],
  )
})

test('shared, launched and freed in any order', async (t) => {
  await shows(
    t,
    `
    const first = own.allocUnsafe(Float32Array, 64)
    fill(first, 5)
    const token = share(first)
    const other = attach(token)
    first.free()
    await cuda.synchronize()
    show(other.every((value) => value === 5), own.stats().currentCount)
    spin(30)
    fill(other, 6)
    other.free()
    show(own.stats().currentCount, own.stats().pendingBytes > 0)
    show(await settled(own))
    const grown = own.allocUnsafe(Float32Array, 10)
    spin(30)
    fill(grown, 7)
    const larger = own.realloc(grown, 1000)
    await settled(own)
    show(larger.subarray(0, 10).every((value) => value === 7), grown.freed)
    const stream = new cuda.Stream()
    const used = own.allocUnsafe(Float32Array, 256)
    spin(30, stream)
    used.free({ stream })
    show(own.stats().pendingBytes)
    stream.fill(larger, 1)
    stream.copy(larger.subarray(0, 10), larger.subarray(20, 30))
    stream.prefetch(larger, 'device')
    await stream.synchronize()
    show(larger[0] !== 7, await settled(own))
    larger.free()
    own[Symbol.dispose]()
    show(own.stats().currentCount, await settled(own))`,
    [[true, 1], [0, true], [0], [true, true], [1024], [true, 0], [0, 0]],
  )
})

test('an allocator that is disposed frees what kernels still use, afterwards', async (t) => {
  await shows(
    t,
    `
    const arrays = Array.from({ length: 50 }, () => own.allocUnsafe(Float32Array, 100))
    spin(40)
    for (const array of arrays.slice(0, 20)) fill(array, 1)
    own[Symbol.dispose]()
    show(own.stats().currentCount, own.stats().pendingBytes === 20 * 512, arrays.every((array) => array.freed))
    show(await settled(own))`,
    [[0, true, true], [0]],
  )
})

test('a worker that ends with blocks that kernels use, and with pending ones, leaves nothing', async (t) => {
  await shows(
    t,
    `
    const body = \`
      const { allocUnsafe, cuda, share } = require('unimalloc')
      const module = cuda.compile('extern "C" __global__ void fill_f32(float *p, unsigned int n, float value) {} extern "C" __global__ void spin(unsigned int ms) {}')
      const arrays = Array.from({ length: 40 }, () => allocUnsafe(Float32Array, 1000))
      module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 30 }] })
      for (const array of arrays) module.kernel('fill_f32').launch({ threads: 1000, args: [array, { u32: 1000 }, { f32: 1 }] })
      for (const array of arrays.slice(0, 10)) array.free()
      share(arrays[20])
      globalThis.kept = arrays\`
    for (let i = 0; i < 3; i++) await new Promise((done) => new Worker(body, { eval: true }).on('exit', done).on('error', (error) => show(String(error))))
    await cuda.synchronize()
    for (let i = 0; i < 100 && allocator.stats().reservedBytes > 0; i++) { allocator.trim(); await new Promise((go) => setTimeout(go, 5)) }
    show(allocator.stats().reservedBytes, allocator.stats().quarantinedCount)`,
    [[0, 0]],
  )
})

test('an array of the host backend is refused by a launch', async (t) => {
  await shows(
    t,
    `
    const array = new Allocator({ backend: 'host' }).allocUnsafe(Float32Array, 10)
    show(code(() => fill(array, 1)), code(() => fill(new Float32Array(3), 1)))
    const dead = own.allocUnsafe(Float32Array, 10)
    dead.free()
    show(code(() => fill(dead, 1)), array.length)`,
    [
      ['INVALID_ARGUMENT', 'NOT_OURS'],
      ['INVALID_ARGUMENT', 10],
    ],
  )
})

test('a warmed-up loop of allocUnsafe, launch and free calls the driver for the launch alone', async (t) => {
  await shows(
    t,
    `
    const stream = new cuda.Stream()
    const round = () => { for (let i = 0; i < 500; i++) { const array = own.allocUnsafe(Float32Array, 256); fill(array, i, stream); array.free() } }
    for (let i = 0; i < 5; i++) { round(); await stream.synchronize() }
    const before = own.stats()
    for (let i = 0; i < 5; i++) { round(); await stream.synchronize() }
    const after = own.stats()
    show(after.backendAllocations - before.backendAllocations, after.totalCount - before.totalCount, after.currentCount)`,
    [[0, 2500, 0]],
  )
})
