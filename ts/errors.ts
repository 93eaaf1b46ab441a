import type { AllocatorStats } from './types.js'

/** What went wrong, for programs. */
export type UnimallocErrorCode =
  | 'OUT_OF_MEMORY'
  | 'CUDA_UNAVAILABLE'
  | 'DOUBLE_FREE'
  | 'NOT_OURS'
  | 'INTERIOR'
  | 'CORRUPTED'
  | 'INVALID_ARGUMENT'
  | 'FORKED'
  | 'EXTERNAL_BUFFERS_BANNED'
  | 'HOST_ACCESS_WHILE_BUSY'
  | 'CUDA_ERROR'
  | 'CONTEXT_LOST'
  | 'STALE_TOKEN'
  | 'NOT_TRANSFERABLE'
  | 'DISPOSED'
  | 'COMPILE_FAILED'
  | 'NATIVE_MISSING'

/** What every call of this package throws. The message says the next step. */
export class UnimallocError extends Error {
  /** What went wrong. */
  readonly code: UnimallocErrorCode
  /** The driver's or the compiler's result, where one caused the error. */
  declare readonly cuda?: { name: string; value: number }
  /** The allocator's figures when it ran out of memory. */
  declare readonly stats?: AllocatorStats
  /** The compiler's log, for `COMPILE_FAILED`. */
  declare readonly log?: string

  constructor(
    code: UnimallocErrorCode,
    message: string,
    details: { cuda?: { name: string; value: number }; stats?: AllocatorStats; log?: string; cause?: unknown } = {},
  ) {
    super(message, 'cause' in details ? { cause: details.cause } : undefined)
    this.code = code
    if (details.cuda !== undefined) this.cuda = details.cuda
    if (details.stats !== undefined) this.stats = details.stats
    if (details.log !== undefined) this.log = details.log
  }

  static {
    // On the prototype, so that it is no own enumerable property of every error.
    Object.defineProperty(this.prototype, 'name', { value: 'UnimallocError', configurable: true, writable: true })
  }
}

/** `INVALID_ARGUMENT`, the error of every failed check. */
export function invalid(message: string): UnimallocError {
  return new UnimallocError('INVALID_ARGUMENT', message)
}

const SEPARATOR = '\u001f'

/** The typed error behind one that native code threw; see `failure.rs` for the form of its message. */
export function fromNative(error: unknown): unknown {
  if (!(error instanceof Error) || error instanceof UnimallocError || !error.message.includes(SEPARATOR)) return error
  const [code, message, name, value, log] = error.message.split(SEPARATOR) as [UnimallocErrorCode, ...string[]]
  return new UnimallocError(code, message ?? '', {
    ...(name ? { cuda: { name, value: Number(value) } } : {}),
    ...(log ? { log } : {}),
  })
}

/** Calls native code; what it throws becomes a typed error. */
export function typed<R>(call: () => R): R {
  try {
    return call()
  } catch (error) {
    throw fromNative(error)
  }
}

/** How a value looks in an error message, short and on one line. */
export function show(value: unknown): string {
  if (typeof value === 'string') return JSON.stringify(value.length > 40 ? `${value.slice(0, 40)}…` : value)
  if (typeof value === 'bigint') return `${value}n`
  if (typeof value === 'function') return `the function ${nameOf(() => value) ?? '(anonymous)'}`
  if (typeof value === 'object' && value !== null)
    return `an object of type ${nameOf(() => value.constructor) ?? tagOf(value) ?? 'Object'}`
  return String(value)
}

/** Of objects whose class has no name, such as generators. */
function tagOf(value: object): string | undefined {
  try {
    const tag = (value as { [Symbol.toStringTag]?: unknown })[Symbol.toStringTag]
    return typeof tag === 'string' && tag !== '' ? tag : undefined
  } catch {
    return undefined
  }
}

/** The name of a function or class; undefined where it has none, or where asking for it throws. */
function nameOf(find: () => { name?: unknown } | undefined): string | undefined {
  try {
    const name = find()?.name
    return typeof name === 'string' && name !== '' ? name : undefined
  } catch {
    return undefined
  }
}
