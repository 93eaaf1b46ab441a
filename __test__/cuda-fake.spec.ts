// CUDA's part of the package against a stand-in driver: the real loading path, real addresses, injected faults.
import anyTest from 'ava'

import { fakeCudaDirectory, runWithFakeCuda } from './helpers/fake-cuda.js'
import { program, showsOver } from './helpers/shows.js'

const directory = fakeCudaDirectory()
// One process at a time: some of them measure.
const test = directory === null ? anyTest.skip : anyTest.serial

const shows = showsOver(directory)

test('auto takes CUDA, and devices are described', async (t) => {
  await shows(
    t,
    `
    const [device] = cuda.devices()
    show(isCudaAvailable(), whyNoCuda(), new Allocator().backend, cuda.devices().length)
    show(device.name, device.index, device.totalBytes, device.computeCapability, device.concurrentManagedAccess, device.driverVersion)`,
    [
      [true, null, 'cuda-unified', 1],
      ['Fake CUDA device', 0, 16 * 2 ** 30, [9, 0], true, 13000],
    ],
  )
})

test('the main job: allocate, fill, launch, read from the same array', async (t) => {
  await shows(
    t,
    `
    const a = alloc(Float32Array, 1000), b = alloc(Float32Array, 1000), c = alloc(Float32Array, 1000)
    a.forEach((_, index) => { a[index] = index; b[index] = 2 * index })
    const module = cuda.compile(SOURCE)
    const kernel = module.kernel('vector_add')
    kernel.launch({ threads: 1000, args: [a, b, c, { u32: 1000 }] })
    await cuda.synchronize()
    show(c.every((value, index) => value === 3 * index))
    const half = c.subarray(500)
    module.kernel('fill_f32').launch({ grid: 4, block: 128, args: [half, { u32: 500 }, { f32: 1.5 }] })
    await cuda.defaultStream.synchronize()
    show(c[499], c[500], c[999])`,
    [[true], [1497, 1.5, 1.5]],
  )
})

test('PTX text and compileAsync', async (t) => {
  await shows(
    t,
    `
    const ptx = '.version 8.0\\n.target sm_70\\n.address_size 64\\n.visible .entry scale(.param .u64 p, .param .u32 n, .param .f32 f) { ret; }'
    const module = await cuda.compileAsync(ptx, { name: 'mine.ptx' })
    const array = alloc(Float32Array, 10)
    array.fill(2)
    const stream = new cuda.Stream()
    module.kernel('scale').launch({ threads: [10], args: [array, { u32: 10 }, { f32: 3 }], stream })
    stream.synchronizeBlocking()
    show(array[9])
    module[Symbol.dispose]()
    show(code(() => module.kernel('scale')))`,
    [[6], ['DISPOSED']],
  )
})

