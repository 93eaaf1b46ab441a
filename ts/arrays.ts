import {
  Block,
  adopt,
  bufferOf,
  contentOfBuffer,
  extentOf,
  guard,
  intrinsicBuffer,
  isDetached,
  tagOf,
} from './buffers.js'
import type { Owner } from './buffers.js'
import { invalid, show, UnimallocError } from './errors.js'
import { Owned } from './ledger.js'
import type { Ledger } from './ledger.js'
import { freeBlock, giveBack } from './magazine.js'
import { checkFreeOptions, release } from './release.js'
import type { CheckedFreeOptions } from './release.js'
import { GONE, Handle, promote, retireIfDetached, slabOf } from './slabs.js'
import type { Slab } from './slabs.js'
import type { ArrayType, FreeOptions, TypedArray, UnifiedArray } from './types.js'

const { subarray } = Object.getPrototypeOf(Uint8Array.prototype) as {
  subarray(this: unknown, start?: number, end?: number): TypedArray
}

type PlainConstructor = new (buffer: ArrayBufferLike, byteOffset: number, length: number) => TypedArray

/** What the module knows of one kind of array. */
interface Kind {
  readonly name: string
  readonly bytesPerElement: number
  /**
   * A unified array over a part of a buffer. `content` is the block, or the handle of one that a magazine hands out; then the array has a
   * serial number.
   */
  make(buffer: ArrayBufferLike, offset: number, length: number, content: Block | number, serial: number): UnifiedArray
  /** The block, or the handle of a magazine's; null once the array was freed; undefined for an array that is not ours. */
  contentOf(array: object): Block | number | null | undefined
  /** Makes the array a dead one. */
  kill(array: object): void
}

