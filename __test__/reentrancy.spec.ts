// Code of the program that runs in the middle of a call of ours, and frees, allocates or throws there.
import test from 'ava'
import type { ExecutionContext } from 'ava'
import { Allocator, share } from 'unimalloc'
import type { FreeOptions, UnifiedArray } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'
import { collectUntil } from './helpers/gc.js'

const host = (maxBytes = Infinity): Allocator => new Allocator({ backend: 'host', maxBytes })

/** Options whose `after` is found to be absent, once it has run `meanwhile`. */
function meddling(meanwhile: () => void): FreeOptions {
  let reads = 0
  return {
    get after() {
      if (reads++ === 0) meanwhile()
      return undefined as never
    },
  }
}

const ways = [
  ['alloc', (own: Allocator) => own.alloc(Uint8Array, 16)],
  ['allocUnsafe', (own: Allocator) => own.allocUnsafe(Uint8Array, 16)],
] as const

/** The books are those of no arrays at all. */
function isEven(t: ExecutionContext, own: Allocator): void {
  const { currentBytes, currentCount, requestedBytes, pendingBytes } = own.stats()
  t.deepEqual([currentBytes, currentCount, requestedBytes, pendingBytes], [0, 0, 0, 0])
}

for (const [name, make] of ways) {
  test(`${name}: an option of free() that frees the array itself is a double free`, (t) => {
    const own = host()
    const array = make(own)
    throwsCode(
      t,
      () =>
        array.free(
          meddling(() => {
            array.free()
          }),
        ),
      'DOUBLE_FREE',
    )
    isEven(t, own)
  })

  test(`${name}: an option of free() that frees the array and allocates again leaves the new array alone`, (t) => {
    const own = host()
    // A mere view of a pooled block that is left sees whatever comes there next, and frees it: so the types say.
    for (const through of name === 'alloc' ? (['array', 'view'] as const) : (['array'] as const)) {
      const array = make(own)
      const view = new DataView(array.buffer, array.byteOffset, 4)
      let next: UnifiedArray<Uint8Array> | undefined
      const options = meddling(() => {
        array.free()
        next = make(own)
      })
      t.throws(() => (through === 'array' ? array.free(options) : own.free(view, options)))
      t.false(next?.freed)
      t.is(own.stats().currentCount, 1)
      next?.fill(7)
      next?.free()
      isEven(t, own)
    }
  })

  test(`${name}: a length of the program's own that frees the array and allocates again leaves the new array alone`, (t) => {
    const own = host()
    const array = make(own)
    let next: UnifiedArray<Uint8Array> | undefined
    Object.defineProperty(array, 'length', {
      get() {
        if (next === undefined) {
          Object.defineProperty(array, 'length', { value: 16 })
          array.free()
          next = make(own)
        }
        return 16
      },
      configurable: true,
    })
    throwsCode(
      t,
      () => {
        array.free()
        array.free() // where nothing of the program's is looked at
      },
      'DOUBLE_FREE',
    )
    next ??= make(own)
    t.false(next.freed)
    t.is(own.stats().currentCount, 1)
    next.free()
    isEven(t, own)
  })

  test(`${name}: the allocator frees an array whose own free() the program has replaced`, (t) => {
    const own = host()
    const array = make(own)
    Object.defineProperty(array, 'free', { value: () => own.free(array) })
    array.free()
    t.true(array.freed)
    isEven(t, own)
    const stripped = make(own)
    const prototype: unknown = Object.getPrototypeOf(stripped)
    Object.setPrototypeOf(stripped, Uint8Array.prototype)
    throwsCode(t, () => own.free(stripped), 'INVALID_ARGUMENT')
    Object.setPrototypeOf(stripped, prototype as object)
    own.free(stripped)
    isEven(t, own)
  })

  test(`${name}: each option of free() is read once`, async (t) => {
    const own = host()
    let reads = 0
    make(own).free({
      get after() {
        return reads++ === 0 ? Promise.resolve() : (5 as never)
      },
    })
    t.is(reads, 1)
    t.true(await collectUntil(() => own.stats().currentCount === 0))
  })

  for (const [what, after] of [
    [
      'throws',
      {
        // oxlint-disable-next-line unicorn/no-thenable -- it is what the option takes
        then: () => {
          throw new Error('no')
        },
      },
    ],
    // oxlint-disable-next-line unicorn/no-thenable -- it is what the option takes
    ['calls back twice', { then: (done: () => void) => (done(), done()) }],
    ['is rejected', Promise.reject(new Error('no'))],
  ] as const) {
    if (after instanceof Promise) after.catch(() => {})
    test(`${name}: an operation to wait for that ${what} holds no memory`, async (t) => {
      const own = host()
      const array = make(own)
      array.free({ after: after as PromiseLike<unknown> })
      t.true(array.freed)
      t.true(await collectUntil(() => own.stats().currentCount === 0))
      isEven(t, own)
    })
  }

  test(`${name}: realloc of an array that the out-of-memory handler frees or shares fails, and loses nothing`, (t) => {
    const own = host(4096)
    const first = own[name](Uint8Array, 4096)
    own.onOutOfMemory(() => {
      first.free()
      return true
    })
    throwsCode(t, () => own.realloc(first, 2048), 'INVALID_ARGUMENT', /freed/)
    isEven(t, own)

    const [ballast, second] = [own[name](Uint8Array, 2048), own[name](Uint8Array, 2048).fill(9)]
    own.onOutOfMemory(() => {
      ballast.free()
      share(second)
      return true
    })
    throwsCode(t, () => own.realloc(second, 1024), 'INVALID_ARGUMENT', /shared/)
    t.true(second.every((value) => value === 9))
    second.free()
    isEven(t, own)
  })

  test(`${name}: a scope that ends in the out-of-memory handler keeps nothing`, (t) => {
    const own = host(4096)
    const scope = own.scope()
    const ballast = own[name](Uint8Array, 4096)
    own.onOutOfMemory(() => {
      ballast.free()
      scope[Symbol.dispose]()
      return true
    })
    throwsCode(t, () => scope[name](Uint8Array, 4096), 'DISPOSED')
    isEven(t, own)
  })
}

