import { setImmediate } from 'node:timers'

import { native } from './native.js'

let hasCollected = false

/**
 * Lets the engine look for arrays that the program has dropped, once a turn of the event loop: what it finds is given back in the next one.
 */
export function collectDropped(): void {
  if (hasCollected) return
  hasCollected = true
  setImmediate(() => {
    hasCollected = false
  }).unref()
  native().collectGarbage()
}
