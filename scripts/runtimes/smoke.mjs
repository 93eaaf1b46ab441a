// What must hold on every runtime, over the installed package, with nothing but the runtime: `node smoke.mjs`, `bun smoke.mjs`,
// `deno run -A smoke.mjs`. The last line counts; the line before it says, as JSON, what this runtime has.
import assert from 'node:assert/strict'
import { constants } from 'node:buffer'
import { createRequire } from 'node:module'
import { mkdtempSync, openSync, closeSync, readSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Worker } from 'node:worker_threads'
import * as unimalloc from 'unimalloc'

const { alloc, allocUnsafe, Allocator, allocator, attach, from, pointerOf, share, UnimallocError } = unimalloc
const require = createRequire(import.meta.url)
const host = new Allocator({ backend: 'host' })
const collect = globalThis.gc ?? globalThis.Bun?.gc?.bind(null, true)
const turn = (milliseconds = 0) => new Promise((resolve) => setTimeout(resolve, milliseconds))

/** @param {() => unknown} call @param {string} code */
function throwsCode(call, code) {
  assert.throws(call, (error) => error instanceof UnimallocError && error.code === code && error.message.length > 15)
}

let keptAfterWorkers

const kinds = [
  Int8Array,
  Uint8Array,
  Uint8ClampedArray,
  Int16Array,
  Uint16Array,
  Int32Array,
  Uint32Array,
  BigInt64Array,
  BigUint64Array,
  Float32Array,
  Float64Array,
  ...(globalThis.Float16Array ? [globalThis.Float16Array] : []),
]

const tests = {
  'import and require are one package with one state'() {
    const required = require('unimalloc')
    assert.equal(required.Allocator, Allocator)
    assert.equal(required.allocator, allocator)
    const before = allocator.stats().currentCount
    const array = required.alloc(Float32Array, 8)
    assert.equal(allocator.stats().currentCount, before + 1)
    allocator.free(array)
  },
  'arrays of every kind are real, zeroed and aligned'() {
    for (const kind of kinds) {
      const array = host.alloc(kind, 100)
      assert.ok(array instanceof kind)
      assert.equal(array.length, 100)
      assert.ok(array.every((value) => Number(value) === 0))
      assert.equal(array.pointer % 256n, 0n)
      array[99] = typeof array[0] === 'bigint' ? 7n : 7
      assert.equal(Number(array.at(-1)), 7)
      assert.equal(pointerOf(array.subarray(3)), array.pointer + BigInt(3 * kind.BYTES_PER_ELEMENT))
      array.free()
      assert.ok(array.freed)
    }
  },
  'a freed array is empty, and freeing twice is found'() {
    const array = host.alloc(Float64Array, 4)
    array.free()
    assert.equal(array.length, 0)
    throwsCode(() => array.free(), 'DOUBLE_FREE')
    throwsCode(() => array.pointer, 'INVALID_ARGUMENT')
    array[Symbol.dispose]()
  },
  'pooled arrays, in numbers'() {
    const own = new Allocator({ backend: 'host' })
    const arrays = Array.from({ length: 5000 }, (_, index) =>
      own.allocUnsafe(Uint32Array, 1 + (index % 300)).fill(index),
    )
    assert.ok(arrays.every((array, index) => array.every((value) => value === index)))
    assert.equal(new Set(arrays.map((array) => array.pointer)).size, 5000)
    for (const array of arrays) array.free()
    throwsCode(() => arrays[17].free(), 'DOUBLE_FREE')
    assert.equal(own.stats().currentBytes, 0)
    own[Symbol.dispose]()
  },
  'slabs that are collected while others are mapped'() {
    const own = new Allocator({ backend: 'host' })
    for (let round = 0; round < 3000; round++) {
      const arrays = Array.from({ length: 60 }, (_, index) =>
        own.allocUnsafe(Uint8Array, 256 * (1 + ((index * 37) % 256))),
      )
      for (const array of arrays) array.free()
      own.trim()
      // Some engines finalize what they collect on threads of their own, while the program goes on.
      if (round % 100 === 0) collect?.()
    }
    own[Symbol.dispose]()
  },
  'large arrays'() {
    const array = host.alloc(Float32Array, 64 * 2 ** 20)
    array[array.length - 1] = 3
    assert.equal(array.byteLength, 2 ** 28)
    array.free()
  },
  'copies in, grows, scopes'() {
    const source = from(new Int16Array([1, -2, 3]))
    assert.deepEqual([...source], [1, -2, 3])
    source.free()
    const grown = host.realloc(host.from(Uint8Array, [1, 2, 3]), 6)
    assert.deepEqual([...grown], [1, 2, 3, 0, 0, 0])
    const scope = host.scope()
    const inside = scope.allocUnsafe(Uint8Array, 10)
    scope[Symbol.dispose]()
    assert.ok(inside.freed)
    grown.free()
  },
  'reads a file straight into the memory'() {
    const folder = mkdtempSync(join(tmpdir(), 'unimalloc-smoke-'))
    try {
      const path = join(folder, 'numbers')
      writeFileSync(path, new Uint8Array(Float32Array.of(1.5, 2.5, 3.5).buffer))
      const array = host.alloc(Float32Array, 3)
      const file = openSync(path, 'r')
      assert.equal(readSync(file, array, 0, array.byteLength, 0), 12)
      closeSync(file)
      assert.deepEqual([...array], [1.5, 2.5, 3.5])
      array.free()
    } finally {
      rmSync(folder, { recursive: true })
    }
  },
  'mistakes are typed errors'() {
    throwsCode(() => host.free(new Float32Array(4)), 'NOT_OURS')
    const array = host.alloc(Float32Array, 16)
    throwsCode(() => host.free(array.subarray(2)), 'INTERIOR')
    array.free()
    throwsCode(() => alloc(Float32Array, -1), 'INVALID_ARGUMENT')
    throwsCode(() => allocUnsafe(Float32Array, Number.NaN), 'INVALID_ARGUMENT')
    throwsCode(() => new Allocator({ backend: 'host', maxBytes: 1024 }).alloc(Uint8Array, 4096), 'OUT_OF_MEMORY')
    if (!unimalloc.isCudaAvailable()) {
      throwsCode(() => new Allocator({ backend: 'cuda-unified' }), 'CUDA_UNAVAILABLE')
      assert.ok(unimalloc.whyNoCuda().length > 20)
    }
  },
  'shared with a worker, which writes into the same memory'() {
    const array = host.alloc(Float32Array, 1000)
    const source = `
      const { parentPort, workerData } = require('node:worker_threads')
      const { attach } = require(workerData.path)
      const array = attach(workerData.token)
      array.fill(4.25)
      array.free()
      parentPort.postMessage('done')`
    // A module that is evaluated from text finds no packages by itself: it gets the path.
    const workerData = { token: share(array), path: require.resolve('unimalloc') }
    return new Promise((resolve, reject) => {
      const worker = new Worker(source, { eval: true, workerData })
      worker.once('error', reject)
      worker.once('message', () => {
        worker.terminate()
        try {
          assert.ok(array.every((value) => value === 4.25))
          const again = attach(share(array))
          assert.equal(again[999], 4.25)
          again.free()
          array.free()
          resolve()
        } catch (error) {
          reject(error)
        }
      })
    })
  },
  async 'workers that end, and are ended, in the middle of pooled arrays'() {
    const before = host.stats().quarantinedBytes
    for (const end of ['process.exit(0)', 'setInterval(() => {}, 1000)', '']) {
      const source = `
        const { parentPort, workerData } = require('node:worker_threads')
        const { Allocator } = require(workerData)
        const own = new Allocator({ backend: 'host' })
        for (let index = 0; index < 2000; index++) {
          const array = own.allocUnsafe(Uint8Array, 1 + index).fill(index)
          if (index % 3 !== 0) array.free()
        }
        parentPort.postMessage('ready')
        ${end}`
      const worker = new Worker(source, { eval: true, workerData: require.resolve('unimalloc') })
      await new Promise((resolve, reject) => {
        worker.once('error', reject)
        worker.once('message', resolve)
      })
      if (end !== 'process.exit(0)') await worker.terminate()
      // The thread cleans up on its own time.
      await turn(50)
    }
    const array = host.allocUnsafe(Uint8Array, 100).fill(7)
    assert.equal(array[99], 7)
    array.free()
    keptAfterWorkers = host.stats().quarantinedBytes > before
    // Deno does not say at the end of a thread whether the program has given a buffer away.
    assert.equal(keptAfterWorkers, 'Deno' in globalThis)
  },
  async 'arrays that nobody holds are given back'() {
    if (!collect) return 'skipped'
    const own = new Allocator({ backend: 'host' })
    ;(() => {
      for (let index = 0; index < 50; index++) own.alloc(Uint8Array, 100_000)
    })()
    for (let round = 0; round < 50 && own.stats().currentCount > 5; round++) {
      collect()
      await turn(5)
    }
    assert.ok(own.stats().currentCount <= 5, `${own.stats().currentCount} of 50 are still there`)
  },
}

