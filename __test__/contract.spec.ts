import test from 'ava'
import { Worker } from 'node:worker_threads'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'
import {
  Allocator,
  CudaUnifiedBackend,
  HardenedPolicy,
  HostBackend,
  isCudaAvailable,
  lastError,
  SecurePolicy,
  StandardPolicy,
  ThreadAllocator,
} from 'unimalloc'

import { throwsCode } from './helpers/errors.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const withoutCuda = isCudaAvailable() ? test.skip : test
const PAGE = 4096

test('allocate and deallocate: regions, exact, once', (t) => {
  const region = HostBackend.allocate(16 * PAGE)
  t.is(typeof region, 'bigint')
  t.is(region! % BigInt(PAGE), 0n)
  t.false(HostBackend.deallocate(region, 8 * PAGE), 'a wrong size')
  t.false(HostBackend.deallocate(region! + BigInt(PAGE), 15 * PAGE), 'an interior address')
  t.true(HostBackend.deallocate(region, 16 * PAGE))
  t.false(HostBackend.deallocate(region, 16 * PAGE), 'twice')
  t.is(lastError()?.code, 'NOT_REGISTERED')
  t.false(HostBackend.deallocate(null, PAGE))
  t.false(HostBackend.deallocate(2n ** 64n, PAGE))
})

for (const backend of [HostBackend, CudaUnifiedBackend]) {
  test(`${backend.name}: sizes that are none answer null with a reason`, (t) => {
    for (const size of [0, -PAGE, 1, PAGE - 1, PAGE + 1, 1.5 * PAGE + 0.5, NaN, Infinity, 2 ** 63, 2 ** 70]) {
      t.is(backend.allocate(size), null, String(size))
      t.is(lastError()?.code, 'INVALID_SIZE', String(size))
      t.true(lastError()!.message.length > 20)
    }
    throwsCode(t, () => backend.allocate('4096' as never), 'INVALID_ARGUMENT')
    throwsCode(t, () => backend.allocate(4096n as never), 'INVALID_ARGUMENT')
    throwsCode(t, () => backend.deallocate(5 as never, PAGE), 'INVALID_ARGUMENT', /bigint/)
  })

  test(`${backend.name}: capabilities`, (t) => {
    const host = backend === HostBackend
    t.is(backend.supportsPageReset, host)
    t.is(backend.supportsMakeGuard, host)
    t.is(backend.supportsDecommit, host)
    t.false(backend.enableCpuCache)
  })
}

withoutCuda('cuda-unified without a GPU: null, never host memory, with the reason', (t) => {
  t.is(CudaUnifiedBackend.allocate(PAGE), null)
  t.is(lastError()?.code, 'NO_DRIVER')
  t.is(CudaUnifiedBackend.threadAlloc(100, 16), null)
  t.is(lastError()?.code, 'NO_DRIVER')
  t.deepEqual(CudaUnifiedBackend.globalSegmentPool(), { count: 0, bytes: 0 })
})

test('page reset, guard and decommit: of own regions only, and whole pages', (t) => {
  const region = HostBackend.allocate(16 * PAGE)!
  t.true(HostBackend.pageReset(region, 16 * PAGE))
  t.true(HostBackend.decommit(region + BigInt(4 * PAGE), 4 * PAGE))
  t.true(HostBackend.makeGuard(region + BigInt(8 * PAGE), PAGE))
  t.false(HostBackend.pageReset(region + 1n, PAGE))
  t.is(lastError()?.code, 'INVALID_RANGE')
  t.false(HostBackend.pageReset(region, 17 * PAGE))
  t.false(HostBackend.decommit(0x1000n, PAGE))
  t.false(HostBackend.makeGuard(null, PAGE))
  const block = HostBackend.threadAlloc(65536, PAGE)!
  t.false(HostBackend.decommit(block, PAGE), "the allocator's own memory is not the program's to change")
  HostBackend.threadFree(block)
  t.true(HostBackend.deallocate(region, 16 * PAGE))
  t.false(CudaUnifiedBackend.pageReset(0x1000n, PAGE))
  t.false(CudaUnifiedBackend.makeGuard(0x1000n, PAGE))
  t.false(CudaUnifiedBackend.decommit(0x1000n, PAGE))
})

