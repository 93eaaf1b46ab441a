// Several devices, of which a stand-in driver has as many as it is told to.
import anyTest from 'ava'

import { fakeCudaDirectory } from './helpers/fake-cuda.js'
import { showsOver } from './helpers/shows.js'

const directory = fakeCudaDirectory()
const test = directory === null ? anyTest.skip : anyTest.serial
const shows = showsOver(directory)

const TWO = { FAKE_CUDA_DEVICES: '2' }
const WITHOUT_ACCESS = { ...TWO, FAKE_CUDA_CONCURRENT: '0' }

/** An allocator, a stream and kernels of each device, and what the driver counts. */
const BOTH = `
  const library = require('koffi').load('libcuda.so.1')
  const counter = library.func('uint64_t fake_cuda_counter(const char *)')
  const count = (name) => Number(counter(name))
  const one = (device) => {
    const own = new Allocator({ device }), stream = new cuda.Stream({ device })
    const module = cuda.compile(SOURCE, { device })
    const run = (name, threads, ...args) => module.kernel(name).launch({ threads, args, stream })
    return { own, stream, run, fill: (array, value) => run('fill_f32', array.length, array, { u32: array.length }, { f32: value }), spin: (ms) => run('spin', 1, { u32: ms }) }
  }
`

test('devices are listed by index, and each option that names one takes those there are', async (t) => {
  await shows(
    t,
    `
    show(...cuda.devices().map(({ index }) => index))
    for (const device of [0, 1, 2]) {
      const made = [() => new Allocator({ device }), () => new cuda.Stream({ device }), () => cuda.compile(SOURCE, { device })]
      show(device, ...made.map((make) => code(() => (make(), 'made'))))
    }
    show(code(() => new Allocator({ device: -1 })), code(() => new Allocator({ device: 1, backend: 'host' })), message(() => new Allocator({ device: 2 })))`,
    [
      [0, 1],
      [0, 'made', 'made', 'made'],
      [1, 'made', 'made', 'made'],
      [2, 'INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'device is 2; this machine has 2, counted from 0: see cuda.devices()'],
    ],
    TWO,
  )
})

test('only devices that are used get a context', async (t) => {
  await shows(
    t,
    `${BOTH}
    show(count('live_contexts'))
    const own = new Allocator({ device: 2, maxBytes: '10%' })
    const array = own.alloc(Float32Array, 100)
    own.alloc(Uint8Array, 20 * 2 ** 20)
    const stream = new cuda.Stream({ device: 2 })
    cuda.compile(SOURCE, { device: 2 }).kernel('fill_f32').launch({ threads: 100, args: [array, { u32: 100 }, { f32: 3 }], stream })
    await cuda.synchronize()
    own.trim()
    show(array[99], own.stats().limitBytes > 0, count('live_contexts'))
    cuda.devices() // tells what is free, which takes one
    show(count('live_contexts'))`,
    [[0], [3, true, 1], [4]],
    { FAKE_CUDA_DEVICES: '4' },
  )
})

test('arrays of each device, of every way to be allocated, are used on it and share no memory', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    for (const placement of ['auto', 'host', 'device', 'read-mostly']) {
      for (const length of [100, 50_000, 5_000_000]) {
        for (const make of ['alloc', 'allocUnsafe']) {
          const arrays = [a, b].map(({ own }) => own[make](Float32Array, length, { placement }))
          a.fill(arrays[0], 1)
          b.fill(arrays[1], 2)
          await cuda.synchronize()
          const right = arrays.every((array, device) => array[0] === device + 1 && array[length - 1] === device + 1)
          const apart = Math.abs(Number(arrays[0].pointer - arrays[1].pointer)) >= 2 ** 16
          if (!right || !apart || a.own.owns(arrays[1])) show(placement, length, make, right, apart)
          b.own.free(arrays[0]) // by whichever allocator
          arrays[1].free()
        }
      }
    }
    a.own.trim()
    show(a.own.stats().currentCount, b.own.stats().currentCount, a.own.stats().pendingBytes, b.own.stats().pendingBytes)`,
    [[0, 0, 0, 0]],
    TWO,
  )
})

test('without a stream a launch uses one of the kernel’s device; a stream of another is refused', async (t) => {
  await shows(
    t,
    `${BOTH}
    const own = new Allocator({ device: 1 })
    const array = own.alloc(Float32Array, 10)
    const kernel = cuda.compile(SOURCE, { device: 1 }).kernel('fill_f32')
    kernel.launch({ threads: 10, args: [array, { u32: 10 }, { f32: 3 }] })
    await cuda.synchronize()
    show(array[9])
    for (const stream of [cuda.defaultStream, new cuda.Stream()]) {
      show(/device 1 .* device 0: compile it for that device, or use a stream/.test(message(() => kernel.launch({ threads: 10, args: [array, { u32: 10 }, { f32: 3 }], stream }))))
    }`,
    [[3], [true], [true]],
    TWO,
  )
})

test('a stream waits for an event of the other device; time between two devices is refused', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    const array = a.own.alloc(Float32Array, 100)
    const start = b.stream.record()
    a.spin(150)
    a.fill(array, 5)
    const filled = a.stream.record()
    b.stream.wait(filled)
    b.run('scale', 100, array, { u32: 100 }, { f32: 2 })
    const end = b.stream.record()
    show(end.done)
    await end.wait()
    show(array[99], filled.done, end.millisecondsSince(start) >= 100)
    show(code(() => end.millisecondsSince(filled)), message(() => end.millisecondsSince(filled)))`,
    [
      [false],
      [10, true, true],
      ['INVALID_ARGUMENT', 'times of two devices cannot be compared: record both events on one'],
    ],
    TWO,
  )
})

