import test from 'ava'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { Worker } from 'node:worker_threads'
import { Allocator, attach, share } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'
import { collectUntil } from './helpers/gc.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const host = () => new Allocator({ backend: 'host' })

/** A worker that answers each message with what the function makes of it. */
function worker(onMessage: string): Worker {
  const program = `
    const { parentPort } = require('node:worker_threads')
    const { createRequire } = require('node:module')
    const unimalloc = createRequire(${JSON.stringify(root)} + 'x.cjs')('unimalloc')
    const state = {}
    parentPort.on('message', async (message) => {
      try {
        parentPort.postMessage(await (${onMessage})(message, unimalloc, state))
      } catch (error) {
        parentPort.postMessage({ code: error.code, message: String(error) })
      }
    })`
  return new Worker(program, { eval: true, execArgv: [] })
}

async function ask(of: Worker, message: unknown): Promise<any> {
  of.postMessage(message)
  const [answer] = await once(of, 'message')
  return answer
}

test('another thread sees the same bytes, both ways', async (t) => {
  const own = host()
  const array = own.alloc(Float32Array, 1000)
  array[3] = 1.5
  const other = worker(`(token, { attach }, state) => {
    const array = (state.array ??= attach(token))
    array[4] = array[3] * 2
    return { kind: array.constructor.name, length: array.length, pointer: array.pointer }
  }`)
  const answer = await ask(other, share(array))
  t.deepEqual(answer, { kind: 'Float32Array', length: 1000, pointer: array.pointer })
  t.is(array[4], 3)
  array[3] = 5
  await ask(other, null)
  t.is(array[4], 10)
  await other.terminate()
  array.free()
})

test('the memory lives until the last array over it lets go', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 10_000).fill(7)
  const other = worker(`(message, { attach }, state) => {
    if (message.token) state.array = attach(message.token)
    else if (message.free) state.array.free()
    return state.array.freed ? 'freed' : [state.array[0], state.array[9999]]
  }`)
  t.deepEqual(await ask(other, { token: share(array) }), [7, 7])
  array.free()
  t.true(array.freed)
  t.is(own.stats().currentCount, 1)
  for (const filler of Array.from({ length: 100 }, () => own.alloc(Uint8Array, 10_000).fill(1))) filler.free()
  t.deepEqual(await ask(other, {}), [7, 7])
  t.is(await ask(other, { free: true }), 'freed')
  t.is(own.stats().currentCount, 0)
  await other.terminate()
})

test('an attached array that a worker drops is let go by its garbage collector', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 1000)
  const other = worker(`async (token, { attach }) => {
    if (token) attach(token)
    for (let round = 0; round < 20; round++) { gc(); await new Promise((go) => setTimeout(go, 2)) }
    return true
  }`)
  await ask(other, share(array))
  array.free()
  for (let round = 0; round < 20 && own.stats().currentCount > 0; round++) await ask(other, null)
  t.is(own.stats().currentCount, 0)
  await other.terminate()
})

test('a worker that exits lets go of what it attached', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 1000)
  const other = worker(`(token, { attach }, state) => {
    state.array = attach(token)
    setImmediate(() => process.exit(0))
    return true
  }`)
  const exited = once(other, 'exit')
  await ask(other, share(array))
  await exited
  array.free()
  t.is(own.stats().currentCount, 0)
})

test('a worker that is terminated with shared blocks leaves them valid', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 1000).fill(4)
  const other = worker(`(token, { attach }, state) => { state.array = attach(token); return true }`)
  await ask(other, share(array))
  await other.terminate()
  for (const filler of Array.from({ length: 200 }, () => own.alloc(Uint8Array, 1000).fill(1))) filler.free()
  t.true(array.every((value) => value === 4))
  array.free()
})

test('transfer hands over: dead here, alive in the thread that attaches', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 1000).fill(8)
  const token = share(array, { transfer: true })
  t.true(array.freed)
  t.is(array.length, 0)
  t.is(own.stats().currentCount, 1)
  const other = worker(
    `(token, { attach }) => { const array = attach(token); const sum = array.reduce((a, b) => a + b); array.free(); return sum }`,
  )
  t.is(await ask(other, token), 8000)
  t.is(own.stats().currentCount, 0)
  t.is((await ask(other, token)).code, 'STALE_TOKEN')
  await other.terminate()
})

test('a late attach is stale', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  const token = share(array)
  array.free()
  throwsCode(t, () => attach(token), 'STALE_TOKEN', /keep an array/)
  const dropped = (): unknown => share(own.alloc(Uint8Array, 100))
  const late = dropped()
  t.true(await collectUntil(() => own.stats().currentCount === 0))
  throwsCode(t, () => attach(late as never), 'STALE_TOKEN')
})

