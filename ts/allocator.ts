import { constants } from 'node:buffer'

import {
  checkReadable,
  contentOfArray,
  freeView,
  killArray,
  kindOf,
  kindOfArray,
  locate,
  isOwnedBy,
  makeArray,
  usableBytesOf,
} from './arrays.js'
import type { Located } from './arrays.js'
import { Block, intrinsicBuffer, intrinsicLength, isDetached } from './buffers.js'
import { Books } from './books.js'
import { collectDropped } from './collector.js'
import { madeStream, streamHandle } from './cuda/stream-handle.js'
import type { NativeStream } from './cuda/stream-handle.js'
import { disposableEverywhere, dispose } from './dispose.js'
import { fromNative, invalid, show, typed, UnimallocError } from './errors.js'
import { asked, hot, results } from './hot.js'
import type { Kind } from './kind.js'
import { closeLedger, openLedger } from './ledger.js'
import type { Ledger } from './ledger.js'
import { reportAtExit, Tracker } from './leaks.js'
import { dropEmptySlabs, freeAll, magazineFor, MOST_BYTES, NATIVE, obtain, take } from './magazine.js'
import type { Magazine } from './magazine.js'
import { name, showAs } from './naming.js'
import { BACKENDS, MAX_EXACT, native, PLACEMENTS, REFUSED } from './native.js'
import {
  alignment,
  checkAllocatorOptions,
  checkEnvironment,
  checkKeys,
  count,
  DEFAULT_ALIGNMENT,
  oneOf,
  trackFromEnvironment,
} from './options.js'
import type { CheckedAllocatorOptions } from './options.js'
import { openAccount } from './open-account.js'
import { allocationError, tooLarge } from './out-of-memory.js'
import { checkReceivers, foreignReceiver } from './receivers.js'
import { end, release } from './release.js'
import { ArrayScope, Collected } from './scope.js'
import type { Scope } from './scope.js'
import { readStats, showBytes } from './stats.js'
import { noteBuffer } from './thread-end.js'
import type {
  AllocatorOptions,
  AllocatorStats,
  AllocOptions,
  ArrayType,
  BackendName,
  Copied,
  FreeOptions,
  LeakReport,
  Placement,
  PolicyName,
  TypedArray,
  UnifiedArray,
} from './types.js'

/** An account that is open: from here on native code knows the allocator. */
interface Opened {
  number: number
  backend: BackendName
  policy: PolicyName
  device: number
  /** Of an allocation without options. */
  plain: Request
  /** Null where magazines do not serve. */
  magazine: Magazine | null
}

/** How a block is to be made. */
interface Request {
  alignment: number
  placement: number
  stream?: NativeStream
}

/** Bits beside the placement's number: what is done about the contents, and which blocks may be neighbours. `alloc.rs` has the same. */
const ZEROED = 4
const POOLED = 8

/** Options of an allocator that opens its account later. */
const DEFERRED: AllocatorOptions = {}

/** Inherits nothing, not even what a library has put onto `Object.prototype`. */
const NO_OPTIONS = Object.freeze(Object.create(null)) as AllocatorOptions

const ALLOC_KEYS = ['placement', 'alignment', 'stream'] as const

/** What is left to be closed of an allocator that was collected. */
interface Remains {
  account: number
  ledger: Ledger | null
}

/** Closes the account of an allocator that was collected; blocks that native code knows of settle with it all the same. */
const accountCloser = new FinalizationRegistry<Remains>(({ account, ledger }) => {
  if (ledger !== null && !ledger.isEmpty) ledger.abandoned = true
  else {
    if (ledger !== null) closeLedger(ledger)
    native().closeAccount(account)
  }
})

/** Lets the package make the default allocator, which opens its account late and is never disposed. */
export let makeDefaultAllocator: (options: () => AllocatorOptions) => Allocator
/** Whether the allocator has opened its account. */
export let isOpen: (allocator: Allocator) => boolean

/**
 * Hands out typed arrays over memory that the CPU and the GPU share. An account of its own over pools that the whole process
 * shares: ceiling, current, peak and total are per allocator. Belongs to the thread that made it.
 */
