import { invalid, UnimallocError } from './errors.js'
import { native } from './native.js'
import type { Slab, Slot } from './slabs.js'

/** Slot words: the upper byte is the state, the lower one has flags, with which a block is no longer the magazine's alone. */
export enum Word {
  live = 0xff00,
  held = 0xfa00,
  tracked = 0x04,
}

/** Stands where there is no slot word to look at: what it says is that nothing is live. */
export const NO_WORDS = new Uint16Array(1)

/** What lies behind an array: a block of which native code keeps the books, or one that a magazine handed out. */
export type Content = Block | Slot

/** Whose account a block is on: an allocator, as far as a block needs to know it. */
export interface Owner {
  /** Told when a block of its own was let go by this thread. */
  forget(block: Block): void
}

/** Something that frees what it has collected, unless it is told that it need not. */
export interface Collector {
  drop(block: Block): void
}

/**
 * A block of memory as this thread sees it: one `ArrayBuffer`, or a part of a slab, and any number of arrays and views over it.
 * Native code knows the hold by `handle`; when it has ended, the handle names nothing any more.
 */
export class Block {
  /** Set when this thread has let the memory go. */
  freed = false
  /** Unified arrays over the block in this thread: more than one after an `attach` in the thread that shared it. */
  arrays = 1
  /** What names the block to other threads, once it was shared. */
  token: string | null = null
  /** The scope that frees it. */
  scope: Collector | null = null
  /** The slab that it lies in; null where it has a buffer of its own. */
  slab: Slab | null = null
  /** Which block of the slab it is. */
  index = 0
  /** By what its owner finds the buffer again, and where it has noted that. */
  holder: ArrayBuffer | WeakRef<ArrayBuffer> | null = null
  place = 0
  /** A block that native code knows of is not freed by a store into its slot word, as a {@link Slot} is. */
  readonly words: Uint16Array = NO_WORDS

  constructor(
    /** 0 for an empty array, which owns no memory. */
    readonly handle: number,
    readonly address: number,
    readonly usable: number,
    /** Null where another thread's allocator owns the block. */
    readonly owner: Owner | null,
    readonly pooled: boolean,
    readonly alignment: number,
    readonly placement: number,
    /** Bytes that were asked for. */
    readonly requested: number,
  ) {}

  /** Where in its buffer the block starts. */
  get start(): number {
    return this.slab === null ? 0 : this.index * this.slab.block
  }
}

/** A constructor whose object is its argument: what a class adds after `super` it adds to that. */
const Identity = function (object: object) {
  return object
} as unknown as new (object: object) => object

/**
 * Puts a block, or a slab, onto its `ArrayBuffer` as a private field: found from any view of the buffer, kept by nothing else, and not to be
 * forged. Faster to look up than a WeakMap, and no work for the garbage collector.
 */
class Stamp extends Identity {
  #content: Block | Slab

  private constructor(buffer: ArrayBufferLike, content: Block | Slab) {
    super(buffer)
    this.#content = content
  }

  static put(buffer: ArrayBufferLike, content: Block | Slab): object {
    return new Stamp(buffer, content)
  }

  static of(buffer: object): Block | Slab | undefined {
    return #content in buffer ? buffer.#content : undefined
  }
}

const transfer = ArrayBuffer.prototype.transfer as ((this: unknown, bytes: number) => ArrayBuffer) | undefined

/**
 * Whether native code may detach buffers. From Node 23 on `markAsUntransferable()` gives a buffer a key, and Node-API ends the process for want of
 * it, where `transfer()` throws; other engines run finalizers inside the call.
 */
export const detachesNatively =
  process.versions['bun'] === undefined &&
  process.versions['deno'] === undefined &&
  Number.parseInt(process.versions.node, 10) < 23

function refuseTransfer(): never {
  throw new UnimallocError(
    'NOT_TRANSFERABLE',
    'the buffer of a unified array cannot be transferred: its memory belongs to the allocator of this process. ' +
      'Pass share(array) to another thread and attach() there, or copy with slice()',
  )
}

/**
 * Prototype of our buffers. `transfer()` would move the bytes to a buffer that may be posted to another thread and live
 * on there after this one's memory is gone.
 */
const guarded: ArrayBuffer = Object.create(ArrayBuffer.prototype, {
  transfer: { value: refuseTransfer, writable: true, configurable: true },
  transferToFixedLength: { value: refuseTransfer, writable: true, configurable: true },
})

/** Marks a buffer as the one over a block or a slab. */
export function adopt(buffer: ArrayBuffer, content: Block | Slab): void {
  Stamp.put(buffer, content)
}