test('what does not compile has the log; an unknown kernel and bad options are refused', async (t) => {
  await shows(
    t,
    `
    const bad = 'extern "C" __global__ void broken(float *p { }'
    try { cuda.compile(bad) } catch (error) { show(error.code, typeof error.log, error.log.length > 0, error.cuda !== undefined) }
    show(await rejected(cuda.compileAsync(bad)))
    show(code(() => cuda.compile('')), code(() => cuda.compile(5)), code(() => cuda.compile(SOURCE, { flag: [] })), code(() => cuda.compile(SOURCE, { flags: '-O' })), code(() => cuda.compile(SOURCE, { device: 7 })))
    show(await rejected(cuda.compileAsync(SOURCE, { device: -1 })))
    const module = cuda.compile(SOURCE)
    show(code(() => module.kernel('nope')) !== 'nothing', code(() => module.kernel('')), code(() => module.kernel(5)))`,
    [
      ['COMPILE_FAILED', 'string', true, true],
      ['COMPILE_FAILED'],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
      ['INVALID_ARGUMENT'],
      [true, 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
    ],
  )
})

test('wrong launches are refused, and the process goes on', async (t) => {
  const launches = [
    `{ args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ grid: 1, threads: 1, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 4 }] }`,
    `{ threads: 4, args: [a, { u32: 4 }, { f64: 1 }] }`,
    `{ threads: 4, args: [a, 4, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { u32: -4 }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 1.5 }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 4n }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 4 }, { f32: '1' }] }`,
    `{ threads: 4, args: [a, { u32: 4 }, { f32: 1, f64: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 4 }, { float: 1 }] }`,
    `{ threads: 4, args: [a, { u32: 4 }, null] }`,
    `{ threads: 4, args: [dead, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, args: 'a' }`,
    `{ threads: 4, arg: [] }`,
    `{ threads: -1, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 0, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: NaN, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: [1, 2, 3, 4], args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, block: 4096, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, block: 0, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ grid: [1, 1e6, 1], args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, sharedBytes: 1e9, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, stream: {}, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, unsafeConcurrent: 1, args: [a, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, args: [onHost, { u32: 4 }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, { toString: 4 }, { f32: 1 }] }`,
    `{ threads: 4, args: [a, , { f32: 1 }] }`,
    // Freed after its address could have been looked up.
    `{ threads: 4, args: [pooled, { get u32() { pooled.free(); return 4 } }, { f32: 1 }] }`,
    `null`,
  ]
  await shows(
    t,
    `
    const kernel = cuda.compile(SOURCE).kernel('fill_f32')
    const a = alloc(Float32Array, 4), dead = alloc(Float32Array, 4), onHost = new Allocator({ backend: 'host' }).alloc(Float32Array, 4)
    const pooled = allocUnsafe(Float32Array, 4)
    dead.free()
    for (const config of [${launches.join(', ')}]) show(code(() => kernel.launch(config)))
    show(code(() => kernel.launch({ threads: 4, args: [new Float32Array(4), { u32: 4 }, { f32: 1 }] })))
    kernel.launch({ threads: 4, args: [a, { u32: 4 }, { f32: 9 }] })
    await cuda.synchronize()
    show(Array.from(a))`,
    [...launches.map(() => ['INVALID_ARGUMENT']), ['NOT_OURS'], [[9, 9, 9, 9]]],
  )
})

test('streams: order, events, time, and what is refused', async (t) => {
  await shows(
    t,
    `
    const module = cuda.compile(SOURCE)
    const [one, two] = [new cuda.Stream(), new cuda.Stream({ device: 0 })]
    const array = alloc(Float32Array, 100)
    const start = one.record()
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 150 }], stream: one })
    module.kernel('fill_f32').launch({ threads: 100, args: [array, { u32: 100 }, { f32: 5 }], stream: one })
    const event = one.record()
    two.wait(event)
    module.kernel('scale').launch({ threads: 100, args: [array, { u32: 100 }, { f32: 2 }], stream: two })
    show(event.done)
    let ticks = 0
    const timer = setInterval(() => ticks++, 5)
    await two.synchronize()
    clearInterval(timer)
    show(array[99], event.done, ticks >= 3)
    await event.wait()
    const ms = event.millisecondsSince(start)
    show(ms >= 140 && ms < 5000, typeof one.handle, one.handle !== two.handle)
    const foreign = cuda.Stream.from(one.handle)
    show(foreign.handle === one.handle, code(() => cuda.Stream.from(5)), code(() => cuda.Stream.from(-1n)))
    foreign[Symbol.dispose]()
    event[Symbol.dispose](); event[Symbol.dispose]()
    show(code(() => event.done), code(() => two.wait(event)), code(() => two.wait({})), await rejected(event.wait()))
    two[Symbol.dispose](); two[Symbol.dispose]()
    show(code(() => two.record()), await rejected(two.synchronize()), code(() => two.handle), code(() => cuda.defaultStream[Symbol.dispose]()), code(() => new cuda.Stream({ device: 3 })), code(() => new cuda.Stream({ dev: 3 })), code(() => new cuda.Event()))`,
    [
      [false],
      [10, true, true],
      [true, 'bigint', true],
      [true, 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
      ['DISPOSED', 'DISPOSED', 'INVALID_ARGUMENT', 'DISPOSED'],
      [
        'DISPOSED',
        'DISPOSED',
        'DISPOSED',
        'INVALID_ARGUMENT',
        'INVALID_ARGUMENT',
        'INVALID_ARGUMENT',
        'INVALID_ARGUMENT',
      ],
    ],
  )
})

test('copy, fill, prefetch and recordUse', async (t) => {
  await shows(
    t,
    `
    const stream = new cuda.Stream()
    const a = alloc(Uint8Array, 1000), b = alloc(Uint8Array, 1000)
    stream.fill(a, 7)
    stream.copy(b.subarray(500), a.subarray(0, 500))
    stream.prefetch(b, 'device')
    stream.prefetch(b, 'host')
    stream.recordUse(b)
    await stream.synchronize()
    show(a.every((value) => value === 7), b[499], b[500], b[999])
    show(code(() => stream.fill(a, 256)), code(() => stream.fill(a, -1)), code(() => stream.copy(a, b.subarray(1))), code(() => stream.copy(a.subarray(0, 10), a.subarray(5, 15))), code(() => stream.copy(new Uint8Array(10), b.subarray(0, 10))), code(() => stream.prefetch(a, 'gpu')))
    stream.fill(a.subarray(0, 0), 1)
    a.free()
    show(code(() => stream.fill(a, 1)), code(() => stream.recordUse(a)), code(() => stream.prefetch(a, 'host')))`,
    [
      [true, 0, 7, 7],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'NOT_OURS', 'INVALID_ARGUMENT'],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
    ],
  )
})

test('an array freed while a kernel uses it is pending, and its memory is used again only afterwards', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    const module = cuda.compile(SOURCE)
    const stream = new cuda.Stream()
    const array = own.alloc(Float32Array, 1000)
    const { pointer } = array
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 150 }], stream })
    module.kernel('fill_f32').launch({ threads: 1000, args: [array, { u32: 1000 }, { f32: 5 }], stream })
    array.free()
    show(own.stats().currentCount, own.stats().currentBytes, own.stats().pendingBytes >= 4000)
    const others = Array.from({ length: 200 }, () => own.alloc(Float32Array, 1000))
    show(others.some((other) => other.pointer === pointer))
    await stream.synchronize()
    show(others.every((other) => other.every((value) => value === 0)), own.stats().pendingBytes)
    const after = Array.from({ length: 300 }, () => own.alloc(Float32Array, 1000))
    show(after.some((other) => other.pointer === pointer))`,
    [[0, 0, true], [false], [true, 0], [true]],
  )
})

test('the stream that one of two arrays was freed with counts when the other is freed', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    const module = cuda.compile(SOURCE)
    const stream = new cuda.Stream()
    const array = own.alloc(Float32Array, 1000)
    const again = attach(share(array))
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 150 }], stream })
    array.free({ stream })
    again.free()
    show(own.stats().currentCount, own.stats().pendingBytes >= 4000)
    own.trim() // waits
    show(own.stats().pendingBytes)`,
    [[0, true], [0]],
  )
})

