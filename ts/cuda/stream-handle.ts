import { invalid, show, UnimallocError } from '../errors.js'
import type { Native } from '../native.js'

/** A stream as native code knows it. */
export type NativeStream = ReturnType<Native['streamCreate']>

/** What a stream object stands for. */
interface Binding {
  /** Null before it is made: then nothing has run on it. */
  made: NativeStream | null
  readonly make: () => NativeStream
}

/** By the object that the program has; null once that was disposed. Beside the class, so that `free` needs no CUDA code. */
const bindings = new WeakMap<object, Binding | null>()

/** Ties a stream object to its native handle, or to how that is made at its first use. */
export function bindStream(stream: object, made: NativeStream | null, make: Binding['make'] = unmade): void {
  bindings.set(stream, { made, make })
}

function unmade(): never {
  throw new Error('a stream that has a handle needs no other')
}

/** Makes a stream one that is used no more. */
export function unbindStream(stream: object): void {
  bindings.set(stream, null)
}

function binding(stream: unknown): Binding {
  const found = typeof stream === 'object' && stream !== null ? bindings.get(stream) : undefined
  if (found === null) throw new UnimallocError('DISPOSED', 'the stream was disposed: make a new one')
  if (found === undefined) throw invalid(`the stream is ${show(stream)}; pass a cuda.Stream`)
  return found
}

/** A stream's native handle, made if need be; or an error that says what is wrong with the value. */
export function streamHandle(stream: unknown): NativeStream {
  const found = binding(stream)
  return (found.made ??= found.make())
}

/** As {@link streamHandle}; null where the stream was never used, or could not be for want of a GPU. Makes none. */
export function madeStream(stream: unknown): NativeStream | null {
  return binding(stream).made
}

/** As {@link streamHandle}; null where no GPU is usable. */
export function streamIfUsable(stream: unknown): NativeStream | null {
  try {
    return streamHandle(stream)
  } catch (error) {
    if (error instanceof UnimallocError && error.code === 'CUDA_UNAVAILABLE') return null
    throw error
  }
}