/** Adds to one standard kind what makes an array a unified one. */
function unify(Base: ArrayType): Kind {
  class Unified extends (Base as unknown as PlainConstructor) {
    /** Null once the array was freed. */
    #content: Block | number | null
    #serial: number

    constructor(buffer: ArrayBufferLike, offset: number, length: number, content: Block | number, serial: number) {
      super(buffer, offset, length)
      this.#content = content
      this.#serial = serial
    }

    // By these two the program gets hold of the buffer.
    override get buffer(): ArrayBufferLike {
      const buffer = intrinsicBuffer(this)
      guard(buffer)
      return buffer
    }

    subarray(start?: number, end?: number): TypedArray {
      guard(intrinsicBuffer(this))
      return subarray.call(this, start, end)
    }

    get pointer(): bigint {
      return pointerOf(Unified.contentOf(this) ?? null, intrinsicBuffer(this))
    }

    get freed(): boolean {
      return Unified.contentOf(this) === null
    }

    free(options?: FreeOptions): void {
      const handle = this.#content
      // A length of 0 says that somebody has detached the slab: no array over one is empty.
      if (typeof handle === 'number' && options === undefined && this.length !== 0 && giveBack(handle, this.#serial)) {
        this.#content = null
        return
      }
      // The options may be objects of the program's that free the array themselves: they come first.
      const checked = checkFreeOptions(options)
      const content = Unified.contentOf(this) ?? null
      if (content === null) throw doubleFree()
      if (typeof content === 'number') freePooled(slabOf(content), content & Handle.indexMask, checked)
      else release(content, intrinsicBuffer(this) as ArrayBuffer, checked)
      this.#content = null
    }

    [Symbol.dispose](): void {
      const content = Unified.contentOf(this) ?? null
      if (content === null) return
      // Whose slab was detached cannot be freed any more, by no fault of whoever owns the array.
      const slab = typeof content === 'number' ? slabOf(content) : content.slab
      if (slab !== null && retireIfDetached(slab)) return
      this.free()
    }

    static contentOf(array: object): Block | number | null | undefined {
      if (!(#content in array)) return undefined
      const content = array.#content
      if (typeof content === 'number') {
        return slabOf(content).isCurrent(content & Handle.indexMask, array.#serial) ? content : null
      }
      return content === null || content.freed ? null : content
    }

    static kill(array: object): void {
      if (#content in array) array.#content = null
    }
  }
  // Without a constructor of its own the prototype inherits the plain one: `map`, `slice` and `subarray` give plain arrays, and
  // libraries that compare `x.constructor` accept ours.
  delete (Unified.prototype as { constructor?: unknown }).constructor
  return {
    name: Base.name,
    bytesPerElement: Base.BYTES_PER_ELEMENT,
    make: (buffer, offset, length, content, serial) =>
      new Unified(buffer, offset, length, content, serial) as unknown as UnifiedArray,
    contentOf: Unified.contentOf,
    kill: Unified.kill,
  }
}

const kindsByConstructor = new Map<unknown, Kind>()
const kindsByName = new Map<string, Kind>()

for (const Base of [
  Int8Array,
  Uint8Array,
  Uint8ClampedArray,
  Int16Array,
  Uint16Array,
  Int32Array,
  Uint32Array,
  Float32Array,
  Float64Array,
  BigInt64Array,
  BigUint64Array,
  (globalThis as { Float16Array?: ArrayType }).Float16Array,
]) {
  if (Base === undefined) continue
  const kind = unify(Base as ArrayType)
  kindsByConstructor.set(Base, kind)
  kindsByName.set(kind.name, kind)
}

export type { Kind }

/** Of the latest call: most programs ask for the same type many times on end. */
let latestType: unknown
let latestKind: Kind | undefined

/** The kind that a constructor makes. */
export function kindOf(what: string, type: unknown): Kind {
  if (type === latestType && latestKind !== undefined) return latestKind
  const kind = kindsByConstructor.get(type)
  if (kind !== undefined) {
    latestType = type
    latestKind = kind
    return kind
  }
  throw invalid(`${what}: the type is ${show(type)}; pass the constructor of a standard typed array, as Float32Array`)
}

/** The kind of that name. */
export function kindNamed(name: string): Kind | undefined {
  return kindsByName.get(name)
}

/** The kind of a typed array, also of a subclass such as Buffer; undefined for anything else. */
export function kindOfArray(value: unknown): Kind | undefined {
  const tag = tagOf(value)
  return tag === undefined ? undefined : kindsByName.get(tag)
}

/** The block of a unified array, or the handle of a magazine's; null once it was freed; undefined for any other value. */
export function contentOfArray(value: object): Block | number | null | undefined {
  return kindOfArray(value)?.contentOf(value)
}

/** An array over a fresh buffer. */
export function makeArray(kind: Kind, buffer: ArrayBuffer, length: number, block: Block): UnifiedArray {
  adopt(buffer, block)
  return kind.make(buffer, 0, length, block, 0)
}

/** One more array over a block. */
export function makeAnother(kind: Kind, buffer: ArrayBuffer, length: number, block: Block): UnifiedArray {
  return kind.make(buffer, block.start, length, block, 0)
}

function pointerOf(content: Block | number | null, buffer: ArrayBufferLike): bigint {
  if (content === null) throw invalid('the array was freed, and has no address any more')
  const isMemory = typeof content === 'number' || content.handle !== 0
  if (isMemory && isDetached(buffer)) throw invalid(DETACHED)
  return BigInt(typeof content === 'number' ? slabOf(content).address(content & Handle.indexMask) : content.address)
}

const DETACHED =
  'the buffer was detached, by a stream or by structuredClone with a transfer list: its bytes are elsewhere, and the array is of no use'

/** The error for a value that is no live array of ours. */
function notOurs(): UnimallocError {
  return new UnimallocError(
    'NOT_OURS',
    'the memory was not allocated by unimalloc: make the array with alloc(), allocUnsafe() or from()',
  )
}

/** A second free, found. */
function doubleFree(): UnimallocError {
  return new UnimallocError('DOUBLE_FREE', 'the array was freed before: look for a second owner, or use `using`')
}

function interior(offset: number): UnimallocError {
  return new UnimallocError(
    'INTERIOR',
    `the view starts ${offset} bytes into its block: free the array that alloc() returned, or a view of its start`,
  )
}

/** Where a view of ours lies: in a block, or in one that a magazine handed out and that nobody else knows of. */
interface Found {
  block: Block | null
  slab: Slab
  index: number
  buffer: ArrayBuffer
  /** Bytes from the start of the block to the start of the view. */
  offset: number
}

/** Finds the live block of any view, or throws what is wrong with it. */
function find(what: string, view: ArrayBufferView): Found {
  const buffer = bufferOf(what, view) as ArrayBuffer
  let content: Block | Slab | number | null | undefined = contentOfArray(view)
  if (content === null) throw invalid(`${what}: the array was freed`)
  content ??= contentOfBuffer(buffer)
  if (content === undefined) throw isDetached(buffer) ? invalid(`${what}: ${DETACHED}`) : notOurs()
  const { byteOffset } = extentOf(view)
  if (content instanceof Block) {
    if (content.freed) throw invalid(`${what}: the array was freed`)
    if (content.handle !== 0 && isDetached(buffer)) throw invalid(`${what}: ${DETACHED}`)
    return { block: content, slab: GONE, index: 0, buffer, offset: byteOffset - content.start }
  }
  const slab = typeof content === 'number' ? slabOf(content) : content
  if (isDetached(buffer)) {
    retireIfDetached(slab)
    throw invalid(`${what}: ${DETACHED}`)
  }
  const index = typeof content === 'number' ? content & Handle.indexMask : Math.floor(byteOffset / slab.block)
  const block = slab.promoted?.get(index) ?? null
  if (!slab.isLive(index) || block?.freed === true) throw invalid(`${what}: the array was freed`)
  return { block, slab, index, buffer, offset: byteOffset - index * slab.block }
}

/** A view of ours and the live block behind it. `offset` is where in the block the view starts. */
export interface Located {
  block: Block
  buffer: ArrayBuffer
  offset: number
}

/** Finds the live block of any view, for what native code must know of; or throws what is wrong with it. */
export function locate(what: string, view: ArrayBufferView): Located {
  const { block, slab, index, buffer, offset } = find(what, view)
  return { block: block ?? promote(slab, index), buffer, offset }
}

/** Address of a view's first byte. */
export function addressOf(what: string, view: ArrayBufferView): number {
  const { block, slab, index, offset } = find(what, view)
  if (block?.handle === 0) return 0
  return (block?.address ?? slab.address(index)) + offset
}

/** Bytes that a view's block really has. */
export function usableBytesOf(what: string, view: ArrayBufferView): number {
  const { block, slab } = find(what, view)
  return block?.usable ?? slab.block
}

/** Whether a view lies in a live block of an owner. */
export function isOwnedBy(view: ArrayBufferView, owner: Owner, ledger: Ledger | null): boolean {
  let content: Block | Slab | number | null | undefined = contentOfArray(view)
  if (content === undefined) {
    const buffer = bufferOf('owns', view)
    content = isDetached(buffer) ? undefined : contentOfBuffer(buffer)
  }
  if (content == null) return false
  if (content instanceof Block) return !content.freed && content.owner === owner
  const slab = typeof content === 'number' ? slabOf(content) : content
  const index =
    typeof content === 'number' ? content & Handle.indexMask : Math.floor(extentOf(view).byteOffset / slab.block)
  if (ledger === null || !slab.isLive(index) || slab.owners[index] === undefined) return false
  if (slab.isTracked(index)) return slab.promoted?.get(index)?.owner === owner
  return (slab.owners[index] as number) >>> Owned.slackBits === ledger.owner
}

/** Where a device finds a view, and the hold that keeps its block; no hold where this thread alone can free it. */
export interface DeviceAddress {
  address: number
  hold: number
  /** Number of the backend, where there is no hold. */
  backend: number
}

/** For a call that is over before this thread goes on: it spares native code the books of a magazine's block. */
export function deviceAddress(what: string, view: ArrayBufferView): DeviceAddress {
  const { block, slab, index, offset } = find(what, view)
  if (block === null) return { address: slab.address(index) + offset, hold: 0, backend: slab.stack?.backend ?? -1 }
  return { address: block.handle === 0 ? 0 : block.address + offset, hold: block.handle, backend: -1 }
}

/** Frees the block of a unified array, or of a view that starts where a block does. */
export function freeView(view: ArrayBufferView, options: FreeOptions | undefined): void {
  if (ArrayBuffer.isView(view) && contentOfArray(view) !== undefined) {
    ;(view as unknown as UnifiedArray).free(options)
    return
  }
  const checked = checkFreeOptions(options)
  const buffer = bufferOf('free', view)
  const { byteOffset } = extentOf(view)
  const content = contentOfBuffer(buffer)
  if (content === undefined) throw isDetached(buffer) ? invalid(`free: ${DETACHED}`) : notOurs()
  if (content instanceof Block) {
    if (isDetached(buffer)) {
      throw invalid(
        content.freed ? 'free: the buffer is detached, because its array was freed before' : `free: ${DETACHED}`,
      )
    }
    if (content.freed) throw doubleFree()
    if (byteOffset !== 0) throw interior(byteOffset)
    release(content, buffer as ArrayBuffer, checked)
    return
  }
  const index = Math.floor(byteOffset / content.block)
  if (!isDetached(buffer)) {
    if (!content.isLive(index)) throw doubleFree()
    if (byteOffset % content.block !== 0) throw interior(byteOffset % content.block)
  }
  freePooled(content, index, checked)
}

/** Frees a live block of a slab, where the short way was not open. */
function freePooled(slab: Slab, index: number, options: CheckedFreeOptions): void {
  if (retireIfDetached(slab)) throw invalid(`free: ${DETACHED}`)
  const block = slab.promoted?.get(index)
  if (block?.freed === true) throw doubleFree()
  if (block !== undefined || options.stream !== null || options.after !== null) {
    release(block ?? promote(slab, index), slab.buffer, options)
  } else if (slab.isTracked(index)) {
    throw doubleFree() // this thread has let it go; others still hold it
  } else {
    freeBlock(slab, index)
  }
}

/** Marks an array as dead without touching its memory. */
export function killArray(array: object): void {
  kindOfArray(array)?.kill(array)
}
