// How magazines end: with their worker, at a trim from elsewhere, for want of memory, at the end of the process.
import test from 'ava'
import type { ExecutionContext } from 'ava'

import { runProgram } from './helpers/child.js'

const HOST = { UNIMALLOC_BACKEND: 'host' }

/** The program must end by itself, without an error, and say this. */
async function says(
  t: ExecutionContext,
  program: string,
  expected: unknown[][],
  environment: Record<string, string> = {},
): Promise<void> {
  const prelude = `
    const { Worker, markAsUntransferable } = require('node:worker_threads')
    const { Allocator, allocUnsafe, allocator, share, attach } = require('unimalloc')
    const say = (...values) => console.log(JSON.stringify(values))
    const code = (call) => { try { return call() ?? 'nothing' } catch (error) { return error.code ?? String(error) } }
    const run = (body, onMessage = () => {}) => new Promise((done) => {
      const worker = new Worker("const { parentPort, workerData } = require('node:worker_threads'); const { Allocator, allocUnsafe, allocator, share, attach } = require('unimalloc'); (async () => {" + body + "})()", { eval: true })
      worker.on('error', (error) => say('error', String(error)))
      worker.on('message', (message) => onMessage(message, worker))
      worker.on('exit', done)
    })
    const reserved = () => { allocator.trim(); return allocator.stats().reservedBytes }
    ;(async () => {`
  const outcome = await runProgram(`${prelude}${program}})()`, { ...HOST, ...environment })
  t.is(outcome.signal, null, outcome.stderr)
  t.is(outcome.code, 0, outcome.stderr)
  t.is(outcome.stderr, '')
  const lines = outcome.stdout.trim().split('\n')
  t.deepEqual(
    lines.map((line) => JSON.parse(line) as unknown),
    expected,
  )
}

test('a worker that ends with a full magazine and with live blocks leaves nothing', async (t) => {
  await says(
    t,
    `
    await run("globalThis.kept = []; for (let size = 1; size <= 65536; size += 997) { kept.push(allocUnsafe(Uint8Array, size)); for (let i = 0; i < 20; i++) kept.push(allocUnsafe(Uint8Array, size)); kept.pop().free() }")
    say(reserved(), allocator.stats().quarantinedCount)`,
    [[0, 0]],
  )
})

test('a worker that calls process.exit, and many workers, leave nothing', async (t) => {
  await says(
    t,
    `
    for (let i = 0; i < 8; i++) await run("globalThis.kept = allocUnsafe(Uint8Array, 100); new Allocator().allocUnsafe(Uint8Array, 5000); process.exit(0)")
    say(reserved(), allocator.stats().quarantinedCount)`,
    [[0, 0]],
  )
})

test('workers that are stopped in the middle of it leave nothing', async (t) => {
  await says(
    t,
    `
    const body = "parentPort.postMessage(1); const live = []; for (let i = 0; ; i++) { live.push(allocUnsafe(Uint8Array, 1 + (i * 7919) % 60000)); if (live.length > 300) { live.splice((i * 31) % 300, 1)[0].free(); live.shift().free() } if (i % 1000 === 0) allocator.trim() }"
    for (let i = 0; i < 12; i++) await run(body, (_, worker) => setTimeout(() => worker.terminate(), 3 + i * 7))
    say(reserved(), allocator.stats().quarantinedCount)`,
    [[0, 0]],
  )
})

test('a block that a worker shared outlives it, and comes back from the thread that attached', async (t) => {
  await says(
    t,
    `
    let array
    await run("globalThis.kept = allocUnsafe(Float32Array, 100).fill(3); parentPort.postMessage(share(kept)); await new Promise((done) => parentPort.once('message', done))", (token, worker) => {
      array = attach(token)
      worker.postMessage('go on')
    })
    say(array.length, array.every((value) => value === 3), reserved() > 0)
    // Others come and go on what the worker left, and touch nothing of it.
    await run("for (let i = 0; i < 5000; i++) allocUnsafe(Float32Array, 100).fill(1)")
    say(array.every((value) => value === 3))
    array.free()
    say(reserved(), allocator.stats().quarantinedCount)`,
    [[100, true, true], [true], [0, 0]],
  )
})

test('a block that was handed over outlives its worker', async (t) => {
  await says(
    t,
    `
    let token
    await run("const given = allocUnsafe(Uint8Array, 40000).fill(9); parentPort.postMessage(share(given, { transfer: true }))", (message) => { token = message })
    const array = attach(token)
    say(array.length, array.every((value) => value === 9))
    array.free()
    say(reserved())`,
    [[40000, true], [0]],
  )
})

