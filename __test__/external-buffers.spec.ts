// Electron, and every engine whose memory is a cage, forbids ArrayBuffers over native memory. Here the answer is given in the engine's
// place, below the addon (helpers/no-external-buffers.c), in a process that is otherwise Node's.
import { spawnSync } from 'node:child_process'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

import anyTest from 'ava'

import { runProgram } from './helpers/child.js'

const source = fileURLToPath(new URL('helpers/no-external-buffers.c', import.meta.url))
const folder = mkdtempSync(join(tmpdir(), 'unimalloc-no-external-buffers-'))
process.once('exit', () => rmSync(folder, { recursive: true, force: true }))

/** The library to preload, or null: it takes a C compiler and glibc. */
function build(): string | null {
  if (process.platform !== 'linux') return null
  const library = join(folder, 'no-external-buffers.so')
  const built = spawnSync(
    process.env['CC'] ?? 'cc',
    ['-shared', '-fPIC', '-Wall', '-Werror', '-o', library, source, '-ldl'],
    {
      encoding: 'utf8',
    },
  )
  if (built.error !== undefined) return null
  if (built.status !== 0) throw new Error(`the preloaded library could not be built:\n${built.stderr}`)
  return library
}

const library = build()
const test = library === null ? anyTest.skip : anyTest

/** Runs a program under the ban and gives what it said, one JSON text a line. */
async function banned(program: string): Promise<unknown[]> {
  const prologue = `
    const unimalloc = require('unimalloc')
    const { Worker } = require('node:worker_threads')
    const say = (...values) => console.log(JSON.stringify(values))
    const caught = (run) => { try { run(); return null } catch (error) { return error } }
    const code = (run) => { const error = caught(run); return error === null ? 'none' : (error.code ?? error.message) }
    const reserved = () => unimalloc.HostBackend.pools()
    `
  const environment = { LD_PRELOAD: library as string, EXTERNAL_BUFFERS: 'banned', UNIMALLOC_BACKEND: 'host' }
  const { code, signal, stdout, stderr } = await runProgram(prologue + program, environment)
  if (code !== 0) throw new Error(`ended with ${code ?? signal}:\n${stderr}`)
  return stdout
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as unknown)
}

const BANNED = 'EXTERNAL_BUFFERS_BANNED'

test('alloc, allocUnsafe, from and scopes: the typed error, which says what to do', async (t) => {
  const [codes, message] = await banned(`
    const { alloc, allocUnsafe, allocator, from } = unimalloc
    say(
      code(() => alloc(Float32Array, 100)), code(() => alloc(Uint8Array, 64 * 2 ** 20)), code(() => alloc(Uint8Array, 0)),
      code(() => allocUnsafe(Float32Array, 100)), code(() => allocUnsafe(Uint8Array, 64 * 2 ** 20)),
      code(() => from(Int32Array, [1, 2, 3])), code(() => allocator.scope().alloc(Int8Array, 5)))
    say(caught(() => alloc(Float32Array, 100)).message, caught(() => allocUnsafe(Float32Array, 100)).message)`)
  t.deepEqual(codes, [BANNED, BANNED, 'none', BANNED, BANNED, BANNED, BANNED])
  for (const text of message as string[]) t.regex(text, /Electron.*separate node binary/s)
})

test('nothing is held, counted or lost, however often it is tried', async (t) => {
  const [figures, freed, later] = await banned(`
    const { Allocator } = unimalloc
    const own = new Allocator({ maxBytes: 2 ** 30 })
    for (let i = 0; i < 20_000; i++) {
      caught(() => own.alloc(Uint8Array, 4096 + i))
      caught(() => own.allocUnsafe(Uint8Array, 1 + (i % 65536)))
    }
    const { currentCount, currentBytes, pendingBytes } = own.stats()
    say(currentCount, currentBytes, pendingBytes)
    own.trim()
    say(own.stats().reservedBytes, reserved().segment.bytes, reserved().huge.bytes, reserved().orphan.bytes)
    process.env.EXTERNAL_BUFFERS = 'allowed'
    const arrays = [own.alloc(Uint8Array, 10).fill(1), own.allocUnsafe(Uint8Array, 10).fill(2)]
    say(arrays.map((array) => array[9]), own.stats().currentCount)`)
  t.deepEqual(figures, [0, 0, 0])
  t.deepEqual(freed, [0, 0, 0, 0])
  t.deepEqual(later, [[1, 2], 2])
})

test('realloc: the old array stays as it was', async (t) => {
  const [outcome] = await banned(`
    const { alloc, allocator } = unimalloc
    process.env.EXTERNAL_BUFFERS = 'allowed'
    const array = alloc(Uint8Array, 100).fill(7)
    process.env.EXTERNAL_BUFFERS = 'banned'
    say(code(() => allocator.realloc(array, 2 ** 20)), array.freed, array[99], allocator.stats().currentCount)`)
  t.deepEqual(outcome, [BANNED, false, 7, 1])
})

test('attach: the typed error, and the shared array lives and dies as before', async (t) => {
  const [inside, outside] = await banned(`
    process.env.EXTERNAL_BUFFERS = 'allowed'
    const { alloc, share, allocator } = unimalloc
    const array = alloc(Uint8Array, 2 ** 20).fill(3)
    const worker = new Worker(\`
      const { parentPort, workerData } = require('node:worker_threads')
      const { attach } = require('unimalloc')
      try { attach(workerData); parentPort.postMessage(['none', '']) } catch (error) { parentPort.postMessage([error.code, error.message]) }\`,
      { eval: true, workerData: share(array), env: require('node:worker_threads').SHARE_ENV })
    process.env.EXTERNAL_BUFFERS = 'banned'
    worker.once('message', (message) => say(...message))
    worker.once('exit', () => {
      array.free()
      allocator.trim()
      say(array.freed, allocator.stats().currentCount, allocator.stats().reservedBytes)
    })`)
  const [name, text] = inside as [string, string]
  t.is(name, BANNED)
  t.regex(text, /plain Node process/)
  t.deepEqual(outside, [true, 0, 0])
})

test('attach of an array that its thread gave up: the token was all that held it', async (t) => {
  const [outcome] = await banned(`
    process.env.EXTERNAL_BUFFERS = 'allowed'
    const { alloc, share, attach, allocator } = unimalloc
    const array = alloc(Uint8Array, 2 ** 20)
    const token = share(array, { transfer: true })
    process.env.EXTERNAL_BUFFERS = 'banned'
    say(code(() => attach(token)), code(() => attach(token)), allocator.trim() > 0, allocator.stats().reservedBytes)`)
  t.deepEqual(outcome, [BANNED, 'STALE_TOKEN', true, 0])
})

test('doctor says it', async (t) => {
  const cli = fileURLToPath(new URL('../dist/cli.mjs', import.meta.url))
  const { status, stdout } = spawnSync(process.execPath, [cli, 'doctor', '--json'], {
    env: { ...process.env, LD_PRELOAD: library as string, EXTERNAL_BUFFERS: 'banned' },
    encoding: 'utf8',
  })
  t.not(status, null)
  t.regex(stdout, /EXTERNAL_BUFFERS_BANNED|forbids/)
})