/** What is not the same everywhere; the table in docs/guide/runtimes.md. */
function features() {
  const parses = (source) => {
    try {
      return Boolean(new Function(source))
    } catch {
      return false
    }
  }
  const whatTransferDoes = () => {
    const array = host.alloc(Uint8Array, 8).fill(9)
    try {
      const { buffer } = structuredClone(array, { transfer: [array.buffer] })
      return array.length === 0 ? 'moves' : buffer === array.buffer ? 'nothing' : 'copies'
    } catch (error) {
      return error.code === 'NOT_TRANSFERABLE' ? 'NOT_TRANSFERABLE' : error.name
    }
  }
  const largest = () => {
    try {
      host.alloc(Uint8Array, 5 * 2 ** 30).free()
      return true
    } catch (error) {
      if (error.code === 'OUT_OF_MEMORY') return constants.MAX_LENGTH > 2 ** 32
      return error.code
    }
  }
  return {
    'arrays beyond 4 GiB': largest(),
    Float16Array: 'Float16Array' in globalThis,
    using: parses('{ using nothing = null }'),
    'buffer.transfer()': typeof ArrayBuffer.prototype.transfer === 'function',
    'transfer of an array': whatTransferDoes(),
    "a worker's pooled memory after its end": keptAfterWorkers ? 'kept' : 'given back',
  }
}

const counts = { passed: 0, failed: 0, skipped: 0 }
for (const [name, test] of Object.entries(tests)) {
  try {
    const outcome = (await test()) === 'skipped' ? 'skipped' : 'passed'
    counts[outcome] += 1
    console.log(`${outcome === 'passed' ? '✔' : '-'} ${name}`)
  } catch (error) {
    counts.failed += 1
    console.log(`✘ ${name}\n${error.stack}`)
  }
}
console.log(JSON.stringify(features()))
console.log(`${counts.passed} passed, ${counts.failed} failed${counts.skipped ? `, ${counts.skipped} skipped` : ''}`)
process.exit(counts.failed > 0 ? 1 : 0)
