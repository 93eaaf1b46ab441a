import { setTimeout as delay } from 'node:timers/promises'

/** Collects garbage and lets finalizers run until the condition holds. False when it never does. */
export async function collectUntil(condition: () => boolean): Promise<boolean> {
  for (let round = 0; round < 60; round++) {
    globalThis.gc?.()
    // Finalizers of buffers run in tasks of the event loop.
    await delay(round < 10 ? 1 : 20)
    if (condition()) return true
  }
  return false
}