test('a stream that has the handle of one that ended is another stream', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    const spin = cuda.compile(SOURCE).kernel('spin')
    const ended = new cuda.Stream()
    const { handle } = ended
    const [array, other] = [own.alloc(Uint8Array, 100_000), own.alloc(Uint8Array, 100_000)]
    ended.fill(array, 1)
    ended.fill(other, 1)
    ended[Symbol.dispose]()
    other.free()
    for (let round = 0; round < 5; round++) { gc(); await new Promise((go) => setImmediate(go)) }
    own.trim() // waits; nothing is left to keep the stream
    const next = new cuda.Stream()
    spin.launch({ grid: 1, block: 1, args: [{ u32: 300 }], stream: next })
    array.free() // not used by what runs there now
    show(next.handle === handle, own.stats().pendingBytes)`,
    [[true, 0]],
  )
})

test('an array dropped while a kernel uses it', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    const module = cuda.compile(SOURCE)
    const stream = new cuda.Stream()
    const launch = () => {
      const array = own.alloc(Float32Array, 1000)
      module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 200 }], stream })
      module.kernel('fill_f32').launch({ threads: 1000, args: [array, { u32: 1000 }, { f32: 5 }], stream })
      return array.pointer
    }
    const pointer = launch()
    for (let round = 0; round < 20 && own.stats().currentCount > 0; round++) { gc(); await new Promise((go) => setTimeout(go, 2)) }
    show(own.stats().currentCount, own.stats().pendingBytes > 0)
    const others = Array.from({ length: 200 }, () => own.alloc(Float32Array, 1000))
    show(others.some((other) => other.pointer === pointer))
    await cuda.synchronize()
    show(own.stats().pendingBytes, others.every((other) => other[0] === 0))`,
    [[0, true], [false], [0, true]],
  )
})

