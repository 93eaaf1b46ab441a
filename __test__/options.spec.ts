import test from 'ava'
import { alloc, Allocator, allocator, allocUnsafe, configure } from 'unimalloc'
import { totalmem } from 'node:os'

import { runProgram } from './helpers/child.js'
import { throwsCode } from './helpers/errors.js'

const lengths: unknown[] = [
  NaN,
  -1,
  -0.5,
  1.5,
  Infinity,
  -Infinity,
  2 ** 53,
  1e300,
  '5',
  5n,
  null,
  undefined,
  {},
  [4],
  true,
  new Uint8Array(2),
]

for (const length of lengths) {
  test(`length ${typeof length} ${String(length)} is refused, and leaks nothing`, (t) => {
    const before = allocator.stats()
    throwsCode(t, () => alloc(Float32Array, length as number), 'INVALID_ARGUMENT', /length/)
    throwsCode(t, () => allocUnsafe(Uint8Array, length as number), 'INVALID_ARGUMENT', /length/)
    t.is(allocator.stats().currentCount, before.currentCount)
    t.is(allocator.stats().totalCount, before.totalCount)
  })
}

for (const type of [
  Array,
  Object,
  Buffer,
  DataView,
  ArrayBuffer,
  null,
  undefined,
  'Float32Array',
  {},
  class extends Float32Array {},
]) {
  test(`type ${typeof type} ${(type as { name?: string } | null)?.name ?? String(type)} is refused`, (t) => {
    throwsCode(t, () => alloc(type as never, 4), 'INVALID_ARGUMENT', /constructor/)
  })
}

for (const alignment of [0, 3, -8, 1.5, NaN, 2 ** 22, '64', null]) {
  test(`alignment ${String(alignment)} is refused`, (t) => {
    throwsCode(t, () => alloc(Uint8Array, 8, { alignment: alignment as number }), 'INVALID_ARGUMENT', /alignment/)
  })
}

test('other options of an allocation', (t) => {
  throwsCode(t, () => alloc(Uint8Array, 8, { placement: 'gpu' as never }), 'INVALID_ARGUMENT', /'device'/)
  throwsCode(t, () => alloc(Uint8Array, 8, { aligment: 64 } as never), 'INVALID_ARGUMENT', /aligment.*alignment/)
  throwsCode(t, () => alloc(Uint8Array, 8, { stream: 5 } as never), 'INVALID_ARGUMENT', /Stream/)
  throwsCode(t, () => alloc(Uint8Array, 8, 64 as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => alloc(Uint8Array, 8, null as never), 'INVALID_ARGUMENT')
  for (const placement of ['auto', 'host', 'device', 'read-mostly'] as const) alloc(Uint8Array, 8, { placement }).free()
})

const badOptions: Array<[unknown, RegExp]> = [
  [{ backend: 'cuda' }, /'cuda-unified'/],
  [{ backend: null }, /backend/],
  [{ policy: 'strict' }, /'hardened'/],
  [{ placement: 'cpu' }, /'host'/],
  [{ device: -1 }, /device/],
  [{ device: 1.5 }, /device/],
  [{ device: '0' }, /device/],
  [{ backend: 'host', device: 1 }, /host backend/],
  [{ track: 1 }, /track/],
  [{ maxByte: 5 }, /maxBytes/],
  [5, /object/],
  [null, /object/],
  ['host', /object/],
  [[], /object/],
]
for (const [options, message] of badOptions) {
  test(`allocator options ${JSON.stringify(options)} are refused`, (t) => {
    throwsCode(t, () => new Allocator(options as never), 'INVALID_ARGUMENT', message)
    throwsCode(t, () => configure(options as never), 'INVALID_ARGUMENT')
  })
}

for (const maxBytes of [
  '-5%',
  '101%',
  '-5',
  '',
  'GiB',
  '5GB',
  '5 gib',
  '1e3MiB',
  'half',
  NaN,
  -1,
  1.5,
  2 ** 60,
  null,
  {},
  5n,
]) {
  test(`maxBytes ${typeof maxBytes} ${String(maxBytes)} is refused`, (t) => {
    throwsCode(t, () => new Allocator({ backend: 'host', maxBytes: maxBytes as never }), 'INVALID_ARGUMENT', /maxBytes/)
  })
}

test('maxBytes as a percentage is of what the container may use', async (t) => {
  const program = (bytes: number) => `
    process.constrainedMemory = () => ${bytes}
    const { Allocator } = require('unimalloc')
    console.log(new Allocator({ backend: 'host', maxBytes: '50%' }).stats().limitBytes)`
  t.is((await runProgram(program(64 * 2 ** 20))).stdout, `${32 * 2 ** 20}\n`)
  const whole = `${Math.floor(totalmem() / 2)}\n`
  for (const none of [0, 2 ** 64]) {
    t.is((await runProgram(program(none), { UNIMALLOC_MAX_BYTES: 'Infinity' })).stdout, whole)
  }
})

test('maxBytes as bytes, text, percentage and Infinity', (t) => {
  const limit = (maxBytes: never) => new Allocator({ backend: 'host', maxBytes }).stats().limitBytes
  const processLimit = limit(Infinity as never)
  const whole = Math.min(totalmem(), process.constrainedMemory() || Infinity)
  t.is(limit(12_345 as never), 12_345)
  t.is(limit('4096B' as never), 4096)
  t.is(limit('3KiB' as never), 3072)
  t.is(limit('1.5MiB' as never), 1_572_864)
  t.is(limit('2%' as never), Math.min(processLimit, Math.floor(whole * 0.02)))
  t.true(processLimit > 2 ** 26)
})
