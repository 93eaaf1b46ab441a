// allocUnsafe's magazine: blocks that are handed out and taken back without a native call.
import test from 'ava'
import { Allocator, attach, pointerOf, share } from 'unimalloc'
import type { UnifiedArray } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'
import { collectUntil } from './helpers/gc.js'

const host = (options = {}): Allocator => new Allocator({ backend: 'host', ...options })

/** A byte stream moves the bytes of what it is given to a buffer of its own. */
const enqueue = (view: Uint8Array): ReadableStream =>
  new ReadableStream({ type: 'bytes', start: (controller) => controller.enqueue(view as Uint8Array<ArrayBuffer>) })

/** Sizes up to beyond the largest class, in no order. */
function* sizes(count: number): Generator<number> {
  let state = 12345
  for (let index = 0; index < count; index++) {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0
    yield 1 + (state % 70_000)
  }
}

test('arrays of one class lie on one buffer, aligned, apart, and as long as asked', (t) => {
  const own = host()
  const arrays = Array.from({ length: 40 }, () => own.allocUnsafe(Float32Array, 300))
  t.true(new Set(arrays.map((array) => array.buffer)).size <= 2)
  arrays.forEach((array, index) => array.fill(index))
  t.is(new Set(arrays.map((array) => array.pointer)).size, 40)
  arrays.forEach((array, index) => {
    t.is(array.length, 300)
    t.is(array.byteOffset % 256, 0)
    t.is(array.pointer % 256n, 0n)
    t.is(pointerOf(array.subarray(2)), array.pointer + 8n)
    t.true(array.every((value) => value === index))
    t.is(own.usableBytes(array), 1280)
    t.true(own.owns(array.subarray(5)))
    t.is(array.constructor, Float32Array)
  })
  for (const array of arrays) array.free()
  t.false(own.owns(arrays[0]!))
})

test('a block is handed out again at once, and no other allocator call is needed for it', (t) => {
  const own = host()
  own.allocUnsafe(Uint8Array, 1000).free()
  const { buffer, byteOffset } = own.allocUnsafe(Uint8Array, 1000)
  const before = own.stats()
  for (let round = 0; round < 1000; round++) {
    const array = own.allocUnsafe(Uint8Array, 900)
    t.is(array.buffer, buffer)
    t.not(array.byteOffset, byteOffset)
    array.free()
  }
  const after = own.stats()
  t.is(after.totalCount - before.totalCount, 1000)
  t.is(after.backendAllocations, before.backendAllocations)
})

test('figures equal a recount, over every size', (t) => {
  const own = host()
  const live: UnifiedArray<Uint8Array>[] = []
  let [peakBytes, peakCount, totalBytes, totalCount] = [0, 0, 0, 0]
  let turn = 0
  for (const size of sizes(5000)) {
    if (live.length > 0 && turn++ % 3 === 0) live.splice(size % live.length, 1)[0]!.free()
    // Some of them with a buffer of their own, some through native code.
    const array =
      turn % 7 === 0
        ? own.alloc(Uint8Array, size)
        : turn % 11 === 0
          ? own.allocUnsafe(Uint8Array, size, { alignment: 64 })
          : own.allocUnsafe(Uint8Array, size)
    live.push(array)
    totalCount++
    totalBytes += own.usableBytes(array)
    const bytes = live.reduce((sum, each) => sum + own.usableBytes(each), 0)
    peakBytes = Math.max(peakBytes, bytes)
    peakCount = Math.max(peakCount, live.length)
    if (live.length > 60) live.shift()!.free()
  }
  const stats = own.stats()
  t.is(stats.currentCount, live.length)
  t.is(
    stats.currentBytes,
    live.reduce((sum, each) => sum + own.usableBytes(each), 0),
  )
  t.is(
    stats.requestedBytes,
    live.reduce((sum, each) => sum + each.byteLength, 0),
  )
  t.deepEqual(
    [stats.peakBytes, stats.peakCount, stats.totalBytes, stats.totalCount],
    [peakBytes, peakCount, totalBytes, totalCount],
  )
  for (const array of live) array.free()
  const end = own.stats()
  t.deepEqual([end.currentBytes, end.currentCount, end.requestedBytes], [0, 0, 0])
  own.resetPeak()
  t.is(own.stats().peakBytes, 0)
})

