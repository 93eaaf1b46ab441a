import { Block, adopt, bufferOf, blockOfBuffer, isDetached } from './buffers.js'
import { invalid, show, UnimallocError } from './errors.js'
import { release } from './release.js'
import type { ArrayType, FreeOptions, TypedArray, UnifiedArray } from './types.js'

type PlainConstructor = new (buffer: ArrayBufferLike, byteOffset: number, length: number) => TypedArray

/** What the module knows of one kind of array. */
interface Kind {
  readonly name: string
  readonly bytesPerElement: number
  /** A unified array over the start of a buffer. */
  make(buffer: ArrayBufferLike, length: number, block: Block): UnifiedArray
  /** The block; null once the array was freed; undefined for an array that is not ours. */
  blockOf(array: object): Block | null | undefined
  /** Makes the array a dead one. */
  kill(array: object): void
}

/** Adds to one standard kind what makes an array a unified one. */
function unify(Base: ArrayType): Kind {
  class Unified extends (Base as unknown as PlainConstructor) {
    #block: Block | null

    constructor(buffer: ArrayBufferLike, length: number, block: Block) {
      super(buffer, 0, length)
      this.#block = block
    }

    get pointer(): bigint {
      return pointerOfBlock(this.#block, this.buffer)
    }

    get freed(): boolean {
      return this.#block === null || this.#block.freed
    }

    free(options?: FreeOptions): void {
      const block = this.#block
      if (block === null || block.freed) throw doubleFree()
      release(block, this.buffer as ArrayBuffer, options)
      this.#block = null
    }

    [Symbol.dispose](): void {
      if (!this.freed) this.free()
    }

    static blockOf(array: object): Block | null | undefined {
      return #block in array ? array.#block : undefined
    }

    static kill(array: object): void {
      if (#block in array) array.#block = null
    }
  }
  // Without a constructor of its own the prototype inherits the plain one: `map`, `slice` and `subarray` give plain arrays, and
  // libraries that compare `x.constructor` accept ours.
  delete (Unified.prototype as { constructor?: unknown }).constructor
  return {
    name: Base.name,
    bytesPerElement: Base.BYTES_PER_ELEMENT,
    make: (buffer, length, block) => new Unified(buffer, length, block) as unknown as UnifiedArray,
    blockOf: Unified.blockOf,
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

/** The kind that a constructor makes. */
export function kindOf(what: string, type: unknown): Kind {
  const kind = kindsByConstructor.get(type)
  if (kind !== undefined) return kind
  throw invalid(`${what}: the type is ${show(type)}; pass the constructor of a standard typed array, as Float32Array`)
}

/** The kind of that name. */
export function kindNamed(name: string): Kind | undefined {
  return kindsByName.get(name)
}

const tagOf = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(Uint8Array.prototype), Symbol.toStringTag)?.get as (
  this: unknown,
) => string | undefined

/** The kind of a typed array, also of a subclass such as Buffer; undefined for anything else. */
export function kindOfArray(value: unknown): Kind | undefined {
  const tag = tagOf.call(value)
  return tag === undefined ? undefined : kindsByName.get(tag)
}

/** The block of a unified array; null once it was freed; undefined for any other value. */
export function blockOfArray(value: object): Block | null | undefined {
  return kindOfArray(value)?.blockOf(value)
}

/** An array over a fresh buffer. */
export function makeArray(kind: Kind, buffer: ArrayBuffer, length: number, block: Block): UnifiedArray {
  adopt(buffer, block)
  return kind.make(buffer, length, block)
}

function pointerOfBlock(block: Block | null, buffer: ArrayBufferLike): bigint {
  if (block === null || block.freed) throw invalid('the array was freed, and has no address any more')
  if (block.handle !== 0 && isDetached(buffer)) throw invalid(DETACHED)
  return BigInt(block.address)
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

/** A view of ours and the live block behind it. `offset` is where in the block the view starts. */
export interface Located {
  block: Block
  buffer: ArrayBuffer
  offset: number
}

/** Finds the live block of any view, or throws what is wrong with it. */
export function locate(what: string, view: ArrayBufferView): Located {
  const buffer = bufferOf(what, view)
  const own = blockOfArray(view)
  if (own === null) throw invalid(`${what}: the array was freed`)
  const block = own ?? blockOfBuffer(buffer)
  if (block === undefined) throw isDetached(buffer) ? invalid(`${what}: ${DETACHED}`) : notOurs()
  if (block.freed) throw invalid(`${what}: the array was freed`)
  if (block.handle !== 0 && isDetached(buffer)) throw invalid(`${what}: ${DETACHED}`)
  return { block, buffer: buffer as ArrayBuffer, offset: view.byteOffset }
}

/** Address of a view's first byte. */
export function addressOf(what: string, view: ArrayBufferView): number {
  const { block, offset } = locate(what, view)
  return block.handle === 0 ? 0 : block.address + offset
}

/** Frees the block of a unified array, or of a view that starts where a block does. */
export function freeView(view: ArrayBufferView, options: FreeOptions | undefined): void {
  const buffer = bufferOf('free', view)
  const own = blockOfArray(view)
  if (own === null) throw doubleFree()
  if (own === undefined) {
    const block = blockOfBuffer(buffer)
    if (block === undefined) throw isDetached(buffer) ? invalid(`free: ${DETACHED}`) : notOurs()
    if (isDetached(buffer)) {
      throw invalid(
        block.freed ? 'free: the buffer is detached, because its array was freed before' : `free: ${DETACHED}`,
      )
    }
    if (block.freed) throw doubleFree()
    if (view.byteOffset !== 0) {
      throw new UnimallocError(
        'INTERIOR',
        `the view starts ${view.byteOffset} bytes into its block: free the array that alloc() returned, or a view of its start`,
      )
    }
    release(block, buffer as ArrayBuffer, options)
    return
  }
  if (own.freed) throw doubleFree()
  release(own, buffer as ArrayBuffer, options)
  kindOfArray(view)?.kill(view)
}

/** Marks an array as dead without touching its memory. */
export function killArray(array: object): void {
  kindOfArray(array)?.kill(array)
}
