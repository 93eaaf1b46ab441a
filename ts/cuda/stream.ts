import { addressOf } from '../arrays.js'
import { extentOf } from '../buffers.js'
import { disposableEverywhere, dispose } from '../dispose.js'
import { fromNative, invalid, show, typed, UnimallocError } from '../errors.js'
import { log } from '../log.js'
import { name } from '../naming.js'
import { native } from '../native.js'
import type { Native } from '../native.js'
import { onGpu } from './needs-gpu.js'
import { checkKeys, count, oneOf } from '../options.js'
import { checkReceivers } from '../receivers.js'
import { rangeOf } from './range.js'
import { bindStream, streamHandle, streamIfUsable, unbindStream } from './stream-handle.js'

type NativeEvent = ReturnType<Native['streamRecord']>

/** Tells the constructors that the package itself calls them. */
const INTERNAL = Symbol('internal')

let makeEvent: (handle: NativeEvent) => Event
let eventHandle: (event: Event) => NativeEvent
let makeDefaultStream: () => Stream

/**
 * A queue of work for one device, done in order. Does not wait for the legacy default stream. Belongs to the thread that made it;
 * memory that its work uses stays alive until the work is done, whatever becomes of arrays and stream.
 */
export class Stream implements Disposable {
  #disposable = true
  #whyNoPrefetch: string | null = null

  /** Throws `CUDA_UNAVAILABLE` where no GPU is usable, and `INVALID_ARGUMENT` where there is no such device. */
  constructor(options: { device?: number } = {}) {
    if ((options as unknown) === INTERNAL) return
    checkKeys('new Stream', options, ['device'])
    const device = count('new Stream: device', options.device ?? 0, 65535)
    const handle = onGpu(() => typed(() => native().streamCreate(device)))
    bindStream(this, handle)
  }

  /**
   * A stream that other code made, by its `CUstream` or `cudaStream_t`. It must stay alive until this object was disposed: the
   * driver does not check it.
   */
  static from(handle: bigint): Stream {
    if (typeof handle !== 'bigint') throw invalid(`Stream.from: the handle is ${show(handle)}; pass a bigint`)
    const stream = new Stream(INTERNAL as never)
    bindStream(
      stream,
      onGpu(() => typed(() => native().streamFrom(handle))),
    )
    return stream
  }