test('a worker whose slab was taken away, and went to another thread, keeps that memory for good', async (t) => {
  const outcome = await runProgram(
    `
    const { Worker } = require('node:worker_threads')
    const { allocator, Allocator } = require('unimalloc')
    const body = "const { parentPort } = require('node:worker_threads'); const { allocUnsafe } = require('unimalloc'); const a = allocUnsafe(Uint8Array, 5000).fill(9); const b = allocUnsafe(Uint8Array, 5000); const start = a.byteOffset; const moved = ArrayBuffer.prototype.transfer ? ArrayBuffer.prototype.transfer.call(a.buffer) : a.buffer.slice(0); try { parentPort.postMessage({ moved, start }, [moved]) } catch { parentPort.postMessage({ moved: moved.slice(0), start }) } " + (process.argv[1] === 'spin' ? 'for (;;);' : '')
    const worker = new Worker(body, { eval: true })
    let received
    worker.on('message', ({ moved, start }) => { received = new Uint8Array(moved, start, 5000) })
    worker.on('exit', () => {
      const own = new Allocator()
      for (let index = 0; index < 3000; index++) { own.alloc(Uint8Array, 5000).fill(1); own.allocUnsafe(Uint8Array, 5000).fill(2) }
      allocator.trim()
      console.log(received.length, received.every((value) => value === 9), 'transfer' in ArrayBuffer.prototype === own.stats().quarantinedCount > 0)
    })`,
    HOST,
  )
  t.is(outcome.stdout, '5000 true true\n', outcome.stderr)
  t.is(outcome.code, 0)
})

test('trim in one thread reaches the empty slabs of the others at their next refill', async (t) => {
  await says(
    t,
    `
    const cached = []
    await run("const many = Array.from({ length: 400 }, () => allocUnsafe(Uint8Array, 60000)); for (const a of many) a.free(); parentPort.postMessage('full'); await new Promise((done) => parentPort.once('message', done)); const kept = Array.from({ length: 300 }, () => allocUnsafe(Uint8Array, 500)); parentPort.postMessage('next'); await new Promise((done) => parentPort.once('message', done)); kept.forEach((a) => a.free())", (message, worker) => {
      allocator.trim()
      cached.push(allocator.stats().cachedBytes)
      worker.postMessage('go on')
    })
    say(cached[0] < 16e6, cached[1] > 24e6)`,
    [[true, true]],
  )
})

test('for want of memory the thread gives its own magazine back first', async (t) => {
  await says(
    t,
    `
    for (const size of [60000, 30000, 15000]) { const many = Array.from({ length: Math.floor(12e6 / size) }, () => allocUnsafe(Uint8Array, size)); for (const a of many) a.free() }
    const large = allocator.allocUnsafe(Uint8Array, 40 * 2 ** 20)
    say(large.length)
    large.free()
    const own = allocator.alloc(Uint8Array, 40 * 2 ** 20)
    own.free()
    say(Array.from({ length: 600 }, () => allocUnsafe(Uint8Array, 65536)).length)
    say(code(() => Array.from({ length: 600 }, () => allocUnsafe(Uint8Array, 65536))))`,
    [[40 * 2 ** 20], [600], ['OUT_OF_MEMORY']],
    { UNIMALLOC_MAX_BYTES: String(48 * 2 ** 20) },
  )
})

test('garbage of thousands of sizes: memory stays within what is live', async (t) => {
  await says(
    t,
    `
    const own = new Allocator()
    let live = []
    for (let round = 0; round < 6; round++) {
      for (let size = 1; size <= 65536; size += 13) { live.push(own.allocUnsafe(Uint8Array, size)); if (live.length > 100) live.shift().free() }
    }
    say(own.stats().currentCount, own.stats().reservedBytes < 512 * 2 ** 20)
    for (const a of live) a.free()
    say(own.stats().currentBytes, reserved())`,
    [
      [100, true],
      [0, 0],
    ],
  )
})

test('a runtime that forbids external buffers: a typed error, and nothing is lost', async (t) => {
  await says(
    t,
    `
    // What such a runtime answers, put where the package asks.
    const native = require(require.resolve('unimalloc').replace(/dist.index\\.cjs$/, 'native.cjs'))
    delete require.cache[require.resolve('unimalloc')]
    const original = native.hotFunctions
    native.hotFunctions = (shared) => {
      const functions = original(shared)
      functions[4] = () => { new Float64Array(shared, 0, 8)[0] = -3; return null }
      return functions
    }
    const banned = new (require('unimalloc').Allocator)()
    say(code(() => banned.allocUnsafe(Uint8Array, 100)), code(() => banned.allocUnsafe(Uint8Array, 60000)))
    say(banned.stats().currentCount, banned.trim() > 0, banned.stats().reservedBytes)`,
    [
      ['EXTERNAL_BUFFERS_BANNED', 'EXTERNAL_BUFFERS_BANNED'],
      [0, true, 0],
    ],
  )
})

test('markAsUntransferable on a slab: the memory stays, and nothing else changes', async (t) => {
  const outcome = await runProgram(
    `
    const { markAsUntransferable } = require('node:worker_threads')
    const { allocUnsafe, allocator } = require('unimalloc')
    const array = allocUnsafe(Uint8Array, 100)
    markAsUntransferable(array.buffer)
    array.free()
    allocator.trim()
    const next = allocUnsafe(Uint8Array, 100)
    console.log(next.length, array.freed, allocator.stats().currentCount)`,
    HOST,
  )
  t.is(outcome.stdout, '100 true 1\n', outcome.stderr)
})
