import test from 'ava'
import { setTimeout as delay } from 'node:timers/promises'
import { Allocator, allocator } from 'unimalloc'
import type { UnifiedArray } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'
import { collectUntil } from './helpers/gc.js'

const host = () => new Allocator({ backend: 'host' })

test('a scope frees what was allocated through it, and nothing else', (t) => {
  const own = host()
  const outside = own.alloc(Uint8Array, 10)
  let inside: Array<UnifiedArray<Uint8Array | Float32Array>> = []
  {
    using scope = own.scope()
    inside = [
      scope.alloc(Uint8Array, 10),
      scope.allocUnsafe(Float32Array, 10),
      scope.from(Uint8Array.of(1, 2)),
      scope.from(Float32Array, [1]),
    ]
    t.is(own.stats().currentCount, 5)
    t.true(inside.every((array) => !array.freed))
  }
  t.true(inside.every((array) => array.freed))
  t.false(outside.freed)
  t.is(own.stats().currentCount, 1)
  outside.free()
})

test('freeing early, empty arrays, and ending twice', (t) => {
  const own = host()
  const scope = own.scope()
  const early = scope.alloc(Uint8Array, 10)
  const empty = scope.alloc(Uint8Array, 0)
  early.free()
  scope[Symbol.dispose]()
  t.true(empty.freed)
  scope[Symbol.dispose]()
  t.is(own.stats().currentCount, 0)
  throwsCode(t, () => scope.alloc(Uint8Array, 1), 'DISPOSED')
  throwsCode(t, () => scope.keep(empty), 'DISPOSED')
  throwsCode(t, () => scope.scope(), 'DISPOSED')
})

test('keep moves an array to the enclosing scope, and out of the last', (t) => {
  const own = host()
  let kept
  {
    using outer = own.scope()
    let moved
    {
      using inner = outer.scope()
      moved = inner.alloc(Uint8Array, 10)
      t.is(inner.keep(moved), moved)
      throwsCode(t, () => inner.keep(moved as never), 'INVALID_ARGUMENT')
    }
    t.false(moved.freed)
    kept = outer.keep(outer.alloc(Uint8Array, 20))
    throwsCode(t, () => outer.keep(own.alloc(Uint8Array, 1)), 'INVALID_ARGUMENT', /not allocated through this scope/)
    throwsCode(t, () => outer.keep(new Uint8Array(2) as never), 'NOT_OURS')
  }
  t.false(kept.freed)
  kept.free()
  own[Symbol.dispose]()
})

test('an outer scope that ends ends those inside it', (t) => {
  const own = host()
  const outer = own.scope()
  const inner = outer.scope()
  const array = inner.alloc(Uint8Array, 5)
  outer[Symbol.dispose]()
  t.true(array.freed)
  throwsCode(t, () => inner.alloc(Uint8Array, 5), 'DISPOSED')
})

test('realloc keeps the membership', (t) => {
  const own = host()
  let array
  {
    using scope = own.scope()
    array = own.realloc(scope.alloc(Uint8Array, 5), 5000)
    t.false(array.freed)
  }
  t.true(array.freed)
})

test('nothing ambient: two scopes across awaits do not mix', async (t) => {
  const own = host()
  const task = async (milliseconds: number): Promise<UnifiedArray<Uint8Array>> => {
    using scope = own.scope()
    const first = scope.alloc(Uint8Array, 8)
    await delay(milliseconds)
    const second = scope.alloc(Uint8Array, 8)
    t.false(first.freed)
    t.false(second.freed)
    return second
  }
  const [one, two] = await Promise.all([task(1), task(8)])
  t.true(one.freed)
  t.true(two.freed)
  t.is(own.stats().currentCount, 0)
})

test('a scope keeps what nobody else does', async (t) => {
  const own = host()
  const scope = own.scope()
  scope.alloc(Uint8Array, 1000)
  t.false(await collectUntil(() => own.stats().currentCount === 0))
  scope[Symbol.dispose]()
  t.is(own.stats().currentCount, 0)
})

test('a scope of the default allocator', (t) => {
  const before = allocator.stats().currentCount
  {
    using scope = allocator.scope()
    scope.alloc(Uint8Array, 10)
    t.is(allocator.stats().currentCount, before + 1)
  }
  t.is(allocator.stats().currentCount, before)
})

test('a scope has its five methods and nothing of the inside', (t) => {
  const names = Reflect.ownKeys(Object.getPrototypeOf(allocator.scope())).filter((key) => typeof key === 'string')
  t.deepEqual(names.sort(), ['alloc', 'allocUnsafe', 'constructor', 'from', 'keep', 'scope'])
})
