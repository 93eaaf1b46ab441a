import { Block, detach, detachesNatively, hasLostItsBytes, isDetached, notDetachable } from './buffers.js'
import { fromNative, typed } from './errors.js'
import { checkKeys } from './options.js'
import { invalid, show } from './errors.js'
import { asked, hot, releaseHold, results } from './hot.js'
import { native } from './native.js'
import { madeStream } from './cuda/stream-handle.js'
import type { NativeStream } from './cuda/stream-handle.js'
import { forgetShared, noteUnfinished, unfinishedOf } from './shared-blocks.js'
import { retireIfDetached } from './slabs.js'
import { leaving } from './thread-end.js'
import type { FreeOptions } from './types.js'

const FREE_KEYS = ['stream', 'after'] as const

/**
 * Lets a block go: detaches its buffer, so that no view is left to touch the memory, and ends this thread's hold. Where an
 * error is thrown nothing has changed.
 */
export function release(block: Block, buffer: ArrayBuffer, options: CheckedFreeOptions = AT_ONCE): void {
  if (block.arrays > 1) {
    // Other arrays of this thread are over the same buffer: the last of them waits for what this one is told of.
    if (block.handle !== 0) noteUses(block, buffer, options)
    block.arrays--
    return
  }
  if (block.handle === 0) {
    finish(block)
    return
  }
  if (block.slab !== null && retireIfDetached(block.slab)) {
    throw invalid('free: the slab that the array lies in was detached: its bytes are elsewhere, and its memory is kept')
  }
  noteStream(block, options.stream)
  const after = afterAll(block, buffer, options.after)
  if (after !== null) {
    typed(() => native().awaitRelease(block.handle))
    finish(block)
    void endAfter(after, block, buffer)
    return
  }
  // A slab stays: others use it.
  if (block.slab === null) {
    if (hasLostItsBytes(buffer)) {
      finish(block)
      typed(() => native().releaseWhenCollected(block.handle))
      return
    }
    if (detachesNatively) {
      detachAndEnd(block, buffer)
      return
    }
    detachOwn(block, buffer)
  }
  finish(block)
  try {
    releaseHold(block.handle)
  } catch (error) {
    throw fromNative(error)
  }
}

function noteStream(block: Block, stream: NativeStream | null): void {
  if (stream !== null) typed(() => native().recordUse(stream, block.handle))
}

/** Notes what a free of one of several arrays says of their common memory. */
function noteUses(block: Block, buffer: ArrayBuffer, { stream, after }: CheckedFreeOptions): void {
  noteStream(block, stream)
  if (after === null) return
  typed(() => native().awaitRelease(block.handle))
  noteUnfinished(block, buffer, after)
}

/** What the free of the last array waits for: its own operation, and those that the others were freed with. */
function afterAll(block: Block, buffer: ArrayBuffer, after: PromiseLike<unknown> | null): PromiseLike<unknown> | null {
  if (block.token === null || unfinishedOf(block) === null) return after
  if (after !== null) noteUnfinished(block, buffer, after)
  return unfinishedOf(block)
}

/** Frees a block at the end of its scope or allocator, whatever arrays are over it. No error says that its slab was taken away. */
export function end(block: Block, buffer: ArrayBuffer): void {
  block.arrays = 1
  if (block.slab === null || !retireIfDetached(block.slab)) return release(block, buffer)
  finish(block)
  typed(() => releaseHold(block.handle)) // the memory is kept all the same
}

/** Detaches a block's buffer, to end its hold right after. */
function detachOwn(block: Block, buffer: ArrayBuffer): void {
  leaving[0] = block.handle
  try {
    detach(buffer)
  } catch (error) {
    leaving[0] = 0
    throw error
  }
}

/** Detaches a block's buffer and ends its hold, in one call. */
function detachAndEnd(block: Block, buffer: ArrayBuffer): void {
  asked[0] = block.handle
  try {
    hot().detach(buffer)
  } catch (error) {
    finish(block) // it was detached
    throw fromNative(error)
  }
  if (results[0] === 0) throw notDetachable()
  finish(block)
}

function finish(block: Block): void {
  block.freed = true
  block.arrays = 0
  block.scope?.drop(block)
  block.scope = null
  block.owner?.forget(block)
  if (block.slab !== null) {
    block.slab.promoted?.delete(block.index)
    block.slab.renew(block.index)
  }
  if (block.token !== null) forgetShared(block.token)
}

/** Ends the hold of a block that the program already counts as freed, whatever has become of its buffer. */
function endHold(block: Block, buffer: ArrayBuffer): void {
  if (block.slab !== null) {
    releaseHold(block.handle)
    return
  }
  if (isDetached(buffer)) {
    native().releaseWhenCollected(block.handle)
    return
  }
  try {
    detachOwn(block, buffer)
  } catch {
    // The program has forbidden detaching: views may be left, and the garbage collector ends the hold.
    native().releaseWhenCollected(block.handle)
    return
  }
  releaseHold(block.handle)
}

/** Ends a block's hold when an operation has settled, well or not. */
async function endAfter(after: PromiseLike<unknown>, block: Block, buffer: ArrayBuffer): Promise<void> {
  try {
    // What the program passes may be no real promise: `await` bears with one that throws, or calls back twice.
    await after
  } catch {
    // Whoever started the operation hears of it.
  }
  try {
    endHold(block, buffer)
  } catch (error) {
    // Nobody waits for this free: a rejection would end the process for what is no more than a report.
    process.emitWarning(fromNative(error) as Error)
  }
}

/** Options of a free, each read once: getters of the program's run before anything is done, and not again. */
export interface CheckedFreeOptions {
  /** Null also for a stream on which nothing has run yet. */
  readonly stream: NativeStream | null
  readonly after: PromiseLike<unknown> | null
}

const AT_ONCE: CheckedFreeOptions = { stream: null, after: null }

/** Refuses what are no options of a free. */
export function checkFreeOptions(options: FreeOptions | undefined): CheckedFreeOptions {
  if (options === undefined) return AT_ONCE
  checkKeys('free', options, FREE_KEYS)
  const { stream, after } = options
  if (after !== undefined && typeof (after as { then?: unknown } | null)?.then !== 'function') {
    throw invalid(`free: after is ${show(after)}; pass the promise of the unfinished operation`)
  }
  return { stream: stream === undefined ? null : madeStream(stream), after: after ?? null }
}
