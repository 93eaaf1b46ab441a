import { native } from './native.js'

/** Bytes of the first part, doubles; `hot.rs` has the same. */
const NUMBERS = 64
/** Most blocks that go to or from a magazine in one call. */
export const MOST_BLOCKS = 64

const shared = new ArrayBuffer(NUMBERS + 4 * MOST_BLOCKS)

/** What the latest call of this thread answered beside its value. */
export const results = new Float64Array(shared, 0, NUMBERS / 16)
/** What a call is asked with that takes no arguments: the engine hands over numbers more slowly than they are put here. */
export const asked = new Float64Array(shared, NUMBERS / 2, NUMBERS / 16)
/** Block handles that go with a call, or come from it. */
export const handles = new Int32Array(shared, NUMBERS)

/** The calls that arrays make all the time, by a shorter way than the generated binding's. */
export interface Hot {
  /** Asked with account, bytes, alignment, and how. A buffer; results: handle of the hold, address, usable bytes. Or null and the reason. */
  allocate(): ArrayBuffer | null
  /** Asked with the handle of a hold, ends it. */
  release(): void
  /** Borrows blocks for a magazine. Results: how many, or the reason for none; 1 where empty slabs are wanted back. */
  refill(backend: number, device: number, placement: number, size: number, count: number): void
  /** Gives blocks of a magazine back. */
  flush(count: number): void
  /** A span's slab and its slot words. Results: address, block size, number of blocks. Or null and the reason. */
  map(slab: number): [slab: ArrayBuffer, words: ArrayBuffer] | null
  /** Says whether we are about to detach a slab ourselves. */
  setLeaving(slab: number, leaving: 0 | 1): void
  /** Lets a span go whose slab is detached. Results: 1 if it went. */
  unmap(slab: number): void
  /** Keeps a span for good. */
  forsake(slab: number): void
  /** Native code takes over a block's books. Results: handle of the hold. */
  promote(block: number, account: number, requested: number): void
  /** Frees a block that is marked with a stream. */
  freeMarked(block: number, account: number, requested: number): void
  /** Asked with the handle of the buffer's hold, detaches the buffer and ends the hold. Results: 1, or 0 if the buffer cannot be detached. */
  detach(buffer: ArrayBuffer): void
}

/** Ends a hold of a block. */
export function releaseHold(hold: number): void {
  asked[0] = hold
  hot().release()
}

let functions: Hot | undefined

/** Bound at the first call, as {@link native} is. */
export function hot(): Hot {
  return functions ?? bind()
}

function bind(): Hot {
  const [allocate, release, refill, flush, map, setLeaving, unmap, forsake, promote, freeMarked, detach] =
    native().hotFunctions(shared) as unknown as { [index: number]: never } & Iterable<never>
  return (functions = {
    allocate,
    release,
    refill,
    flush,
    map,
    setLeaving,
    unmap,
    forsake,
    promote,
    freeMarked,
    detach,
  } as unknown as Hot)
}
