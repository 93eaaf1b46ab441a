import { mkdtempSync, rmSync, symlinkSync, mkdirSync, writeFileSync } from 'node:fs'
import { spawnSync } from 'node:child_process'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

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
  t.regex(tracked.stderr, /1 array with 4\.9 KiB was not freed/)
  t.regex(tracked.stderr, /forgotten/)
  const untracked = await runProgram(program, { UNIMALLOC_BACKEND: 'host' })
  t.is(untracked.stderr, '')
})

/** Every way to an array, each on a line of its own from the fifth on. */
const WAYS = `
const own = new Allocator({ track: true, backend: 'host' })
const kept = []
function ways() {
  kept.push(own.alloc(Uint8Array, 1))
  kept.push(own.allocUnsafe(Uint8Array, 2))
  kept.push(own.from(Uint8Array, [1, 2, 3]))
  kept.push(own.scope().alloc(Uint8Array, 4))
  kept.push(own.scope().allocUnsafe(Uint8Array, 5))
  kept.push(own.scope().from(new Uint8Array(6)))
  kept.push(own.realloc(own.alloc(Uint8Array, 1), 7))
  kept.push(alloc(Uint8Array, 8))
  kept.push(allocUnsafe(Uint8Array, 9))
  kept.push(from(new Uint8Array(10)))
}
ways()
const first = (leak) => [leak.bytes, leak.stack.split('\\n')[0]]
console.log(JSON.stringify([...own.leaks(), ...allocator.leaks()].map(first).sort(([a], [b]) => a - b)))
`
const NAMES = '{ alloc, allocator, Allocator, allocUnsafe, from }'

/** A source map in which line N of what runs is line N of `original.ts`. */
const MAP = `//# sourceMappingURL=data:application/json;base64,${Buffer.from(
  JSON.stringify({
    version: 3,
    sources: ['original.ts'],
    names: [],
    mappings: WAYS.split('\n')
      .map((_, line) => (line === 0 ? 'AAAA' : 'AACA'))
      .join(';'),
  }),
).toString('base64')}`

const programs: Record<string, { file: string; text: string; flags: string[]; shown: string }> = {
  'an ES module': {
    file: 'program.mjs',
    text: `import ${NAMES} from 'unimalloc'${WAYS}`,
    flags: [],
    shown: 'program.mjs',
  },
  CommonJS: {
    file: 'program.cjs',
    text: `const ${NAMES} = require('unimalloc')${WAYS}`,
    flags: [],
    shown: 'program.cjs',
  },
  'a program with source maps': {
    file: 'mapped.mjs',
    text: `import ${NAMES} from 'unimalloc'${WAYS}${MAP}\n`,
    flags: ['--enable-source-maps'],
    shown: 'original.ts',
  },
}

for (const [title, { file, text, flags, shown }] of Object.entries(programs)) {
  test(`the first line of a stack is the program's own: ${title}`, (t) => {
    const folder = mkdtempSync(join(tmpdir(), 'unimalloc-leaks-'))
    t.teardown(() => rmSync(folder, { recursive: true, force: true }))
    mkdirSync(join(folder, 'node_modules'))
    symlinkSync(fileURLToPath(new URL('..', import.meta.url)), join(folder, 'node_modules', 'unimalloc'), 'junction')
    writeFileSync(join(folder, file), text)
    const env = { ...process.env, UNIMALLOC_TRACK: '1', UNIMALLOC_BACKEND: 'host', NODE_OPTIONS: '' }
    const { stdout, stderr } = spawnSync(process.execPath, [...flags, file], { cwd: folder, env, encoding: 'utf8' })
    const frames = JSON.parse(stdout || '[]') as [number, string][]
    t.deepEqual(
      frames.map(([bytes]) => bytes),
      [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
      stderr,
    )
    for (const [bytes, frame] of frames) t.regex(frame, new RegExp(`at ways .*${shown}:${bytes + 4}:`), stderr)
    t.regex(stderr, /^unimalloc: 10 arrays with 55 B were not freed/m)
  })
}

const FORGETFUL = `
  const { alloc } = require('unimalloc')
  globalThis.kept = alloc(Uint8Array, 1000)
  `
const whereSignals = process.platform === 'win32' ? test.skip : test

for (const signal of ['SIGINT', 'SIGTERM']) {
  whereSignals(`a program that is stopped by ${signal} reports, and ends by it`, async (t) => {
    const stop = `setInterval(() => {}, 1000); process.kill(process.pid, '${signal}')`
    const outcome = await runProgram(FORGETFUL + stop, { UNIMALLOC_BACKEND: 'host', UNIMALLOC_TRACK: '1' })
    t.is(outcome.signal, signal)
    t.regex(outcome.stderr, /^unimalloc: 1 array with 1000 B was not freed\n/)
    t.is(outcome.stderr.match(/unimalloc:/g)?.length, 1)
  })
}

whereSignals('a program that listens for the signal itself decides what it does', async (t) => {
  const listen = `
    process.on('SIGINT', () => { console.log('heard'); setTimeout(() => process.exit(3), 50) })
    setInterval(() => {}, 1000)
    process.kill(process.pid, 'SIGINT')`
  const outcome = await runProgram(FORGETFUL + listen, { UNIMALLOC_BACKEND: 'host', UNIMALLOC_TRACK: '1' })
  t.is(outcome.code, 3)
  t.is(outcome.stdout, 'heard\n')
  t.is(outcome.stderr.match(/unimalloc:/g)?.length, 1)
})

test('tracking keeps no program from ending', async (t) => {
  const outcome = await runProgram(FORGETFUL, { UNIMALLOC_BACKEND: 'host', UNIMALLOC_TRACK: '1' })
  t.is(outcome.code, 0)
})
