// Hints where they cannot apply: nothing happens, for a reason that a program can read. Against a stand-in driver.
import anyTest from 'ava'

import { fakeCudaDirectory } from './helpers/fake-cuda.js'
import { showsOver } from './helpers/shows.js'

const directory = fakeCudaDirectory()
const test = directory === null ? anyTest.skip : anyTest.serial
const shows = showsOver(directory)

/** Arrays of each way to be allocated: of a magazine, of their own, huge, a part, shared, and none at all. */
const ARRAYS = `
  const shared = (array) => { const other = attach(share(array)); array.free(); return other }
  const arrays = (own, options) => [
    own.allocUnsafe(Uint8Array, 1000),
    own.alloc(Uint8Array, 1000, options),
    own.allocUnsafe(Uint8Array, 200_000, options),
    own.alloc(Uint8Array, 20 * 2 ** 20, options),
    own.from(Float32Array.of(1, 2)),
    shared(own.alloc(Uint8Array, 1000)),
    own.alloc(Uint8Array, 0),
  ]
  const reasons = (stream, all, to) => [...new Set(all.map((array) => (stream.prefetch(array, to), stream.whyNoPrefetch)))]
`

test('without a GPU: hints, and frees that name a stream, do nothing and say why', async (t) => {
  await shows(
    t,
    `${ARRAYS}
    const stream = cuda.defaultStream
    const own = new Allocator({ placement: 'device' })
    const all = arrays(own, { placement: 'host', stream })
    show(own.backend, stream.whyNoPrefetch)
    show(reasons(stream, all, 'device').every((reason) => reason === whyNoCuda()), stream.whyNoPrefetch.length > 30)
    for (const array of all) { stream.prefetch(array.subarray(0, 1), 'host'); stream.recordUse(array); array.free({ stream }) }
    show(all.every((array) => array.freed), own.stats().currentCount, own.stats().pendingBytes)
    const [one, two] = [own.allocUnsafe(Uint8Array, 64), own.alloc(Uint8Array, 64)]
    own.free(one, { stream, after: Promise.resolve() })
    two.free({ stream, after: Promise.resolve() })
    await new Promise(setImmediate)
    show(own.stats().currentCount, own.stats().pendingBytes)
    show(code(() => stream.prefetch(two, 'device')), code(() => stream.recordUse(two)), code(() => stream.prefetch(own.alloc(Uint8Array, 8), 'gpu')))
    show(code(() => stream.prefetch(new Uint8Array(8), 'device')), code(() => stream.recordUse(new Uint8Array(8))), code(() => stream.recordUse(8)))
    show(code(() => own.alloc(Uint8Array, 8).free({ stream: {} })), code(() => own.alloc(Uint8Array, 8, { stream: {} })), code(() => stream.record()), code(() => stream.fill(own.alloc(Uint8Array, 8), 1)))`,
    [
      ['host', null],
      [true, true],
      [true, 0, 0],
      [0, 0],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
      ['NOT_OURS', 'NOT_OURS', 'INVALID_ARGUMENT'],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT', 'CUDA_UNAVAILABLE', 'CUDA_UNAVAILABLE'],
    ],
    { FAKE_CUDA_DEVICES: '0' },
  )
})