test('attach in the same thread gives another array over the same buffer', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  const again = attach(share(array))
  t.is(again.buffer, array.buffer)
  again[5] = 3
  t.is(array[5], 3)
  array.free()
  t.true(array.freed)
  t.false(again.freed)
  t.is(again[5], 3)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  again.free()
  t.is(own.stats().currentCount, 0)
})

test('what one of several arrays was freed with, the memory waits for, whichever goes last and however', async (t) => {
  const turn = () => new Promise((resolve) => setImmediate(resolve))
  const ends: Record<string, (own: Allocator, again: Disposable & { free(): void }) => void> = {
    'by hand': (_, again) => again.free(),
    'with its allocator': (own) => own[Symbol.dispose](),
  }
  for (const [name, end] of Object.entries(ends)) {
    for (const length of [100, 100_000]) {
      for (const how of ['alloc', 'allocUnsafe'] as const) {
        const what = `${name}, ${how}, ${length}`
        const own = host()
        const array = own[how](Uint8Array, length)
        const again = attach(share(array))
        const settle: (() => void)[] = []
        const operation = () => new Promise<void>((resolve) => settle.push(resolve))
        array.free({ after: operation() })
        t.true(array.freed, what)
        t.is(again.length, length, what)
        const third = attach(share(again))
        third.free({ after: operation() })
        end(own, again)
        t.true(again.freed, what)
        t.is(own.stats().currentCount, 1, what)
        settle[1]?.()
        await turn()
        t.is(own.stats().currentCount, 1, what)
        settle[0]?.()
        await turn()
        t.is(own.stats().currentCount, 0, what)
      }
    }
  }
})

test('an operation that is over, and one that frees the other array when it is looked at, hold nothing up', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  const again = attach(share(array))
  array.free({ after: Promise.reject(new Error('read failed')) })
  await new Promise((resolve) => setImmediate(resolve))
  again.free()
  t.is(own.stats().currentCount, 0)

  const other = own.alloc(Uint8Array, 100)
  const last = attach(share(other))
  let looks = 0
  const operation = {
    // oxlint-disable-next-line unicorn/no-thenable -- it is what the option takes
    get then() {
      // The first look is whether it is a promise at all.
      if (looks++ > 0 && !last.freed) last.free()
      return (resolve: () => void) => resolve()
    },
  }
  other.free({ after: operation as PromiseLike<unknown> })
  await new Promise((resolve) => setImmediate(resolve))
  t.true(last.freed)
  t.is(own.stats().currentCount, 0)
})

test('the token is small, cloneable, and carries no address', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  const token = share(array)
  t.is(token.unimalloc, 1)
  t.deepEqual(structuredClone(token), token)
  t.true(JSON.stringify(token).length < 300)
  t.false(JSON.stringify(token).includes(array.pointer.toString(16)))
  t.deepEqual(share(array), token)
  array.free()
})

test('what is no token of this process, or was changed, is refused', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  const token = share(array) as unknown as Record<string, unknown>
  for (const bad of [
    null,
    5,
    {},
    { unimalloc: 1 },
    { ...token, type: 'Array' },
    { ...token, length: -1 },
    { ...token, id: 5 },
    { ...token, id: 'zz' },
  ]) {
    throwsCode(t, () => attach(bad as never), 'INVALID_ARGUMENT', /token/)
  }
  throwsCode(t, () => attach({ ...token, length: 101 } as never), 'INVALID_ARGUMENT', /more elements/)
  throwsCode(t, () => attach({ ...token, id: '0'.repeat(32) } as never), 'STALE_TOKEN')
  throwsCode(t, () => attach({ ...token, process: 'f'.repeat(32) } as never), 'STALE_TOKEN', /another process/)
  throwsCode(t, () => share(array.subarray(1) as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => share(array, { transfr: true } as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => share(array, { transfer: 1 } as never), 'INVALID_ARGUMENT')
  t.false(array.freed)
  array.free()
  throwsCode(t, () => share(array), 'INVALID_ARGUMENT', /freed/)
})

test('empty arrays can be shared', (t) => {
  const array = host().alloc(Float32Array, 0)
  const again = attach(share(array))
  t.is(again.length, 0)
  t.true(again instanceof Float32Array)
  again.free()
  t.false(array.freed)
})

test('many workers, many arrays, all returned', async (t) => {
  const own = host()
  const arrays = Array.from({ length: 40 }, (_, index) => own.alloc(Uint32Array, 1000 + index))
  const workers = Array.from({ length: 3 }, () =>
    worker(
      `(tokens, { attach }) => { for (const token of tokens) { const array = attach(token); for (let i = 0; i < array.length; i++) array[i] ||= i; array.free() } return true }`,
    ),
  )
  const tokens = arrays.map((array) => share(array))
  await Promise.all(workers.map((each) => ask(each, tokens)))
  t.true(arrays.every((array) => array.every((value, index) => value === index)))
  for (const array of arrays) array.free()
  t.is(own.stats().currentCount, 0)
  await Promise.all(workers.map((each) => each.terminate()))
})
