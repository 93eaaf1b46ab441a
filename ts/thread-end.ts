import { isMainThread } from 'node:worker_threads'

import { native } from './native.js'
import type { Native } from './native.js'

/** From this size on native code sees to a buffer at once; `thread_end.rs` has the same. */
const LARGE = 256 * 1024

/** The end of the main thread is the process's; other runtimes end their workers in other ways. */
const isWatched = !isMainThread && process.versions['bun'] === undefined && process.versions['deno'] === undefined

/**
 * The handle of the hold whose buffer this thread is about to detach itself: if the thread is stopped before it ends the hold, native
 * code does that.
 */
export const leaving = new Float64Array(1)

/** To be called once the binding is there, before it makes a buffer. */
export function watchThreadEnd(binding: Native): void {
  if (!isWatched) return
  binding.watchThreadEnd(leaving.buffer)
  process.on('exit', settle)
}

/**
 * The thread ends by itself. What its garbage collector has taken, but not yet finalized, native code cannot tell from what lives on in another thread. A
 * collection finishes the one before it, and a second one what the first finds.
 */
function settle(): void {
  for (let round = 0; round < 2 && native().areFinalizersDue(); round++) native().collectGarbage()
}

const soon = Promise.resolve()

let isScheduled = false

/** To be called for each buffer over a block of its own. At the end of the turn native code sees to those that were made in it. */
export function noteBuffer(bytes: number): void {
  if (!isWatched || isScheduled || bytes >= LARGE) return
  isScheduled = true
  void soon.then(cover)
}

function cover(): void {
  isScheduled = false
  native().coverBuffers()
}
