import { guard, intrinsicBuffer, isDetached, tagOf } from './buffers.js'
import type { Content } from './buffers.js'
import { contentOfArray, DETACHED, doubleFree, freePooled, isCurrent } from './arrays.js'
import { disposableEverywhere, dispose } from './dispose.js'
import { invalid } from './errors.js'
import type { UnimallocError } from './errors.js'
import { foreignRead, foreignReceiver } from './receivers.js'
import { release } from './release.js'
import type { CheckedFreeOptions } from './release.js'
import { retireIfDetached, Slot } from './slabs.js'
import type { ArrayType, FreeOptions, TypedArray, UnifiedArray } from './types.js'

/** What the module knows of one kind of array. */
export interface Kind {
  readonly type: ArrayType
  readonly name: string
  readonly bytesPerElement: number
  /** A unified array over a part of a buffer. Throws if the buffer is detached. */
  make(buffer: ArrayBufferLike, offset: number, length: number, content: Content): UnifiedArray
  /** What lies behind an array; null once the array was freed by its own `free`; undefined for an array that is not ours. */
  contentOf(array: object): Content | null | undefined
  /** Makes the array a dead one. */
  kill(array: object): void
  /** The arrays' own `free`, whatever the program has put in its place. */
  free(this: unknown, options?: FreeOptions): void
}

type PlainConstructor = new (buffer: ArrayBufferLike, byteOffset: number, length: number) => TypedArray

/** A standard constructor as the one of its uses that we make. One that this engine has not is stood in for; nobody can name its kind. */
export function plain(Base: unknown): PlainConstructor {
  return (Base ?? Uint8Array) as PlainConstructor
}

const { subarray } = Object.getPrototypeOf(Uint8Array.prototype) as {
  subarray(this: unknown, start?: number, end?: number): TypedArray
}

/** The error of a method that was called on something else. */
export function notAnArray(method: PropertyKey, receiver: unknown): UnimallocError {
  return foreignReceiver(method, 'array', receiver)
}

/** What lies behind the array that a member is asked of; null once it was freed. */
function contentBehind(
  array: unknown,
  key: PropertyKey,
  foreign: typeof foreignRead | typeof foreignReceiver,
): Content | null {
  const content = typeof array === 'object' && array !== null ? contentOfArray(array) : undefined
  if (content === undefined) throw foreign(key, 'array', array)
  return content
}

/** What all kinds have in common; copied to the prototype of each. */
const members = Object.getOwnPropertyDescriptors({
  // By these two the program gets hold of the buffer.
  get buffer(): ArrayBufferLike {
    if (tagOf(this) === undefined) throw foreignRead('buffer', 'array', this)
    const buffer = intrinsicBuffer(this)
    guard(buffer)
    return buffer
  },

  subarray(start?: number, end?: number): TypedArray {
    if (tagOf(this) === undefined) throw notAnArray('subarray', this)
    guard(intrinsicBuffer(this))
    return subarray.call(this, start, end)
  },

  get pointer(): bigint {
    const content = contentBehind(this, 'pointer', foreignRead)
    if (content === null) throw invalid('the array was freed, and has no address any more')
    const isMemory = content instanceof Slot || content.handle !== 0
    if (isMemory && isDetached(intrinsicBuffer(this))) throw invalid(DETACHED)
    return BigInt(content.address)
  },

  get freed(): boolean {
    return contentBehind(this, 'freed', foreignRead) === null
  },

  [dispose](): void {
    const content = contentBehind(this, dispose, foreignReceiver)
    if (content === null) return
    // Whose slab was detached cannot be freed any more, by no fault of whoever owns the array.
    if (content.slab !== null && retireIfDetached(content.slab)) return
    ;(this as unknown as UnifiedArray).free()
  },
})

/** Adds to a class what all kinds have in common. Null where this engine has no such arrays. */
export function unify(
  Base: ArrayType | undefined,
  Unified: { prototype: Pick<Kind, 'free'> } & Pick<Kind, 'contentOf' | 'kill'>,
  make: (...args: Parameters<Kind['make']>) => TypedArray,
): Kind | null {
  if (Base === undefined) return null
  for (const key of Reflect.ownKeys(members)) {
    const member = members[key as keyof typeof members]
    Object.defineProperty(Unified.prototype, key, { ...member, enumerable: false })
  }
  disposableEverywhere(Unified.prototype as unknown as Disposable)
  // Without a constructor of its own the prototype inherits the plain one: `map`, `slice` and `subarray` give plain arrays, and
  // libraries that compare `x.constructor` accept ours.
  delete (Unified.prototype as { constructor?: unknown }).constructor
  const { contentOf, kill } = Unified
  const { name, BYTES_PER_ELEMENT: bytesPerElement } = Base
  const { free } = Unified.prototype
  return { type: Base, name, bytesPerElement, make: make as unknown as Kind['make'], contentOf, kill, free }
}

/** Frees an array where the short way was not open. */
export function freeOtherwise(array: TypedArray, content: Content | null, options: CheckedFreeOptions): void {
  if (content === null || !isCurrent(content)) throw doubleFree()
  if (content instanceof Slot) freePooled(content.slab, content.index, options)
  else release(content, intrinsicBuffer(array) as ArrayBuffer, options)
}
