import { typed } from './errors.js'
import type { Ledger } from './ledger.js'
import { native } from './native.js'
import { requestedBytes } from './slabs.js'
import type { AllocatorStats } from './types.js'

/** Written by native code, account first, then backend; `read_stats` in `alloc.rs` has the order. */
const figures = new Float64Array(32)

/** An account's figures and those of its backend. `ledger` is what magazines handed out for the account. */
export function readStats(account: number, ledger: Ledger | null): AllocatorStats {
  ledger?.publish()
  typed(() => native().readStats(account, figures))
  const at = (index: number): number => figures[index] as number
  return {
    currentBytes: at(0),
    peakBytes: at(1),
    totalBytes: at(2) + (ledger?.totalBytes ?? 0),
    currentCount: at(3),
    peakCount: at(4),
    totalCount: at(5) + (ledger?.totalCount ?? 0),
    requestedBytes: at(6) + (ledger === null || ledger.isEmpty ? 0 : requestedBytes(ledger)),
    pendingBytes: at(7),
    limitBytes: Math.min(at(8), at(16)),
    outOfMemory: at(9),
    reservedBytes: at(10),
    cachedBytes: at(11),
    largestFreeBytes: at(12),
    backendAllocations: at(13),
    backendFrees: at(14),
    backendFailures: at(15),
    quarantinedCount: at(17),
    quarantinedBytes: at(18),
  }
}

/** The ceiling of the process, as the latest {@link readStats} found it. */
export function latestProcessLimit(): number {
  return figures[16] as number
}

/** Bytes in words, for messages. */
export function showBytes(bytes: number): string {
  if (bytes === Infinity) return 'unlimited'
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  let unit = 0
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024
    unit++
  }
  return `${Number.isInteger(bytes) ? bytes : bytes.toFixed(1)} ${units[unit]}`
}
