import test from 'ava'
import { alloc, Allocator } from 'unimalloc'
import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'

import { runProgram } from './helpers/child.js'
import { throwsCode } from './helpers/errors.js'
import { collectUntil } from './helpers/gc.js'

const host = () => new Allocator({ backend: 'host' })

test.serial('an array that is dropped is collected, and its memory used again', async (t) => {
  const own = host()
  // In a function of its own, so that no variable of this one keeps the last.
  const make = (): void => {
    for (let index = 0; index < 50; index++) own.alloc(Uint8Array, 10_000)
  }
  make()
  t.is(own.stats().currentCount, 50)
  t.true(await collectUntil(() => own.stats().currentCount === 0))
  t.is(own.stats().currentBytes, 0)
  t.is(own.stats().totalCount, 50)
})

for (const [name, view] of [
  ['a subarray', (array: Uint8Array) => array.subarray(5, 10)],
  ['its buffer', (array: Uint8Array) => array.buffer],
  ['a Buffer', (array: Uint8Array) => Buffer.from(array.buffer as ArrayBuffer)],
] as const) {
  test.serial(`${name} that is left keeps the memory`, async (t) => {
    const own = host()
    let kept: unknown
    const make = (): void => {
      const array = own.alloc(Uint8Array, 1000).fill(7)
      kept = view(array)
    }
    make()
    const other = own.alloc(Uint8Array, 5)
    void other
    const collected = await collectUntil(() => own.stats().currentCount === 0)
    t.false(collected)
    const bytes = kept instanceof ArrayBuffer ? new Uint8Array(kept) : (kept as Uint8Array)
    t.true(bytes.every((value) => value === 7))
    kept = null
    t.is(bytes.length > 0, true)
  })
}

test.serial('an allocator that is dropped before its arrays leaves them usable', async (t) => {
  let array = host().alloc(Uint8Array, 1000)
  await collectUntil(() => false)
  array.fill(9)
  t.true(array.every((value) => value === 9))
  array.free()
  t.true(array.freed)
})

test.serial('disposing finds live arrays after many others were collected', async (t) => {
  const own = host()
  const kept = own.alloc(Uint8Array, 100)
  for (let index = 0; index < 3000; index++) own.alloc(Uint8Array, 16)
  t.true(await collectUntil(() => own.stats().currentCount === 1))
  for (let index = 0; index < 3000; index++) own.alloc(Uint8Array, 16)
  own[Symbol.dispose]()
  t.true(kept.freed)
  t.is(own.stats().currentCount, 0)
})

test('a buffer refuses its own transfer, and names share()', (t) => {
  const array = alloc(Uint8Array, 16)
  const buffer = array.buffer as ArrayBuffer & { transfer?(): ArrayBuffer; transferToFixedLength?(): ArrayBuffer }
  throwsCode(t, () => buffer.transfer!(), 'NOT_TRANSFERABLE', /share/)
  throwsCode(t, () => buffer.transferToFixedLength!(), 'NOT_TRANSFERABLE', /share/)
  t.is(array.length, 16)
  t.true(buffer instanceof ArrayBuffer)
  t.is(Object.prototype.toString.call(buffer), '[object ArrayBuffer]')
  t.is(Object.getPrototypeOf(buffer.slice(0)), ArrayBuffer.prototype)
  array.free()
})

const transfer = (ArrayBuffer.prototype as { transfer?: () => ArrayBuffer }).transfer

