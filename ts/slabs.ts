import { adopt, Block, detach, guard, isDetached } from './buffers.js'
import { typed, UnimallocError } from './errors.js'
import { hot, results } from './hot.js'
import { ledgerOf, Owned } from './ledger.js'
import type { Ledger } from './ledger.js'
import type { Stack } from './magazine.js'
import { DEFAULT_ALIGNMENT } from './options.js'

/** A block's handle is its slab's number and its index there; `magazine.rs` has the same. */
export enum Handle {
  indexBits = 12,
  indexMask = 0xfff,
}

/** Slot words: the upper byte is the state, the lower one has flags, with which a block is no longer the magazine's alone. */
export enum Word {
  live = 0xff00,
  held = 0xfa00,
  tracked = 0x04,
}

/** The state in a slot word. */
const STATE = 0xff00

/** A span of equal blocks: one `ArrayBuffer` over all of them, and the slot words that native code and we both see. */
export class Slab {
  /** Blocks whose books native code keeps, by index. */
  promoted: Map<number, Block> | null = null
  /**
   * The buffer is detached: by somebody else, and its bytes live on elsewhere, so that none of its blocks is used again; or by us, to
   * give the memory back.
   */
  retired = false
  /** Has a length as long as nobody has detached the buffer. */
  readonly probe: Uint8Array
  /** By block: whose it is, and how many of its bytes were not asked for. Of the latest array over it. */
  readonly owners: number[]
  /** By block: the serial number of the latest array over it; 0 once it was freed by other ways than the magazine's. */
  readonly serials: number[]

  constructor(
    readonly number: number,
    /** Where the blocks are kept while they are free; null in {@link GONE}. */
    readonly stack: Stack | null,
    readonly buffer: ArrayBuffer,
    readonly words: Uint16Array,
    readonly base: number,
    readonly block: number,
    capacity: number,
  ) {
    this.owners = Array.from({ length: capacity }, () => 0)
    this.serials = Array.from({ length: capacity }, () => 0)
    this.probe = new Uint8Array(buffer, 0, Math.min(1, capacity))
  }

  /** Whether the block is handed out. */
  isLive(index: number): boolean {
    return ((this.words[index] as number) & STATE) === Word.live
  }

  /** Whether native code keeps the block's books. */
  isTracked(index: number): boolean {
    return ((this.words[index] as number) & Word.tracked) !== 0
  }

  /** Whether the array with that serial number is (still) the one over the block. */
  isCurrent(index: number, serial: number): boolean {
    return this.serials[index] === serial && (this.retired || this.isLive(index))
  }

  address(index: number): number {
    return this.base + index * this.block
  }

  requested(index: number): number {
    return this.block - ((this.owners[index] as number) & Owned.slackMask)
  }
}

/** Stands for every slab that is no longer there: no block of it is live. */
export const GONE = new Slab(-1, null, new ArrayBuffer(0), new Uint16Array(0), 0, 1, 0)

/** The slabs of this thread by number. */
export const slabs: Slab[] = []

/** The slab that a block's handle names. */
export function slabOf(handle: number): Slab {
  return slabs[handle >>> Handle.indexBits] ?? GONE
}

/** Maps a span for the first time. Null with the reason in `results` if the engine refuses. */
export function mapSlab(number: number, stack: Stack): Slab | null {
  const pair = hot().map(number)
  if (pair === null) return null
  const [buffer, words] = pair
  const [base, block, capacity] = results as unknown as [number, number, number]
  const slab = new Slab(number, stack, buffer, new Uint16Array(words), base, block, capacity)
  adopt(buffer, slab)
  guard(buffer)
  // Numbers are given in order, but for those that are used again: the array stays dense.
  while (slabs.length < number) slabs.push(GONE)
  return (slabs[number] = slab)
}

/** Lets a slab go if no block of it is used or held; its memory then is the allocator's to give back. */
export function dropIfEmpty(slab: Slab): void {
  if (slab.retired || slab.words.some((word) => (word & STATE) === Word.live || word === Word.held)) return
  if (retireIfDetached(slab)) return
  // The thread may be stopped between any two of these calls.
  hot().setLeaving(slab.number, 1)
  try {
    detach(slab.buffer)
  } catch (error) {
    // Not to be detached, by the program's own word: then it stays.
    hot().setLeaving(slab.number, 0)
    if (error instanceof UnimallocError) return
    throw error
  }
  slab.retired = true
  hot().unmap(slab.number)
  slabs[slab.number] = GONE
  try {
    detach(slab.words.buffer as ArrayBuffer)
  } catch {
    // Slot words are never unmapped.
  }
}

/** If somebody has taken a slab's bytes away, keeps its memory for good; whatever was on it is off its owner's books. */
export function retireIfDetached(slab: Slab): boolean {
  if (slab.retired) return true
  if (slab.stack === null || !isDetached(slab.buffer)) return false
  slab.retired = true
  slab.stack.remove(slab)
  const { words } = slab
  for (let index = 0; index < words.length; index++) {
    const word = words[index] as number
    if ((word & STATE) !== Word.live || (word & Word.tracked) !== 0) continue
    ledgerOf(slab.owners[index] as number).settle(slab.block)
    words[index] = Word.held
  }
  typed(() => hot().forsake(slab.number))
  return true
}

/** The live block as one of which native code keeps the books: it can be shared, be in a scope, and wait for something. */
export function promote(slab: Slab, index: number): Block {
  const known = slab.promoted?.get(index)
  if (known !== undefined) return known
  const word = slab.owners[index] as number
  const ledger = ledgerOf(word)
  const requested = slab.requested(index)
  typed(() => hot().promote((slab.number << Handle.indexBits) | index, ledger.account, requested))
  ledger.settle(slab.block)
  const { placement } = slab.stack as Stack
  const { books } = ledger
  const hold = results[0] as number
  const block = new Block(hold, slab.address(index), slab.block, books, true, DEFAULT_ALIGNMENT, placement, requested)
  block.slab = slab
  block.index = index
  ;(slab.promoted ??= new Map()).set(index, block)
  books?.enter(block, slab.buffer)
  return block
}

/** What the arrays on a ledger were asked for, by a look at every block. */
export function requestedBytes({ owner }: Ledger): number {
  let sum = 0
  for (const slab of slabs) {
    if (slab.retired) continue
    for (let index = 0; index < slab.words.length; index++) {
      const mine = (slab.owners[index] as number) >>> Owned.slackBits === owner
      if (mine && slab.isLive(index) && !slab.isTracked(index)) sum += slab.requested(index)
    }
  }
  return sum
}
