import test from 'ava'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import { Worker } from 'node:worker_threads'
import { Allocator, allocator, share } from 'unimalloc'

import { runProgram } from './helpers/child.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const host = () => new Allocator({ backend: 'host' })

/** A worker of a body that may use the package, `parentPort` and `workerData`. */
function worker(body: string, workerData?: unknown): Worker {
  const prelude = `
    const { parentPort, workerData, Worker } = require('node:worker_threads')
    const { createRequire } = require('node:module')
    const { Allocator, alloc, allocUnsafe, attach, share } = createRequire(${JSON.stringify(root)} + 'x.cjs')('unimalloc')
    const kept = (globalThis.kept = [])
    `
  return new Worker(prelude + body, { eval: true, execArgv: [], workerData })
}

/** Ways for a thread to end. `stop` is what the body does after its work. */
const ends = {
  'runs out of work': 'queueMicrotask(() => parentPort.postMessage(1))',
  'calls process.exit': 'parentPort.postMessage(1); setImmediate(() => process.exit(0))',
  throws: "parentPort.postMessage(1); setImmediate(() => { throw new Error('on purpose') })",
  'is terminated': 'setImmediate(() => parentPort.postMessage(1)); setInterval(() => {}, 1e6)',
}

async function runToEnd(thread: Worker, terminate: boolean): Promise<void> {
  thread.on('error', () => {})
  const exited = new Promise((go) => thread.once('exit', go))
  // `once` would be rejected by an error that arrives before the message, on another channel.
  await Promise.race([new Promise((go) => thread.once('message', go)), exited])
  if (terminate) await thread.terminate()
  await exited
}

for (const [end, stop] of Object.entries(ends)) {
  test.serial(`a thread that ${end} lets go of what it holds`, async (t) => {
    const own = host()
    const before = allocator.stats()
    for (let round = 0; round < 3; round++) {
      const array = own.alloc(Uint8Array, 1_000_000).fill(round)
      const work = `
        kept.push(attach(workerData), alloc(Uint8Array, 1_000_000), alloc(Uint8Array, 10), allocUnsafe(Float32Array, 1e6), allocUnsafe(Uint8Array, 10))
        kept[1].fill(1)
        `
      await runToEnd(worker(work + stop, share(array)), end === 'is terminated')
      t.true(array.every((value) => value === round))
      array.free()
      t.is(own.stats().currentCount, 0)
      t.is(own.stats().currentBytes, 0)
    }
    t.is(allocator.stats().quarantinedBytes, before.quarantinedBytes)
  })
}

test.serial('threads inside threads let go too', async (t) => {
  const own = host()
  const before = allocator.stats()
  const array = own.alloc(Uint8Array, 1_000_000)
  const inner = `
    const { parentPort, workerData } = require('node:worker_threads')
    const { createRequire } = require('node:module')
    const { alloc, attach } = createRequire(${JSON.stringify(root)} + 'x.cjs')('unimalloc')
    globalThis.kept = [attach(workerData), alloc(Uint8Array, 1_000_000)]
    setImmediate(() => parentPort.postMessage(1)); setInterval(() => {}, 1e6)`
  const outer = worker(
    `kept.push(attach(workerData), new Worker(${JSON.stringify(inner)}, { eval: true, workerData }))
     kept[1].on('message', () => parentPort.postMessage(1))`,
    share(array),
  )
  await runToEnd(outer, true)
  array.free()
  t.is(own.stats().currentCount, 0)
  t.is(allocator.stats().quarantinedBytes, before.quarantinedBytes)
})

test.serial('a ceiling that workers share is not used up by those that have ended', async (t) => {
  const { stdout, stderr } = await runProgram(
    `
    const { Worker } = require('node:worker_threads')
    const { alloc, share } = require('unimalloc')
    const body = "const { attach, alloc } = require('unimalloc'); const { parentPort, workerData } = require('node:worker_threads'); globalThis.kept = [attach(workerData), alloc(Float32Array, 1e6)]; parentPort.postMessage(1); setInterval(() => {}, 1e6)"
    ;(async () => {
      for (let round = 0; round < 40; round++) {
        const array = alloc(Float32Array, 1e6)
        const worker = new Worker(body, { eval: true, workerData: share(array) })
        await new Promise((go) => worker.once('message', go))
        await worker.terminate()
        array.free()
      }
      console.log('on')
    })()`,
    { UNIMALLOC_BACKEND: 'host', UNIMALLOC_MAX_BYTES: '64MiB' },
  )
  t.is(stdout, 'on\n', stderr)
})

test.serial('an unfinished read does not write to memory that its thread has left behind', async (t) => {
  const own = host()
  const bytes = 64 << 20
  const array = own.alloc(Uint8Array, bytes)
  const thread = worker(
    `const fs = require('node:fs')
     kept.push(attach(workerData))
     const fd = fs.openSync('/dev/urandom', 'r')
     fs.read(fd, kept[0], 0, kept[0].length, null, () => {})
     parentPort.postMessage(1); setInterval(() => {}, 1e6)`,
    share(array),
  )
  await once(thread, 'message')
  array.free()
  t.is(own.stats().currentCount, 1, 'the thread has it')
  await thread.terminate()
  t.is(own.stats().currentCount, 0)
  const next = own.alloc(Uint8Array, bytes)
  await new Promise((go) => setTimeout(go, 200))
  t.true(next.every((byte) => byte === 0))
  next.free()
})

test.serial('memory that something may still use when its thread ends is kept, and is nobody’s any more', async (t) => {
  const own = new Allocator({ backend: 'host', track: true })
  const before = own.stats()
  const array = own.alloc(Uint8Array, 100_000).fill(7)
  const address = array.pointer
  const work = `
    kept.push(attach(workerData))
    kept[0].free({ after: new Promise((go) => kept.push(go)) })
    `
  await runToEnd(worker(work + ends['is terminated'], share(array)), true)
  t.is(own.stats().currentCount, 1, 'this thread has it')
  t.is(own.stats().quarantinedCount, before.quarantinedCount, 'not yet')
  array.free()
  t.deepEqual(own.leaks(), [])
  const { currentCount, currentBytes, requestedBytes, pendingBytes, quarantinedCount, quarantinedBytes } = own.stats()
  t.deepEqual([currentCount, currentBytes, requestedBytes, pendingBytes], [0, 0, 0, 0])
  t.is(quarantinedCount, before.quarantinedCount + 1)
  t.true(quarantinedBytes >= before.quarantinedBytes + 100_000)
  const others = Array.from({ length: 200 }, () => own.alloc(Uint8Array, 100_000))
  t.false(others.some((other) => other.pointer === address))
  own[Symbol.dispose]()
  t.is(own.stats().currentCount, 0)
})

test.serial('arrays that a thread dropped before it ended are not kept', async (t) => {
  const before = allocator.stats()
  for (let round = 0; round < 3; round++) {
    const work = `for (let index = 0; index < 100; index++) alloc(Uint8Array, 1 << 20)
      `
    await runToEnd(worker(work + ends['runs out of work']), false)
  }
  t.is(allocator.stats().quarantinedBytes, before.quarantinedBytes)
})