test('an out-of-memory handler that runs out of memory itself is not called again', (t) => {
  const own = host(4096)
  let calls = 0
  own.onOutOfMemory(() => {
    calls++
    throwsCode(t, () => own.allocUnsafe(Uint8Array, 5000), 'OUT_OF_MEMORY')
    return false
  })
  throwsCode(t, () => own.alloc(Uint8Array, 5000), 'OUT_OF_MEMORY')
  t.is(calls, 1)
  throwsCode(t, () => own.allocUnsafe(Uint8Array, 5000), 'OUT_OF_MEMORY')
  t.is(calls, 2)
})

test('what an out-of-memory handler throws, the allocation throws; the handler serves on', (t) => {
  const own = host(4096)
  const own2 = new TypeError('mine')
  own.onOutOfMemory(() => {
    throw own2
  })
  t.is(
    t.throws(() => own.alloc(Uint8Array, 5000)),
    own2,
  )
  t.is(
    t.throws(() => own.alloc(Uint8Array, 5000)),
    own2,
  )
  isEven(t, own)
})

test('from(): a source that disposes of the allocator, or throws, leaves nothing', (t) => {
  const own = host()
  const element = (act: () => number) => ({
    length: 2,
    get 0() {
      return act()
    },
    1: 1,
  })
  throwsCode(
    t,
    () =>
      own.from(
        Uint8Array,
        element(() => {
          own[Symbol.dispose]()
          return 1
        }),
      ),
    'DISPOSED',
  )
  isEven(t, own)
  const other = host()
  const cause = new Error('mine')
  const error = throwsCode(
    t,
    () =>
      other.from(
        Uint8Array,
        element(() => {
          other[Symbol.dispose]()
          throw cause
        }),
      ),
    'INVALID_ARGUMENT',
    /mine/,
  )
  t.is(error?.cause, cause)
  isEven(t, other)
})

test('from(): a source that grows shorter while it is read leaves zeros, not old contents', (t) => {
  const own = host()
  for (let index = 0; index < 50; index++) own.alloc(Uint8Array, 1000).fill(255).free()
  let reads = 0
  const source = {
    get length() {
      return reads++ < 2 ? 1000 : 1
    },
    0: 1,
  }
  const array = own.from(Uint8Array, source)
  t.true(array.subarray(1).every((value) => value === 0))
})

test('a view that lies about where it is does not deceive us', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 64)
  const view = new Uint8Array(array.buffer, 8)
  Object.defineProperty(view, 'byteOffset', { value: 0 })
  throwsCode(t, () => own.free(view), 'INTERIOR')
  const foreign = new DataView(new ArrayBuffer(8))
  Object.defineProperty(foreign, 'buffer', { value: array.buffer })
  throwsCode(t, () => own.free(foreign), 'NOT_OURS')
  t.false(own.owns(foreign))
  Object.defineProperty(array, 'length', { value: 1e9 })
  const longer = own.realloc(array, 128)
  t.is(longer.length, 128)
  const source = new Uint8Array(2)
  Object.defineProperty(source, 'length', { value: 100 })
  t.is(own.from(source).length, 2)
})

test('a view of a detached slab is refused by the typed error, whatever its kind', (t) => {
  const own = host()
  const array = own.allocUnsafe(Uint8Array, 64)
  const view = new DataView(array.buffer, array.byteOffset, 8)
  void new ReadableStream({ type: 'bytes', start: (controller) => controller.enqueue(array) })
  t.false(own.owns(view))
  throwsCode(t, () => own.free(view), 'INVALID_ARGUMENT', /detached/)
  throwsCode(t, () => own.free(array), 'INVALID_ARGUMENT', /detached/)
})

test('values that throw when they are looked at get the typed error all the same', (t) => {
  const own = host()
  const { proxy, revoke } = Proxy.revocable({}, {})
  revoke()
  const nameless = Object.defineProperty(() => {}, 'name', { value: Symbol('none') })
  for (const value of [proxy, nameless, { constructor: { name: Symbol('none') } }, Object.create(null)]) {
    throwsCode(t, () => own.alloc(value as never, 1), 'INVALID_ARGUMENT')
    throwsCode(t, () => own.alloc(Uint8Array, value as never), 'INVALID_ARGUMENT')
  }
})
