import { disposableEverywhere, dispose } from './dispose.js'
import { invalid, show, typed, UnimallocError } from './errors.js'
import { name } from './naming.js'
import { BACKENDS, MAX_EXACT, native, POLICIES, WAY } from './native.js'
import { checkKeys, oneOf } from './options.js'
import { checkReceivers, foreignRead, foreignReceiver } from './receivers.js'
import type { BackendName, PolicyName } from './types.js'

/** What a pool holds, read at the call. */
export interface PoolFigures {
  /** Segments or blocks. */
  count: number
  bytes: number
}

/** Chooses a policy; without one, the plain slot and the standard policy. */
export interface PolicyOption {
  policy?: PolicyName
}

/** The reason for this thread's latest null, false or refusal; null when nothing has failed yet. */
export function lastError(): { code: string; message: string } | null {
  const reason = typed(() => native().lastReason())
  return reason === null ? null : { code: reason.code, message: reason.message }
}

/** An address for native code. One beyond what an address can be is one that nothing was allocated at. */
function pointerNumber(what: string, pointer: unknown): number {
  if (pointer === null) return 0
  if (typeof pointer !== 'bigint') throw invalid(`${what}: the pointer is ${show(pointer)}; pass a bigint, or null`)
  return pointer >= 0n && pointer <= BigInt(MAX_EXACT) ? Number(pointer) : MAX_EXACT
}

/** A byte count for native code, which itself refuses what is no whole number of bytes. */
function bytesNumber(what: string, value: unknown): number {
  if (typeof value !== 'number') throw invalid(`${what} is ${show(value)}; pass a number of bytes`)
  return value
}

function pointer(address: number): bigint | null {
  return address === 0 ? null : BigInt(address)
}

/** The number of the policy that the options name; undefined where they name none. */
function policyNumber(what: string, options: unknown): number | undefined {
  if (options === undefined) return undefined
  checkKeys(what, options, ['policy'])
  const { policy } = options as PolicyOption
  return policy === undefined ? undefined : POLICIES.indexOf(oneOf(`${what}: policy`, policy, POLICIES))
}

/** How native code reaches an allocator. */
type Reach = { kind: 0 | 1; number: number } | { kind: 2; backend: number; policy: number; way: number }

const INTERNAL = Symbol('internal')
let lend: (reach: Reach, policy: number) => ThreadAllocator
let takeBack: (allocator: ThreadAllocator) => void

const HAND_MADE = 0
const LENT = 1
const SLOT = 2

/** Drops the heaps of hand-made allocators that were collected. Runs on the thread that made them, the only one that may. */
const dropper = new FinalizationRegistry<number>((number) => {
  native().dropAllocator(number)
})

/** The backend of an allocator object, without a check of what it is. */
function backendNumber(what: string, backend: unknown): number {
  if (backend instanceof UnifiedBackend) return BACKENDS.indexOf(backend.name)
  return BACKENDS.indexOf(oneOf(what, backend, BACKENDS))
}

/**
 * One thread's allocator over one backend: hand-made, or lent by `withAllocator`. A lent one throws `DISPOSED` once the
 * call has returned. Addresses are bigints; every other thread may free what it handed out.
 */
export class ThreadAllocator implements Disposable {
  #reach: Reach | null
  readonly #defaultPolicy: number
  readonly #dropToken: object | null = null

