import { UnimallocError } from '../errors.js'

/** The error of a call that only a GPU can serve: the host backend is no way out for it. */
export function needsGpu(error: unknown): unknown {
  if (!(error instanceof UnimallocError) || error.code !== 'CUDA_UNAVAILABLE') return error
  const reason = error.message.replace(/; the host backend works without it$/, '')
  return new UnimallocError(
    'CUDA_UNAVAILABLE',
    `${reason}. Kernels and streams need a GPU; where allocator.backend is 'host', do the work in JavaScript, as the guide on the first kernel shows`,
    { cause: error.cause },
  )
}

/** Calls what only a GPU can serve. */
export function onGpu<R>(call: () => R): R {
  try {
    return call()
  } catch (error) {
    throw needsGpu(error)
  }
}
