import { native } from './native.js'

/** What the latest `allocate` of this thread answered beside the buffer: handle, address and usable bytes, or the reason for a null. */
export const results = new Float64Array(new ArrayBuffer(64))

/** The calls that every array makes, by a shorter way than the generated binding's. */
export interface Hot {
  allocate(account: number, bytes: number, align: number, how: number): ArrayBuffer | null
  release(handle: number): void
}

let functions: Hot | undefined

/** Bound at the first call, as {@link native} is. */
export function hot(): Hot {
  if (functions !== undefined) return functions
  const [allocate, release] = native().hotFunctions(results.buffer as ArrayBuffer)
  return (functions = { allocate, release })
}
