import { invalid, show, UnimallocError } from '../errors.js'
import type { Native } from '../native.js'

/** A stream as native code knows it. */
export type NativeStream = ReturnType<Native['streamCreate']>

/** How to get a stream's native handle, by the object that the program has. Beside the class, so that `free` needs no CUDA code. */
const handles = new WeakMap<object, () => NativeStream>()

/** Ties a stream object to the way to its native handle. */
export function bindStream(stream: object, handle: () => NativeStream): void {
  handles.set(stream, handle)
}

/** Makes a stream one that is used no more. */
export function unbindStream(stream: object): void {
  handles.set(stream, () => {
    throw new UnimallocError('DISPOSED', 'the stream was disposed: make a new one')
  })
}

/** A stream's native handle, or an error that says what is wrong with the value. */
export function streamHandle(stream: unknown): NativeStream {
  const handle = typeof stream === 'object' && stream !== null ? handles.get(stream) : undefined
  if (handle === undefined) throw invalid(`the stream is ${show(stream)}; pass a cuda.Stream`)
  return handle()
}