test('out of memory waits for pending memory before it gives up', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator({ maxBytes: 10000 })
    const module = cuda.compile(SOURCE)
    const array = own.alloc(Float32Array, 2000)
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 50 }] })
    module.kernel('fill_f32').launch({ threads: 2000, args: [array, { u32: 2000 }, { f32: 5 }] })
    array.free()
    show(own.stats().pendingBytes >= 8000)
    const next = own.alloc(Float32Array, 2000)
    show(next.length, next.every((value) => value === 0))
    show(code(() => own.alloc(Float32Array, 2000)))`,
    [[true], [2000, true], ['OUT_OF_MEMORY']],
  )
})

test('a kernel fault: the context is lost, the process and the host views live on', async (t) => {
  await shows(
    t,
    `
    const module = cuda.compile(SOURCE)
    const array = alloc(Float32Array, 10)
    array[0] = 4
    module.kernel('fault').launch({ grid: 1, block: 1, args: [] })
    show(await rejected(cuda.synchronize()))
    show(await rejected(cuda.defaultStream.synchronize()), code(() => new cuda.Stream()), code(() => alloc(Uint8Array, 200 * 2 ** 20)))
    show(array[0])
    array.free()
    show(array.freed, new Allocator({ backend: 'host' }).alloc(Uint8Array, 5).length)`,
    [['CONTEXT_LOST'], ['CONTEXT_LOST', 'CONTEXT_LOST', 'CONTEXT_LOST'], [4], [true, 5]],
  )
})

test('the driver refuses memory: a typed error that names its code, and the process goes on', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    try { own.alloc(Uint8Array, 100) } catch (error) { show(error.code, error.cuda, /CUDA_ERROR_UNKNOWN/.test(error.message)) }
    show(own.stats().currentCount, own.stats().totalCount, own.stats().backendFailures > 0)
    show(new Allocator({ backend: 'host' }).alloc(Uint8Array, 100).length)`,
    [['CUDA_ERROR', { name: 'CUDA_ERROR_UNKNOWN', value: 999 }, true], [0, 0, true], [100]],
    { FAKE_CUDA_FAIL: 'cuMemAllocManaged@1+=999' },
  )
})

test('the driver refuses once: the allocation is tried again', async (t) => {
  await shows(t, `show(new Allocator().alloc(Uint8Array, 100).length)`, [[100]], {
    FAKE_CUDA_FAIL: 'cuMemAllocManaged@1=999',
  })
})