test('with concurrent access each device uses arrays of the other, and a free waits for both', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    for (const [mine, other] of [[a, b], [b, a]]) {
      const [x, y, z] = [mine.own.allocUnsafe(Float32Array, 100), other.own.alloc(Float32Array, 100), other.own.alloc(Float32Array, 100)]
      mine.fill(x, 1)
      mine.stream.synchronizeBlocking()
      other.fill(y, 2)
      other.run('vector_add', 100, x, y, z, { u32: 100 })
      other.stream.copy(x, z)
      await other.stream.synchronize()
      other.stream.prefetch(x, 'device')
      show(z[99], x[99], other.stream.whyNoPrefetch)
    }
    const shared = a.own.alloc(Float32Array, 1000)
    const { pointer } = shared
    a.fill(shared, 1)
    b.spin(200)
    b.fill(shared, 2)
    shared.free()
    await a.stream.synchronize()
    const others = Array.from({ length: 200 }, () => a.own.alloc(Float32Array, 1000))
    show(a.own.stats().pendingBytes >= 4000, others.some((other) => other.pointer === pointer))
    a.own.trim()
    show(a.own.stats().pendingBytes)`,
    [[3, 3, null], [3, 3, null], [true, false], [0]],
    TWO,
  )
})

test('realloc waits for work of whichever device', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    const array = a.own.alloc(Float32Array, 1000)
    b.spin(150)
    b.fill(array, 7)
    const longer = a.own.realloc(array, 50_000)
    show(longer[0], longer[999], longer[1000])`,
    [[7, 7, 0]],
    TWO,
  )
})

