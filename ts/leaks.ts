import { dirname, join, sep } from 'node:path'
import { pathToFileURL } from 'node:url'
import { isMainThread } from 'node:worker_threads'

import { native } from './native.js'
import { showBytes } from './stats.js'
import type { LeakReport } from './types.js'

interface Allocation {
  bytes: number
  stack: string
  /** Nobody but `free` ends it: when its buffer was collected all the same, it was leaked. */
  pooled: boolean
}

/** How a frame of this package names its place: the bundle's, or, where the program runs with source maps, a source's. */
const own = ((): string[] => {
  const root = dirname(dirname(__filename))
  const places = [`${__filename}:`, join(root, 'ts') + sep]
  return [...places, `${pathToFileURL(__filename).href}:`, `${pathToFileURL(join(root, 'ts')).href}/`]
})()

/** The frames of a stack from the first that is not this package's: whoever reads it looks for a line of their own. */
function callers(stack: string): string {
  const frames = stack.split('\n').slice(1)
  const first = frames.findIndex((frame) => !own.some((place) => frame.includes(place)))
  return frames.slice(Math.max(first, 0)).join('\n')
}

/** Remembers where every live allocation of an allocator came from. */
export class Tracker {
  readonly #live = new Map<number, Allocation>()
  #sweepAt = 1024

  /** Notes an allocation; `caller` is the function whose callers are of interest. */
  add(handle: number, bytes: number, pooled: boolean, caller: (...args: never[]) => unknown): void {
    if (this.#live.size >= this.#sweepAt) {
      this.#sweep()
      this.#sweepAt = Math.max(1024, this.#live.size * 2)
    }
    const holder: { stack?: string } = {}
    Error.captureStackTrace?.(holder, caller as () => unknown)
    this.#live.set(handle, { bytes, stack: callers(holder.stack ?? new Error().stack ?? ''), pooled })
  }

  /** The program let the allocation go. */
  remove(handle: number): void {
    this.#live.delete(handle)
  }

  /** Live allocations by where they came from, the most bytes first. */
  report(): LeakReport[] {
    this.#sweep()
    const byStack = new Map<string, LeakReport>()
    for (const { bytes, stack } of this.#live.values()) {
      const entry = byStack.get(stack)
      if (entry === undefined) byStack.set(stack, { bytes, count: 1, stack })
      else {
        entry.bytes += bytes
        entry.count++
      }
    }
    return [...byStack.values()].sort((a, b) => b.bytes - a.bytes)
  }

  /** Drops what the garbage collector has taken: for arrays of `alloc` that is no leak. */
  #sweep(): void {
    const binding = native()
    for (const [handle, { pooled }] of this.#live) {
      if (!pooled && !binding.isHeld(handle)) this.#live.delete(handle)
    }
  }
}

const reported = new Set<Tracker>()

/** Reports a tracker's leaks on standard error when the process ends, also by a signal that would end it. */
export function reportAtExit(tracker: Tracker): void {
  if (reported.size === 0) {
    process.once('exit', printReport)
    if (isMainThread) for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) reportAtSignal(signal)
  }
  reported.add(tracker)
}

function reportAtSignal(signal: NodeJS.Signals): void {
  const listener = (): void => {
    // The program listens itself: it decides, and the report comes when it exits.
    if (process.listenerCount(signal) > 1) return
    process.removeListener(signal, listener)
    printReport()
    process.removeListener('exit', printReport)
    process.kill(process.pid, signal) // ends the process as it would have
  }
  process.on(signal, listener)
}

function printReport(): void {
  const leaks = [...reported].flatMap((tracker) => tracker.report())
  if (leaks.length === 0) return
  const bytes = leaks.reduce((sum, leak) => sum + leak.bytes, 0)
  const count = leaks.reduce((sum, leak) => sum + leak.count, 0)
  const lines = leaks.slice(0, 20).map((leak) => `${showBytes(leak.bytes)} in ${leak.count} from\n${leak.stack}`)
  if (leaks.length > 20) lines.push(`and ${leaks.length - 20} more places`)
  process.stderr.write(
    `unimalloc: ${count === 1 ? '1 array' : `${count} arrays`} with ${showBytes(bytes)} ${count === 1 ? 'was' : 'were'} not freed\n${lines.join('\n')}\n`,
  )
}
