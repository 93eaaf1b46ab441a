import test from 'ava'
import { alloc, Allocator, allocator, allocUnsafe, from, pointerOf } from 'unimalloc'
import type { ArrayType } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'

const kinds = [
  Int8Array,
  Uint8Array,
  Uint8ClampedArray,
  Int16Array,
  Uint16Array,
  Int32Array,
  Uint32Array,
  Float32Array,
  Float64Array,
  BigInt64Array,
  BigUint64Array,
  (globalThis as { Float16Array?: ArrayType }).Float16Array,
].filter((kind) => kind !== undefined) as unknown as Array<typeof Float32Array>

for (const Kind of kinds) {
  test(`${Kind.name}: a real typed array of that kind, zeroed, aligned and with an address`, (t) => {
    const array = alloc(Kind, 33)
    t.true(array instanceof Kind)
    t.is(Object.prototype.toString.call(array), `[object ${Kind.name}]`)
    t.is(array.length, 33)
    t.is(array.byteOffset, 0)
    t.is(array.buffer.byteLength, 33 * Kind.BYTES_PER_ELEMENT)
    const zero = Kind.name.startsWith('Big') ? 0n : 0
    t.true(array.every((value) => (value as unknown) === zero))
    t.is(array.pointer % 256n, 0n)
    t.true(array.pointer > 0n)
    array.free()
    t.is(array.length, 0)
  })
}

test('the constructor, and what map, slice, subarray and filter give, are plain', (t) => {
  const array = from(Float32Array, [3, 1, 2])
  t.is(array.constructor, Float32Array)
  for (const plain of [
    array.map((value) => value * 2),
    array.slice(),
    array.subarray(1),
    array.filter((value) => value > 1),
  ]) {
    t.is(Object.getPrototypeOf(plain), Float32Array.prototype)
    t.false('pointer' in plain)
  }
  t.deepEqual(Array.from(array.map((value) => value * 2)), [6, 2, 4])
  t.is(array.subarray(1).buffer, array.buffer)
  array.free()
})

test('zeroed also where a dirty block is used again', (t) => {
  const own = new Allocator({ backend: 'host' })
  const addresses = new Set<bigint>()
  let reused = 0
  for (let round = 0; round < 200; round++) {
    const array = own.alloc(Uint8Array, 1000)
    t.true(array.every((value) => value === 0))
    if (addresses.has(array.pointer)) reused++
    addresses.add(array.pointer)
    array.fill(0xff)
    array.free()
  }
  t.true(reused > 0, 'no block was used again, so that nothing was tested')
})

test('pointerOf: views of every kind, at every offset', (t) => {
  const array = alloc(Uint8Array, 64)
  t.is(pointerOf(array), array.pointer)
  t.is(pointerOf(array.subarray(5)), array.pointer + 5n)
  t.is(pointerOf(new DataView(array.buffer, 7)), array.pointer + 7n)
  t.is(pointerOf(Buffer.from(array.buffer, 9, 3)), array.pointer + 9n)
  throwsCode(t, () => pointerOf(new Uint8Array(8)), 'NOT_OURS')
  throwsCode(t, () => pointerOf({} as never), 'INVALID_ARGUMENT')
  array.free()
  throwsCode(t, () => pointerOf(array), 'INVALID_ARGUMENT', /freed/)
})

test('different live arrays never overlap', (t) => {
  const arrays = Array.from({ length: 300 }, (_, index) => allocUnsafe(Uint8Array, 1 + index * 37))
  const ranges = arrays
    .map((array) => [array.pointer, array.pointer + BigInt(array.byteLength)] as const)
    .sort((a, b) => (a[0] < b[0] ? -1 : 1))
  for (let index = 1; index < ranges.length; index++) t.true(ranges[index]![0] >= ranges[index - 1]![1])
  arrays.forEach((array, index) => array.fill(index))
  t.true(arrays.every((array, index) => array.every((value) => value === (index & 0xff))))
  for (const array of arrays) array.free()
})