test('without concurrent access an array of the other device is refused, and what can be done is said', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    const here = b.own.alloc(Float32Array, 100)
    const arrays = [a.own.allocUnsafe(Float32Array, 20_000), a.own.alloc(Float32Array, 20_000), a.own.alloc(Float32Array, 5_000_000)]
    arrays.push(a.own.alloc(Float32Array, 20_000).subarray(5, 105), a.own.alloc(Float32Array, 100, { placement: 'device' }))
    for (const array of arrays) show(code(() => b.fill(array, 1)), code(() => b.stream.fill(array, 1)))
    show(message(() => b.run('vector_add', 100, here, arrays[1], here, { u32: 100 })))
    show(count('cuLaunchKernel'), a.own.stats().pendingBytes)
    b.stream.copy(here, arrays[0].fill(4).subarray(0, 100))
    b.run('scale', 100, here, { u32: 100 }, { f32: 2 })
    await cuda.synchronize()
    show(here[99])
    for (const mailbox of [a.own.alloc(Float32Array, 50_000, { placement: 'host' }), a.own.alloc(Float32Array, 100)]) {
      b.fill(mailbox, 6)
      await cuda.synchronize()
      show(mailbox.every((value) => value === 6))
    }`,
    [
      ...Array.from({ length: 5 }, () => ['INVALID_ARGUMENT', 'INVALID_ARGUMENT']),
      [
        "argument 1: the memory was allocated for device 0, and without concurrent managed access device 1 does not reach it: allocate it for device 1, or with the placement 'host', or copy it to memory of device 1 with a stream of that device",
      ],
      [0, 0],
      [8],
      [true],
      [true],
    ],
    WITHOUT_ACCESS,
  )
})

test('a fault on one device leaves the other as it was', async (t) => {
  await shows(
    t,
    `${BOTH}
    const [a, b] = [one(0), one(1)]
    const [dead, alive] = [b.own.alloc(Float32Array, 100), a.own.alloc(Float32Array, 100)]
    b.run('fault', 1)
    show(await rejected(b.stream.synchronize()), code(() => b.own.alloc(Uint8Array, 100 * 2 ** 20)), code(() => new cuda.Stream({ device: 1 })))
    a.fill(alive, 3)
    await a.stream.synchronize()
    show(alive[99], code(() => a.fill(dead, 1)), /device 1/.test(message(() => a.fill(dead, 1))))
    a.fill(alive, 4)
    show(await rejected(cuda.synchronize()), alive[99], a.own.alloc(Uint8Array, 50 * 2 ** 20).length > 0)`,
    [
      ['CONTEXT_LOST', 'CONTEXT_LOST', 'CONTEXT_LOST'],
      [3, 'CONTEXT_LOST', true],
      ['CONTEXT_LOST', 4, true],
    ],
    TWO,
  )
})

test('what one device has no room for, the other has: the ceilings are of each', async (t) => {
  await shows(
    t,
    `
    const [a, b] = [0, 1].map((device) => new Allocator({ device }))
    const size = 40 * 2 ** 20
    const first = a.alloc(Uint8Array, size)
    show(code(() => a.alloc(Uint8Array, size)), b.alloc(Uint8Array, size).length === size, code(() => b.alloc(Uint8Array, size)))
    first.free()
    show(a.alloc(Uint8Array, size).length === size)
    show(new Allocator({ device: 1, maxBytes: '25%' }).stats().limitBytes)`,
    [['OUT_OF_MEMORY', true, 'OUT_OF_MEMORY'], [true], [2 ** 28]],
    { ...TWO, FAKE_CUDA_FREE_BYTES: '64MiB', FAKE_CUDA_TOTAL_BYTES: '1GiB' },
  )
})

test('a ceiling of the process holds for all devices together', async (t) => {
  await shows(
    t,
    `
    const [a, b] = [0, 1].map((device) => new Allocator({ device }))
    const size = 40 * 2 ** 20
    const first = a.alloc(Uint8Array, size)
    show(code(() => b.alloc(Uint8Array, size)))
    first.free()
    show(b.alloc(Uint8Array, size).length === size, a.stats().reservedBytes <= 64 * 2 ** 20)`,
    [['OUT_OF_MEMORY'], [true, true]],
    { ...TWO, UNIMALLOC_MAX_BYTES: '64MiB' },
  )
})
