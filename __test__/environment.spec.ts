import test from 'ava'

import { runProgram } from './helpers/child.js'

const HOST = { UNIMALLOC_BACKEND: 'host' }

test('UNIMALLOC_BACKEND names the default backend, and a wrong name is refused', async (t) => {
  const program = `
    const { allocator, Allocator } = require('unimalloc')
    console.log(allocator.backend, new Allocator().backend)`
  t.is((await runProgram(program, HOST)).stdout, 'host host\n')
  const wrong = await runProgram(program, { UNIMALLOC_BACKEND: 'gpu' })
  t.not(wrong.code, 0)
  t.regex(wrong.stderr, /UNIMALLOC_BACKEND.*'cuda-unified'/)
})

test('UNIMALLOC_MAX_BYTES bounds the process, and what it cannot mean is refused', async (t) => {
  const program = `
    const { Allocator } = require('unimalloc')
    const own = new Allocator()
    try { for (;;) own.allocUnsafe(Uint8Array, 1e6) } catch (error) { console.log(error.code, own.stats().limitBytes, own.stats().currentBytes <= 64 * 2 ** 20) }`
  const bounded = await runProgram(program, { ...HOST, UNIMALLOC_MAX_BYTES: '64MiB' })
  t.is(bounded.stdout, `OUT_OF_MEMORY ${64 * 2 ** 20} true\n`, bounded.stderr)
  const wrong = await runProgram(program, { ...HOST, UNIMALLOC_MAX_BYTES: '64 megabytes' })
  t.regex(wrong.stdout + wrong.stderr, /UNIMALLOC_MAX_BYTES/)
})

test('UNIMALLOC_REGISTRY_CAPACITY bounds what the backend gives, and what it cannot mean is refused', async (t) => {
  const program = `
    const { allocator, allocUnsafe } = require('unimalloc')
    const kept = []
    try { for (;;) kept.push(allocUnsafe(Uint8Array, 64 * 2 ** 20)) } catch (error) { console.log(error.code, kept.length) }`
  const bounded = await runProgram(program, { ...HOST, UNIMALLOC_REGISTRY_CAPACITY: ' 2 ' })
  t.is(bounded.stdout, 'OUT_OF_MEMORY 2\n', bounded.stderr)
  for (const value of ['many', '0', '-1', '1.5']) {
    const wrong = await runProgram(program, { ...HOST, UNIMALLOC_REGISTRY_CAPACITY: value })
    t.regex(wrong.stdout, /^INVALID_ARGUMENT 0\n/, value)
  }
})

test('a variable that is empty is one that is not set', async (t) => {
  const environment = { UNIMALLOC_MAX_BYTES: '', UNIMALLOC_REGISTRY_CAPACITY: ' ', UNIMALLOC_TRACK: '' }
  const outcome = await runProgram(
    `
    const { allocator, allocUnsafe } = require('unimalloc')
    console.log(allocUnsafe(Uint8Array, 2 ** 20).length, Number.isFinite(allocator.stats().limitBytes))`,
    { ...HOST, ...environment },
  )
  t.is(outcome.stdout, `${2 ** 20} true\n`, outcome.stderr)
})

test('UNIMALLOC_TRACK takes 1 or 0', async (t) => {
  const wrong = await runProgram(`new (require('unimalloc').Allocator)()`, { ...HOST, UNIMALLOC_TRACK: 'yes' })
  t.not(wrong.code, 0)
  t.regex(wrong.stderr, /UNIMALLOC_TRACK/)
})

test('configure before the first use', async (t) => {
  const outcome = await runProgram(
    `
    const { alloc, allocator, configure } = require('unimalloc')
    configure({ backend: 'host', policy: 'secure', maxBytes: '1MiB' })
    configure({ backend: 'host', policy: 'hardened', maxBytes: '2MiB' })
    console.log(allocator.policy, allocator.stats().limitBytes, allocator.backend)
    try { configure({}) } catch (error) { console.log(error.code) }`,
    {},
  )
  t.is(outcome.stdout, `hardened ${2 * 2 ** 20} host\nINVALID_ARGUMENT\n`, outcome.stderr)
})

test('import and require share one state and one set of classes', async (t) => {
  const outcome = await runProgram(
    `
    const required = require('unimalloc')
    import('unimalloc').then((imported) => {
      console.log(required.Allocator === imported.Allocator, required.allocator === imported.allocator,
        Object.keys(required).filter((name) => !(name in imported)).length)
    })`,
    HOST,
  )
  t.is(outcome.stdout, 'true true 0\n', outcome.stderr)
})

test('a missing native part explains itself, and the package can still be imported', async (t) => {
  const outcome = await runProgram(
    `
    const Module = require('node:module')
    const resolve = Module._resolveFilename
    Module._resolveFilename = function (request, ...rest) {
      if (request === '#native') throw Object.assign(new Error('Cannot find module'), { code: 'MODULE_NOT_FOUND' })
      return resolve.call(this, request, ...rest)
    }
    const { alloc, Allocator, UnimallocError, isCudaAvailable } = require('unimalloc')
    for (const call of [() => alloc(Uint8Array, 1), () => new Allocator(), () => isCudaAvailable()]) {
      try { call() } catch (error) { console.log(error instanceof UnimallocError, error.code, error.message) }
    }`,
    HOST,
  )
  const lines = outcome.stdout.trim().split('\n')
  t.is(lines.length, 3, outcome.stderr)
  for (const line of lines) t.regex(line, /^true NATIVE_MISSING .*optional.*npm run build/)
})