const whereTransfer = transfer === undefined ? test.serial.skip : test.serial
whereTransfer('bytes moved away behind our back stay valid until their new buffer is collected', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 5000).fill(5)
  let moved: ArrayBuffer | null = transfer!.call(array.buffer)
  t.is(array.length, 0)
  t.false(array.freed)
  throwsCode(t, () => array.pointer, 'INVALID_ARGUMENT', /detached/)
  array.free()
  t.true(array.freed)
  throwsCode(t, () => array.free(), 'DOUBLE_FREE')
  const others = []
  for (let index = 0; index < 100; index++) others.push(own.alloc(Uint8Array, 5000).fill(1))
  t.true(
    new Uint8Array(moved!).every((value) => value === 5),
    'the memory was handed out again too early',
  )
  for (const other of others) other.free()
  t.is(own.stats().currentCount, 1)
  moved = null
  t.true(await collectUntil(() => own.stats().currentCount === 0))
})

test('a byte stream that takes a chunk away, and the consumer that still reads it', async (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 4096).fill(6)
  const stream = new ReadableStream({
    type: 'bytes',
    start(controller) {
      controller.enqueue(array)
      controller.close()
    },
  })
  t.is(array.length, 0)
  array.free()
  const others = []
  for (let index = 0; index < 100; index++) others.push(own.alloc(Uint8Array, 4096).fill(1))
  const { value } = (await stream.getReader().read()) as { value: Uint8Array }
  t.is(value.length, 4096)
  t.true(
    value.every((byte) => byte === 6),
    'the chunk was overwritten',
  )
  for (const other of others) other.free()
})

test('structuredClone and postMessage copy; the array stays ours', (t) => {
  const array = alloc(Float32Array, 4).fill(2)
  const clone = structuredClone(array)
  t.is(Object.getPrototypeOf(clone), Float32Array.prototype)
  clone[0] = 9
  t.is(array[0], 2)
  const { port1, port2 } = new MessageChannel()
  port1.postMessage(array)
  const { message } = receiveMessageOnPort(port2) as { message: Float32Array }
  port1.close()
  t.deepEqual([...message], [2, 2, 2, 2])
  t.false('pointer' in message)
  t.is(array.length, 4)
  array.free()
})

test('a transfer list never moves the memory out of our sight', (t) => {
  const array = alloc(Uint8Array, 64).fill(3)
  const { port1, port2 } = new MessageChannel()
  try {
    port1.postMessage(array, [array.buffer as ArrayBuffer])
    // Node 20 copies and detaches nothing.
    const { message } = receiveMessageOnPort(port2) as { message: Uint8Array }
    t.true(message.every((value) => value === 3))
  } catch (error) {
    t.is((error as Error).name, 'DataCloneError')
    t.is(array.length, 64)
  } finally {
    port1.close()
  }
  array.free()
})

test('a buffer cannot be resized', (t) => {
  const array = alloc(Uint8Array, 64)
  t.throws(() => (array.buffer as ArrayBuffer & { resize(bytes: number): void }).resize(10), { instanceOf: TypeError })
  t.is(array.length, 64)
  array.free()
})

test('a DataView of a freed array throws instead of reading', (t) => {
  const array = alloc(Uint8Array, 64)
  const view = new DataView(array.buffer)
  view.setUint8(0, 5)
  t.is(array[0], 5)
  array.free()
  t.throws(() => view.getUint8(0), { instanceOf: TypeError })
})

test('a million arrays that were freed in one go take nothing with them when their finalizers run', async (t) => {
  // As many holds of one place as its handle has generations: the finalizer of the first must not find the last.
  const { stdout, stderr } = await runProgram(`
    const { Allocator } = require('unimalloc')
    const own = new Allocator({ backend: 'host' })
    for (let index = 0; index < 2 ** 20 - 1; index++) own.alloc(Uint8Array, 64).free()
    const kept = own.alloc(Uint8Array, 64).fill(7)
    const look = () => {
      const others = Array.from({ length: 100 }, () => own.alloc(Uint8Array, 64).fill(9))
      console.log(own.stats().currentCount, kept[0], others.some((other) => other.pointer === kept.pointer))
    }
    // Finalizers run in tasks; with the last of them the event loop is through.
    setTimeout(() => setImmediate(look), 1000)`)
  t.is(stdout, '101 7 false\n', stderr)
})
