// Realms beside the main one, as Jest makes for each test file, and processes that restrict what code may do.
import test from 'ava'
import type { ExecutionContext } from 'ava'

import { runProgram } from './helpers/child.js'

async function shows(t: ExecutionContext, program: string, expected: unknown, flags: string[] = []): Promise<void> {
  const { stdout, stderr, signal } = await runProgram(program, { UNIMALLOC_BACKEND: 'host' }, flags)
  t.is(signal, null, stderr)
  t.deepEqual(JSON.parse(stdout || 'null'), expected, stderr)
}

/** Loads the package inside a realm of its own, which has these globals of the main one. */
const inRealm = (shared: string[]): string => `
  const { readFileSync } = require('node:fs')
  const { dirname, join } = require('node:path')
  const vm = require('node:vm')
  const file = join(dirname(require.resolve('unimalloc/package.json')), 'dist/index.cjs')
  const load = require('node:module').createRequire(file)
  const globals = { process, FinalizationRegistry, ...${JSON.stringify(shared)}.reduce((all, name) => ({ ...all, [name]: globalThis[name] }), {}) }
  const realm = vm.createContext(globals)
  const module_ = { exports: {} }
  const wrapped = '(function (module, exports, require, __filename) {' + readFileSync(file, 'utf8') + '\\n})'
  vm.runInContext(wrapped, realm)(module_, module_.exports, load, file)
  const { Allocator, attach, share } = module_.exports
  const theirs = vm.runInContext('({ Float32Array, Uint8Array, DataView, dispose: Symbol.dispose })', realm)
  const own = new Allocator({ backend: 'host' })
  const code = (call) => { try { call(); return 'nothing' } catch (error) { return error.code + (/another realm/.test(error.message) ? ' realm' : '') } }`

for (const shared of [[], ['ArrayBuffer', 'Uint8Array']]) {
  test(`the package in a realm of its own${shared.length === 0 ? '' : ', as Jest has it'}`, async (t) => {
    await shows(
      t,
      `${inRealm(shared)}
      const a = own.alloc(theirs.Float32Array, 10), b = own.allocUnsafe(theirs.Uint8Array, 10)
      const rest = new Uint8Array(a.buffer)
      const seen = [a instanceof theirs.Float32Array, a.fill(3).every((value) => value === 3)]
      own.free(new DataView(b.buffer, b.byteOffset))
      a.free()
      seen.push(a.length, rest.length, b.freed, own.from(new Float64Array([1, 2]))[1])
      seen.push(code(() => own.alloc(Float32Array, 10)), code(() => own.allocUnsafe(Float32Array, 10)), code(() => a.free()))
      const c = own.alloc(theirs.Uint8Array, 5), d = attach(structuredClone(share(c)))
      d[4] = 9
      seen.push(c[4], typeof theirs.dispose)
      // By the symbol of the main realm, which 'using' of code out there takes.
      own[Symbol.dispose]()
      seen.push(own.stats().currentCount)
      console.log(JSON.stringify(seen))`,
      [true, true, 0, 0, true, 2, 'INVALID_ARGUMENT realm', 'INVALID_ARGUMENT realm', 'DOUBLE_FREE', 9, 'symbol', 0],
    )
  })
}

const EVERYTHING = `
  const { alloc, allocUnsafe, Allocator, attach, from, HostBackend, share } = require('unimalloc')
  const own = new Allocator({ policy: 'secure' }), array = own.realloc(own.alloc(Float32Array, 10), 5000)
  const pooled = allocUnsafe(Uint8Array, 100), copy = from(Float64Array, [1, 2, 3])
  const scope = own.scope()
  scope.allocUnsafe(Uint8Array, 4)
  scope[Symbol.dispose]()
  attach(share(copy)).free()
  for (const each of [array, pooled, copy]) each.free()
  HostBackend.withAllocator((allocator) => allocator.free(allocator.alloc(8, 8)))
  own[Symbol.dispose]()
  let code
  try { copy.free() } catch (error) { code = error.code + ' ' + error.name }
  console.log(JSON.stringify([code, own.stats().currentCount]))`

for (const flag of [
  '--frozen-intrinsics',
  '--jitless',
  '--disallow-code-generation-from-strings',
  '--disable-proto=throw',
]) {
  test(`node ${flag}`, async (t) => {
    await shows(t, EVERYTHING, ['DOUBLE_FREE UnimallocError', 0], [flag])
  })
}

test('a library that adds to Object.prototype adds no options', async (t) => {
  await shows(t, `Object.prototype.extend = () => {}; Object.prototype.transfer = undefined; ${EVERYTHING}`, [
    'DOUBLE_FREE UnimallocError',
    0,
  ])
})

test('where native addons are forbidden the error says how to allow them', async (t) => {
  const program = `
    try { require('unimalloc').alloc(Uint8Array, 1) } catch ({ code, message }) {
      console.log(JSON.stringify([code, /--allow-addons/.test(message), /glibc/.test(message)]))
    }`
  await shows(t, program, ['NATIVE_MISSING', true, false], ['--no-addons'])
  const permission = Number(process.versions.node.split('.')[0]) < 23 ? '--experimental-permission' : '--permission'
  await shows(t, program, ['NATIVE_MISSING', true, false], [permission, '--allow-fs-read=*', '--no-warnings'])
})