test('a warmed-up loop of alloc and free calls no driver', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator()
    const round = () => { for (let index = 0; index < 500; index++) own.allocUnsafe(Uint8Array, 100 + index).free() }
    round()
    const before = own.stats()
    round()
    const after = own.stats()
    show(after.backendAllocations - before.backendAllocations, after.backendFrees - before.backendFrees, after.totalCount - before.totalCount)`,
    [[0, 0, 500]],
  )
})

test('no device, no managed memory, a driver that does not start: unavailable, with the reason', async (t) => {
  for (const environment of [{ FAKE_CUDA_DEVICES: '0' }, { FAKE_CUDA_INIT_ERROR: '803' }, { FAKE_CUDA_MANAGED: '0' }]) {
    await shows(
      t,
      `
      show(isCudaAvailable(), (whyNoCuda() ?? '').length > 30, new Allocator().backend, code(() => new Allocator({ backend: 'cuda-unified' })))
      show(CudaUnifiedBackend.allocate(4096), ['NO_DEVICE', 'NO_DRIVER', 'UNSUPPORTED'].includes(lastError().code))`,
      [
        [false, true, 'host', 'CUDA_UNAVAILABLE'],
        [null, true],
      ],
      environment as Record<string, string>,
    )
  }
})

test('without concurrent access a launch waits, so that the host may touch the array', async (t) => {
  await shows(
    t,
    `
    show(cuda.devices()[0].concurrentManagedAccess)
    const module = cuda.compile(SOURCE)
    const array = alloc(Float32Array, 100)
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 20 }] })
    module.kernel('fill_f32').launch({ threads: 100, args: [array, { u32: 100 }, { f32: 5 }] })
    show(array[99])
    module.kernel('spin').launch({ grid: 1, block: 1, args: [{ u32: 100 }], unsafeConcurrent: true })
    show(code(() => alloc(Float32Array, 10)))
    await cuda.synchronize()
    show(alloc(Float32Array, 10).length, array[0])`,
    [[false], [5], ['HOST_ACCESS_WHILE_BUSY'], [10, 5]],
    { FAKE_CUDA_CONCURRENT: '0' },
  )
})

test('however many launches did not wait, one event of each stream is asked whether the host may touch memory', async (t) => {
  await shows(
    t,
    `
    const spin = cuda.compile(SOURCE).kernel('spin')
    const stream = new cuda.Stream()
    const launch = (stream) => spin.launch({ grid: 1, block: 1, args: [{ u32: 0 }], stream, unsafeConcurrent: true })
    for (let index = 0; index < 300; index++) launch(index % 2 ? stream : cuda.defaultStream)
    await cuda.synchronize()
    const start = performance.now()
    alloc(Uint8Array, 10)
    show(performance.now() - start < 500) // each question takes 5 ms
    spin.launch({ grid: 1, block: 1, args: [{ u32: 200 }], stream, unsafeConcurrent: true })
    launch(cuda.defaultStream)
    await cuda.defaultStream.synchronize()
    show(code(() => alloc(Uint8Array, 10)))`,
    [[true], ['HOST_ACCESS_WHILE_BUSY']],
    { FAKE_CUDA_CONCURRENT: '0', FAKE_CUDA_DELAY_US: 'cuEventQuery=5000' },
  )
})

test('without concurrent access nothing is copied out of an array while a kernel that was not waited for runs', async (t) => {
  await shows(
    t,
    `
    const spin = cuda.compile(SOURCE).kernel('spin')
    const elsewhere = new Allocator({ backend: 'host' })
    const array = alloc(Uint8Array, 100_000).fill(7)
    const near = elsewhere.alloc(Uint8Array, 100_000)
    const small = new Allocator({ placement: 'read-mostly' }).allocUnsafe(Uint8Array, 100).fill(8)
    spin.launch({ grid: 1, block: 1, args: [{ u32: 400 }], unsafeConcurrent: true })
    for (const until = performance.now() + 50; performance.now() < until;);
    const copies = [array, array.subarray(5), small].flatMap((source) => [
      () => elsewhere.from(source),
      () => elsewhere.from(Float64Array, source),
      () => spin.launch({ grid: 1, block: 1, args: [{ bytes: source.subarray(0, 4) }], unsafeConcurrent: true }),
    ])
    show(...new Set(copies.map(code)))
    show(elsewhere.from(near).length, elsewhere.stats().currentCount)
    await cuda.synchronize()
    show(elsewhere.from(array)[9], elsewhere.from(small)[9])`,
    [['HOST_ACCESS_WHILE_BUSY'], [100_000, 2], [7, 8]],
    { FAKE_CUDA_CONCURRENT: '0' },
  )
})

test('without concurrent access a wait that does not block leaves memory to the host: what it takes up is poisoned later', async (t) => {
  await shows(
    t,
    `
    const own = new Allocator({ policy: 'secure', placement: 'read-mostly' })
    const fill = cuda.compile(SOURCE).kernel('fill_f32')
    const kept = own.alloc(Uint8Array, 100_000)
    const stream = new cuda.Stream()
    const counter = require('koffi').load('libcuda.so.1').func('uint64_t fake_cuda_counter(const char *)')
    const fills = () => Number(counter('cuMemsetD8Async'))
    let end
    const waits = [() => cuda.synchronize(), () => stream.synchronize(), () => end.wait()]
    for (const wait of waits) {
      const gone = own.alloc(Float32Array, 2 ** 20)
      fill.launch({ threads: 2 ** 20, args: [gone, { u32: 2 ** 20 }, { f32: 1 }], stream })
      end = stream.record()
      gone.free()
      const before = fills()
      const waiting = wait()
      for (const until = performance.now() + 300; performance.now() < until;) kept[0]++
      const meanwhile = fills()
      await waiting
      show(meanwhile - before, fills() - meanwhile, own.stats().pendingBytes)
    }`,
    [
      [0, 1, 0],
      [0, 1, 0],
      [0, 1, 0],
    ],
    { FAKE_CUDA_CONCURRENT: '0', FAKE_CUDA_LAG_US: '20000' },
  )
})

test('that launches wait is said once, where they do and the program did not ask for more', async (t) => {
  const launches = (concurrent: string, options: string) =>
    shows(
      t,
      `
    const warnings = []
    process.on('warning', (warning) => warnings.push(warning))
    const kernel = cuda.compile(SOURCE).kernel('spin')
    for (let i = 0; i < 3; i++) kernel.launch({ grid: 1, block: 1, args: [{ u32: 1 }]${options} })
    await cuda.synchronize()
    await new Promise(setImmediate)
    show(warnings.map(({ code }) => code), warnings.every(({ message }) => message.includes('pass unsafeConcurrent: true')))`,
      [[concurrent === '0' && options === '' ? ['UNIMALLOC_LAUNCH_WAITS'] : [], true]],
      { FAKE_CUDA_CONCURRENT: concurrent },
    )
  await launches('0', '')
  await launches('0', ', unsafeConcurrent: true')
  await launches('1', '')
})

test('several devices: an allocator, a module and a stream of the second', async (t) => {
  await shows(
    t,
    `
    show(cuda.devices().map((device) => device.index), code(() => new Allocator({ device: 2 })))
    const own = new Allocator({ device: 1 })
    const array = own.alloc(Float32Array, 10)
    const kernel = cuda.compile(SOURCE, { device: 1 }).kernel('fill_f32')
    kernel.launch({ threads: 10, args: [array, { u32: 10 }, { f32: 3 }] })
    show(code(() => kernel.launch({ threads: 10, args: [array, { u32: 10 }, { f32: 3 }], stream: new cuda.Stream({ device: 0 }) })))
    await cuda.synchronize()
    show(array[9])`,
    [[[0, 1], 'INVALID_ARGUMENT'], ['INVALID_ARGUMENT'], [3]],
    { FAKE_CUDA_DEVICES: '2' },
  )
})

test('maxBytes as a percentage is of the device', async (t) => {
  await shows(t, `show(new Allocator({ maxBytes: '10%' }).stats().limitBytes)`, [[Math.floor(2 ** 30 / 10)]], {
    FAKE_CUDA_TOTAL_BYTES: '1GiB',
    FAKE_CUDA_FREE_BYTES: '900MiB',
  })
})

test('regions of the driver, given back once it has confirmed', async (t) => {
  await shows(
    t,
    `
    const region = CudaUnifiedBackend.allocate(4096)
    show(region > 0n, CudaUnifiedBackend.deallocate(region, 8192), CudaUnifiedBackend.deallocate(region, 4096), lastError().code)
    show(CudaUnifiedBackend.deallocate(region, 4096), CudaUnifiedBackend.deallocate(region, 4096), lastError().code)`,
    [
      [true, false, false, 'DRIVER'],
      [true, false, 'NOT_REGISTERED'],
    ],
    { FAKE_CUDA_FAIL: 'cuMemFree_v2@1=999' },
  )
})

test('the end of the process makes no driver call, whatever is live', async (t) => {
  const outcome = await runWithFakeCuda(
    directory as string,
    program(`
    globalThis.kept = [alloc(Float32Array, 100), new cuda.Stream(), cuda.compile(SOURCE).kernel('spin'), cuda.defaultStream.record()]
    globalThis.kept[2].launch({ grid: 1, block: 1, args: [{ u32: 30 }] })
    process.exit(0)`),
    { FAKE_CUDA_ABORT_ON_EXIT_CALLS: '1' },
  )
  t.is(outcome.signal, null, outcome.stderr)
  t.is(outcome.code, 0, outcome.stderr)
  t.is(outcome.stderr, '')
})