  static {
    name(this, 'Stream')
    disposableEverywhere(this.prototype)
    checkReceivers(this, 'stream', (value) => #disposable in value)
    makeDefaultStream = () => {
      const stream = new Stream(INTERNAL as never)
      bindStream(stream, null, () => onGpu(() => typed(() => native().streamDefault(0))))
      stream.#disposable = false
      return stream
    }
  }

  /** Resolves when all that was queued is done. Does not block the event loop. */
  async synchronize(): Promise<void> {
    const stream = streamHandle(this)
    await settled(native().streamWait(stream))
  }

  /** Waits until all that was queued is done, and blocks the thread meanwhile. */
  synchronizeBlocking(): void {
    const stream = streamHandle(this)
    typed(() => native().streamSynchronize(stream))
  }

  /** An event that is done when all that was queued so far is. */
  record(): Event {
    const stream = streamHandle(this)
    return makeEvent(typed(() => native().streamRecord(stream)))
  }

  /** Lets what is queued from now on wait for an event, also of another stream or device. Does not block. */
  wait(event: Event): void {
    const stream = streamHandle(this)
    const handle = eventHandle(event)
    typed(() => native().streamWaitEvent(stream, handle))
  }

  /**
   * Moves the pages of a view, in the stream's order. It is a hint, and does nothing where it cannot apply, on the host backend or on a
   * device without concurrent access: {@link whyNoPrefetch} has the reason.
   */
  prefetch(view: ArrayBufferView, to: 'device' | 'host'): void {
    const stream = streamIfUsable(this)
    const toHost = oneOf('prefetch: to', to, ['device', 'host']) === 'host'
    if (stream === null) {
      addressOf('prefetch', view)
      this.#whyNoPrefetch = typed(() => native().cudaUnavailableReason())
      log('debug', () => `not-prefetched reason=${JSON.stringify(this.#whyNoPrefetch)}`)
      return
    }
    const range = rangeOf('prefetch', view)
    this.#whyNoPrefetch =
      range === null
        ? 'the view is empty'
        : typed(() => native().streamPrefetch(stream, range.handle, range.offset, range.bytes, toHost))
  }

  /** Why the latest {@link prefetch} on this stream did nothing, in words; null where it was done, or there was none. */
  get whyNoPrefetch(): string | null {
    return this.#whyNoPrefetch
  }

  /** Copies bytes by the GPU's copy engine. Both views lie in unified memory and have the same number of bytes. */
  copy(to: ArrayBufferView, from: ArrayBufferView): void {
    const stream = streamHandle(this)
    const target = rangeOf('copy: to', to)
    const source = rangeOf('copy: from', from)
    const [room, bytes] = [extentOf(to).byteLength, extentOf(from).byteLength]
    if (room !== bytes) throw invalid(`copy: ${bytes} bytes do not fit ${room}; pass views of the same length`)
    if (target === null || source === null) return
    if (target.handle === source.handle && Math.abs(target.offset - source.offset) < target.bytes) {
      throw invalid('copy: the views overlap; copy to another array first')
    }
    typed(() => native().streamCopy(stream, target.handle, target.offset, source.handle, source.offset, target.bytes))
  }

  /** Sets every byte of a view, on the GPU. */
  fill(view: ArrayBufferView, byte: number): void {
    const stream = streamHandle(this)
    const range = rangeOf('fill', view)
    const value = count('fill: byte', byte, 255)
    if (range === null) return
    typed(() => native().streamFill(stream, range.handle, range.offset, range.bytes, value))
  }

  /**
   * Says that foreign code uses a view on this stream: once freed, its memory is not handed out before that work is done. Does nothing
   * where there is no GPU.
   */
  recordUse(view: ArrayBufferView): void {
    const stream = streamIfUsable(this)
    if (stream === null) {
      addressOf('recordUse', view)
      return
    }
    const range = rangeOf('recordUse', view)
    if (range === null) return
    typed(() => native().recordUse(stream, range.handle))
  }

  /** The `CUstream`, for foreign code. */
  get handle(): bigint {
    const stream = streamHandle(this)
    return typed(() => native().streamHandle(stream))
  }

  /** Ends the use of the stream; queued work still completes. A second call does nothing. The default stream refuses. */
  [dispose](): void {
    if (!this.#disposable) throw invalid('the default stream serves the whole program and is not disposed')
    unbindStream(this)
  }
}

/** A moment in a stream, from {@link Stream.record}. */
export class Event implements Disposable {
  #handle: NativeEvent | null

  private constructor(caller: symbol, handle: NativeEvent) {
    if (caller !== INTERNAL) throw invalid('an event is made by stream.record(), not by new')
    this.#handle = handle
  }

  static {
    name(this, 'Event')
    disposableEverywhere(this.prototype)
    checkReceivers(this, 'event', (value) => #handle in value)
    makeEvent = (handle) => new Event(INTERNAL, handle)
    eventHandle = (event) => {
      if (typeof event !== 'object' || event === null || !(#handle in event)) {
        throw invalid(`the event is ${show(event)}; pass one that stream.record() returned`)
      }
      return event.#live()
    }
  }

  /** Whether the moment has come. Does not wait. */
  get done(): boolean {
    const handle = this.#live()
    return typed(() => native().eventDone(handle))
  }

  /** Resolves when the moment has come. Does not block the event loop. */
  async wait(): Promise<void> {
    await settled(native().eventWait(this.#live()))
  }

  /** Milliseconds of device time since `start`. Both events must be done, and of one device. */
  millisecondsSince(start: Event): number {
    const handle = this.#live()
    const from = eventHandle(start)
    return typed(() => native().eventElapsed(handle, from))
  }

  /** Lets the event go. A second call does nothing. */
  [dispose](): void {
    this.#handle = null
  }

  #live(): NativeEvent {
    if (this.#handle === null) throw new UnimallocError('DISPOSED', 'the event was disposed: record a new one')
    return this.#handle
  }
}

/** What a launch without a stream uses: a stream of the first device, made at its first use. */
export const defaultStream: Stream = makeDefaultStream()

/** Resolves when all devices have done all that they were given. Does not block the event loop. */
export async function synchronize(): Promise<void> {
  await settled(native().cudaSynchronize())
}

/** A native promise whose error is a typed one. */
export async function settled<T>(promise: Promise<T>): Promise<T> {
  try {
    return await promise
  } catch (error) {
    throw fromNative(error)
  }
}
