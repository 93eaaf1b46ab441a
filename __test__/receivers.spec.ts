// Methods that were torn off, or called on something that is none of ours: an error of the package, with the next step.
import { inspect } from 'node:util'

import test from 'ava'
import type { ExecutionContext } from 'ava'
import { alloc, Allocator, allocUnsafe, cuda, HostBackend, ThreadAllocator, UnimallocError } from 'unimalloc'

import { fakeCudaDirectory } from './helpers/fake-cuda.js'
import { showsOver } from './helpers/shows.js'

/** What a program may call a method on by mistake. */
const strangers = (object: object): unknown[] => [
  undefined,
  null,
  5,
  'text',
  {},
  [],
  () => {},
  new Float32Array(4),
  new DataView(new ArrayBuffer(8)),
  Object.getPrototypeOf(object),
  Object.create(object),
  new Proxy(object, {}),
]

/** These need nothing of what they are called on. */
const FREE_STANDING = new Set(['Allocator.free', 'Allocator.usableBytes'])
/** As the methods of standard arrays, these serve every typed array. */
const ANY_ARRAY = new Set<PropertyKey>(['buffer', 'subarray'])

interface Asked {
  name: string
  key: PropertyKey
  receiver: unknown
  ask: () => unknown
}

/** Every method and every getter of an object's class, with every stranger. */
function* questions(name: string, object: object): Generator<Asked> {
  const prototype = Object.getPrototypeOf(object) as object
  for (const key of Reflect.ownKeys(prototype)) {
    if (key === 'constructor' || key === Symbol.for('nodejs.util.inspect.custom')) continue
    const { get, value } = Object.getOwnPropertyDescriptor(prototype, key) as PropertyDescriptor
    const call = (get ?? value) as (this: unknown) => unknown
    for (const receiver of strangers(object)) {
      if (FREE_STANDING.has(`${name}.${String(key)}`)) continue
      if (ANY_ARRAY.has(key) && receiver instanceof Float32Array && receiver.constructor === Float32Array) {
        if (Object.getPrototypeOf(receiver) === Float32Array.prototype) continue
      }
      yield {
        name: `${name}.${String(key)} on ${inspect(receiver).split('\n')[0]}`,
        key,
        receiver,
        ask: () => call.call(receiver),
      }
    }
  }
}

