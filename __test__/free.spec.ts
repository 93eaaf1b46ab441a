import test from 'ava'
import { setTimeout as delay } from 'node:timers/promises'
import { alloc, Allocator, allocator, allocUnsafe } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'

for (const make of [alloc, allocUnsafe]) {
  const name = make === alloc ? 'alloc' : 'allocUnsafe'

  test(`${name}: free of an array with a buffer of its own detaches, so that no stale view reaches the memory`, (t) => {
    const array = make(Uint8Array, make === alloc ? 100 : 100_000)
    const { buffer } = array
    const part = array.subarray(10, 20)
    array.free()
    t.true(array.freed)
    t.is(array.length, 0)
    t.is(part.length, 0)
    t.is(buffer.byteLength, 0)
    t.is(array[0] as unknown, undefined)
    array[0] = 1
    t.throws(() => new Uint8Array(buffer), { instanceOf: TypeError })
  })

  test(`${name}: freeing twice is found, by every way to free`, (t) => {
    const array = make(Uint8Array, 100)
    array.free()
    throwsCode(t, () => array.free(), 'DOUBLE_FREE')
    throwsCode(t, () => allocator.free(array), 'DOUBLE_FREE')
    t.notThrows(() => array[Symbol.dispose]())
    throwsCode(t, () => array.pointer, 'INVALID_ARGUMENT', /freed/)
  })

  test(`${name}: freeing twice is found also after the memory was used again`, (t) => {
    const own = new Allocator({ backend: 'host' })
    const first = make === alloc ? own.alloc(Uint8Array, 500) : own.allocUnsafe(Uint8Array, 500)
    const address = first.pointer
    first.free()
    const others = []
    for (let round = 0; round < 1000; round++) {
      const other = make === alloc ? own.alloc(Uint8Array, 500) : own.allocUnsafe(Uint8Array, 500)
      others.push(other)
      if (other.pointer === address) break
    }
    const second = others.find((other) => other.pointer === address)
    t.truthy(second, 'the block was not used again, so that nothing was tested')
    throwsCode(t, () => first.free(), 'DOUBLE_FREE')
    t.false(second!.freed)
    second!.fill(3)
    for (const other of others) other.free()
  })

  test(`${name}: a plain view, a DataView and a Buffer at the block's start free it`, (t) => {
    const views = [
      (buffer: ArrayBuffer, start: number) => new Uint8Array(buffer, start),
      (buffer: ArrayBuffer, start: number) => new Float32Array(buffer, start, 2),
      (buffer: ArrayBuffer, start: number) => new DataView(buffer, start),
      (buffer: ArrayBuffer, start: number) => Buffer.from(buffer, start),
      (buffer: ArrayBuffer, start: number) => new Uint8Array(buffer, start, 0),
    ]
    for (const view of views) {
      const before = allocator.stats().currentCount
      const array = make(Uint8Array, 64)
      const other = view(array.buffer as ArrayBuffer, array.byteOffset)
      allocator.free(other)
      t.true(array.freed)
      t.is(allocator.stats().currentCount, before)
      throwsCode(t, () => array.free(), 'DOUBLE_FREE')
      if (make === alloc) throwsCode(t, () => allocator.free(other), 'INVALID_ARGUMENT', /detached/)
      else throwsCode(t, () => allocator.free(other), 'DOUBLE_FREE')
    }
  })

  test(`${name}: a view inside a block is refused, and frees nothing`, (t) => {
    const array = make(Uint8Array, 64)
    throwsCode(t, () => allocator.free(array.subarray(1)), 'INTERIOR', /1 bytes into/)
    throwsCode(t, () => allocator.free(new DataView(array.buffer, array.byteOffset + 63)), 'INTERIOR')
    throwsCode(t, () => allocator.free(Buffer.from(array.buffer, array.byteOffset + 8, 8)), 'INTERIOR')
    t.false(array.freed)
    array.free()
  })
}

test('memory that is not ours is refused', (t) => {
  throwsCode(t, () => allocator.free(new Uint8Array(10)), 'NOT_OURS')
  throwsCode(t, () => allocator.free(Buffer.alloc(10)), 'NOT_OURS')
  throwsCode(t, () => allocator.free(new DataView(new ArrayBuffer(10))), 'NOT_OURS')
  throwsCode(t, () => allocator.free(new Uint8Array(new SharedArrayBuffer(10))), 'NOT_OURS')
  for (const value of [null, undefined, 5, 'x', {}, [], new ArrayBuffer(8), 10n]) {
    throwsCode(t, () => allocator.free(value as never), 'INVALID_ARGUMENT')
  }
})

test('an array that only looks like ours is refused', (t) => {
  const array = alloc(Uint8Array, 16)
  const fake = Object.create(Object.getPrototypeOf(array))
  t.throws(() => fake.free())
  t.throws(() => fake.pointer)
  const borrowed = Object.setPrototypeOf(new Uint8Array(16), Object.getPrototypeOf(array))
  throwsCode(t, () => allocator.free(borrowed), 'NOT_OURS')
  array.free()
})

test('an array is freed through any allocator, and its owner is charged', (t) => {
  const one = new Allocator({ backend: 'host' })
  const two = new Allocator({ backend: 'host' })
  const array = one.alloc(Uint8Array, 1000)
  two.free(array)
  t.is(one.stats().currentBytes, 0)
  t.is(one.stats().totalCount, 1)
  t.is(two.stats().totalCount, 0)
  t.true(array.freed)
})

test('free with after: dead at once, but the memory stays until the promise settles', async (t) => {
  for (const outcome of ['fulfilled', 'rejected'] as const) {
    const own = new Allocator({ backend: 'host' })
    const array = own.alloc(Uint8Array, 1000)
    const { buffer } = array
    const operation = resolvers()
    array.free({ after: operation.promise })
    t.true(array.freed)
    throwsCode(t, () => array.free(), 'DOUBLE_FREE')
    t.is(buffer.byteLength, 1000)
    t.is(own.stats().currentCount, 1)
    if (outcome === 'fulfilled') operation.resolve(undefined)
    else operation.reject(new Error('read failed'))
    await delay(1)
    t.is(buffer.byteLength, 0)
    t.is(own.stats().currentCount, 0)
  }
})

function resolvers(): { promise: Promise<unknown>; resolve(value: unknown): void; reject(error: Error): void } {
  let resolve!: (value: unknown) => void
  let reject!: (error: Error) => void
  const promise = new Promise((yes, no) => ([resolve, reject] = [yes, no]))
  return { promise, resolve, reject }
}

test('free: bad options are refused, and free nothing', (t) => {
  const array = alloc(Uint8Array, 10)
  throwsCode(t, () => array.free({ aftr: 1 } as never), 'INVALID_ARGUMENT', /aftr/)
  throwsCode(t, () => array.free({ after: 5 } as never), 'INVALID_ARGUMENT', /promise/)
  throwsCode(t, () => array.free({ stream: {} } as never), 'INVALID_ARGUMENT', /Stream/)
  throwsCode(t, () => array.free(null as never), 'INVALID_ARGUMENT')
  t.false(array.freed)
  array.free()
})
