import { isMainThread } from 'node:worker_threads'

import { detach, isDetached } from './buffers.js'
import type { Block } from './buffers.js'
import { releaseHold } from './hot.js'

/** What this thread knows of a block that several threads see. */
interface Entry {
  block: Block
  buffer: WeakRef<ArrayBuffer>
}

/** Shared blocks of this thread by token, so that it never has two buffers over the same bytes. */
const entries = new Map<string, Entry>()
let sweepAt = 64
let willLetGo = false

/** Remembers a shared block. */
export function rememberShared(token: string, block: Block, buffer: ArrayBuffer): void {
  if (entries.size >= sweepAt) {
    for (const [key, entry] of entries) if (entry.buffer.deref() === undefined) entries.delete(key)
    sweepAt = Math.max(64, entries.size * 2)
  }
  entries.set(token, { block, buffer: new WeakRef(buffer) })
  if (!willLetGo && !isMainThread) {
    willLetGo = true
    process.once('exit', letGo)
  }
}

/** The buffer that this thread already has over a shared block. */
export function findShared(token: string): { block: Block; buffer: ArrayBuffer } | undefined {
  const entry = entries.get(token)
  const buffer = entry?.buffer.deref()
  if (entry === undefined || buffer === undefined || entry.block.freed || isDetached(buffer)) return undefined
  return { block: entry.block, buffer }
}

/** What may still use a block of which one array was freed and others live on. */
interface Unfinished {
  /** Not to be collected meanwhile, whatever becomes of those others. */
  buffer: ArrayBuffer
  settled: Promise<unknown>
}

const unfinished = new Map<Block, Unfinished>()

/** Notes an operation that must have settled before the last array over a block gives its memory back. */
export function noteUnfinished(block: Block, buffer: ArrayBuffer, operation: PromiseLike<unknown>): void {
  // Looked at in a later microtask: it may be an object of the program's that frees the other arrays when its `then` is read.
  const later = Promise.resolve().then(() => operation)
  const entry: Unfinished = { buffer, settled: Promise.allSettled([unfinishedOf(block), later]) }
  unfinished.set(block, entry)
  void forgetWhenSettled(block, entry)
}

async function forgetWhenSettled(block: Block, entry: Unfinished): Promise<void> {
  await entry.settled
  if (unfinished.get(block) === entry) unfinished.delete(block)
}

/** Settles when nothing uses a block any more that was noted for it; null where nothing does. */
export function unfinishedOf(block: Block): Promise<unknown> | null {
  return unfinished.get(block)?.settled ?? null
}

/** The block is no longer this thread's. */
export function forgetShared(token: string): void {
  entries.delete(token)
}

/**
 * A worker that exits lets its shared blocks go in an orderly way. When an environment is torn down with buffers left in it,
 * native code cannot know whether their bytes live on elsewhere, and keeps the blocks for good.
 */
function letGo(): void {
  for (const { block, buffer: reference } of entries.values()) {
    const buffer = reference.deref()
    // What lies in a slab goes with the slab, in native code.
    if (buffer === undefined || block.slab !== null || block.freed || isDetached(buffer)) continue
    if (unfinished.has(block)) continue // kept, as what waits for its operation in any other way
    try {
      detach(buffer)
      block.freed = true
      releaseHold(block.handle)
    } catch {
      // Not to be detached: then it is kept, as at any teardown.
    }
  }
  entries.clear()
}