test('the limit is exact, also where native code holds a part of it', (t) => {
  const own = host({ maxBytes: 10 * 1024 })
  const large = own.alloc(Uint8Array, 4096)
  const arrays = Array.from({ length: 6 }, () => own.allocUnsafe(Uint8Array, 1024))
  const error = throwsCode(t, () => own.allocUnsafe(Uint8Array, 1), 'OUT_OF_MEMORY', /maxBytes/)
  t.is(error!.stats!.currentBytes, 10 * 1024)
  t.is(own.stats().outOfMemory, 1)
  throwsCode(t, () => own.alloc(Uint8Array, 1), 'OUT_OF_MEMORY')
  arrays[0]!.free()
  arrays[0] = own.allocUnsafe(Uint8Array, 1000)
  large.free()
  t.is(own.allocUnsafe(Uint8Array, 4000).length, 4000)
  own.onOutOfMemory((bytes) => {
    t.is(bytes, 100)
    arrays[1]!.free()
    return true
  })
  t.is(own.allocUnsafe(Uint8Array, 100).length, 100)
})

test('two allocators of one class: each block is charged to its own', (t) => {
  const [first, second] = [host(), host()]
  const mine = Array.from({ length: 100 }, () => first.allocUnsafe(Uint8Array, 700))
  const other = second.allocUnsafe(Uint8Array, 700)
  t.true(first.owns(mine[3]!))
  t.false(second.owns(mine[3]!))
  second.free(mine[3]!)
  t.is(first.stats().currentCount, 99)
  t.is(second.stats().currentCount, 1)
  const again = second.allocUnsafe(Uint8Array, 700)
  t.is(again.pointer, BigInt(pointerOf(again)))
  first[Symbol.dispose]()
  t.is(first.stats().currentCount, 0)
  t.is(second.stats().currentCount, 2)
  t.false(other.freed)
  t.true(mine.every((array) => array.freed))
  throwsCode(t, () => first.allocUnsafe(Uint8Array, 700), 'DISPOSED')
  // The blocks are used again, and arrays of the disposed allocator do not free them.
  const fresh = Array.from({ length: 100 }, () => second.allocUnsafe(Uint8Array, 700))
  for (const array of mine) throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  t.true(fresh.every((array) => !array.freed))
  for (const array of fresh) array.free()
})

test('an array whose block was freed by a view stays dead after the block was used again', (t) => {
  const own = host()
  const old = own.allocUnsafe(Uint8Array, 3000)
  own.free(new DataView(old.buffer, old.byteOffset, 4))
  t.true(old.freed)
  const next = own.allocUnsafe(Uint8Array, 3000)
  t.is(next.pointer, BigInt(pointerOf(next)))
  t.is(next.byteOffset, old.byteOffset)
  t.true(old.freed)
  throwsCode(t, () => old.free(), 'DOUBLE_FREE')
  throwsCode(t, () => own.free(old), 'DOUBLE_FREE')
  throwsCode(t, () => old.pointer, 'INVALID_ARGUMENT')
  t.notThrows(() => old[Symbol.dispose]())
  t.false(next.freed)
  next.free()
})

test('a view of a free block, and one that ends a slab, free nothing', (t) => {
  const own = host()
  const array = own.allocUnsafe(Uint8Array, 5000)
  const { buffer, byteOffset } = array
  throwsCode(t, () => own.free(new Uint8Array(buffer, byteOffset + 1, 4)), 'INTERIOR', /1 bytes into/)
  throwsCode(t, () => own.free(new Uint8Array(buffer, buffer.byteLength)), 'DOUBLE_FREE')
  array.free()
  throwsCode(t, () => own.free(new Uint8Array(buffer, byteOffset, 4)), 'DOUBLE_FREE')
  throwsCode(t, () => pointerOf(new Uint8Array(buffer, byteOffset, 4)), 'INVALID_ARGUMENT', /freed/)
  t.false(own.owns(new Uint8Array(buffer, byteOffset, 4)))
})

