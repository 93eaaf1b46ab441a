import { locate } from '../arrays.js'
import { extentOf } from '../buffers.js'

/** A view as native code finds it again. */
export interface Range {
  handle: number
  offset: number
  bytes: number
}

/** Where a view lies; null when it is empty and has no memory. */
export function rangeOf(what: string, view: ArrayBufferView): Range | null {
  const { block, offset } = locate(what, view)
  const { byteLength } = extentOf(view)
  if (block.handle === 0 || byteLength === 0) return null
  return { handle: block.handle, offset, bytes: byteLength }
}
