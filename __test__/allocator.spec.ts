import { constants } from 'node:buffer'
import { inspect } from 'node:util'

import test from 'ava'
import {
  alloc,
  Allocator,
  allocator,
  cuda,
  isCudaAvailable,
  ThreadAllocator,
  UnimallocError,
  whyNoCuda,
} from 'unimalloc'
import type { AllocatorStats, UnifiedArray } from 'unimalloc'

import { runProgram } from './helpers/child.js'
import { throwsCode } from './helpers/errors.js'

const host = (maxBytes?: number | '1MiB') =>
  new Allocator({ backend: 'host', ...(maxBytes === undefined ? {} : { maxBytes }) })

test('auto takes CUDA where it is usable and host memory where not, and says which', (t) => {
  const own = new Allocator({ backend: 'auto' })
  t.is(own.backend, isCudaAvailable() ? 'cuda-unified' : 'host')
  t.is(own.policy, 'standard')
  t.is(isCudaAvailable(), whyNoCuda() === null)
  t.is(new Allocator({ backend: 'host', policy: 'secure' }).policy, 'secure')
})

test('statistics: current, peak and total, bytes and count, are those of this allocator alone', (t) => {
  const own = host()
  const other = host()
  const zero = own.stats()
  t.deepEqual(
    [zero.currentBytes, zero.peakBytes, zero.totalBytes, zero.currentCount, zero.peakCount, zero.totalCount],
    [0, 0, 0, 0, 0, 0],
  )
  const arrays: Array<UnifiedArray<Uint8Array>> = []
  let bytes = 0
  for (const length of [100, 5000, 70_000, 3_000_000, 20_000_000]) {
    const array = own.alloc(Uint8Array, length)
    arrays.push(array)
    bytes += own.usableBytes(array)
  }
  const full = own.stats()
  t.is(full.currentBytes, bytes)
  t.is(full.peakBytes, bytes)
  t.is(full.totalBytes, bytes)
  t.is(full.currentCount, 5)
  t.is(full.requestedBytes, 23_075_100)
  t.true(full.reservedBytes >= bytes)
  t.true(full.backendAllocations >= 1)
  arrays[0]!.free()
  arrays[1]!.free()
  const again = own.alloc(Uint8Array, 100)
  const some = own.stats()
  t.is(some.currentCount, 4)
  t.is(some.peakCount, 5)
  t.is(some.totalCount, 6)
  t.is(some.peakBytes, bytes)
  t.true(some.currentBytes < bytes)
  own.resetPeak()
  t.is(own.stats().peakBytes, some.currentBytes)
  t.is(own.stats().peakCount, 4)
  again.free()
  for (const array of arrays.slice(2)) array.free()
  const end = own.stats()
  t.is(end.currentBytes, 0)
  t.is(end.requestedBytes, 0)
  t.is(end.currentCount, 0)
  t.is(end.pendingBytes, 0)
  t.is(other.stats().totalCount, 0)
})

test('maxBytes bounds the live blocks of this allocator, and freeing makes room again', (t) => {
  const own = host(10_000)
  const first = own.alloc(Uint8Array, 6000)
  const error = throwsCode(t, () => own.alloc(Uint8Array, 6000), 'OUT_OF_MEMORY', /maxBytes/)
  const stats = error!.stats as AllocatorStats
  t.is(stats.currentCount, 1)
  t.is(stats.limitBytes, 10_000)
  t.is(stats.outOfMemory, 1)
  t.regex(error!.message, /using/)
  t.regex(error!.message, /await/)
  t.is(own.stats().currentCount, 1)
  t.is(own.stats().totalCount, 1)
  first.free()
  own.alloc(Uint8Array, 6000).free()
  t.is(host(10_000).stats().limitBytes, 10_000)
})

test('a synchronous loop that drops arrays without freeing them ends in a clear error, not in the death of the process', (t) => {
  const own = host('1MiB')
  const error = throwsCode(
    t,
    () => {
      for (let round = 0; round < 100_000; round++) own.alloc(Uint8Array, 4096)
    },
    'OUT_OF_MEMORY',
    /event loop/,
  )
  t.true(error!.stats!.currentBytes <= 2 ** 20)
  t.true(error!.stats!.currentCount >= 100)
  own[Symbol.dispose]()
})

