import { adopt, Block, detach, guard, isDetached, NO_WORDS, Word } from './buffers.js'
import { typed, UnimallocError } from './errors.js'
import { hot, results } from './hot.js'
import { putSparesBack } from './ledger.js'
import type { Ledger, Tally } from './ledger.js'
import type { Stack } from './magazine.js'
import { DEFAULT_ALIGNMENT } from './options.js'

/** A block's handle is its slab's number and its index there; `magazine.rs` has the same. */
export enum Handle {
  indexBits = 12,
  indexMask = 0xfff,
}

/** The state in a slot word. */
const STATE = 0xff00

/**
 * One life or more of a block of a slab. An array that is freed forgets its slot, which then serves the block's next array. Where a block is freed
 * in any other way, its array still has the slot: then that is {@link Slab.renew put out of use}, and the block gets another.
 *
 * ```text
 * slot.words === NO_WORDS, or slot.slab.slots[slot.index] === slot
 * ```
 */
export class Slot {
  words: Uint16Array
  /** The slab's. */
  readonly buffer: ArrayBuffer
  readonly probe: Uint8Array
  /** Bytes of the largest array that the block is for, and of the largest that is too small for it. */
  readonly most: number
  readonly below: number
  /** Where in the slab's buffer the block starts. */
  readonly offset: number
  /** On whose account the block is, or was the last time. */
  tally: Tally | null = null
  /** Bytes that were asked for. */
  requested = 0
  /** The block below it on its stack; not looked at while it is on none. */
  next: Slot
  /** How many are on the stack from here down. */
  depth = 0

  constructor(
    readonly slab: Slab,
    /** Which block of the slab it is; in one that is out of use, 0. */
    public index: number,
  ) {
    this.words = slab.words
    this.buffer = slab.buffer
    this.probe = slab.probe
    this.most = slab.block
    this.below = slab.stack?.below ?? 0
    this.offset = Math.imul(index, slab.block)
    this.next = this
  }

  /** Whether an array that has the slot has not been freed. */
  get isCurrent(): boolean {
    return this.words !== NO_WORDS && (this.slab.retired || this.slab.isLive(this.index))
  }

  get handle(): number {
    return (this.slab.number << Handle.indexBits) | this.index
  }

  get address(): number {
    return this.slab.base + this.offset
  }
}

/** A span of equal blocks: one `ArrayBuffer` over all of them, and the slot words that native code and we both see. */
export class Slab {
  /** Blocks whose books native code keeps, by index. */
  promoted: Map<number, Block> | null = null
  /**
   * The buffer is detached: by somebody else, and its bytes live on elsewhere, so that none of its blocks is used again; or by us, to
   * give the memory back.
   */
  retired = false
  /** Those of the blocks that a magazine has ever borrowed, by index. */
  readonly slots: (Slot | undefined)[] = []
  /** Has a length as long as nobody has detached the buffer. */
  readonly probe: Uint8Array

  constructor(
    readonly number: number,
    /** Where the blocks are kept while they are free; null in {@link GONE}. */
    readonly stack: Stack | null,
    readonly buffer: ArrayBuffer,
    readonly words: Uint16Array,
    readonly base: number,
    readonly block: number,
  ) {
    this.probe = new Uint8Array(buffer, 0, Math.min(1, buffer.byteLength))
  }

  /** The slot of a block. */
  slot(index: number): Slot {
    return (this.slots[index] ??= new Slot(this, index))
  }

  /** Whether the block is handed out. */
  isLive(index: number): boolean {
    return ((this.words[index] as number) & STATE) === Word.live
  }

  /** Whether native code keeps the block's books. */
  isTracked(index: number): boolean {
    return ((this.words[index] as number) & Word.tracked) !== 0
  }

  /** Puts the slot of a block that was freed out of use, so that the array that has it counts as freed. */
  renew(index: number): void {
    const slot = this.slots[index]
    if (slot === undefined) return
    this.slots[index] = undefined
    slot.words = NO_WORDS
    slot.index = 0
  }

  address(index: number): number {
    return this.base + index * this.block
  }

  /** The blocks on a ledger that native code does not know of. */
  *ownedBy(ledger: Ledger): Generator<Slot> {
    if (this.retired) return
    for (const slot of this.slots) {
      if (slot?.tally?.ledger === ledger && this.isLive(slot.index) && !this.isTracked(slot.index)) yield slot
    }
  }
}

/**
 * Stands for every slab that is no longer there: no block of it is live. Its address is no number, but of the kind that the engine keeps
 * addresses as: an integer would make it an object of another shape.
 */
export const GONE = new Slab(-1, null, new ArrayBuffer(0), new Uint16Array(0), NaN, 1)

/** The slabs of this thread by number. */
export const slabs: Slab[] = []

/** Maps a span for the first time. Null with the reason in `results` if the engine refuses. */
export function mapSlab(number: number, stack: Stack): Slab | null {
  const pair = hot().map(number)
  if (pair === null) return null
  const [buffer, words] = pair
  const slab = new Slab(number, stack, buffer, new Uint16Array(words), results[0] as number, stack.block)
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
  putSparesBack()
  slab.retired = true
  slab.stack.remove(slab)
  const { words } = slab
  for (let index = 0; index < words.length; index++) {
    const word = words[index] as number
    if ((word & STATE) !== Word.live || (word & Word.tracked) !== 0) continue
    slab.slots[index]?.tally?.settle()
    words[index] = Word.held
  }
  typed(() => hot().forsake(slab.number))
  return true
}

/** The live block as one of which native code keeps the books: it can be shared, be in a scope, and wait for something. */
export function promote(slab: Slab, index: number): Block {
  const known = slab.promoted?.get(index)
  if (known !== undefined) return known
  const { tally, requested, handle, address } = slab.slot(index)
  if (tally === null) throw new Error('a block that was handed out is on no account')
  const { ledger } = tally
  typed(() => hot().promote(handle, ledger.account, requested))
  tally.moveOut()
  const { placement } = slab.stack as Stack
  const { books } = ledger
  const hold = results[0] as number
  const block = new Block(hold, address, slab.block, books, true, DEFAULT_ALIGNMENT, placement, requested)
  block.slab = slab
  block.index = index
  ;(slab.promoted ??= new Map()).set(index, block)
  books?.enter(block, slab.buffer)
  return block
}

/** What the arrays on a ledger were asked for, by a look at every block. */
export function requestedBytes(ledger: Ledger): number {
  let sum = 0
  for (const slab of slabs) for (const slot of slab.ownedBy(ledger)) sum += slot.requested
  return sum
}