test('pools: counts and bytes, read at the call, and nothing shared between backends', (t) => {
  const before = HostBackend.globalHugePool()
  const block = HostBackend.threadAlloc(64 * 2 ** 20, PAGE)
  HostBackend.threadFree(block)
  const after = HostBackend.globalHugePool()
  t.true(after.bytes >= before.bytes + 64 * 2 ** 20 || after.bytes >= 64 * 2 ** 20)
  t.true(after.count >= 1)
  t.deepEqual(HostBackend.pools().huge, after)
  t.deepEqual(Object.keys(HostBackend.pools()), ['segment', 'orphan', 'huge'])
  if (!isCudaAvailable()) t.deepEqual(CudaUnifiedBackend.globalHugePool(), { count: 0, bytes: 0 })
})

test('threadAlloc, threadFree, threadRealloc, usableSize', (t) => {
  for (const policy of ['standard', 'secure', 'hardened'] as const) {
    const block = HostBackend.threadAlloc(100, 64, { policy })!
    t.is(block % 64n, 0n)
    t.true(HostBackend.usableSize(block) >= 100)
    t.is(HostBackend.usableSize(block + 1n), 0)
    const grown = HostBackend.threadRealloc(block, 100_000, 64, { policy })!
    t.true(HostBackend.usableSize(grown) >= 100_000)
    HostBackend.threadFree(grown, { policy })
    t.is(HostBackend.usableSize(grown), 0)
    throwsCode(t, () => HostBackend.threadFree(grown, { policy }), 'DOUBLE_FREE')
  }
  const empty = HostBackend.threadAlloc(0, 1)!
  t.true(empty > 0n)
  t.not(HostBackend.threadAlloc(0, 1), empty)
  throwsCode(t, () => HostBackend.threadFree(empty + 1n), 'INTERIOR')
  HostBackend.threadFree(empty)
  HostBackend.threadFree(null)
  throwsCode(t, () => HostBackend.threadFree(0x1234n), 'NOT_OURS')
  throwsCode(t, () => HostBackend.threadFree(-5n), 'NOT_OURS')
  throwsCode(t, () => HostBackend.threadFree(2n ** 80n), 'NOT_OURS')
  throwsCode(t, () => HostBackend.threadFree('x' as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => HostBackend.threadAlloc(10, 16, { policy: 'weak' as never }), 'INVALID_ARGUMENT')
  throwsCode(t, () => HostBackend.threadAlloc(10, 16, { polcy: 1 } as never), 'INVALID_ARGUMENT')
  t.is(HostBackend.threadRealloc(0x1234n, 10, 16), null)
  t.is(lastError()?.code, 'NOT_REGISTERED')
  const fresh = HostBackend.threadRealloc(null, 10, 16)
  t.true(fresh !== null)
  HostBackend.threadFree(fresh)
})

test('sizes and alignments that are none answer null with the reason', (t) => {
  for (const align of [0, 3, 2 ** 22, -16, NaN]) {
    t.is(HostBackend.threadAlloc(100, align), null, String(align))
    t.is(lastError()?.code, 'INVALID_ALIGNMENT', String(align))
  }
  for (const size of [-1, NaN, 1.5, 2 ** 63]) {
    t.is(HostBackend.threadAlloc(size, 16), null, String(size))
    t.is(lastError()?.code, 'INVALID_SIZE', String(size))
  }
})

test('a block of one policy freed under another', (t) => {
  for (const from of ['standard', 'secure', 'hardened'] as const) {
    for (const to of ['standard', 'secure', 'hardened'] as const) {
      const block = HostBackend.threadAlloc(100, 16, { policy: from })
      HostBackend.threadFree(block, { policy: to })
      throwsCode(t, () => HostBackend.threadFree(block, { policy: from }), 'DOUBLE_FREE')
    }
  }
})

test('slots: standard and secure share the plain one, hardened has the encoded one', (t) => {
  const plain = HostBackend.getAllocatorPtr()!
  t.true(plain > 0n)
  t.is(HostBackend.getAllocatorPtr(), plain)
  t.is(HostBackend.getAllocatorPtrRaw(), plain)
  t.is(HostBackend.getAllocatorPtr({ policy: 'standard' }), plain)
  t.is(HostBackend.getAllocatorPtr({ policy: 'secure' }), plain)
  const encoded = HostBackend.getAllocatorPtr({ policy: 'hardened' })!
  t.not(encoded, plain)
  t.is(HostBackend.getAllocatorPtrRaw({ policy: 'hardened' }), encoded)
  t.is(HostBackend.getAllocatorPtrRawForEncryption(true), encoded)
  t.is(HostBackend.getAllocatorPtrRawForEncryption(false), plain)
  t.is(StandardPolicy.getAllocatorPtr(HostBackend), plain)
  t.is(SecurePolicy.getAllocatorPtr(HostBackend), plain)
  t.is(HardenedPolicy.getAllocatorPtr(HostBackend), encoded)
  t.is(HardenedPolicy.getAllocatorPtrRaw(HostBackend), encoded)
  t.not(CudaUnifiedBackend.getAllocatorPtr(), plain)
  throwsCode(t, () => StandardPolicy.getAllocatorPtr('gpu' as never), 'INVALID_ARGUMENT')
})

test('raw getters never make a slot, in a thread that has none', async (t) => {
  const program = `
    const { createRequire } = require('node:module')
    const { parentPort } = require('node:worker_threads')
    const { HostBackend, HardenedPolicy } = createRequire(${JSON.stringify(root)} + 'x.cjs')('unimalloc')
    const raw = () => [HostBackend.getAllocatorPtrRaw(), HostBackend.getAllocatorPtrRaw({ policy: 'hardened' }), HardenedPolicy.getAllocatorPtrRaw(HostBackend)]
    const before = [...raw(), ...raw()]
    const made = HostBackend.getAllocatorPtr()
    parentPort.postMessage({ before, made, after: raw() })`
  const worker = new Worker(program, { eval: true, execArgv: [] })
  const [{ before, made, after }] = await once(worker, 'message')
  t.deepEqual(before, [null, null, null, null, null, null])
  t.deepEqual(after, [made, null, null])
  t.not(made, HostBackend.getAllocatorPtr())
})

test("withAllocator: the thread's allocator, under the guard", (t) => {
  let kept: ThreadAllocator | undefined
  const result = HostBackend.withAllocator((allocator) => {
    kept = allocator
    t.is<bigint | null, bigint | null>(allocator.ptr, HostBackend.getAllocatorPtr())
    const block = allocator.alloc(100, 64)!
    t.is(block % 64n, 0n)
    t.is(
      HostBackend.withAllocator(() => t.fail()),
      null,
    )
    t.is(
      HostBackend.withAllocatorUnguarded(() => t.fail()),
      null,
    )
    t.is(
      StandardPolicy.withAllocator(HostBackend, () => t.fail()),
      null,
    )
    const other = HostBackend.threadAlloc(100, 16)
    HostBackend.threadFree(block)
    throwsCode(t, () => allocator.free(block), 'DOUBLE_FREE')
    HostBackend.threadFree(other)
    throwsCode(t, () => allocator[Symbol.dispose](), 'INVALID_ARGUMENT')
    return 'result'
  })
  t.is(result, 'result')
  throwsCode(t, () => kept!.alloc(10, 16), 'DISPOSED')
  throwsCode(t, () => kept!.ptr, 'DISPOSED')
  t.is(
    HostBackend.withAllocator(() => undefined),
    undefined,
  )
})

test('alloc() inside withAllocator works, without touching the borrowed allocator', (t) => {
  const own = new Allocator({ backend: 'host' })
  const array = HostBackend.withAllocator((allocator) => {
    const block = allocator.alloc(100, 16)
    const made = own.alloc(Uint8Array, 100)
    own.alloc(Uint8Array, 100).free()
    allocator.free(block)
    return made
  })
  t.is(own.stats().currentCount, 1)
  array!.free()
  t.is(own.stats().currentCount, 0)
})

test('withAllocator: a throw passes through and releases the guard', (t) => {
  const thrown = new RangeError('mine')
  const error = t.throws(() => HostBackend.withAllocator(() => { throw thrown }), { instanceOf: RangeError }) // prettier-ignore
  t.is(error, thrown)
  t.is(
    HostBackend.withAllocator(() => 1),
    1,
  )
  t.throws(() => HardenedPolicy.withAllocator(HostBackend, () => { throw thrown })) // prettier-ignore
  t.is(
    HardenedPolicy.withAllocator(HostBackend, () => 2),
    2,
  )
  t.throws(() => HostBackend.withAllocator(() => { throw null })) // prettier-ignore
  t.is(
    HostBackend.withAllocator(() => 3),
    3,
  )
  throwsCode(t, () => HostBackend.withAllocator(5 as never), 'INVALID_ARGUMENT')
})

test('withAllocator by policy', (t) => {
  HostBackend.withAllocator(
    (allocator) => {
      t.is<bigint | null, bigint | null>(allocator.ptr, HostBackend.getAllocatorPtr({ policy: 'hardened' }))
      const block = allocator.alloc(50, 16)!
      allocator.free(block)
      throwsCode(t, () => allocator.alloc(50, 16, { policy: 'standard' }), 'INVALID_ARGUMENT', /mode/)
    },
    { policy: 'hardened' },
  )
})

test('withAllocatorUnguarded: re-entry is safe', (t) => {
  let kept: ThreadAllocator | undefined
  const result = HostBackend.withAllocatorUnguarded((outer) => {
    kept = outer
    const block = outer.alloc(100, 16)!
    const inner = HostBackend.withAllocatorUnguarded((allocator) => {
      allocator.free(block)
      return allocator.ptr
    })
    t.is(inner, outer.ptr)
    const guarded = HostBackend.withAllocator((allocator) => {
      throwsCode(t, () => outer.free(1n), 'INVALID_ARGUMENT', /guarded/)
      t.is(outer.alloc(10, 16), null)
      t.is(lastError()?.code, 'REENTRANT')
      return allocator.alloc(10, 16)
    })
    outer.free(guarded)
    return 7
  })
  t.is(result, 7)
  throwsCode(t, () => kept!.alloc(1, 1), 'DISPOSED')
  t.is(
    SecurePolicy.withAllocatorUnguarded(HostBackend, (allocator) => allocator.ptr),
    HostBackend.getAllocatorPtr(),
  )
})

test.serial('registering a hand-made allocator', (t) => {
  const own = HostBackend.getAllocatorPtr()
  const encoded = HostBackend.getAllocatorPtr({ policy: 'hardened' })
  {
    using mine = new ThreadAllocator(HostBackend, 'plain')
    t.not(mine.ptr, own)
    const before = HostBackend.threadAlloc(100, 16)
    HostBackend.registerCurrentAllocatorPtr(mine.ptr)
    t.is(HostBackend.getAllocatorPtr(), mine.ptr)
    t.is(HostBackend.getAllocatorPtr({ policy: 'hardened' }), encoded)
    const block = HostBackend.threadAlloc(100, 16)
    HostBackend.threadFree(before)
    HostBackend.registerCurrentAllocatorPtr(null)
    t.is(HostBackend.getAllocatorPtr(), own)
    HostBackend.threadFree(block)
    HostBackend.registerCurrentAllocatorPtr(mine.ptr)
  }
  t.is(HostBackend.getAllocatorPtr(), own, 'dropping it unregisters it')
})

test.serial('registering what is no allocator of this thread and backend changes nothing', (t) => {
  const own = HostBackend.getAllocatorPtr()
  const refused = (pointer: bigint, code: string): void => {
    HostBackend.registerCurrentAllocatorPtr(pointer)
    t.is(HostBackend.getAllocatorPtr(), own)
    t.is(lastError()?.code, code)
  }
  refused(0x1234n, 'NOT_REGISTERED')
  refused(2n ** 60n, 'NOT_REGISTERED')
  using other = new ThreadAllocator(CudaUnifiedBackend, 'plain')
  refused(other.ptr, 'NOT_REGISTERED')
  const dead = new ThreadAllocator(HostBackend, 'plain')
  const { ptr } = dead
  dead[Symbol.dispose]()
  refused(ptr, 'NOT_REGISTERED')
  using mine = new ThreadAllocator('host', 'plain')
  HostBackend.withAllocator(() => refused(mine.ptr, 'REENTRANT'))
})

test('hand-made allocators: modes, blocks that outlive them, and disposal', (t) => {
  const plain = new ThreadAllocator(HostBackend, 'plain')
  const encrypted = new ThreadAllocator(HostBackend, 'encrypted')
  throwsCode(t, () => plain.alloc(10, 16, { policy: 'hardened' }), 'INVALID_ARGUMENT')
  throwsCode(t, () => encrypted.alloc(10, 16, { policy: 'standard' }), 'INVALID_ARGUMENT')
  const one = plain.alloc(10, 16, { policy: 'secure' })!
  const two = encrypted.alloc(10, 16)!
  plain.free(two)
  t.is(plain.alloc(10, 3), null)
  t.is(lastError()?.code, 'INVALID_ALIGNMENT')
  t.is(plain.alloc(-1, 16), null)
  plain[Symbol.dispose]()
  plain[Symbol.dispose]()
  throwsCode(t, () => plain.alloc(10, 16), 'DISPOSED')
  throwsCode(t, () => plain.ptr, 'DISPOSED')
  HostBackend.threadFree(one)
  throwsCode(t, () => HostBackend.threadFree(one), 'DOUBLE_FREE')
  encrypted[Symbol.dispose]()
  throwsCode(t, () => new ThreadAllocator(HostBackend, 'secret' as never), 'INVALID_ARGUMENT')
  throwsCode(t, () => new ThreadAllocator('gpu' as never, 'plain'), 'INVALID_ARGUMENT')
})

test('lastError is null until something fails, in each thread', async (t) => {
  const worker = new Worker(
    `const { createRequire } = require('node:module')
     const { lastError } = createRequire(${JSON.stringify(root)} + 'x.cjs')('unimalloc')
     require('node:worker_threads').parentPort.postMessage(lastError())`,
    { eval: true, execArgv: [] },
  )
  HostBackend.allocate(1)
  t.deepEqual(await once(worker, 'message'), [null])
  t.is(lastError()?.code, 'INVALID_SIZE')
})

test("a region that another thread gets while its release is not confirmed yet stays that thread's to release", async (t) => {
  const program = `
    const { HostBackend } = require('unimalloc')
    let refused = 0
    for (let round = 0; round < 20000; round++) {
      const region = HostBackend.allocate(4096)
      if (region === null || !HostBackend.deallocate(region, 4096)) refused++
    }
    require('node:worker_threads').parentPort.postMessage(refused)`
  const refusals = await Promise.all(
    Array.from({ length: 4 }, async () => (await once(new Worker(program, { eval: true }), 'message'))[0] as number),
  )
  t.deepEqual(refusals, [0, 0, 0, 0])
})
