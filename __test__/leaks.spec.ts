import test from 'ava'
import { Allocator } from 'unimalloc'

import { runProgram } from './helpers/child.js'
import { collectUntil } from './helpers/gc.js'

test('live allocations by the place they came from', (t) => {
  const own = new Allocator({ backend: 'host', track: true })
  const allocateHere = (): unknown => own.alloc(Uint8Array, 1000)
  const allocateThere = (): unknown => own.allocUnsafe(Float64Array, 1000)
  const kept = [allocateHere(), allocateThere(), allocateThere()]
  const leaks = own.leaks()
  const there = leaks.filter((leak) => leak.stack.includes('allocateThere'))
  t.is(
    there.reduce((sum, leak) => sum + leak.count, 0),
    2,
  )
  t.is(
    there.reduce((sum, leak) => sum + leak.bytes, 0),
    16_000,
  )
  t.true(leaks[0]!.bytes >= leaks.at(-1)!.bytes)
  t.regex(leaks[0]!.stack, /leaks\.spec/)
  t.notRegex(leaks[0]!.stack, /Allocator\.allocUnsafe/)
  t.is(kept.length, 3)
  own[Symbol.dispose]()
  t.deepEqual(own.leaks(), [])
})

test('what was freed, and what the garbage collector took from alloc, is no leak', async (t) => {
  const own = new Allocator({ backend: 'host', track: true })
  const drop = (): void => {
    for (let index = 0; index < 10; index++) own.alloc(Uint8Array, 64)
  }
  drop()
  own.alloc(Uint8Array, 64).free()
  t.is(
    own.leaks().reduce((sum, leak) => sum + leak.count, 0),
    10,
  )
  t.true(await collectUntil(() => own.leaks().length === 0))
})

test('an array of allocUnsafe that nobody freed is a leak, also once its buffer was collected', async (t) => {
  const own = new Allocator({ backend: 'host', track: true })
  const drop = (): void => {
    own.allocUnsafe(Uint8Array, 64)
  }
  drop()
  await collectUntil(() => own.stats().currentCount === 0)
  t.is(own.leaks().length, 1)
  t.regex(own.leaks()[0]!.stack, /drop/)
})

test('without tracking there is nothing to report', (t) => {
  const own = new Allocator({ backend: 'host' })
  using array = own.alloc(Uint8Array, 10)
  t.is(array.length, 10)
  t.deepEqual(own.leaks(), [])
})

test('UNIMALLOC_TRACK=1 reports at exit what was not freed, with the place', async (t) => {
  const program = `
    const { alloc } = require('unimalloc')
    function forgotten() { globalThis.kept = alloc(Uint8Array, 5000) }
    forgotten()
    alloc(Uint8Array, 10).free()`
  const tracked = await runProgram(program, { UNIMALLOC_TRACK: '1', UNIMALLOC_BACKEND: 'host' })
  t.is(tracked.code, 0, tracked.stderr)
  t.regex(tracked.stderr, /1 arrays with 4\.9 KiB were not freed/)
  t.regex(tracked.stderr, /forgotten/)
  const untracked = await runProgram(program, { UNIMALLOC_BACKEND: 'host' })
  t.is(untracked.stderr, '')
})