test('more than the process may have is refused with a typed error that says so, and no more', async (t) => {
  const { stdout, stderr } = await runProgram(
    `
    const { alloc, allocator } = require('unimalloc')
    try {
      alloc(Uint8Array, 128 << 20)
    } catch (error) {
      console.log(error.code, error.message)
      console.log(error.stats.outOfMemory, allocator.stats().currentBytes)
    }`,
    { UNIMALLOC_BACKEND: 'host', UNIMALLOC_MAX_BYTES: '64MiB' },
  )
  const message =
    'OUT_OF_MEMORY 128 MiB could not be allocated: that is more than the limit of 64 MiB allows in all. Ask for less, or raise UNIMALLOC_MAX_BYTES'
  t.is(stdout, `${message}\n1 0\n`, stderr)
})

test('more than maxBytes in all is told from too much at once', (t) => {
  const own = host(1 << 20)
  throwsCode(
    t,
    () => own.alloc(Uint8Array, 2 << 20),
    'OUT_OF_MEMORY',
    /limit of 1 MiB allows in all\. Ask for less, or raise maxBytes$/,
  )
  const array = own.alloc(Uint8Array, 900_000)
  throwsCode(t, () => own.alloc(Uint8Array, 900_000), 'OUT_OF_MEMORY', /Live are 896 KiB in 1 array, .*Free arrays/)
  array.free()
})

const isLimited = constants.MAX_LENGTH < 2 ** 40
;(isLimited ? test : test.skip)('what no buffer can show is not taken from the system', (t) => {
  const own = host()
  const before = own.stats().reservedBytes
  throwsCode(t, () => own.alloc(Uint8Array, constants.MAX_LENGTH + 1), 'INVALID_ARGUMENT', /its limit is/)
  t.is(own.stats().reservedBytes, before)
})

test('an allocator tells about itself', (t) => {
  const own = host(1 << 20)
  const array = own.alloc(Uint8Array, 5000)
  t.is(inspect(own), "Allocator { backend: 'host', policy: 'standard', live: 1 array, 5 KiB of 1 MiB }")
  array.free()
  own[Symbol.dispose]()
  t.regex(inspect(own), /live: 0 arrays, 0 B of 1 MiB, disposed }$/)
  t.deepEqual(
    [Allocator.name, cuda.Stream.name, cuda.Event.name, ThreadAllocator.name, host().scope().constructor.name],
    ['Allocator', 'Stream', 'Event', 'ThreadAllocator', 'Scope'],
  )
})

test('methods without their allocator are typed errors', (t) => {
  const { alloc, allocUnsafe, from } = Allocator.prototype as unknown as Record<string, (...args: unknown[]) => unknown>
  for (const call of [alloc, allocUnsafe, from]) {
    throwsCode(t, () => call!(Float32Array, 1), 'INVALID_ARGUMENT', /called without its allocator; write allocator\./)
  }
})

test('what was meant is said', (t) => {
  const own = host()
  const alloc = (...args: unknown[]) => own.alloc(...(args as [never, never]))
  throwsCode(t, () => alloc(Float32Array, [1, 2]), 'INVALID_ARGUMENT', /to copy values, write from\(Float32Array, …\)/)
  throwsCode(t, () => alloc(Buffer, 10), 'INVALID_ARGUMENT', /pass the constructor Uint8Array, and Buffer\.from/)
  throwsCode(t, () => alloc(ArrayBuffer, 10), 'INVALID_ARGUMENT', /pass the constructor Uint8Array, and array\.buffer/)
  throwsCode(
    t,
    () => new Allocator({ maxBytes: '8GB' as never }),
    'INVALID_ARGUMENT',
    /units are B, KiB, MiB, GiB and TiB/,
  )
  t.is(new Allocator({ backend: 'host', maxBytes: '1000' as never }).stats().limitBytes, 1000)
})

test('from takes iterables', (t) => {
  const own = host()
  const squares = function* () {
    for (let index = 0; index < 4; index++) yield index * index
  }
  t.deepEqual([...own.from(Float32Array, squares() as never)], [0, 1, 4, 9])
  t.deepEqual([...own.from(Uint8Array, new Set([3, 1]) as never)], [3, 1])
  throwsCode(t, () => own.from(squares() as never), 'INVALID_ARGUMENT', /an object of type Generator;/)
})

