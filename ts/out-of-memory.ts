import { constants } from 'node:buffer'

import { UnimallocError } from './errors.js'
import type { UnimallocErrorCode } from './errors.js'
import type { Ledger } from './ledger.js'
import { log } from './log.js'
import { native, REFUSED } from './native.js'
import { latestProcessLimit, readStats, showBytes } from './stats.js'
import type { AllocatorStats } from './types.js'

/** Codes for the allocator's reasons that are not a want of memory; `failure.rs` has their names. */
const CODES: Record<string, UnimallocErrorCode> = {
  INVALID_SIZE: 'INVALID_ARGUMENT',
  INVALID_ALIGNMENT: 'INVALID_ARGUMENT',
  NO_DRIVER: 'CUDA_UNAVAILABLE',
  NO_DEVICE: 'CUDA_UNAVAILABLE',
  UNSUPPORTED: 'CUDA_UNAVAILABLE',
  DRIVER: 'CUDA_ERROR',
  CONTEXT_LOST: 'CONTEXT_LOST',
  FORKED: 'FORKED',
}

/** The error for an allocation that came to nothing. `refusal` is what native code gave as the reason, if it was asked. */
export function allocationError(
  account: number,
  ledger: Ledger | null,
  bytes: number,
  refusal: number | null,
): UnimallocError {
  const error = errorFor(account, ledger, bytes, refusal)
  log('warn', () => `refused bytes=${bytes} code=${error.code}: ${error.message}`)
  return error
}

function errorFor(account: number, ledger: Ledger | null, bytes: number, refusal: number | null): UnimallocError {
  if (refusal === REFUSED.buffersBanned) {
    return new UnimallocError(
      'EXTERNAL_BUFFERS_BANNED',
      'this runtime forbids ArrayBuffers over native memory, as Electron does since version 21; a copy would cut the link to the ' +
        'GPU. Do the work in a plain Node process (child_process.fork with ELECTRON_RUN_AS_NODE does not lift the ban; a ' +
        'separate node binary does) and pass it the data',
    )
  }
  if (refusal === REFUSED.bufferRefused) {
    return tooLarge(bytes)
  }
  const reason = refusal === REFUSED.byLimit ? null : native().lastReason()
  const code = CODES[reason?.code ?? '']
  if (reason != null && code !== undefined) {
    const cuda =
      reason.driver == null ? undefined : { name: native().cudaErrorName(reason.driver), value: reason.driver }
    const named = cuda === undefined ? '' : ` (${cuda.name})`
    return new UnimallocError(
      code,
      `${showBytes(bytes)} could not be allocated: ${reason.message}${named}`,
      cuda ? { cuda } : {},
    )
  }
  native().countRefusal(account)
  const stats = readStats(account, ledger)
  const message = `${showBytes(bytes)} could not be allocated: `
  const details = { stats }
  const own = refusal === REFUSED.byLimit
  const limit = own ? stats.limitBytes : processLimit(reason?.code)
  if (bytes > limit) {
    const raise = own ? 'maxBytes' : 'UNIMALLOC_MAX_BYTES'
    return new UnimallocError(
      'OUT_OF_MEMORY',
      `${message}that is more than the limit of ${showBytes(limit)} allows in all. Ask for less, or raise ${raise}`,
      details,
    )
  }
  const cause = own
    ? `the allocator's maxBytes of ${showBytes(limit)} would be exceeded`
    : (reason?.message ?? 'the backend has no more memory')
  return new UnimallocError('OUT_OF_MEMORY', `${message}${cause}. ${figuresOf(stats, own)}${adviceOn(stats)}`, details)
}

/** The error for a buffer that this engine cannot make. */
export function tooLarge(bytes: number): UnimallocError {
  return new UnimallocError(
    'INVALID_ARGUMENT',
    `the engine refused a buffer of ${showBytes(bytes)}; its limit is ${showBytes(constants.MAX_LENGTH)}: use several smaller ` +
      'arrays, or a newer Node (22 and later allow more than 4 GiB)',
  )
}

/** The ceiling that the backend kept to, where it was that. */
function processLimit(reason: string | undefined): number {
  return reason === 'BUDGET' ? latestProcessLimit() : Infinity
}

function figuresOf(stats: AllocatorStats, own: boolean): string {
  const pending = stats.pendingBytes === 0 ? '' : `, pending on the GPU ${showBytes(stats.pendingBytes)}`
  const cached =
    stats.cachedBytes === 0
      ? ''
      : `, cached by the process ${showBytes(stats.cachedBytes)} (largest free block ${showBytes(stats.largestFreeBytes)})`
  const kept =
    stats.quarantinedCount === 0
      ? ''
      : `, kept for good after threads that ended ${showBytes(stats.quarantinedBytes)} in ${stats.quarantinedCount} blocks`
  const arrays = stats.currentCount === 1 ? '1 array' : `${stats.currentCount} arrays`
  const limit = own ? stats.limitBytes : Math.max(stats.limitBytes, latestProcessLimit())
  return `Live are ${showBytes(stats.currentBytes)} in ${arrays}${pending}${cached}${kept}, limit ${showBytes(limit)}`
}

function adviceOn(stats: AllocatorStats): string {
  if (stats.currentCount === 0 && stats.pendingBytes === 0) return ''
  return (
    '. Free arrays when they are done, with `using` or free(). Arrays that are merely dropped are collected only when the ' +
    'program yields to the event loop: in a loop that allocates, `await` a timer or I/O'
  )
}