export class Allocator implements Disposable {
  #opened: Opened | null = null
  #options: (() => AllocatorOptions) | null = null
  #outOfMemory: ((neededBytes: number) => boolean) | null = null
  /** The handler runs: what it allocates itself does not call it again. */
  #isAsking = false
  #disposed = false
  #books: Books
  /** What magazines hand out for it. Null until the first `allocUnsafe`, once it is disposed, and for good where magazines do not serve. */
  #pooled: Ledger | null = null
  /** The same; its figures count also when the allocator was disposed. */
  #ledger: Ledger | null = null
  #remains: Remains | null = null

  static {
    makeDefaultAllocator = (options) => {
      const allocator = new Allocator(DEFERRED)
      allocator.#options = options
      allocator.#books = new Books(allocator, false)
      return allocator
    }
    isOpen = (allocator) => allocator.#opened !== null
    name(this, 'Allocator')
    disposableEverywhere(this.prototype)
    const isOne = (value: object): boolean => #pooled in value
    checkReceivers(this, 'allocator', isOne, ['alloc', 'allocUnsafe', 'from', 'free', 'usableBytes'])
    showAs(this, isOne, (allocator) => allocator.#show())
  }

  /**
   * Throws `INVALID_ARGUMENT` for options that are none, and `CUDA_UNAVAILABLE` when `'cuda-unified'` is asked for where no GPU
   * is usable.
   */
  constructor(options: AllocatorOptions = NO_OPTIONS) {
    this.#books = new Books(this, true)
    if (options !== DEFERRED) this.#open(options)
  }

  /** The backend in use; with `'auto'`, the one that was chosen. */
  get backend(): BackendName {
    return this.#account().backend
  }

  /** The policy in use. */
  get policy(): PolicyName {
    return this.#account().policy
  }

  /**
   * An array of zeros with a buffer of its own. Freed by `free`, by `using`, by a scope, or by the garbage collector, which
   * runs only when the program yields to the event loop.
   */
  alloc<C extends ArrayType>(type: C, length: number, options?: AllocOptions): UnifiedArray<InstanceType<C>> {
    if (typeof this !== 'object' || this === null || !(#pooled in this)) throw unbound('alloc', this)
    return this.#make(kindOf('alloc', type), length, options, ZEROED, this.alloc) as UnifiedArray<InstanceType<C>>
  }

  /**
   * An array with arbitrary contents. As with `Buffer.allocUnsafe`, small ones (up to 64 KiB) are parts of a buffer that they share: a byte stream
   * or `structuredClone` that takes one takes all. Free it: the garbage collector need not.
   */
  allocUnsafe<C extends ArrayType>(type: C, length: number, options?: AllocOptions): UnifiedArray<InstanceType<C>> {
    if (typeof this !== 'object' || this === null || !(#pooled in this)) throw unbound('allocUnsafe', this)
    const pooled = this.#pooled
    if (pooled !== null && options === undefined) {
      const array = take(pooled, type, length)
      if (array !== null) return array as UnifiedArray<InstanceType<C>>
    }
    return this.#makeUnsafe(type, length, options) as UnifiedArray<InstanceType<C>>
  }

  /** An array with a copy of `source`: of the same type, or of the type that is named. Lives as one of `alloc`. */
  from<T extends TypedArray>(source: T, options?: AllocOptions): UnifiedArray<Copied<T>>
  from<C extends ArrayType>(
    type: C,
    source: ArrayLike<InstanceType<C>[number]>,
    options?: AllocOptions,
  ): UnifiedArray<InstanceType<C>>
  from(first: unknown, second?: unknown, third?: unknown): UnifiedArray {
    if (typeof this !== 'object' || this === null || !(#pooled in this)) throw unbound('from', this)
    let kind: Kind
    let source: ArrayLike<number>
    let options: AllocOptions | undefined
    if (typeof first === 'function') {
      kind = kindOf('from', first)
      source = elementsOf(second)
      options = third as AllocOptions | undefined
    } else {
      const own = kindOfArray(first)
      if (own === undefined) {
        throw invalid(`from: the source is ${show(first)}; pass a typed array, or a type and an array`)
      }
      if (third !== undefined) throw invalid('from: too many arguments; pass a typed array and options')
      kind = own
      source = first as ArrayLike<number>
      options = second as AllocOptions | undefined
    }
    const isTyped = kindOfArray(source) !== undefined
    if (isTyped) {
      if (isDetached(intrinsicBuffer(source))) throw invalid('from: the source is detached or freed')
      checkReadable(source)
    }
    const length = isTyped ? intrinsicLength(source) : source.length
    // An object that is no array may say another length the next time it is asked.
    const contents = isTyped || Array.isArray(source) ? 0 : ZEROED
    const array = this.#make(kind, length, options, contents, this.from)
    try {
      ;(array as unknown as Uint8Array).set(source)
    } catch (error) {
      array[dispose]()
      const reason = error instanceof Error ? error.message : show(error)
      throw new UnimallocError('INVALID_ARGUMENT', `from: the source does not fit a ${kind.name}: ${reason}`, {
        cause: error,
      })
    }
    // Elements of the source may be getters of the program's.
    this.#check()
    return array
  }

  /**
   * Frees an array of any allocator, or a plain view, `DataView` or `Buffer` that starts where a block does. Throws `DOUBLE_FREE`,
   * `INTERIOR`, `NOT_OURS`, or `INVALID_ARGUMENT` for a detached view.
   */
  free(view: ArrayBufferView, options?: FreeOptions): void {
    freeView(view, options)
  }

  /**
   * An array of another length with the contents of `array`, which is dead afterwards. What is new is zero where `alloc` made
   * the array. On failure `array` is as it was.
   */
  realloc<T>(array: UnifiedArray<T>, length: number): UnifiedArray<T> {
    this.#check()
    const view = array as unknown as UnifiedArray
    const own = typeof array === 'object' && array !== null ? contentOfArray(array) : undefined
    if (own === undefined) throw invalid('realloc: pass an array that alloc(), allocUnsafe() or from() returned')
    const { block, buffer } = locateUnshared(view)
    const kind = kindOfArray(view) as Kind
    const owner = block.owner instanceof Books ? block.owner.allocator : this
    const request = { alignment: block.alignment, placement: block.placement }
    const scope = block.scope
    const fresh = owner.#makeChecked(kind, length, request, block.pooled ? POOLED : ZEROED, this.realloc)
    try {
      locateUnshared(view)
    } catch (error) {
      fresh.free() // the out-of-memory handler has freed or shared the very array
      throw error
    }
    const to = locate('realloc', fresh).block
    const bytes = Math.min(length, intrinsicLength(view)) * kind.bytesPerElement
    if (bytes > 0 && !typed(() => native().copyBlock(to.handle, block.handle, bytes))) {
      fresh.free()
      throw allocationError(owner.#account().number, owner.#ledger, bytes, null)
    }
    release(block, buffer)
    killArray(view)
    if (scope instanceof Collected) scope.add(to, fresh.buffer as ArrayBuffer)
    return fresh as unknown as UnifiedArray<T>
  }

  /** Whether a view lies in a live block of this allocator. */
  owns(view: ArrayBufferView): boolean {
    return ArrayBuffer.isView(view) && isOwnedBy(view, this.#books, this.#pooled)
  }

  /** Bytes that the view's block really has, its size rounded up; 0 for an empty array. */
  usableBytes(view: ArrayBufferView): number {
    return usableBytesOf('usableBytes', view)
  }

  /** A scope whose end frees what was allocated through it. */
  scope(): Scope {
    this.#check()
    return new ArrayScope(this, null)
  }

  /**
   * Gives back to the backend what of its pools is free as a whole, all but `keepBytes` of that; answers how many bytes went. What is
   * free beside live blocks stays. With CUDA this may wait for the device.
   */
  trim(keepBytes: number = 0): number {
    const keep = keepBytes === Infinity ? keepBytes : count('trim: keepBytes', keepBytes)
    const { backend } = this.#account()
    dropEmptySlabs()
    return typed(() => native().trim(BACKENDS.indexOf(backend), keep))
  }

  /** This allocator's figures, and those of its backend. */
  stats(): AllocatorStats {
    return readStats(this.#account(true).number, this.#ledger)
  }

  /** Starts `peakBytes` and `peakCount` afresh from what is live. */
  resetPeak(): void {
    const { number } = this.#account()
    this.#ledger?.publish()
    typed(() => native().resetPeak(number))
    this.#ledger?.shut()
  }

  /** Live allocations by the place they came from; empty unless tracking is on. */
  leaks(): LeakReport[] {
    this.#account(true)
    return this.#books.tracker?.report() ?? []
  }

  /**
   * Why a placement, without an argument the allocator's own, does nothing for arrays of this allocator, in words: as on the host backend. Null where
   * it has its effect. An array with such a placement works all the same.
   */
  whyNoPlacement(placement?: Placement): string | null {
    const opened = this.#account(true)
    const number =
      placement === undefined
        ? opened.plain.placement
        : PLACEMENTS.indexOf(oneOf('whyNoPlacement: placement', placement, PLACEMENTS))
    return typed(() => native().placementHint(BACKENDS.indexOf(opened.backend), opened.device, number))
  }

  /**
   * Calls `handler` when memory is wanting; if it answers true, having freed something, the allocation is tried once more. What it
   * throws, the allocation throws. It is not called again for what it allocates itself.
   */
  onOutOfMemory(handler: ((neededBytes: number) => boolean) | null): void {
    if (handler !== null && typeof handler !== 'function') {
      throw invalid(`onOutOfMemory: the handler is ${show(handler)}; pass a function, or null for none`)
    }
    this.#check()
    this.#outOfMemory = handler
  }

  /** Frees what the allocator still owns; later allocations throw `DISPOSED`. A second call does nothing. */
  [dispose](): void {
    if (this.#disposed) return
    if (!this.#books.disposable) {
      throw invalid(
        'the default allocator serves the whole program and is not disposed: make one with new Allocator() for that',
      )
    }
    this.#disposed = true
    const errors: unknown[] = []
    for (const [block, buffer] of this.#books.takeAll()) {
      try {
        end(block, buffer)
      } catch (error) {
        errors.push(error)
      }
    }
    const pooled = this.#pooled
    this.#pooled = null // nothing is allocated any more
    if (pooled !== null) {
      try {
        if (!pooled.isEmpty) typed(() => freeAll(pooled))
        closeLedger(pooled)
        if (this.#remains !== null) this.#remains.ledger = null
      } catch (error) {
        errors.push(error)
      }
    }
    if (errors.length > 0) throw errors[0]
  }

  /** {@link allocUnsafe}, where the short way is not open. */
  #makeUnsafe(type: ArrayType, length: number, options: AllocOptions | undefined): UnifiedArray {
    return this.#make(kindOf('allocUnsafe', type), length, options, POOLED, this.allocUnsafe)
  }

  #make(
    kind: Kind,
    length: number,
    options: AllocOptions | undefined,
    contents: number,
    caller: (...args: never[]) => unknown,
  ): UnifiedArray {
    const opened = this.#account()
    const request = options === undefined ? opened.plain : checkAllocOptions(caller.name, options, opened)
    return this.#makeChecked(kind, length, request, contents, caller)
  }

  #makeChecked(
    kind: Kind,
    length: number,
    request: Request,
    contents: number,
    caller: (...args: never[]) => unknown,
  ): UnifiedArray {
    const opened = this.#account()
    if (!Number.isInteger(length) || length < 0 || length > MAX_EXACT / kind.bytesPerElement) {
      throw lengthError(caller.name, length, kind)
    }
    const bytes = length * kind.bytesPerElement
    const pooled = (contents & POOLED) !== 0
    if (bytes === 0) {
      const empty = new Block(0, 0, 0, this.#books, pooled, request.alignment, request.placement, 0)
      return makeArray(kind, new ArrayBuffer(0), 0, empty)
    }
    if (pooled && bytes <= MOST_BYTES && isPlain(opened, request)) {
      const array = this.#obtain(opened, kind, length, bytes)
      if (array !== null) return array
    }
    // Before the system is asked for what no buffer can show.
    if (bytes > constants.MAX_LENGTH) throw tooLarge(bytes)
    const buffer = this.#allocate(opened, bytes, request, contents)
    const handle = results[0] as number
    const address = results[1] as number
    const usable = results[2] as number
    const isNearCeiling = results[3] === 1
    const block = new Block(handle, address, usable, this.#books, pooled, request.alignment, request.placement, bytes)
    const array = makeArray(kind, buffer, length, block)
    noteBuffer(bytes)
    this.#books.tracker?.add(handle, bytes, pooled, caller)
    this.#books.enter(block, buffer)
    if (isNearCeiling) collectDropped()
    return array
  }

  #allocate(opened: Opened, bytes: number, request: Request, contents: number): ArrayBuffer {
    const how = request.placement | contents
    const made = this.#attempt(opened, bytes, request, how)
    return typeof made === 'number' ? this.#allocateAgain(opened, bytes, request, how, made) : made
  }

  /** Apart, so that no closure is made for an allocation that needs none. */
  #allocateAgain(opened: Opened, bytes: number, request: Request, how: number, refusal: number): ArrayBuffer {
    return this.#insist(opened, bytes, refusal, () => this.#attempt(opened, bytes, request, how)) as ArrayBuffer
  }

  /** A buffer over a new block, or why there is none. */
  #attempt(
    { number }: Opened,
    bytes: number,
    { alignment: align, stream }: Request,
    how: number,
  ): ArrayBuffer | number {
    this.#ledger?.shut()
    this.#ledger?.publish()
    try {
      if (stream !== undefined) {
        return native().allocateForStream(number, bytes, align, how, results, stream) ?? (results[0] as number)
      }
      asked[0] = number
      asked[1] = bytes
      asked[2] = align
      asked[3] = how
      return hot().allocate() ?? (results[0] as number)
    } catch (error) {
      throw fromNative(error)
    }
  }

  /** An array of the magazine; null where it cannot serve. */
  #obtain(opened: Opened, kind: Kind, length: number, bytes: number): UnifiedArray | null {
    const pooled = (this.#pooled ??= this.#openPooled(opened))
    if (pooled === null) return null
    const attempt = (): UnifiedArray | number => typed(() => obtain(pooled, kind.type, length, bytes))
    const made = attempt()
    return typeof made === 'number' ? this.#insist(opened, bytes, made, attempt) : made
  }

  #openPooled(opened: Opened): Ledger | null {
    if (opened.magazine === null) return null
    const ledger = openLedger(opened.number, this.#books, opened.magazine.stacks)
    if (ledger === null) {
      opened.magazine = null
      return null
    }
    if (this.#remains !== null) this.#remains.ledger = ledger
    this.#ledger = ledger
    return ledger
  }

  /**
   * Tries again with what memory can be found: what this thread keeps for its own use, what the GPU finishes soon, what the
   * program's handler frees. Null where a magazine cannot serve after all.
   */
  #insist<T extends object>(opened: Opened, bytes: number, refusal: number, attempt: () => T | number): T | null {
    let made: T | number = refusal
    if (made === REFUSED.byBackend) {
      // To the pools, from which the next try takes what it needs.
      typed(() => {
        dropEmptySlabs()
        native().trim(BACKENDS.indexOf(opened.backend), Number.MAX_VALUE)
      })
      made = attempt()
    }
    if (isRefusal(made)) {
      collectDropped() // for the next turn
      if (typed(() => native().drainPending())) made = attempt()
    }
    if (isRefusal(made) && this.#askForMemory(bytes)) {
      this.#check()
      made = attempt()
    }
    if (typeof made !== 'number') return made
    if (made === NATIVE) return null
    throw allocationError(opened.number, this.#ledger, bytes, made)
  }

  /** Whether the program's handler says that it has freed something. */
  #askForMemory(bytes: number): boolean {
    if (this.#outOfMemory === null || this.#isAsking) return false
    this.#isAsking = true
    try {
      const answer: unknown = this.#outOfMemory(bytes)
      if (typeof answer === 'object' && answer !== null && typeof (answer as { then?: unknown }).then === 'function') {
        // Nobody hears of it otherwise; what it is about is said below.
        void Promise.resolve(answer).catch(() => {})
        throw invalid(
          'onOutOfMemory: the handler is asynchronous, and an allocation cannot wait for it; free at once and return true, or return false',
        )
      }
      return answer === true
    } finally {
      this.#isAsking = false
    }
  }

  #show(): string {
    const opened = this.#opened
    if (opened === null) return 'Allocator { not used yet }'
    const { currentCount, currentBytes, limitBytes } = this.stats()
    const live = `${currentCount} ${currentCount === 1 ? 'array' : 'arrays'}, ${showBytes(currentBytes)}`
    const limit = limitBytes === Infinity ? '' : ` of ${showBytes(limitBytes)}`
    const disposed = this.#disposed ? ', disposed' : ''
    return `Allocator { backend: '${opened.backend}', policy: '${opened.policy}', live: ${live}${limit}${disposed} }`
  }

  #check(): void {
    if (this.#disposed) throw new UnimallocError('DISPOSED', 'the allocator was disposed: make a new one')
  }

  #account(disposedToo = false): Opened {
    if (!disposedToo) this.#check()
    return this.#opened ?? this.#open(this.#options?.() ?? {})
  }

  #open(options: AllocatorOptions): Opened {
    checkEnvironment()
    const checked: CheckedAllocatorOptions = checkAllocatorOptions(
      !this.#books.disposable ? 'configure' : 'new Allocator',
      options,
    )
    const { number, backend } = openAccount(checked)
    if (checked.track) {
      this.#books.tracker = new Tracker()
      if (trackFromEnvironment()) reportAtExit(this.#books.tracker)
    }
    if (this.#books.disposable) {
      this.#remains = { account: number, ledger: null }
      accountCloser.register(this, this.#remains)
    }
    // Blocks of the other policies have contents to be seen to, those for the device pages to be moved; a tracker is told of each.
    const serves = checked.policy === 'standard' && checked.placement !== 'device' && !checked.track
    const placement = PLACEMENTS.indexOf(checked.placement)
    return (this.#opened = {
      number,
      backend,
      policy: checked.policy,
      device: checked.device,
      plain: { alignment: DEFAULT_ALIGNMENT, placement },
      magazine: serves ? magazineFor(BACKENDS.indexOf(backend), checked.device, placement) : null,
    })
  }
}

/** What a source has: iterables too, once and for all. */
function elementsOf(source: unknown): ArrayLike<number> {
  if (typeof source === 'object' && source !== null) {
    if (typeof (source as { length?: unknown }).length === 'number') return source as ArrayLike<number>
    if (typeof (source as { [Symbol.iterator]?: unknown })[Symbol.iterator] === 'function') {
      return Array.from(source as Iterable<number>)
    }
  }
  throw invalid(`from: the source is ${show(source)}; pass an array, a typed array or an iterable`)
}

function unbound(method: string, receiver: unknown): Error {
  const { message } = foreignReceiver(method, 'allocator', receiver)
  return invalid(`${message}, or import { ${method} } from 'unimalloc' for the default one`)
}

/** What is wrong with a length. Apart, so that no message is put together for one that is right. */
function lengthError(what: string, length: unknown, kind: Kind): Error {
  const most = Math.floor(MAX_EXACT / kind.bytesPerElement)
  if (typeof length !== 'number') {
    const copy = typeof length === 'object' && length !== null ? `; to copy values, write from(${kind.name}, …)` : ''
    return invalid(`${what}: length is ${show(length)}; pass a number${copy}`)
  }
  if (length > most) return invalid(`${what}: length is ${length}; the most of this type is ${most}`)
  return invalid(`${what}: length is ${length}; pass a whole number from 0 up`)
}

/** The block of an array that can be moved to another. */
function locateUnshared(view: UnifiedArray): Located {
  const found = locate('realloc', view)
  if (found.block.token !== null || found.block.arrays > 1) {
    throw invalid(
      'realloc: the array is shared with other threads, which would lose it: allocate a new one and share that',
    )
  }
  return found
}

/** Whether there was a refusal that freed memory can cure. */
function isRefusal(made: unknown): boolean {
  return made === REFUSED.byLimit || made === REFUSED.byBackend
}

/** Whether a magazine serves such a request: its blocks are all alike. */
function isPlain({ plain }: Opened, { alignment, placement, stream }: Request): boolean {
  return alignment === plain.alignment && placement === plain.placement && stream === undefined
}

function checkAllocOptions(what: string, options: AllocOptions, opened: Opened): Request {
  checkKeys(what, options, ALLOC_KEYS)
  const { alignment: align, placement, stream } = options
  const request: Request = {
    alignment: align === undefined ? DEFAULT_ALIGNMENT : alignment(`${what}: alignment`, align),
    placement:
      placement === undefined
        ? opened.plain.placement
        : PLACEMENTS.indexOf(oneOf(`${what}: placement`, placement, PLACEMENTS)),
  }
  if (stream !== undefined) {
    // The host writes to a copy at once, and on host memory there is nothing to order.
    if (what === 'from' || opened.backend === 'host') madeStream(stream)
    else request.stream = streamHandle(stream)
  }
  return request
}