test('a view that is kept after the free does no harm, and is empty once its memory is given back', (t) => {
  const own = host()
  const array = own.allocUnsafe(Uint8Array, 2222).fill(7)
  const view = array.subarray(0, 10)
  array.free()
  view.fill(1)
  own.trim()
  t.is(view.length, 0)
  t.is(view[0] as unknown, undefined)
  throwsCode(t, () => own.free(view), 'INVALID_ARGUMENT', /detached/)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
})

test('trim leaves slabs with live blocks in place', (t) => {
  const own = host()
  const kept = own.allocUnsafe(Uint8Array, 1500).fill(5)
  const others = Array.from({ length: 200 }, () => own.allocUnsafe(Uint8Array, 1500))
  for (const other of others) other.free()
  own.trim()
  t.true(kept.every((value) => value === 5))
  t.is(kept.length, 1500)
  kept.free()
})

for (const [how, detach] of [
  ['enqueue of a byte stream', (view: Uint8Array) => void enqueue(view)],
  [
    'structuredClone with a transfer list',
    (view: Uint8Array) => void globalThis.structuredClone(view.buffer, { transfer: [view.buffer as ArrayBuffer] }),
  ],
  [
    "ArrayBuffer.prototype's transfer",
    (view: Uint8Array) =>
      void (ArrayBuffer.prototype as { transfer?: () => void }).transfer?.call(view.buffer as ArrayBuffer),
  ],
] as const) {
  test(`a slab that is taken away by ${how} is out of use for good, and nothing else is`, (t) => {
    const own = host()
    const size = 12_000 + how.length * 700 // a class of its own
    const arrays = Array.from({ length: 10 }, () => own.allocUnsafe(Uint8Array, size))
    const [taken, neighbour] = arrays as [UnifiedArray<Uint8Array>, UnifiedArray<Uint8Array>]
    const elsewhere = own.allocUnsafe(Uint8Array, 300).fill(4)
    const start = taken.pointer - BigInt(taken.byteOffset)
    const end = start + BigInt(taken.buffer.byteLength)
    const before = own.stats()
    const neighbours = arrays.filter((array) => array.buffer === taken.buffer).length
    const shared = arrays.find((array) => array.buffer === taken.buffer && array !== taken && array !== neighbour)!
    const token = share(shared)
    own.free(
      arrays.find(
        (array) => array.buffer === taken.buffer && array !== taken && array !== neighbour && array !== shared,
      )!,
    )
    try {
      detach(taken)
    } catch {
      t.log('this engine refuses')
    }
    if (taken.length > 0) {
      for (const array of arrays) array[Symbol.dispose]()
      t.is(own.stats().currentCount, 1)
      return
    }
    t.is(neighbour.length, 0)
    throwsCode(t, () => taken.free(), 'INVALID_ARGUMENT', /detached/)
    throwsCode(t, () => neighbour.free(), 'INVALID_ARGUMENT', /detached/)
    throwsCode(t, () => own.free(neighbour), 'INVALID_ARGUMENT', /detached/)
    throwsCode(t, () => shared.free(), 'INVALID_ARGUMENT', /detached/)
    throwsCode(t, () => taken.pointer, 'INVALID_ARGUMENT', /detached/)
    throwsCode(t, () => pointerOf(neighbour), 'INVALID_ARGUMENT', /detached/)
    t.notThrows(() => neighbour[Symbol.dispose]())
    t.false(own.owns(new Uint8Array(8)))
    // Its memory is not handed out again, neither from the stack nor by the allocator's core.
    const fresh = Array.from({ length: 100 }, () => own.allocUnsafe(Uint8Array, size))
    t.true(fresh.every((array) => array.length === size && (array.pointer < start || array.pointer >= end)))
    t.true(elsewhere.every((value) => value === 4))
    const stats = own.stats()
    t.is(stats.quarantinedBytes - before.quarantinedBytes, Number(end - start))
    // All that was on it is off the books, but for the one that others may still attach to.
    t.is(stats.currentCount, 11 - neighbours + 1 + 100)
    void token
    for (const array of [...fresh, elsewhere]) array.free()
    own.trim()
    own[Symbol.dispose]()
  })
}