test('an empty array owns no memory', (t) => {
  const before = allocator.stats()
  const array = alloc(Float64Array, 0)
  t.is(array.length, 0)
  t.is(array.pointer, 0n)
  t.is(pointerOf(array), 0n)
  t.false(array.freed)
  t.is(allocator.usableBytes(array), 0)
  t.true(allocator.owns(array))
  t.is(allocator.stats().currentCount, before.currentCount)
  array.free()
  t.true(array.freed)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  throwsCode(t, () => array.pointer, 'INVALID_ARGUMENT')
})

test('alignment: every power of two up to 2 MiB', (t) => {
  for (let alignment = 1; alignment <= 2 ** 21; alignment *= 2) {
    const array = allocUnsafe(Uint8Array, 100, { alignment })
    t.is(array.pointer % BigInt(alignment), 0n)
    array.free()
  }
})

test('from: same type, other types, array-likes, Buffers', (t) => {
  const source = Float32Array.of(1, 2, 3)
  const same = from(source)
  t.true(same instanceof Float32Array)
  t.deepEqual([...same], [1, 2, 3])
  source[0] = 9
  t.is(same[0], 1)
  const other = from(Int16Array, Float64Array.of(1.9, -2.9))
  t.deepEqual([...other], [1, -2])
  const bigs = from(BigInt64Array, [5n, -6n])
  t.deepEqual([...bigs], [5n, -6n])
  const like = from(Uint8Array, { length: 2, 0: 7, 1: 8 })
  t.deepEqual([...like], [7, 8])
  const bytes = from(Buffer.from('héllo'))
  t.is(Object.getPrototypeOf(bytes.slice()), Uint8Array.prototype)
  t.is(Buffer.from(bytes).toString(), 'héllo')
  const copy = from(same)
  t.not(copy.pointer, same.pointer)
  for (const array of [same, other, bigs, like, bytes, copy]) array.free()
})

test('from: what cannot be copied is refused, and leaks nothing', (t) => {
  const before = allocator.stats().currentCount
  throwsCode(t, () => from(BigInt64Array, [1] as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => from(Float32Array, [1n] as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => from([1, 2] as never), 'INVALID_ARGUMENT', /pass a typed array/)
  throwsCode(t, () => from(Float32Array, null as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => from(Float32Array, 5 as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => from(Float32Array, { length: -1 }), 'INVALID_ARGUMENT')
  throwsCode(t, () => from(Float32Array, { length: 1.5 }), 'INVALID_ARGUMENT')
  const throwing = { length: 2, get 0(): number { throw new Error('mine') } } // prettier-ignore
  throwsCode(t, () => from(Float32Array, throwing), 'INVALID_ARGUMENT', /mine/)
  const dead = alloc(Float32Array, 4)
  dead.free()
  throwsCode(t, () => from(dead), 'INVALID_ARGUMENT', /detached|freed/)
  t.is(allocator.stats().currentCount, before)
})

test('usableBytes is at least what was asked for, and at most an eighth more for larger blocks', (t) => {
  for (const bytes of [1, 15, 16, 17, 127, 128, 129, 1000, 4096, 70_000, 1_000_000]) {
    const array = allocUnsafe(Uint8Array, bytes)
    const usable = allocator.usableBytes(array)
    t.true(usable >= bytes)
    if (bytes >= 2048) t.true(usable <= Math.ceil(bytes * 1.125) + 65536, `${bytes} -> ${usable}`)
    t.is(allocator.usableBytes(array.subarray(0, 0)), usable)
    array.free()
  }
})

test('using frees at the end of the block, also when it is left by a throw', (t) => {
  const before = allocator.stats().currentCount
  let outer
  t.throws(() => {
    using array = alloc(Float32Array, 10)
    outer = array
    t.is(allocator.stats().currentCount, before + 1)
    throw new Error('out')
  })
  t.true((outer as unknown as { freed: boolean }).freed)
  t.is(allocator.stats().currentCount, before)
})
