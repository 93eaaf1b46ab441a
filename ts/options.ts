import { totalmem } from 'node:os'

import { invalid, show } from './errors.js'
import { BACKENDS, PLACEMENTS, POLICIES } from './native.js'
import type { AllocatorOptions, BackendName, Bytes, Placement, PolicyName } from './types.js'

/** Largest alignment that the allocator honours: the backend's own page size for large memory. */
export const MAX_ALIGNMENT = 2 * 1024 * 1024

/** As CUDA libraries expect. */
export const DEFAULT_ALIGNMENT = 256

/** Refuses what is no options object, and keys that mean nothing: a misspelt option must not pass in silence. */
export function checkKeys(what: string, options: unknown, known: readonly string[]): void {
  if (typeof options !== 'object' || options === null || Array.isArray(options)) {
    throw invalid(`${what}: the options are ${show(options)}; pass an object, or nothing`)
  }
  // Own keys only: what some library has put onto `Object.prototype` is no option of ours.
  for (const key of Object.keys(options)) {
    if (!known.includes(key)) {
      throw invalid(`${what}: unknown option ${show(key)}; known are ${known.join(', ')}`)
    }
  }
}

/** One of a few words. */
export function oneOf<T extends string>(what: string, value: unknown, words: readonly T[]): T {
  if (typeof value === 'string' && (words as readonly string[]).includes(value)) return value as T
  throw invalid(`${what} is ${show(value)}; use one of ${words.map((word) => `'${word}'`).join(', ')}`)
}

/** A number of elements or bytes. */
export function count(what: string, value: unknown, max: number = Number.MAX_SAFE_INTEGER): number {
  if (typeof value !== 'number') throw invalid(`${what} is ${show(value)}; pass a number`)
  if (!Number.isInteger(value) || value < 0) throw invalid(`${what} is ${value}; pass a whole number from 0 up`)
  if (value > max) throw invalid(`${what} is ${value}; the most is ${max}`)
  return value
}

/** An alignment. */
export function alignment(what: string, value: unknown): number {
  const bytes = count(what, value)
  if (bytes < 1 || bytes > MAX_ALIGNMENT || (bytes & (bytes - 1)) !== 0) {
    throw invalid(`${what} is ${bytes}; pass a power of two from 1 to ${MAX_ALIGNMENT}`)
  }
  return bytes
}

const UNITS: Record<string, number> = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 }

/** A number of bytes from any of the ways to write one. `whole` is what a percentage is of. */
export function bytes(what: string, value: Bytes, whole: () => number): number {
  if (typeof value === 'number') {
    if (value === Infinity) return value
    return count(what, value)
  }
  if (typeof value === 'string' && /^\d+$/.test(value.trim())) return count(what, Number(value))
  const match = typeof value === 'string' ? /^(\d+(?:\.\d+)?)\s?(B|KiB|MiB|GiB|TiB|%)$/.exec(value.trim()) : null
  if (match === null) {
    if (typeof value === 'string' && value.trim() === 'Infinity') return Infinity
    throw invalid(
      `${what} is ${show(value)}; write a number of bytes, '512MiB', '8GiB', '50%' or Infinity. The units are B, KiB, MiB, GiB and TiB`,
    )
  }
  const amount = Number(match[1])
  const unit = match[2] as string
  if (unit === '%') {
    if (amount > 100) throw invalid(`${what} is ${show(value)}; a percentage is at most 100%`)
    return Math.floor((whole() * amount) / 100)
  }
  return count(what, Math.floor(amount * (UNITS[unit] as number)))
}

/** Options of an allocator after every check that needs no native code. */
export interface CheckedAllocatorOptions {
  backend: BackendName | 'auto'
  policy: PolicyName
  placement: Placement
  maxBytes: Bytes
  device: number
  track: boolean
}

/** The smallest segment. */
const LEAST_LIMIT = 2 * 1024 * 1024

const ALLOCATOR_KEYS = ['backend', 'policy', 'placement', 'maxBytes', 'device', 'track'] as const

/** Checks the options of an allocator and fills in the defaults, which the environment may set. */
export function checkAllocatorOptions(what: string, options: AllocatorOptions): CheckedAllocatorOptions {
  checkKeys(what, options, ALLOCATOR_KEYS)
  const { backend, policy = 'standard', placement = 'auto', maxBytes = Infinity, device = 0, track } = options
  if (track !== undefined && typeof track !== 'boolean') {
    throw invalid(`${what}: track is ${show(track)}; pass true or false`)
  }
  bytes(`${what}: maxBytes`, maxBytes, () => 0)
  return {
    backend:
      backend === undefined ? backendFromEnvironment() : oneOf(`${what}: backend`, backend, [...BACKENDS, 'auto']),
    policy: oneOf(`${what}: policy`, policy, POLICIES),
    placement: oneOf(`${what}: placement`, placement, PLACEMENTS),
    maxBytes,
    device: count(`${what}: device`, device, 65535),
    track: track ?? trackFromEnvironment(),
  }
}

function backendFromEnvironment(): BackendName | 'auto' {
  const value = process.env['UNIMALLOC_BACKEND']
  if (value === undefined || value === '') return 'auto'
  return oneOf('the environment variable UNIMALLOC_BACKEND', value, [...BACKENDS, 'auto'])
}

/** Whether allocations of every allocator are tracked and reported at exit. */
export function trackFromEnvironment(): boolean {
  const value = process.env['UNIMALLOC_TRACK']
  if (value === undefined || value === '' || value === '0') return false
  if (value === '1') return true
  throw invalid(`the environment variable UNIMALLOC_TRACK is ${show(value)}; use 1 or 0`)
}

/** Checks what the allocator's core will read by itself, where a mistake could only be ignored. Empty is unset. */
export function checkEnvironment(): void {
  const limit = process.env['UNIMALLOC_MAX_BYTES']?.trim()
  if (limit) {
    const what = 'the environment variable UNIMALLOC_MAX_BYTES'
    if (bytes(what, limit as Bytes, totalmem) < LEAST_LIMIT) {
      throw invalid(
        `${what} is ${show(limit)}; the least is 2MiB, for the allocator takes no less from the system at once`,
      )
    }
  }
  const log = process.env['UNIMALLOC_LOG']?.trim()
  if (log) oneOf('the environment variable UNIMALLOC_LOG', log, ['error', 'warn', 'info', 'debug', 'off'])
  const capacity = process.env['UNIMALLOC_REGISTRY_CAPACITY']?.trim()
  if (capacity && !/^\+?0*[1-9]\d{0,14}$/.test(capacity)) {
    throw invalid(
      `the environment variable UNIMALLOC_REGISTRY_CAPACITY is ${show(capacity)}; pass a whole number from 1 up`,
    )
  }
}