test('onOutOfMemory: an asynchronous handler is a typed error', (t) => {
  const own = host(10_000)
  const array = own.alloc(Uint8Array, 6000)
  own.onOutOfMemory((async () => true) as never)
  throwsCode(t, () => own.alloc(Uint8Array, 6000), 'INVALID_ARGUMENT', /handler is asynchronous/)
  array.free()
})

test('disposal works for code that knows the registered symbol only', (t) => {
  const registered: typeof Symbol.dispose = Symbol.for('Symbol.dispose') as never
  const own = host()
  const [large, small] = [own.alloc(Uint8Array, 100), own.allocUnsafe(Uint8Array, 100)]
  large[registered]()
  small[registered]()
  t.true(large.freed && small.freed)
  const scope = own.scope()
  const scoped = scope.alloc(Uint8Array, 5)
  scope[registered]()
  t.true(scoped.freed)
  own[registered]()
  throwsCode(t, () => own.alloc(Uint8Array, 5), 'DISPOSED')
})

test('onOutOfMemory: tried once more when the handler freed something', (t) => {
  const own = host(10_000)
  const victim = own.alloc(Uint8Array, 6000)
  const needed: number[] = []
  own.onOutOfMemory((bytes) => {
    needed.push(bytes)
    victim.free()
    return true
  })
  const array = own.alloc(Uint8Array, 7000)
  t.deepEqual(needed, [7000])
  own.onOutOfMemory((bytes) => {
    needed.push(bytes)
    return false
  })
  throwsCode(t, () => own.alloc(Uint8Array, 7000), 'OUT_OF_MEMORY')
  t.is(needed.length, 2)
  own.onOutOfMemory(() => true)
  throwsCode(t, () => own.alloc(Uint8Array, 7000), 'OUT_OF_MEMORY')
  own.onOutOfMemory(() => {
    throw new RangeError('from the handler')
  })
  t.throws(() => own.alloc(Uint8Array, 7000), { instanceOf: RangeError })
  own.onOutOfMemory(null)
  throwsCode(t, () => own.alloc(Uint8Array, 7000), 'OUT_OF_MEMORY')
  throwsCode(t, () => own.onOutOfMemory(5 as never), 'INVALID_ARGUMENT')
  array.free()
  t.is(own.stats().currentCount, 0)
})

test('onOutOfMemory: a handler that allocates itself does not confuse the retry', (t) => {
  const own = host(10_000)
  const victim = own.alloc(Uint8Array, 9000)
  own.onOutOfMemory(() => {
    victim.free()
    own.alloc(Uint8Array, 100).free()
    return true
  })
  const array = own.alloc(Uint8Array, 8000)
  t.is(array.length, 8000)
  t.true(array.every((value) => value === 0))
  array.free()
})

test('dispose frees what is still owned, and then refuses', (t) => {
  const own = host()
  const kept = own.alloc(Uint8Array, 1000)
  const unsafe = own.allocUnsafe(Uint8Array, 1000)
  const part = kept.subarray(3)
  const freed = own.alloc(Uint8Array, 1000)
  freed.free()
  own[Symbol.dispose]()
  t.true(kept.freed)
  t.true(unsafe.freed)
  t.is(kept.length, 0)
  t.is(part.length, 0)
  t.is(own.stats().currentCount, 0)
  throwsCode(t, () => own.alloc(Uint8Array, 1), 'DISPOSED')
  throwsCode(t, () => own.allocUnsafe(Uint8Array, 1), 'DISPOSED')
  throwsCode(t, () => own.from(Uint8Array.of(1)), 'DISPOSED')
  throwsCode(t, () => own.scope(), 'DISPOSED')
  throwsCode(t, () => own.trim(), 'DISPOSED')
  throwsCode(t, () => kept.free(), 'DOUBLE_FREE')
  t.notThrows(() => own[Symbol.dispose]())
  t.notThrows(() => kept[Symbol.dispose]())
})

test('using an allocator and an array of it together', (t) => {
  let array
  {
    using own = host()
    using inner = own.alloc(Float32Array, 5)
    array = inner
    t.false(array.freed)
  }
  t.true(array.freed)
})