test('a slab that was taken away unnoticed is found by the next allocation', (t) => {
  const own = host()
  const array = own.allocUnsafe(Uint8Array, 21_000)
  array.free()
  try {
    enqueue(new Uint8Array(array.buffer as ArrayBuffer))
  } catch {
    t.log('this engine refuses')
  }
  const next = own.allocUnsafe(Uint8Array, 21_000)
  t.is(next.length, 21_000)
  next.free()
  own.trim()
})

test('a block that an allocator freed comes again, and is anybody’s once the allocator is gone', (t) => {
  const [first, second] = [host(), host()]
  const array = first.allocUnsafe(Uint8Array, 23_000)
  const { pointer } = array
  array.free()
  const again = first.allocUnsafe(Uint8Array, 23_000)
  t.is(again.pointer, pointer)
  t.true(array.freed)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  again.free()
  t.is(first.stats().currentCount, 0)
  t.is(first.stats().currentBytes, 0)
  first[Symbol.dispose]()
  const others = second.allocUnsafe(Uint8Array, 23_000)
  t.is(others.pointer, pointer)
  others.free()
})

test('a trim finds the block that another allocator keeps at hand', (t) => {
  const [first, second] = [host(), host()]
  const array = first.allocUnsafe(Uint8Array, 25_000)
  const view = array.subarray(0, 10)
  array.free()
  second.trim()
  t.is(view.length, 0)
  const next = first.allocUnsafe(Uint8Array, 25_000)
  t.is(next.length, 25_000)
  next.free()
})

test('a slab that was taken away with blocks in it that several allocators keep at hand is used by none of them', (t) => {
  const allocators = [host(), host(), host()]
  const arrays = allocators.map((own) => own.allocUnsafe(Uint8Array, 27_000))
  const { buffer } = arrays[0]!
  t.true(arrays.every((array) => array.buffer === buffer))
  const starts = new Set(arrays.map((array) => array.pointer))
  for (const array of arrays) array.free()
  try {
    enqueue(new Uint8Array(buffer as ArrayBuffer))
  } catch {
    t.log('this engine refuses')
  }
  if (buffer.byteLength > 0) return
  for (const own of [...allocators, ...allocators]) {
    const next = own.allocUnsafe(Uint8Array, 27_000)
    t.is(next.length, 27_000)
    t.false(starts.has(next.pointer))
    next.free()
    t.is(own.stats().currentCount, 0)
  }
  for (const own of allocators) own[Symbol.dispose]()
})

test('the methods of a slab refuse to move its bytes', (t) => {
  const array = host().allocUnsafe(Uint8Array, 100)
  if ('transfer' in ArrayBuffer.prototype) {
    const buffer = array.buffer as ArrayBuffer & { transfer(): void; transferToFixedLength(): void }
    throwsCode(t, () => buffer.transfer(), 'NOT_TRANSFERABLE', /share/)
    throwsCode(t, () => buffer.transferToFixedLength(), 'NOT_TRANSFERABLE')
  }
  t.is(array.length, 100)
  array.free()
})

test('a shared block lives until its last array lets go, and then comes back', (t) => {
  const own = host()
  const array = own.allocUnsafe(Float64Array, 50).fill(2)
  const token = share(array)
  const other = attach<Float64Array>(token)
  t.is(other.pointer, array.pointer)
  t.is(other.length, 50)
  other[3] = 9
  t.is(array[3], 9)
  array.free()
  t.true(array.freed)
  t.false(other.freed)
  t.is(own.stats().currentCount, 1)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  throwsCode(t, () => own.realloc(array, 3), 'INVALID_ARGUMENT')
  other.free()
  t.is(own.stats().currentCount, 0)
  throwsCode(t, () => attach(token), 'STALE_TOKEN')
  throwsCode(t, () => other.free(), 'DOUBLE_FREE')
  // Handed over, it is found again with its contents.
  const given = own.allocUnsafe(Uint8Array, 64).fill(8)
  const handed = share(given, { transfer: true })
  t.true(given.freed)
  const taken = attach<Uint8Array>(handed)
  t.true(taken.every((value) => value === 8))
  taken.free()
  t.is(own.stats().currentCount, 0)
})

