import test from 'ava'
import { alloc, Allocator, share } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'

const host = (maxBytes = Infinity) => new Allocator({ backend: 'host', maxBytes })

test('growing keeps the contents, zeroes what is new, and leaves the old array dead', (t) => {
  const own = host()
  // Dirty memory to be found again.
  for (const dirty of Array.from({ length: 50 }, () => own.alloc(Uint8Array, 8000).fill(0xff))) dirty.free()
  let array = own.alloc(Float64Array, 10)
  array.fill(1.5)
  for (const length of [11, 100, 1000, 100_000]) {
    const old = array
    const before = array.length
    array = own.realloc(array, length)
    t.is(array.length, length)
    t.true(array.subarray(0, 10).every((value) => value === 1.5))
    t.true(array.subarray(before).every((value) => value === 0))
    t.true(old.freed)
    t.is(old.length, 0)
    throwsCode(t, () => old.free(), 'DOUBLE_FREE')
  }
  array = own.realloc(array, 3)
  t.deepEqual([...array], [1.5, 1.5, 1.5])
  array.free()
  t.is(own.stats().currentCount, 0)
  t.is(own.stats().currentBytes, 0)
})

test('from and to nothing', (t) => {
  const own = host()
  let array = own.alloc(Uint8Array, 0)
  array = own.realloc(array, 5)
  t.deepEqual([...array], [0, 0, 0, 0, 0])
  const old = array
  array = own.realloc(array, 0)
  t.true(old.freed)
  t.is(array.length, 0)
  t.is(array.pointer, 0n)
  t.is(own.stats().currentCount, 0)
  array.free()
})

test('the alignment is kept', (t) => {
  const own = host()
  let array = own.alloc(Uint8Array, 100, { alignment: 65536 })
  for (const length of [1000, 300_000, 10]) {
    array = own.realloc(array, length)
    t.is(array.pointer % 65536n, 0n)
  }
  array.free()
})

test('on failure the array is as it was', (t) => {
  const own = host(20_000)
  const array = own.alloc(Uint8Array, 10_000).fill(4)
  const { pointer } = array
  throwsCode(t, () => own.realloc(array, 15_000), 'OUT_OF_MEMORY')
  throwsCode(t, () => own.realloc(array, -1), 'INVALID_ARGUMENT')
  throwsCode(t, () => own.realloc(array, NaN), 'INVALID_ARGUMENT')
  t.false(array.freed)
  t.is(array.pointer, pointer)
  t.true(array.every((value) => value === 4))
  t.is(own.stats().currentCount, 1)
  array.free()
})

test('what is no live array of ours is refused', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 10)
  throwsCode(t, () => own.realloc(array.subarray(0) as never, 20), 'INVALID_ARGUMENT')
  throwsCode(t, () => own.realloc(new Uint8Array(4) as never, 20), 'INVALID_ARGUMENT')
  throwsCode(t, () => own.realloc(null as never, 20), 'INVALID_ARGUMENT')
  array.free()
  throwsCode(t, () => own.realloc(array, 20), 'INVALID_ARGUMENT', /freed/)
  const shared = own.alloc(Uint8Array, 10)
  share(shared)
  throwsCode(t, () => own.realloc(shared, 20), 'INVALID_ARGUMENT', /shared/)
  t.false(shared.freed)
  shared.free()
})

test('the owner stays the owner', (t) => {
  const one = host()
  const two = host()
  const array = two.realloc(one.alloc(Uint8Array, 10), 20)
  t.true(one.owns(array))
  t.is(two.stats().totalCount, 0)
  array.free()
  const kept = alloc(Uint8Array, 10)
  const grown = one.realloc(kept, 1000)
  t.false(one.owns(grown))
  grown.free()
})
