import { Word } from './buffers.js'
import { handles as passed, hot, MOST_BLOCKS, results } from './hot.js'
import type { Kind } from './kind.js'
import { kindOfType } from './kinds.js'
import { putBack, putSparesBack, Room, STEP } from './ledger.js'
import type { Ledger, Tally } from './ledger.js'
import { REFUSED } from './native.js'
import { dropIfEmpty, GONE, Handle, mapSlab, retireIfDetached, Slot, slabs } from './slabs.js'
import type { Slab } from './slabs.js'
import type { UnifiedArray } from './types.js'

/** The largest array that magazines serve. */
export const MOST_BYTES = 65536

/** About how many bytes go to or from a magazine in one call. */
const BATCH_BYTES = 256 * 1024

/** Size classes are eight to a doubling; with alignment 256 only their multiples of 256 are used. `geometry.rs` has the rule. */
function blockFor(bytes: number): number {
  const rounded = Math.ceil(bytes / STEP) * STEP
  const step = Math.max(STEP, 2 ** (31 - Math.clz32(rounded - 1) - 3))
  return (Math.ceil(rounded / step) * step) | 0
}

/** Free blocks of one size, ready to be handed out: their words say HELD. A list, the latest first. */
export class Stack {
  /** Below the first; its depth counts what was given back from below since the stack was empty. */
  readonly bottom = new Slot(GONE, 0)
  top: Slot = this.bottom
  /** Blocks that come or go in one call. */
  readonly batch: number
  readonly #capacity: number
  /** Depth of the last block that there is room for. */
  deepest: number

  constructor(
    readonly backend: number,
    readonly device: number,
    readonly placement: number,
    readonly block: number,
    /** The largest array for which there are smaller blocks. */
    readonly below: number,
  ) {
    this.batch = Math.max(4, Math.min(MOST_BLOCKS, Math.floor(BATCH_BYTES / block)))
    this.#capacity = 4 * this.batch
    this.deepest = this.#capacity
  }

  get length(): number {
    return this.top.depth - this.bottom.depth
  }

  /** Puts a free block on top. */
  push(slot: Slot): void {
    const { top } = this
    const depth = top.depth + 1
    slot.next = top
    slot.depth = depth
    this.top = slot
    if (depth > this.deepest) this.flush(this.batch)
  }

  /** Gives the `count` blocks that have been here the longest back to the allocator. */
  flush(count: number): void {
    const { bottom } = this
    const lowest = bottom.depth + count
    let above: Slot | null = null
    let slot = this.top
    for (; slot.depth > lowest; slot = slot.next) above = slot
    const handles: number[] = []
    for (; slot !== bottom; slot = slot.next) handles.push(slot.handle)
    if (above === null) this.#clear()
    else {
      above.next = bottom
      bottom.depth = lowest
      this.deepest = lowest + this.#capacity
    }
    for (let from = 0; from < handles.length; from += MOST_BLOCKS) {
      const batch = handles.slice(from, from + MOST_BLOCKS)
      passed.set(batch)
      hot().flush(batch.length)
    }
  }

  #clear(): void {
    this.bottom.depth = 0
    this.top = this.bottom
    this.deepest = this.#capacity
  }

  /** Forgets the blocks of a slab. */
  remove(slab: Slab): void {
    const kept: Slot[] = []
    for (let slot = this.top; slot !== this.bottom; slot = slot.next) if (slot.slab !== slab) kept.push(slot)
    this.#clear()
    for (let slot = kept.pop(); slot !== undefined; slot = kept.pop()) this.push(slot)
  }

  /** Brings a batch of blocks. Answers 0, or why there is none; {@link NATIVE} where the magazine cannot serve. */
  refill(): number {
    hot().refill(this.backend, this.device, this.placement, this.block, this.batch)
    const count = results[0] as number
    const trimmed = results[1] === 1
    if (count <= 0) return count < 0 ? count : NATIVE
    // Mapping a slab may come to nothing, and puts its answers where these are.
    const batch = passed.slice(0, count)
    let refusal = 0
    const refused: number[] = []
    // The allocator hands out ascending addresses; so do we, from the top.
    for (let at = count - 1; at >= 0; at--) {
      const handle = batch[at] as number
      const number = handle >>> Handle.indexBits
      const slab = slabs[number] ?? GONE
      const mapped = slab === GONE ? mapSlab(number, this) : slab
      if (mapped === null) {
        refusal = results[0] as number
        refused.push(handle)
      } else if (!mapped.retired) {
        this.push(mapped.slot(handle & Handle.indexMask))
      } // of a retired slab nothing is used again; it is lent no more, either
    }
    if (refused.length > 0) giveUp(refused)
    if (trimmed) dropEmptySlabs(this)
    return this.length > 0 ? 0 : refusal
  }
}

/** The engine made no buffer over these blocks. */
function giveUp(blocks: number[]): void {
  passed.set(blocks)
  hot().flush(blocks.length)
  for (const number of new Set(blocks.map((handle) => handle >>> Handle.indexBits))) hot().unmap(number)
}