function check(t: ExecutionContext, { name, key }: Asked, error: unknown): void {
  t.true(error instanceof UnimallocError, `${name}: ${inspect(error)}`)
  const { code, message } = error as UnimallocError
  t.is(code, 'INVALID_ARGUMENT', name)
  const word = typeof key === 'symbol' ? '[Symbol.dispose]' : String(key)
  t.true(message.startsWith(`${word}: `), message)
  t.regex(message, /; (write \w+[.[].*bind|read it from the \w+ itself)/, name)
}

async function checkAll(t: ExecutionContext, name: string, object: object): Promise<number> {
  let asked = 0
  for (const question of questions(name, object)) {
    asked++
    try {
      const answer: unknown = await question.ask()
      t.fail(`${question.name} answered ${inspect(answer)}`)
    } catch (error) {
      check(t, question, error)
    }
  }
  return asked
}

const own = new Allocator({ backend: 'host' })

test('arrays of every kind, allocators, scopes, streams, events, backends, thread allocators', async (t) => {
  const types = [Float32Array, Uint8Array, Float64Array, Int32Array, Uint32Array, Uint16Array, Int16Array]
  const others = [Uint8ClampedArray, Int8Array, BigInt64Array, BigUint64Array]
  const objects: [string, object][] = [
    ...[...types, ...others].map((type): [string, object] => [type.name, own.alloc(type as typeof Uint8Array, 4)]),
    ['allocUnsafe', own.allocUnsafe(Uint8Array, 8)],
    ['Allocator', own],
    ['Scope', own.scope()],
    ['HostBackend', HostBackend],
    ['ThreadAllocator', new ThreadAllocator(HostBackend, 'plain')],
    ['Stream', cuda.defaultStream],
    ['Event', Object.create(cuda.Event.prototype) as object],
  ]
  for (const [name, object] of objects) t.true((await checkAll(t, name, object)) >= 4 * 8, name)
})

test('torn off by destructuring', (t) => {
  const array = own.allocUnsafe(Float32Array, 4)
  const { free } = array
  const says = /^free: called without its array; write array\.free\(…\), or bind it: array\.free\.bind\(array\)$/
  t.throws(() => free(), { instanceOf: UnimallocError, code: 'INVALID_ARGUMENT', message: says })
  t.false(array.freed)
  const bound = array.free.bind(array)
  bound()
  t.true(array.freed)
  const { threadAlloc } = HostBackend
  t.throws(() => threadAlloc(8, 8), {
    code: 'INVALID_ARGUMENT',
    message: /^threadAlloc: called without its backend; write backend\.threadAlloc/,
  })
  const { stats } = own
  t.throws(() => stats(), {
    code: 'INVALID_ARGUMENT',
    message: /^stats: called without its allocator; write allocator\.stats/,
  })
})

test('called on an array that is not ours, it says so and frees nothing', (t) => {
  const array = own.allocUnsafe(Float32Array, 4)
  const stranger = new Float32Array(4)
  t.throws(() => array.free.call(stranger as never), {
    code: 'INVALID_ARGUMENT',
    message: /which is no array .*; write array\.free/,
  })
  // Of another kind, it is an array of ours but not one of this class.
  const other = alloc(Uint8Array, 4)
  t.throws(() => array.free.call(other as never), { code: 'INVALID_ARGUMENT', message: /^free: / })
  t.false(other.freed)
  other.free()
  array.free()
})

test('a rejected promise where a promise was to be expected', async (t) => {
  const { synchronize } = cuda.defaultStream
  const { wait } = cuda.Event.prototype
  await t.throwsAsync(synchronize(), { code: 'INVALID_ARGUMENT', message: /^synchronize: called without its stream/ })
  await t.throwsAsync(wait(), { code: 'INVALID_ARGUMENT', message: /^wait: called without its event/ })
})

test('prototypes, and objects made from one, can be looked at', (t) => {
  const objects = [
    allocUnsafe(Uint8Array, 8),
    alloc(Float32Array, 0),
    own,
    own.scope(),
    HostBackend,
    cuda.defaultStream,
  ]
  for (const object of objects) {
    const prototype = Object.getPrototypeOf(object) as object
    for (const shown of [prototype, Object.create(object), new Proxy(object, {})]) {
      for (const options of [{}, { showHidden: true, getters: true }, { showProxy: true }]) {
        t.notThrows(() => inspect(shown, options))
      }
    }
  }
  t.regex(inspect(own), /^Allocator \{ backend: 'host'/)
  t.notRegex(inspect(Allocator.prototype), /backend: 'host'/)
})

test('a method keeps its name and its length', (t) => {
  const { prototype } = cuda.Stream
  t.deepEqual([prototype.copy.name, prototype.copy.length], ['copy', 2])
  t.deepEqual([own.realloc.name, own.realloc.length, own.trim.length], ['realloc', 2, 0])
})

const directory = fakeCudaDirectory()
const withDriver = directory === null ? test.skip : test.serial

withDriver('modules and kernels', async (t) => {
  await showsOver(directory)(
    t,
    `
    const module = cuda.compile(SOURCE), kernel = module.kernel('spin')
    const { kernel: find, [Symbol.dispose]: dispose } = module, { launch } = kernel
    show(message(() => find('spin')), code(() => find.call({}, 'spin')), code(() => dispose()), code(() => dispose.call(kernel)))
    show(message(() => launch({ grid: 1, args: [{ u32: 1 }] })), code(() => launch.call(module, {})))
    show(find.call(module, 'spin') !== kernel)`,
    [
      [
        'kernel: called without its module; write module.kernel(…), or bind it: module.kernel.bind(module)',
        'INVALID_ARGUMENT',
        'INVALID_ARGUMENT',
        'INVALID_ARGUMENT',
      ],
      [
        'launch: called without its kernel; write kernel.launch(…), or bind it: kernel.launch.bind(kernel)',
        'INVALID_ARGUMENT',
      ],
      [true],
    ],
  )
})
