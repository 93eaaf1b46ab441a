import { totalmem } from 'node:os'

import { invalid, typed, UnimallocError } from './errors.js'
import { log } from './log.js'
import { BACKENDS, native, POLICIES } from './native.js'
import { bytes } from './options.js'
import type { CheckedAllocatorOptions } from './options.js'
import type { BackendName } from './types.js'

/** Settles which backend it will be and how many bytes a limit is, and opens the account with native code. */
export function openAccount(options: CheckedAllocatorOptions): { number: number; backend: BackendName } {
  const binding = native()
  const missing = options.backend === 'host' ? null : typed(() => binding.cudaUnavailableReason())
  if (options.backend === 'cuda-unified' && missing !== null) {
    throw new UnimallocError('CUDA_UNAVAILABLE', `${missing}. To run without a GPU, ask for backend 'host' or 'auto'.`)
  }
  const backend = options.backend === 'auto' ? (missing === null ? 'cuda-unified' : 'host') : options.backend
  const { device } = options
  // Asked of the driver alone: to be described in full, every device would get a context.
  const deviceBytes = backend === 'host' ? [] : typed(() => binding.cudaTotalBytes())
  if (backend === 'host') {
    if (device !== 0)
      throw invalid(`device is ${device}, and the host backend has none; leave it out, or ask for 'cuda-unified'`)
  } else {
    const { length } = deviceBytes
    if (device >= length) {
      throw invalid(`device is ${device}; this machine has ${length}, counted from 0: see cuda.devices()`)
    }
  }
  const whole = (): number => (backend === 'host' ? hostBytes() : (deviceBytes[device] as number))
  const limit = bytes('maxBytes', options.maxBytes, whole)
  const number = typed(() =>
    binding.openAccount(BACKENDS.indexOf(backend), POLICIES.indexOf(options.policy), device, limit),
  )
  log('info', () => {
    const why = missing === null || options.backend !== 'auto' ? '' : ` because ${JSON.stringify(missing)}`
    const { policy, placement } = options
    return `allocator backend=${backend} asked=${options.backend}${why} device=${device} policy=${policy} placement=${placement} limit=${limit}`
  })
  return { number, backend }
}

/** What the host has for this process: RAM, or what its container may use, as `UNIMALLOC_MAX_BYTES` understands a percentage. */
function hostBytes(): number {
  // Not every runtime has the call; where there is no limit it answers 0 or more than there is.
  return Math.min(totalmem(), process.constrainedMemory?.() || Infinity)
}