test('realloc, scopes, and a free that waits', async (t) => {
  const own = host()
  const array = own.allocUnsafe(Uint16Array, 100)
  array.forEach((_, index) => (array[index] = index))
  const grown = own.realloc(array, 5000)
  t.true(array.freed)
  t.is(grown.length, 5000)
  t.true(grown.subarray(0, 100).every((value, index) => value === index))
  const shrunk = own.realloc(grown, 10)
  t.deepEqual([...shrunk], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
  const outer = own.scope()
  const kept = outer.allocUnsafe(Uint8Array, 10)
  const dropped = outer.allocUnsafe(Uint8Array, 10)
  const freed = outer.allocUnsafe(Uint8Array, 10)
  freed.free()
  const stranger = own.allocUnsafe(Uint8Array, 10)
  outer.keep(kept)
  outer[Symbol.dispose]()
  t.deepEqual([kept.freed, dropped.freed, stranger.freed], [false, true, false])
  let done!: () => void
  const wait = new Promise<void>((resolve) => (done = resolve))
  kept.free({ after: wait })
  t.true(kept.freed)
  const meanwhile = Array.from({ length: 200 }, () => own.allocUnsafe(Uint8Array, 10))
  t.true(meanwhile.every((other) => other.byteOffset !== kept.byteOffset || other.buffer !== kept.buffer))
  done()
  await wait
  await Promise.resolve()
  for (const other of [...meanwhile, stranger, shrunk]) other.free()
  t.is(own.stats().currentCount, 0)
})

test('an array that nobody freed is a leak, also once it was collected', async (t) => {
  const own = host()
  ;(() => own.allocUnsafe(Uint8Array, 128))()
  await collectUntil(() => false)
  t.is(own.stats().currentCount, 1)
})

test('blocks outlive a collected allocator, and can be freed in every way', async (t) => {
  let collected = 0
  const registry = new FinalizationRegistry(() => collected++)
  const arrays = (() => {
    const own = host()
    registry.register(own, null)
    return Array.from({ length: 4 }, () => own.allocUnsafe(Uint8Array, 900).fill(6))
  })()
  t.true(await collectUntil(() => collected === 1))
  const [first, second, third, fourth] = arrays as unknown as [UnifiedArray, UnifiedArray, UnifiedArray, UnifiedArray]
  first.free()
  const token = share(second)
  second.free()
  throwsCode(t, () => attach(token), 'STALE_TOKEN')
  const moved = host().realloc(third as UnifiedArray<Uint8Array>, 5)
  t.deepEqual([...moved], [6, 6, 6, 6, 6])
  moved.free()
  fourth.free({ after: Promise.resolve() })
  await Promise.resolve()
})

test('many allocators, one after the other', (t) => {
  for (let round = 0; round < 2000; round++) {
    const own = host()
    const array = own.allocUnsafe(Uint8Array, 64)
    t.is(own.stats().currentCount, 1)
    if (round % 2 === 0) array.free()
    own[Symbol.dispose]()
    t.true(array.freed)
  }
})

test('types in turn', (t) => {
  const own = host()
  const types = [Float32Array, Uint8Array, BigInt64Array, Float64Array, Int16Array, Uint8ClampedArray]
  for (let round = 0; round < 600; round++) {
    const type = types[round % types.length]!
    const array = own.allocUnsafe(type as typeof Float32Array, 33)
    t.true(array instanceof type)
    t.is(array.byteLength, 33 * type.BYTES_PER_ELEMENT)
    array.free()
  }
  t.is(own.stats().currentCount, 0)
})

test('other policies, placements on the device, tracking and options go the native way', (t) => {
  for (const options of [
    { policy: 'secure' as const },
    { policy: 'hardened' as const },
    { placement: 'device' as const },
    { track: true },
  ]) {
    const own = host(options)
    const array = own.allocUnsafe(Uint8Array, 256)
    t.is(array.buffer.byteLength, 256)
    array.free()
    t.is(array.length, 0)
  }
  const own = host()
  const array = own.allocUnsafe(Uint8Array, 256, { alignment: 4096 })
  t.is(array.pointer % 4096n, 0n)
  t.is(array.buffer.byteLength, 256)
  array.free()
})
