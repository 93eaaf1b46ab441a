import { Buffer } from 'node:buffer' // a realm of its own has none

import { Block, adopt, bufferOf, contentOfBuffer, extentOf, intrinsicBuffer, isDetached, tagOf } from './buffers.js'
import type { Content, Owner } from './buffers.js'
import { invalid, show, typed, UnimallocError } from './errors.js'
import type { Kind } from './kind.js'
import { kindNamed, kindOfType } from './kinds.js'
import type { Ledger } from './ledger.js'
import { freeBlock } from './magazine.js'
import { native } from './native.js'
import { checkFreeOptions, release } from './release.js'
import type { CheckedFreeOptions } from './release.js'
import { GONE, promote, retireIfDetached, Slot } from './slabs.js'
import type { Slab } from './slabs.js'
import type { FreeOptions, UnifiedArray } from './types.js'

/** The kind that a constructor makes, or an error. */
export function kindOf(what: string, type: unknown): Kind {
  const kind = kindOfType(type)
  if (kind !== null) return kind
  if (type === Buffer)
    throw invalid(
      `${what}: the type is Buffer; pass the constructor Uint8Array, and Buffer.from(array.buffer) views the array as one`,
    )
  if (type === ArrayBuffer || type === DataView || type === SharedArrayBuffer) {
    throw invalid(
      `${what}: the type is ${show(type)}; pass the constructor Uint8Array, and array.buffer is an ArrayBuffer`,
    )
  }
  const other =
    typeof type === 'function' && Object.hasOwn(type, 'BYTES_PER_ELEMENT') ? ' of another realm, or one like it' : ''
  throw invalid(
    `${what}: the type is ${show(type)}${other}; pass the constructor of a standard typed array, as Float32Array, of the realm ` +
      'that loaded this package',
  )
}

/** The kind of a typed array, also of a subclass such as Buffer; undefined for anything else. */
export function kindOfArray(value: unknown): Kind | undefined {
  const tag = tagOf(value)
  return tag === undefined ? undefined : kindNamed(tag)
}

/** What lies behind a unified array; null once it was freed; undefined for any other value. */
export function contentOfArray(value: object): Content | null | undefined {
  const content = kindOfArray(value)?.contentOf(value)
  return content == null || isCurrent(content) ? content : null
}

/** Whether what lies behind an array is still its own. */
export function isCurrent(content: Content): boolean {
  return content instanceof Slot ? content.isCurrent : !content.freed
}

/** An array over a fresh buffer. */
export function makeArray(kind: Kind, buffer: ArrayBuffer, length: number, block: Block): UnifiedArray {
  adopt(buffer, block)
  return kind.make(buffer, 0, length, block)
}

/** One more array over a block. */
export function makeAnother(kind: Kind, buffer: ArrayBuffer, length: number, block: Block): UnifiedArray {
  return kind.make(buffer, block.start, length, block)
}

export const DETACHED =
  'the buffer was detached, by a stream or by structuredClone with a transfer list: its bytes are elsewhere, and the array is of no use'

/** The error for a value that is no live array of ours. */
function notOurs(): UnimallocError {
  return new UnimallocError(
    'NOT_OURS',
    'the memory was not allocated by unimalloc: make the array with alloc(), allocUnsafe() or from()',
  )
}

/** A second free, found. */
export function doubleFree(): UnimallocError {
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
  let content: Content | Slab | null | undefined = contentOfArray(view)
  if (content === null) throw invalid(`${what}: the array was freed`)
  content ??= contentOfBuffer(buffer)
  if (content === undefined) throw isDetached(buffer) ? invalid(`${what}: ${DETACHED}`) : notOurs()
  const { byteOffset } = extentOf(view)
  if (content instanceof Block) {
    if (content.freed) throw invalid(`${what}: the array was freed`)
    if (content.handle !== 0 && isDetached(buffer)) throw invalid(`${what}: ${DETACHED}`)
    return { block: content, slab: GONE, index: 0, buffer, offset: byteOffset - content.start }
  }
  const slab = content instanceof Slot ? content.slab : content
  if (isDetached(buffer)) {
    retireIfDetached(slab)
    throw invalid(`${what}: ${DETACHED}`)
  }
  const index = content instanceof Slot ? content.index : Math.floor(byteOffset / slab.block)
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
  let content: Content | Slab | null | undefined = contentOfArray(view)
  if (content === undefined) {
    const buffer = bufferOf('owns', view)
    content = isDetached(buffer) ? undefined : contentOfBuffer(buffer)
  }
  if (content == null) return false
  if (content instanceof Block) return !content.freed && content.owner === owner
  const slab = content instanceof Slot ? content.slab : content
  const index = content instanceof Slot ? content.index : Math.floor(extentOf(view).byteOffset / slab.block)
  if (ledger === null || !slab.isLive(index)) return false
  if (slab.isTracked(index)) return slab.promoted?.get(index)?.owner === owner
  return slab.slots[index]?.tally?.ledger === ledger
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

/** Refuses to copy from a typed array over memory that the CPU may not touch now. Such a read would end the process. */
export function checkReadable(array: unknown): void {
  const content = contentOfBuffer(intrinsicBuffer(array))
  if (content instanceof Block) {
    if (content.handle !== 0) typed(() => native().checkReadable(content.handle, 0))
  } else if (content?.stack != null) {
    const { backend } = content.stack
    typed(() => native().checkReadable(0, backend))
  }
}

/** Frees the block of a unified array, or of a view that starts where a block does. */
export function freeView(view: ArrayBufferView, options: FreeOptions | undefined): void {
  const kind = kindOfArray(view)
  if (kind?.contentOf(view) !== undefined) {
    kind.free.call(view, options)
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
export function freePooled(slab: Slab, index: number, options: CheckedFreeOptions): void {
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