/** The magazine cannot serve: ask native code for an array with a buffer of its own. */
export const NATIVE = 1

/** The stacks for one kind of memory, by the number of steps that an array takes. */
export class Magazine {
  readonly stacks: readonly Stack[]

  constructor(backend: number, device: number, placement: number) {
    let latest: Stack | null = null
    this.stacks = Array.from({ length: MOST_BYTES / STEP + 1 }, (_, steps) => {
      const block = blockFor(Math.max(1, steps) * STEP)
      if (latest?.block === block) return latest
      return (latest = new Stack(backend, device, placement, block, latest?.block ?? 0))
    })
  }
}

/**
 * An array over a free block of its class. Makes no native call. Null where there is none at hand, it is out of use, the owner's limit is reached,
 * or an argument is none for a magazine. The less code here, the more callers the engine puts it into.
 */
export function take(ledger: Ledger, type: unknown, length: number): UnifiedArray | null {
  const kind = kindOfType(type)
  if (kind === null || !Number.isInteger(length)) return null
  const bytes = length * kind.bytesPerElement
  const { spare } = ledger
  if (spare === null || bytes > spare.most || bytes <= spare.below) return takeTop(ledger, kind, length, bytes)
  // No `try` instead: the engine does not inline a constructor inside one.
  if (spare.probe.length === 0) return null
  const array = kind.make(spare.buffer, spare.offset, length, spare)

  ledger.spare = null
  spare.words[spare.index] = Word.live
  spare.requested = bytes
  ;(spare.tally as Tally).taken++
  return array
}

/** {@link take} from the stack. */
function takeTop(ledger: Ledger, kind: Kind, length: number, bytes: number): UnifiedArray | null {
  if (bytes <= 0 || bytes > MOST_BYTES) return null
  const tally = ledger.tallies[(bytes + (STEP - 1)) >> 8] as Tally
  if (ledger.spare !== null) ledger.putSpareBack()
  const { stack } = tally
  const slot = stack.top
  // The bottom's slab has no bytes, either.
  if (slot.probe.length === 0) return null
  let room = (ledger.room - tally.cost) | 0
  if ((room & Room.guard) !== 0 && (room = ledger.admit(tally)) < 0) return null
  const array = kind.make(slot.buffer, slot.offset, length, slot)

  stack.top = slot.next
  slot.words[slot.index] = Word.live
  slot.requested = bytes
  if (slot.tally !== tally) slot.tally = tally
  ledger.room = room
  tally.taken++
  return array
}

/** As {@link take}, with all that may be needed for it. Answers why there is no array, or {@link NATIVE}. */
export function obtain(ledger: Ledger, type: unknown, length: number, bytes: number): UnifiedArray | number {
  const { stack } = ledger.tallies[(bytes + (STEP - 1)) >> 8] as Tally
  ledger.putSpareBack()
  for (;;) {
    if (stack.length === 0) {
      const refusal = stack.refill()
      if (refusal !== 0) return refusal
    }
    if (retireIfDetached(stack.top.slab)) continue
    return take(ledger, type, length) ?? REFUSED.byLimit
  }
}

/** Frees the block of an array by the short way: live, and known to nobody else. */
export function giveBack(slot: Slot): void {
  const { ledger } = slot.tally as Tally
  slot.words[slot.index] = Word.held
  if (ledger.spare === null) ledger.spare = slot
  else putBack(slot)
}

/** Frees a live block that the magazine handed out and that native code has not taken over, whoever asks for it. */
export function freeBlock(slab: Slab, index: number): void {
  const { tally, handle, requested } = slab.slot(index)
  slab.renew(index) // its array is not told
  tally?.settle()
  if (slab.words[index] !== Word.live) {
    // Work on a stream was given the block, and may still use it.
    tally?.ledger.shut()
    hot().freeMarked(handle, (tally as Tally).ledger.account, requested)
    return
  }
  slab.words[index] = Word.held
  ;(slab.stack as Stack).push(slab.slot(index))
}

/** Frees every block that is on a ledger and that a magazine handed out. */
export function freeAll(ledger: Ledger): void {
  for (const slab of slabs) for (const { index } of Array.from(slab.ownedBy(ledger))) freeBlock(slab, index)
}

const magazines = new Map<number, Magazine>()

/** This thread's magazine for memory of a kind. */
export function magazineFor(backend: number, device: number, placement: number): Magazine {
  const key = (device * 2 + backend) * 4 + placement
  let magazine = magazines.get(key)
  if (magazine === undefined) magazines.set(key, (magazine = new Magazine(backend, device, placement)))
  return magazine
}

/** Gives every free block back and lets empty slabs go: somebody needs the memory. */
export function dropEmptySlabs(but: Stack | null = null): void {
  putSparesBack()
  for (const { stacks } of magazines.values()) {
    for (const stack of stacks) if (stack !== but && stack.length > 0) stack.flush(stack.length)
  }
  for (const slab of slabs) if (slab.stack !== null && slab.stack !== but) dropIfEmpty(slab)
}