test('the default allocator is not disposed, and is configured before its first use only', async (t) => {
  alloc(Uint8Array, 1).free()
  throwsCode(t, () => allocator[Symbol.dispose](), 'INVALID_ARGUMENT', /default/)
  const { configure } = await import('unimalloc')
  throwsCode(t, () => configure({ maxBytes: 5 }), 'INVALID_ARGUMENT', /first/)
  alloc(Uint8Array, 1).free()
})

test('owns', (t) => {
  const own = host()
  const array = own.alloc(Uint8Array, 100)
  t.true(own.owns(array))
  t.true(own.owns(array.subarray(7)))
  t.true(own.owns(new DataView(array.buffer)))
  t.false(host().owns(array))
  t.false(own.owns(new Uint8Array(5)))
  t.false(own.owns(null as never))
  array.free()
  t.false(own.owns(array))
})

test('trim gives cached memory back', (t) => {
  const own = host()
  own.alloc(Uint8Array, 40_000_000).free()
  const before = own.stats()
  t.true(before.cachedBytes >= 40_000_000)
  const given = own.trim()
  const after = own.stats()
  t.true(given >= 40_000_000)
  t.true(after.cachedBytes <= before.cachedBytes - 40_000_000)
  t.true(after.reservedBytes <= before.reservedBytes - given)
  t.true(after.backendFrees > before.backendFrees)
  own.alloc(Uint8Array, 40_000_000).free()
  t.is(own.trim(Infinity), 0)
  throwsCode(t, () => own.trim(-1), 'INVALID_ARGUMENT')
  throwsCode(t, () => own.trim(NaN), 'INVALID_ARGUMENT')
  own.trim()
})

test('the largest free block is the largest that is to be had without asking the backend', (t) => {
  const own = host()
  own.trim()
  const MiB = 2 ** 20
  for (const size of [1000, 30 * MiB, 3 * MiB, 8 * MiB, 7 * MiB, 20 * MiB, 600 * 1024]) {
    const kept = own.alloc(Uint8Array, size)
    if (size === 20 * MiB) kept.free()
    const { largestFreeBytes, backendAllocations } = own.stats()
    t.true(largestFreeBytes >= MiB, `${size}`)
    own.alloc(Uint8Array, largestFreeBytes).free()
    t.is(own.stats().backendAllocations, backendAllocations, `${largestFreeBytes} after ${size}`)
    own.alloc(Uint8Array, largestFreeBytes + 1).free()
    t.is(own.stats().backendAllocations, backendAllocations + 1, `${largestFreeBytes + 1} after ${size}`)
    own.trim()
    own.alloc(Uint8Array, 1000) // lives on, so that there is a segment
  }
})

test('secure and hardened allocators zero every block, also of allocUnsafe', (t) => {
  for (const policy of ['secure', 'hardened'] as const) {
    const own = new Allocator({ backend: 'host', policy })
    for (let round = 0; round < 50; round++) {
      const array = own.allocUnsafe(Uint8Array, 500)
      t.true(
        array.every((value) => value === 0),
        policy,
      )
      array.fill(0xaa)
      array.free()
    }
    t.is(own.stats().currentCount, 0)
  }
})

const withoutCuda = isCudaAvailable() ? test.skip : test
withoutCuda('without a GPU: cuda-unified throws, and says what is missing and what to do', (t) => {
  const error = throwsCode(t, () => new Allocator({ backend: 'cuda-unified' }), 'CUDA_UNAVAILABLE', /'host'/)
  t.true(error!.message.startsWith(whyNoCuda()!))
  t.deepEqual(cuda.devices(), [])
  throwsCode(t, () => cuda.compile('x'), 'CUDA_UNAVAILABLE')
  throwsCode(t, () => new cuda.Stream(), 'CUDA_UNAVAILABLE')
  throwsCode(t, () => cuda.defaultStream.record(), 'CUDA_UNAVAILABLE')
})

withoutCuda('without a GPU: asynchronous calls reject with the same typed error', async (t) => {
  for (const promise of [cuda.synchronize(), cuda.compileAsync('x'), cuda.defaultStream.synchronize()]) {
    const error = await t.throwsAsync(promise, { instanceOf: UnimallocError })
    t.is((error as UnimallocError).code, 'CUDA_UNAVAILABLE')
  }
})