  /** A new allocator of this thread, with plain or encoded free lists. */
  constructor(backend: Backend | BackendName, mode: 'plain' | 'encrypted') {
    if ((mode as unknown) === INTERNAL) {
      const { reach, policy } = backend as unknown as { reach: Reach; policy: number }
      this.#reach = reach
      this.#defaultPolicy = policy
      return
    }
    const encrypted = oneOf('new ThreadAllocator: mode', mode, ['plain', 'encrypted']) === 'encrypted'
    const of = backendNumber('new ThreadAllocator: backend', backend)
    const number = typed(() => native().makeAllocator(of, encrypted))
    this.#reach = { kind: HAND_MADE, number }
    this.#defaultPolicy = encrypted ? 2 : 0
    this.#dropToken = {}
    dropper.register(this, number, this.#dropToken)
  }

  static {
    name(this, 'ThreadAllocator')
    disposableEverywhere(this.prototype)
    checkReceivers(this, 'allocator', (value) => #reach in value)
    lend = (reach, policy) => new ThreadAllocator({ reach, policy } as never, INTERNAL as never)
    takeBack = (allocator) => {
      allocator.#reach = null
    }
  }

  /** Its heap, for `registerCurrentAllocatorPtr`. */
  get ptr(): bigint {
    const reach = this.#live()
    const address =
      reach.kind === SLOT
        ? typed(() => native().unguardedPointer(reach.backend, reach.policy, reach.way))
        : typed(() => native().allocatorPointer(reach.kind, reach.number))
    return BigInt(address)
  }

  /**
   * A block, or null with the reason in {@link lastError}. Throws `INVALID_ARGUMENT` for a policy whose free lists are not of
   * this allocator's mode.
   */
  alloc(size: number, align: number, options?: PolicyOption): bigint | null {
    const reach = this.#live()
    const policy = policyNumber('alloc', options) ?? this.#defaultPolicy
    const bytes = wholeBytes(bytesNumber('alloc: size', size))
    const alignment = wholeBytes(bytesNumber('alloc: align', align))
    const address =
      reach.kind === SLOT
        ? typed(() => native().unguardedAlloc(reach.backend, reach.policy, reach.way, policy, bytes, alignment))
        : typed(() => native().allocatorAlloc(reach.kind, reach.number, policy, bytes, alignment))
    if (address === 0) {
      const reason = lastError()
      if (reason?.code === 'MODE_MISMATCH') throw invalid(`alloc: ${reason.message}`)
    }
    return pointer(address)
  }

  /** Frees a block of any allocator of the backend. Throws the typed error; null does nothing. */
  free(ptr: bigint | null, options?: PolicyOption): void {
    const reach = this.#live()
    const policy = policyNumber('free', options) ?? this.#defaultPolicy
    const address = pointerNumber('free', ptr)
    if (reach.kind === SLOT) {
      typed(() => native().unguardedFree(reach.backend, reach.policy, reach.way, policy, address))
    } else {
      typed(() => native().allocatorFree(reach.kind, reach.number, policy, address))
    }
  }

  /** Drops a hand-made allocator; its live blocks stay valid. A second call does nothing; a lent allocator refuses. */
  [dispose](): void {
    const reach = this.#reach
    if (reach === null) return
    if (reach.kind !== HAND_MADE) throw invalid('the allocator is lent by withAllocator, which takes it back by itself')
    this.#reach = null
    if (this.#dropToken !== null) dropper.unregister(this.#dropToken)
    typed(() => native().dropAllocator(reach.number))
  }

  #live(): Reach {
    if (this.#reach === null) {
      throw new UnimallocError(
        'DISPOSED',
        'the allocator is gone: it was disposed, or was lent by a withAllocator call that has returned',
      )
    }
    return this.#reach
  }
}

/** A size that no call serves, in the place of what is no whole number of bytes. */
function wholeBytes(value: number): number {
  return Number.isInteger(value) && value >= 0 ? value : MAX_EXACT
}

function runGuarded<R>(backend: number, policy: number, way: number, f: (allocator: ThreadAllocator) => R): R | null {
  if (typeof f !== 'function') throw invalid(`withAllocator: the callback is ${show(f)}; pass a function`)
  let outcome: R | null = null
  const ran = typed(() =>
    native().withAllocator(backend, policy, way, (number) => {
      const allocator = lend({ kind: LENT, number }, policy)
      try {
        outcome = f(allocator)
      } finally {
        takeBack(allocator)
      }
    }),
  )
  return ran ? outcome : null
}

function runUnguarded<R>(backend: number, policy: number, way: number, f: (allocator: ThreadAllocator) => R): R | null {
  if (typeof f !== 'function') throw invalid(`withAllocatorUnguarded: the callback is ${show(f)}; pass a function`)
  if (typed(() => native().unguardedPointer(backend, policy, way)) === 0) return null
  const allocator = lend({ kind: SLOT, backend, policy, way }, policy)
  try {
    return f(allocator)
  } finally {
    takeBack(allocator)
  }
}

/** A backend with its pools, its thread slots and its free functions. The two are {@link CudaUnifiedBackend} and {@link HostBackend}. */
export interface Backend {
  /** Its name in {@link AllocatorOptions}. */
  readonly name: BackendName
  readonly supportsPageReset: boolean
  readonly supportsMakeGuard: boolean
  readonly supportsDecommit: boolean
  readonly enableCpuCache: boolean
  /** A region of `size` bytes, a positive multiple of 4,096; or null with the reason in {@link lastError}. */
  allocate(size: number): bigint | null
  /** Gives back a region that came from `allocate`. False with the reason in {@link lastError}. */
  deallocate(ptr: bigint | null, size: number): boolean
  /** Drops the pages of a range of such a region, which then reads as zero. */
  pageReset(ptr: bigint | null, size: number): boolean
  /** Makes a range of such a region inaccessible. */
  makeGuard(ptr: bigint | null, size: number): boolean
  /** Releases the pages of a range of such a region, but keeps its addresses. */
  decommit(ptr: bigint | null, size: number): boolean
  pools(): { segment: PoolFigures; orphan: PoolFigures; huge: PoolFigures }
  globalSegmentPool(): PoolFigures
  globalOrphanPool(): PoolFigures
  globalHugePool(): PoolFigures
  /** Runs `f` with this thread's allocator under the guard: null, and `f` not run, when such a call is running already. */
  withAllocator<R>(f: (allocator: ThreadAllocator) => R, options?: PolicyOption): R | null
  /** Runs `f` without arming the guard; null when a guarded call is running. */
  withAllocatorUnguarded<R>(f: (allocator: ThreadAllocator) => R, options?: PolicyOption): R | null
  /** This thread's allocator, made if need be. */
  getAllocatorPtr(options?: PolicyOption): bigint | null
  /** This thread's allocator, or null until there is one. */
  getAllocatorPtrRaw(options?: PolicyOption): bigint | null
  /** As `getAllocatorPtrRaw`, by the mode of the free lists. */
  getAllocatorPtrRawForEncryption(encrypted: boolean): bigint | null
  /** Makes a hand-made allocator of this thread its own; null restores the thread's. A refusal changes nothing and is in {@link lastError}. */
  registerCurrentAllocatorPtr(ptr: bigint | null): void
  /** A block, or null with the reason in {@link lastError}. */
  threadAlloc(size: number, align: number, options?: PolicyOption): bigint | null
  /** Frees a block from any thread. Throws the typed error; null does nothing. */
  threadFree(ptr: bigint | null, options?: PolicyOption): void
  /** Moves a block to a new size; null with the reason in {@link lastError}, and then the block is as it was. */
  threadRealloc(ptr: bigint | null, newSize: number, align: number, options?: PolicyOption): bigint | null
  /** Usable bytes of a live block; 0 for any other pointer. */
  usableSize(ptr: bigint | null): number
}

type Pools = ReturnType<Backend['pools']>

/** The number of the backend that a method was called on, or the error for one called on something else. */
let numberOf: (backend: unknown, key: string, foreign?: typeof foreignReceiver) => number

function capabilities(backend: unknown, key: string): ReturnType<ReturnType<typeof native>['backendCapabilities']> {
  const number = numberOf(backend, key, foreignRead)
  return typed(() => native().backendCapabilities(number))
}

function poolsOf(backend: number): Pools {
  const figures = typed(() => native().poolFigures(backend))
  const at = (index: number): PoolFigures => ({
    count: figures[index] as number,
    bytes: figures[index + 1] as number,
  })
  return { segment: at(0), orphan: at(2), huge: at(4) }
}

class UnifiedBackend implements Backend {
  readonly name: BackendName
  readonly #number: number

  static {
    numberOf = (backend, key, foreign = foreignReceiver) => {
      if (backend instanceof UnifiedBackend && #number in backend) return backend.#number
      throw foreign(key, 'backend', backend)
    }
  }

  constructor(name: BackendName) {
    this.name = name
    this.#number = BACKENDS.indexOf(name)
  }

  get supportsPageReset(): boolean {
    return capabilities(this, 'supportsPageReset').pageReset
  }

  get supportsMakeGuard(): boolean {
    return capabilities(this, 'supportsMakeGuard').makeGuard
  }

  get supportsDecommit(): boolean {
    return capabilities(this, 'supportsDecommit').decommit
  }

  get enableCpuCache(): boolean {
    return capabilities(this, 'enableCpuCache').cpuCache
  }

  allocate(size: number): bigint | null {
    const backend = numberOf(this, 'allocate')
    const bytes = bytesNumber('allocate: size', size)
    return pointer(typed(() => native().backendAllocate(backend, bytes)))
  }

  deallocate(ptr: bigint | null, size: number): boolean {
    const backend = numberOf(this, 'deallocate')
    const [address, bytes] = [pointerNumber('deallocate', ptr), bytesNumber('deallocate: size', size)]
    return typed(() => native().backendDeallocate(backend, address, bytes))
  }

  pageReset(ptr: bigint | null, size: number): boolean {
    const backend = numberOf(this, 'pageReset')
    const [address, bytes] = [pointerNumber('pageReset', ptr), bytesNumber('pageReset: size', size)]
    return typed(() => native().backendPageReset(backend, address, bytes))
  }

  makeGuard(ptr: bigint | null, size: number): boolean {
    const backend = numberOf(this, 'makeGuard')
    const [address, bytes] = [pointerNumber('makeGuard', ptr), bytesNumber('makeGuard: size', size)]
    return typed(() => native().backendMakeGuard(backend, address, bytes))
  }

  decommit(ptr: bigint | null, size: number): boolean {
    const backend = numberOf(this, 'decommit')
    const [address, bytes] = [pointerNumber('decommit', ptr), bytesNumber('decommit: size', size)]
    return typed(() => native().backendDecommit(backend, address, bytes))
  }

  pools(): Pools {
    return poolsOf(numberOf(this, 'pools'))
  }

  globalSegmentPool(): PoolFigures {
    return poolsOf(numberOf(this, 'globalSegmentPool')).segment
  }

  globalOrphanPool(): PoolFigures {
    return poolsOf(numberOf(this, 'globalOrphanPool')).orphan
  }

  globalHugePool(): PoolFigures {
    return poolsOf(numberOf(this, 'globalHugePool')).huge
  }

  withAllocator<R>(f: (allocator: ThreadAllocator) => R, options?: PolicyOption): R | null {
    const backend = numberOf(this, 'withAllocator')
    const policy = policyNumber('withAllocator', options)
    return runGuarded(backend, policy ?? 0, way(policy), f)
  }

  withAllocatorUnguarded<R>(f: (allocator: ThreadAllocator) => R, options?: PolicyOption): R | null {
    const backend = numberOf(this, 'withAllocatorUnguarded')
    const policy = policyNumber('withAllocatorUnguarded', options)
    return runUnguarded(backend, policy ?? 0, way(policy), f)
  }

  getAllocatorPtr(options?: PolicyOption): bigint | null {
    const policy = policyNumber('getAllocatorPtr', options)
    return pointer(
      typed(() => native().slotPointer(numberOf(this, 'getAllocatorPtr'), policy ?? 0, way(policy), false)),
    )
  }

  getAllocatorPtrRaw(options?: PolicyOption): bigint | null {
    const policy = policyNumber('getAllocatorPtrRaw', options)
    return pointer(
      typed(() => native().slotPointer(numberOf(this, 'getAllocatorPtrRaw'), policy ?? 0, way(policy), true)),
    )
  }

  getAllocatorPtrRawForEncryption(encrypted: boolean): bigint | null {
    const backend = numberOf(this, 'getAllocatorPtrRawForEncryption')
    if (typeof encrypted !== 'boolean') {
      throw invalid(`getAllocatorPtrRawForEncryption: encrypted is ${show(encrypted)}; pass true or false`)
    }
    return pointer(typed(() => native().slotPointerForEncryption(backend, encrypted)))
  }

  registerCurrentAllocatorPtr(ptr: bigint | null): void {
    const backend = numberOf(this, 'registerCurrentAllocatorPtr')
    const address = pointerNumber('registerCurrentAllocatorPtr', ptr)
    typed(() => native().registerSlot(backend, address))
  }

  threadAlloc(size: number, align: number, options?: PolicyOption): bigint | null {
    const backend = numberOf(this, 'threadAlloc')
    const policy = policyNumber('threadAlloc', options) ?? 0
    const [bytes, alignment] = [bytesNumber('threadAlloc: size', size), bytesNumber('threadAlloc: align', align)]
    return pointer(typed(() => native().threadAlloc(backend, policy, bytes, alignment)))
  }

  threadFree(ptr: bigint | null, options?: PolicyOption): void {
    const backend = numberOf(this, 'threadFree')
    const policy = policyNumber('threadFree', options) ?? 0
    const address = pointerNumber('threadFree', ptr)
    typed(() => native().threadFree(backend, policy, address))
  }

  threadRealloc(ptr: bigint | null, newSize: number, align: number, options?: PolicyOption): bigint | null {
    const backend = numberOf(this, 'threadRealloc')
    const policy = policyNumber('threadRealloc', options) ?? 0
    const address = pointerNumber('threadRealloc', ptr)
    const [bytes, alignment] = [
      bytesNumber('threadRealloc: newSize', newSize),
      bytesNumber('threadRealloc: align', align),
    ]
    return pointer(typed(() => native().threadRealloc(backend, policy, address, bytes, alignment)))
  }

  usableSize(ptr: bigint | null): number {
    const backend = numberOf(this, 'usableSize')
    const address = pointerNumber('usableSize', ptr)
    return typed(() => native().usableSize(backend, address))
  }
}

function way(policy: number | undefined): number {
  return policy === undefined ? WAY.plain : WAY.forPolicy
}

/** Managed memory of the CUDA driver. Never host memory: without a usable GPU every allocation is null with a reason. */
export const CudaUnifiedBackend: Backend = new UnifiedBackend('cuda-unified')

/** Ordinary host memory, for machines without a GPU. */
export const HostBackend: Backend = new UnifiedBackend('host')

/** Chooses this thread's slot of a backend by a policy: standard and secure the plain one, hardened the encoded one. */
export interface PolicySlots {
  readonly name: PolicyName
  withAllocator<R>(backend: Backend, f: (allocator: ThreadAllocator) => R): R | null
  withAllocatorUnguarded<R>(backend: Backend, f: (allocator: ThreadAllocator) => R): R | null
  getAllocatorPtr(backend: Backend): bigint | null
  getAllocatorPtrRaw(backend: Backend): bigint | null
}

function policySlots(name: PolicyName): PolicySlots {
  const policy = POLICIES.indexOf(name)
  const of = (backend: Backend): number => backendNumber('backend', backend)
  return Object.freeze({
    name,
    withAllocator: <R>(backend: Backend, f: (allocator: ThreadAllocator) => R) =>
      runGuarded(of(backend), policy, WAY.selection, f),
    withAllocatorUnguarded: <R>(backend: Backend, f: (allocator: ThreadAllocator) => R) =>
      runUnguarded(of(backend), policy, WAY.selection, f),
    getAllocatorPtr: (backend: Backend) =>
      pointer(typed(() => native().slotPointer(of(backend), policy, WAY.selection, false))),
    getAllocatorPtrRaw: (backend: Backend) =>
      pointer(typed(() => native().slotPointer(of(backend), policy, WAY.selection, true))),
  })
}

/** Checks every free. */
export const StandardPolicy: PolicySlots = policySlots('standard')

/** Also zeroes every block, overwrites freed ones, and shuffles fresh ones. */
export const SecurePolicy: PolicySlots = policySlots('secure')

/** Also encodes free lists, delays reuse and checks redzones. */
export const HardenedPolicy: PolicySlots = policySlots('hardened')
