import test from 'ava'
import type { ExecutionContext } from 'ava'

import { runProgram } from './helpers/child.js'

const HOST = { UNIMALLOC_BACKEND: 'host' }

/** The program must end with this code, by no signal, and say nothing but `stdout`. */
async function endsWell(t: ExecutionContext, program: string, stdout: string, code = 0): Promise<void> {
  const outcome = await runProgram(program, HOST)
  t.is(outcome.signal, null, outcome.stderr)
  t.is(outcome.code, code, outcome.stderr)
  t.is(outcome.stdout, stdout)
  t.is(outcome.stderr, '')
}

test('process.exit with live arrays of every kind', async (t) => {
  await endsWell(
    t,
    `
    const { alloc, allocUnsafe, Allocator, share } = require('unimalloc')
    globalThis.kept = [alloc(Float32Array, 1e6), allocUnsafe(Uint8Array, 100), new Allocator({ policy: 'hardened' }).alloc(Uint8Array, 50)]
    share(globalThis.kept[0])
    console.log('out')
    process.exit(3)`,
    'out\n',
    3,
  )
})

test('the end of the program with live arrays', async (t) => {
  await endsWell(t, `globalThis.kept = require('unimalloc').alloc(Uint8Array, 1e6); console.log(1)`, '1\n')
})

const inWorker = (body: string, after = ''): string => `
  const { Worker } = require('node:worker_threads')
  const worker = new Worker(${JSON.stringify(body)}, { eval: true })
  worker.on('error', (error) => console.log('error', error))
  worker.on('exit', () => { console.log('gone'); ${after} })`

test('the addon loaded only in a worker, which ends with live arrays', async (t) => {
  await endsWell(t, inWorker(`globalThis.kept = require('unimalloc').alloc(Uint8Array, 1e5)`), 'gone\n')
})

test('the addon loaded in many workers, one after the other', async (t) => {
  await endsWell(
    t,
    `
    const { Worker } = require('node:worker_threads')
    const run = () => new Promise((done) => new Worker("const { alloc, Allocator } = require('unimalloc'); alloc(Uint8Array, 1e5).free(); globalThis.x = new Allocator().alloc(Uint8Array, 10)", { eval: true }).on('exit', done))
    ;(async () => { for (let i = 0; i < 20; i++) await run(); console.log('done') })()`,
    'done\n',
  )
})

test('a worker that is terminated in the middle of allocating', async (t) => {
  await endsWell(
    t,
    `
    const { Worker } = require('node:worker_threads')
    const { alloc } = require('unimalloc')
    const body = "const { alloc } = require('unimalloc'); require('node:worker_threads').parentPort.postMessage(1); for (;;) { const a = alloc(Uint8Array, 5000); a.fill(1); a.free() }"
    ;(async () => {
      for (let round = 0; round < 5; round++) {
        const worker = new Worker(body, { eval: true })
        await new Promise((go) => worker.once('message', go))
        await new Promise((go) => setTimeout(go, 5))
        await worker.terminate()
      }
      const array = alloc(Uint8Array, 5000)
      console.log(array.every((value) => value === 0))
      array.free()
    })()`,
    'true\n',
  )
})

test('a worker that is terminated inside withAllocator', async (t) => {
  await endsWell(
    t,
    `
    const { Worker } = require('node:worker_threads')
    const { HostBackend } = require('unimalloc')
    const body = "const { HostBackend } = require('unimalloc'); HostBackend.withAllocator((a) => { require('node:worker_threads').parentPort.postMessage(1); for (;;) a.free(a.alloc(100, 16)) })"
    ;(async () => {
      const worker = new Worker(body, { eval: true })
      await new Promise((go) => worker.once('message', go))
      await worker.terminate()
      console.log(HostBackend.withAllocator(() => 5))
    })()`,
    '5\n',
  )
})

test('a block whose buffer was moved to another thread is kept for good, and stays valid there', async (t) => {
  await endsWell(
    t,
    `
    const { Worker } = require('node:worker_threads')
    const { Allocator } = require('unimalloc')
    const transfer = ArrayBuffer.prototype.transfer
    const body = "const { parentPort } = require('node:worker_threads'); const { alloc } = require('unimalloc'); const a = alloc(Uint8Array, 5000).fill(9); const moved = ArrayBuffer.prototype.transfer ? ArrayBuffer.prototype.transfer.call(a.buffer) : a.buffer.slice(0); try { parentPort.postMessage(moved, [moved]) } catch { parentPort.postMessage(moved.slice(0)) }"
    const worker = new Worker(body, { eval: true })
    let received
    worker.on('message', (buffer) => { received = new Uint8Array(buffer) })
    worker.on('exit', () => {
      const own = new Allocator()
      for (let index = 0; index < 500; index++) own.alloc(Uint8Array, 5000).fill(1)
      console.log(received.length, received.every((value) => value === 9), own.stats().quarantinedCount, own.stats().quarantinedBytes >= 5000)
    })`,
    'transfer' in ArrayBuffer.prototype ? '5000 true 1 true\n' : '5000 true 0 false\n',
  )
})

test('markAsUntransferable on a buffer of ours is survived', async (t) => {
  const outcome = await runProgram(
    `
    const { markAsUntransferable } = require('node:worker_threads')
    const { alloc } = require('unimalloc')
    const array = alloc(Uint8Array, 100)
    markAsUntransferable(array.buffer)
    try { array.free() } catch (error) { console.log(error.code) }
    console.log('on')`,
    HOST,
  )
  t.regex(outcome.stdout, /on\n$/)
  // Old versions detach all the same; newer ones refuse, with a typed error.
  t.regex(outcome.stdout, /^(NOT_TRANSFERABLE\n)?on\n$/)
})

test('the package loaded twice shares nothing it should not', async (t) => {
  await endsWell(
    t,
    `
    const first = require('unimalloc')
    const path = require.resolve('unimalloc')
    delete require.cache[path]
    const second = require('unimalloc')
    const array = first.alloc(Uint8Array, 100)
    let code
    try { second.allocator.free(array) } catch (error) { code = error.code }
    console.log(first !== second, code, array.freed)
    array.free()`,
    'true NOT_OURS false\n',
  )
})
