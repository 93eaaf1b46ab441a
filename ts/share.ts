import { killArray, kindOfArray, makeAnother, makeArray, locate } from './arrays.js'
import { Block, adopt, intrinsicLength } from './buffers.js'
import { fromNative, invalid, show, typed, UnimallocError } from './errors.js'
import type { Kind } from './kind.js'
import { kindNamed } from './kinds.js'
import { native } from './native.js'
import { checkKeys } from './options.js'
import { release } from './release.js'
import { findShared, rememberShared } from './shared-blocks.js'
import { noteBuffer } from './thread-end.js'
import type { TypedArray, UnifiedArray } from './types.js'

/** Names a shared array to other threads of this process. Structured-cloneable; holds no reference, and no address. */
export interface SharedToken<T = TypedArray> {
  readonly unimalloc: 1
  readonly __type?: T
}

interface TokenFields extends SharedToken {
  readonly process: string
  readonly id: string
  readonly type: string
  readonly length: number
}

const facts = new Float64Array(4)

/**
 * A token for `postMessage`, with which another thread gets an array over the same bytes by {@link attach}. The memory lives until
 * the last array over it lets go. The token holds no reference: keep the array until the other thread has attached, or
 * hand it over with `transfer`, which ends this array at once and keeps the memory for the first thread that attaches.
 */
export function share<T>(array: UnifiedArray<T>, options: { transfer?: boolean } = {}): SharedToken<T> {
  checkKeys('share', options, ['transfer'])
  const transfer = options.transfer ?? false
  if (typeof transfer !== 'boolean') throw invalid(`share: transfer is ${show(transfer)}; pass true or false`)
  const view = array as unknown as TypedArray
  const { block, buffer, offset } = locate('share', view)
  const kind = kindOfArray(view)
  if (kind === undefined || offset !== 0) {
    throw invalid('share: pass the array that alloc(), allocUnsafe() or from() returned, not a part of it')
  }
  const binding = native()
  const length = intrinsicLength(view)
  const fields = { unimalloc: 1, process: typed(() => binding.processNonce()), type: kind.name, length } as const
  if (block.handle === 0) {
    if (transfer) array.free()
    return { ...fields, id: '' } as unknown as SharedToken<T>
  }
  if (transfer && block.arrays > 1) {
    throw invalid('share: other arrays of this thread are over the same memory; free them before it is handed over')
  }
  const id = typed(() => binding.shareBlock(block.handle, transfer))
  block.token = id
  if (transfer) {
    release(block, buffer)
    killArray(view)
  } else {
    rememberShared(id, block, buffer)
  }
  return { ...fields, id } as unknown as SharedToken<T>
}

/**
 * An array over the memory that a token names, in any thread of the process. Free it, or leave it to the garbage collector.
 * Throws `STALE_TOKEN` when the memory is gone.
 */
export function attach<T = TypedArray>(token: SharedToken<T>): UnifiedArray<T> {
  const { id, kind, length } = checkToken(token)
  if (id === '') {
    const empty = new Block(0, 0, 0, null, false, 1, 0, 0)
    return makeArray(kind, new ArrayBuffer(0), 0, empty) as unknown as UnifiedArray<T>
  }
  const present = findShared(id)
  if (present !== undefined) {
    checkFits(kind, length, present.block.requested)
    present.block.arrays++
    return makeAnother(kind, present.buffer, length, present.block) as unknown as UnifiedArray<T>
  }
  const buffer = typed(() => native().attachBlock(id, facts))
  const [handle, address, usable, requested] = facts as unknown as [number, number, number, number]
  const block = new Block(handle, address, usable, null, false, 1, 0, requested)
  block.token = id
  adopt(buffer, block)
  noteBuffer(requested)
  try {
    checkFits(kind, length, requested)
  } catch (error) {
    release(block, buffer)
    throw fromNative(error)
  }
  rememberShared(id, block, buffer)
  return makeAnother(kind, buffer, length, block) as unknown as UnifiedArray<T>
}

function checkFits(kind: Kind, length: number, bytes: number): void {
  if (length * kind.bytesPerElement > bytes) {
    throw invalid('attach: the token was changed: it names more elements than its memory has; pass it on as it is')
  }
}

function checkToken(token: unknown): { id: string; kind: Kind; length: number } {
  const fields = token as Partial<TokenFields> | null
  if (typeof fields !== 'object' || fields === null || fields.unimalloc !== 1) {
    throw invalid(`attach: the token is ${show(token)}; pass the object that share() returned`)
  }
  const kind = typeof fields.type === 'string' ? kindNamed(fields.type) : undefined
  const { id, length, process: nonce } = fields
  if (typeof id !== 'string' || kind === undefined || !Number.isSafeInteger(length) || (length as number) < 0) {
    throw invalid('attach: the token was changed; pass the object that share() returned as it is')
  }
  if (nonce !== typed(() => native().processNonce())) {
    throw new UnimallocError(
      'STALE_TOKEN',
      'the token is from another process: memory is shared between threads of one process only; send the contents instead',
    )
  }
  return { id, kind, length: length as number }
}