/** To be called before the program sees a buffer of ours for the first time: most it never sees, and this takes a while. */
export function guard(buffer: ArrayBufferLike): void {
  if (Object.getPrototypeOf(buffer) !== guarded && Stamp.of(buffer) !== undefined)
    Object.setPrototypeOf(buffer, guarded)
}

type Getter = (this: unknown) => number

const typedArray: object = Object.getPrototypeOf(Uint8Array.prototype)
const typedArrayBuffer = Object.getOwnPropertyDescriptor(typedArray, 'buffer')?.get as (
  this: unknown,
) => ArrayBufferLike
const typedArrayTag = Object.getOwnPropertyDescriptor(typedArray, Symbol.toStringTag)?.get as (
  this: unknown,
) => string | undefined

const [typedArrayOffset, typedArrayBytes, typedArrayLength] = (['byteOffset', 'byteLength', 'length'] as const).map(
  (name) => Object.getOwnPropertyDescriptor(typedArray, name)?.get,
) as [Getter, Getter, Getter]
const [dataViewOffset, dataViewBytes, dataViewBuffer] = (['byteOffset', 'byteLength', 'buffer'] as const).map(
  (name) => Object.getOwnPropertyDescriptor(DataView.prototype, name)?.get,
) as [Getter, Getter, (this: unknown) => ArrayBufferLike]

/** The name of a typed array's kind; undefined for any other value. */
export function tagOf(value: unknown): string | undefined {
  return typedArrayTag.call(value)
}

/** Where a view lies in its buffer, by the engine's own getters; all 0 when the buffer is detached. */
export function extentOf(view: ArrayBufferView): { byteOffset: number; byteLength: number } {
  if (tagOf(view) !== undefined)
    return { byteOffset: typedArrayOffset.call(view), byteLength: typedArrayBytes.call(view) }
  // Only these two throw for a detached buffer.
  if (isDetached(dataViewBuffer.call(view))) return { byteOffset: 0, byteLength: 0 }
  return { byteOffset: dataViewOffset.call(view), byteLength: dataViewBytes.call(view) }
}

/** The number of elements of a typed array, by the engine's own getter. */
export function intrinsicLength(array: unknown): number {
  return typedArrayLength.call(array)
}

/** The buffer of a typed array, by the engine's own getter. */
export function intrinsicBuffer(array: unknown): ArrayBufferLike {
  return typedArrayBuffer.call(array)
}

/** The block or the slab that a buffer was made over. */
export function contentOfBuffer(buffer: ArrayBufferLike): Block | Slab | undefined {
  return Stamp.of(buffer)
}

const bufferBytes = Object.getOwnPropertyDescriptor(ArrayBuffer.prototype, 'byteLength')?.get as Getter

/** {@link isDetached} for the buffer of a block that has bytes, which takes less time. */
export function hasLostItsBytes(buffer: ArrayBuffer): boolean {
  return bufferBytes.call(buffer) === 0
}

const detachedGetter = Object.getOwnPropertyDescriptor(ArrayBuffer.prototype, 'detached')?.get

/** Whether a buffer has lost its bytes. Without the getter (Node 20), a block's buffer with no bytes is a detached one. */
export function isDetached(buffer: ArrayBufferLike): boolean {
  if (detachedGetter !== undefined && buffer instanceof ArrayBuffer) return detachedGetter.call(buffer) as boolean
  if (buffer.byteLength > 0) return false
  try {
    return new Uint8Array(buffer).length < 0
  } catch {
    return true
  }
}

/** Takes the bytes from a buffer. Throws, and changes nothing, if the program has forbidden that. */
export function detach(buffer: ArrayBuffer): void {
  let detached: boolean
  try {
    detached = transfer === undefined ? native().detach(buffer) : (transfer.call(buffer, 0), true)
  } catch {
    detached = false
  }
  if (!detached) throw notDetachable()
}

/** The error for a buffer that the engine does not let us detach. */
export function notDetachable(): UnimallocError {
  return new UnimallocError(
    'NOT_TRANSFERABLE',
    'the buffer cannot be detached, because markAsUntransferable() was called on it: leave its array to the garbage ' +
      'collector, and do not mark buffers of unified arrays',
  )
}

/** A view's buffer, or an error that says what is wrong with the value. */
export function bufferOf(what: string, view: unknown): ArrayBufferLike {
  if (!ArrayBuffer.isView(view)) {
    throw invalid(
      `${what}: pass a typed array, a DataView or a Buffer, not ${typeof view === 'object' ? 'another object' : typeof view}`,
    )
  }
  return tagOf(view) === undefined ? dataViewBuffer.call(view) : intrinsicBuffer(view)
}