test('arrays of the host backend beside a GPU: a prefetch says why not, a stream that is named is waited for', async (t) => {
  await shows(
    t,
    `${ARRAYS}
    const own = new Allocator({ backend: 'host' })
    const stream = new cuda.Stream()
    const spin = cuda.compile(SOURCE).kernel('spin')
    const all = arrays(own, { placement: 'device', stream })
    const said = reasons(stream, all, 'device')
    show(said.length, said.some((reason) => /host backend/.test(reason)), said.some((reason) => /empty/.test(reason)))
    stream.prefetch(alloc(Uint8Array, 100), 'device')
    show(stream.whyNoPrefetch)
    for (const array of all) array.free({ stream: cuda.defaultStream }) // nothing has run there
    show(own.stats().pendingBytes)

    const pooled = own.allocUnsafe(Uint8Array, 1000), large = own.alloc(Uint8Array, 20 * 2 ** 20)
    const addresses = [pooled.pointer, large.pointer]
    spin.launch({ grid: 1, block: 1, args: [{ u32: 300 }], stream })
    stream.recordUse(pooled)
    pooled.free()
    large.free({ stream })
    show(own.stats().currentCount, own.stats().pendingBytes >= 20 * 2 ** 20)
    const others = Array.from({ length: 300 }, () => own.allocUnsafe(Uint8Array, 1000)).concat(own.alloc(Uint8Array, 20 * 2 ** 20))
    show(others.some((other) => addresses.includes(other.pointer)))
    own.trim() // waits
    show(own.stats().pendingBytes)
    show(code(() => stream.fill(others[0], 1)), code(() => stream.copy(others[0], others[1])))
    stream[Symbol.dispose]()
    show(code(() => others[0].free({ stream })), code(() => stream.prefetch(others[0], 'host')), code(() => own.alloc(Uint8Array, 8, { stream })), others[0].freed)`,
    [
      [2, true, true],
      [null],
      [0],
      [0, true],
      [false],
      [0],
      ['INVALID_ARGUMENT', 'INVALID_ARGUMENT'],
      ['DISPOSED', 'DISPOSED', 'DISPOSED', false],
    ],
  )
})

test('without concurrent access: no advice and no prefetch, whatever the block', async (t) => {
  await shows(
    t,
    `${ARRAYS}
    const stream = new cuda.Stream()
    const counter = require('koffi').load('libcuda.so.1').func('uint64_t fake_cuda_counter(const char *)')
    for (const placement of ['auto', 'host', 'device', 'read-mostly']) {
      const own = new Allocator({ placement })
      const all = arrays(own, { placement })
      const said = reasons(stream, all, 'device')
      show(placement, own.whyNoPlacement() === null, said.length, said.filter((reason) => /concurrent managed access/.test(reason)).length)
      for (const array of all) array.free()
    }
    show(...['cuMemAdvise', 'cuMemAdvise_v2', 'cuMemPrefetchAsync', 'cuMemPrefetchAsync_v2', 'cuMemDiscardAndPrefetchBatchAsync'].map((name) => Number(counter(name))))`,
    [
      ['auto', true, 2, 1],
      ['host', true, 2, 1],
      ['device', false, 2, 1],
      ['read-mostly', false, 2, 1],
      [0, 0, 0, 0, 0],
    ],
    { FAKE_CUDA_CONCURRENT: '0' },
  )
})

test('what a placement does, by backend and device', async (t) => {
  const body = `
    const placements = ['auto', 'host', 'device', 'read-mostly']
    const kinds = [new Allocator({ backend: 'host', placement: 'device' }), new Allocator({ placement: 'device' })]
    for (const own of kinds) show(own.backend, ...placements.map((placement) => own.whyNoPlacement(placement) === null), own.whyNoPlacement() === own.whyNoPlacement('device'))
    show(kinds[0].whyNoPlacement().length > 30, code(() => kinds[0].whyNoPlacement('gpu')))`
  const host = ['host', true, false, false, false, true]
  const rest = [true, 'INVALID_ARGUMENT']
  await shows(t, body, [host, ['cuda-unified', true, true, true, true, true], rest])
  await shows(t, body, [host, ['cuda-unified', true, true, false, false, true], rest], { FAKE_CUDA_CONCURRENT: '0' })
})

test('a prefetch of more than the device has free is left out, and says so', async (t) => {
  await shows(
    t,
    `
    const array = alloc(Uint8Array, 40 * 2 ** 20)
    const control = require('koffi').load('libcuda.so.1').func('int64_t fake_cuda_control(const char *, int64_t)')
    control('free_bytes', 20 * 2 ** 20)
    const stream = new cuda.Stream()
    stream.prefetch(array, 'device')
    show(/less memory free/.test(stream.whyNoPrefetch))
    stream.prefetch(array, 'host')
    show(stream.whyNoPrefetch)`,
    [[true], [null]],
  )
})
