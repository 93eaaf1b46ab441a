/// <reference lib="esnext.disposable" preserve="true" />
import type { Stream } from './cuda/stream.js'

/** Where memory comes from. */
export type BackendName = 'cuda-unified' | 'host'

/**
 * What an allocator does beyond handing out memory. `standard` checks every free; `secure` also zeroes every block,
 * overwrites freed ones and shuffles fresh ones; `hardened` also encodes free lists and delays reuse.
 */
export type PolicyName = 'standard' | 'secure' | 'hardened'

/** Who touches a block most. A hint: the contents are the same wherever they live. */
export type Placement = 'auto' | 'host' | 'device' | 'read-mostly'

/** A number of bytes, or text such as `'8GiB'` or `'50%'`, or `Infinity`. Checked at run time: `'-5%'` is an error. */
export type Bytes = number | `${number}${'B' | 'KiB' | 'MiB' | 'GiB' | 'TiB'}` | `${number}%`

/** Any standard typed array. */
export interface TypedArray extends ArrayBufferView {
  readonly BYTES_PER_ELEMENT: number
  readonly length: number
  [index: number]: number | bigint
}

/** Constructor of any standard typed array, `Float16Array` where the engine has it. */
export interface ArrayType<T extends TypedArray = TypedArray> {
  new (length: number): T
  readonly BYTES_PER_ELEMENT: number
}

/** The plain array type that `slice` of `T` gives. */
export type Copied<T> = T extends { slice(start?: number, end?: number): infer S } ? S : never

/** How to make an {@link Allocator}. Unknown keys are errors. */
export interface AllocatorOptions {
  /**
   * Default `'auto'`: CUDA where it is usable, else host memory; the environment variable `UNIMALLOC_BACKEND` may name another
   * default. Asking for `'cuda-unified'` without a usable GPU throws `CUDA_UNAVAILABLE`; it never falls back.
   */
  backend?: BackendName | 'auto'
  /** Default `'standard'`. */
  policy?: PolicyName
  /** Default `'auto'`. */
  placement?: Placement
  /** Ceiling on this allocator's live block bytes; a percentage is of the device's memory, on the host of RAM or the container's. Default none. */
  maxBytes?: Bytes
  /** Index of the CUDA device. Default 0. */
  device?: number
  /** Remember the stack of every allocation, for {@link Allocator.leaks}. Default false, or true with `UNIMALLOC_TRACK=1`. */
  track?: boolean
}

/** How to make one array. Unknown keys are errors. */
export interface AllocOptions {
  /** Default: the allocator's. */
  placement?: Placement
  /** Alignment of the first byte: a power of two up to 2 MiB. Default 256, as CUDA libraries expect. */
  alignment?: number
  /**
   * The stream that will use the memory first. Zeroing is then ordered on it, and with `allocUnsafe` and placement `'device'` the memory
   * may be some that earlier work on it still uses: the program touches the array only after the stream was synchronised. Of no
   * effect on the host backend.
   */
  stream?: Stream
}

/** How to free an array. Unknown keys are errors. */
export interface FreeOptions {
  /** A stream on which foreign code may still use the memory: it is not handed out again before that work is done. Of no effect without a GPU. */
  stream?: Stream
  /** The array is dead at once, but its memory stays until this settles: for an unfinished `fs.read` into it. */
  after?: PromiseLike<unknown>
}

/** What a {@link UnifiedArray} has beside the members of its typed array. */
export interface UnifiedArrayMembers extends Disposable {
  /** Address for the device and the host; `0n` when empty. Throws `INVALID_ARGUMENT` once the array is freed. */
  readonly pointer: bigint
  /** Whether the memory has been given back. */
  readonly freed: boolean
  /**
   * Gives the memory back; a second call throws `DOUBLE_FREE`. The buffer is detached: views that are left have length 0. Not so for arrays of
   * `allocUnsafe` of up to 64 KiB, which share a buffer: a view of one that is left sees whatever comes there next.
   */
  free(options?: FreeOptions): void
}

/** A real typed array whose bytes the GPU sees too. `map`, `slice` and `subarray` give plain arrays. */
export type UnifiedArray<T = TypedArray> = T & UnifiedArrayMembers

/** Figures of one allocator and of its backend. Bytes unless the name says count. */
export interface AllocatorStats {
  /** Live blocks of this allocator, as rounded up by the size classes. */
  currentBytes: number
  /** Highest `currentBytes` since the start or {@link Allocator.resetPeak}. */
  peakBytes: number
  /** Sum over all allocations ever made. */
  totalBytes: number
  /** Live blocks of this allocator. */
  currentCount: number
  /** Highest `currentCount` since the start or {@link Allocator.resetPeak}. */
  peakCount: number
  /** Allocations ever made. */
  totalCount: number
  /** What was asked for, of the live blocks. */
  requestedBytes: number
  /** Freed, but the GPU may still use them. They count against the limit. */
  pendingBytes: number
  /** This allocator's ceiling, or the process's where that is lower. */
  limitBytes: number
  /** Held by the backend's pools, in use or not; shared by all allocators. */
  reservedBytes: number
  /** Free in the backend's pools; {@link Allocator.trim} gives it back. */
  cachedBytes: number
  /** The largest block that the pools can serve without asking the backend. */
  largestFreeBytes: number
  /** Calls of the backend that gave memory. */
  backendAllocations: number
  /** Calls of the backend that took memory back. */
  backendFrees: number
  /** Calls of the backend that failed. */
  backendFailures: number
  /** Allocations of this allocator that failed for want of memory. */
  outOfMemory: number
  /**
   * Blocks of the process that are kept for good, and are no allocator's any more: their thread ended, or their slab was taken away, while something out
   * of sight might still use them.
   */
  quarantinedCount: number
  /** Their bytes. */
  quarantinedBytes: number
}

/** Live allocations that came from one place in the program. */
export interface LeakReport {
  bytes: number
  count: number
  stack: string
}
