import type { Kind } from './arrays.js'
import { handles as passed, hot, MOST_BLOCKS, results } from './hot.js'
import { Cell, ledgerOf, Owned } from './ledger.js'
import type { Ledger } from './ledger.js'
import { REFUSED } from './native.js'
import { dropIfEmpty, GONE, Handle, mapSlab, retireIfDetached, slabOf, slabs, Word } from './slabs.js'
import type { Slab } from './slabs.js'
import type { UnifiedArray } from './types.js'

/** Sizes that magazines serve. */
export enum Size {
  /** The largest array. */
  most = 65536,
  stepShift = 8,
  /** All blocks are multiples of it, for the alignment's sake. */
  step = 256,
}

/** About how many bytes go to or from a magazine in one call. */
const BATCH_BYTES = 256 * 1024

/** Size classes are eight to a doubling; with alignment 256 only their multiples of 256 are used. `geometry.rs` has the rule. */
function blockFor(bytes: number): number {
  const rounded = Math.ceil(bytes / Size.step) * Size.step
  const step = 2 ** Math.max(Size.stepShift, 31 - Math.clz32(rounded - 1) - 3)
  return Math.ceil(rounded / step) * step
}

/** Free blocks of one size, ready to be handed out: their words say HELD. */
export class Stack {
  readonly handles: number[]
  length = 0
  /** Blocks that come or go in one call. */
  readonly batch: number
  readonly capacity: number

  constructor(
    readonly backend: number,
    readonly device: number,
    readonly placement: number,
    readonly block: number,
  ) {
    this.batch = Math.max(4, Math.min(MOST_BLOCKS, Math.floor(BATCH_BYTES / block)))
    this.capacity = 4 * this.batch
    this.handles = Array.from({ length: this.capacity }, () => 0)
  }

  /** Puts a free block on top. */
  push(handle: number): void {
    if (this.length === this.capacity) this.flush(this.batch)
    this.handles[this.length++] = handle
  }

  /** Gives the `count` blocks that have been here the longest back to the allocator. */
  flush(count: number): void {
    const { handles } = this
    for (let from = 0; from < count; from += MOST_BLOCKS) {
      const batch = handles.slice(from, Math.min(count, from + MOST_BLOCKS))
      passed.set(batch)
      hot().flush(batch.length)
    }
    handles.copyWithin(0, count, this.length)
    this.length -= count
  }

  /** Forgets the blocks of a slab. */
  remove(slab: Slab): void {
    let kept = 0
    for (let at = 0; at < this.length; at++) {
      const handle = this.handles[at] as number
      if (handle >>> Handle.indexBits !== slab.number) this.handles[kept++] = handle
    }
    this.length = kept
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
      if (slab !== GONE) {
        // Of a retired slab nothing is used again; it is lent no more, either.
        if (!slab.retired) this.handles[this.length++] = handle
      } else if (mapSlab(number, this) !== null) {
        this.handles[this.length++] = handle
      } else {
        refusal = results[0] as number
        refused.push(handle)
      }
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

/** The stacks for one kind of memory, by class. */
export class Magazine {
  readonly stacks: readonly Stack[] = []
  /** By the number of 256-byte steps that an array takes. */
  readonly #bySteps: readonly Stack[]

  constructor(backend: number, device: number, placement: number) {
    const stacks: Stack[] = []
    this.#bySteps = Array.from({ length: Size.most / Size.step + 1 }, (_, steps) => {
      const block = blockFor(Math.max(1, steps) * Size.step)
      if (stacks.at(-1)?.block !== block) stacks.push(new Stack(backend, device, placement, block))
      return stacks.at(-1) as Stack
    })
    this.stacks = stacks
  }

  /**
   * An array from the stack of its class. Makes no native call. Null where the stack is empty, its top out of use, or the owner's limit
   * reached.
   */
  take(ledger: Ledger, kind: Kind, length: number, bytes: number): UnifiedArray | null {
    const stack = this.#bySteps[(bytes + (Size.step - 1)) >> Size.stepShift] as Stack
    const top = stack.length - 1
    if (top < 0) return null
    const { block } = stack
    const { cells } = ledger
    const held = cells[Cell.heldBytes] as number
    const pooled = ledger.pooledBytes + block
    if (held + pooled > ledger.limit) return null
    const handle = stack.handles[top] as number
    const slab = slabs[handle >>> Handle.indexBits] as Slab
    if (slab.probe.length === 0) return null
    const index = handle & Handle.indexMask
    const serial = nextSerial
    const array = kind.make(slab.buffer, index * block, length, handle, serial)

    stack.length = top
    nextSerial = serial === -1 ? 1 : (serial + 1) | 0 // 0 stands for none
    slab.words[index] = Word.live
    slab.serials[index] = serial
    slab.owners[index] = (ledger.owner << Owned.slackBits) | (block - bytes)

    ledger.pooledBytes = pooled
    const current = held + pooled - (cells[Cell.pendingBytes] as number)
    if (current > (cells[Cell.peakBytes] as number)) cells[Cell.peakBytes] = current
    const count = ++ledger.pooledCount + (cells[Cell.count] as number)
    if (count > (cells[Cell.peakCount] as number)) cells[Cell.peakCount] = count
    ledger.totalBytes += block
    ledger.totalCount++
    return array
  }

  /** As {@link take}, with all that may be needed for it. Answers why there is no array, or {@link NATIVE}. */
  obtain(ledger: Ledger, kind: Kind, length: number, bytes: number): UnifiedArray | number {
    const stack = this.#bySteps[(bytes + (Size.step - 1)) >> Size.stepShift] as Stack
    for (;;) {
      if (stack.length === 0) {
        const refusal = stack.refill()
        if (refusal !== 0) return refusal
      }
      if (retireIfDetached(slabOf(stack.handles[stack.length - 1] as number))) continue
      return this.take(ledger, kind, length, bytes) ?? REFUSED.byLimit
    }
  }

  /** Frees every block that is on a ledger and that the magazine handed out. */
  freeAll(ledger: Ledger): void {
    for (const slab of slabs) {
      if (slab.retired || !this.stacks.includes(slab.stack as Stack)) continue
      for (let index = 0; index < slab.words.length; index++) {
        const mine = (slab.owners[index] as number) >>> Owned.slackBits === ledger.owner
        if (mine && slab.isLive(index) && slab.promoted?.has(index) !== true) freeBlock(slab, index)
      }
    }
  }
}

/** Number of the next array; never 0. */
let nextSerial = 1

/** Frees a live block that the magazine handed out and that native code has not taken over. */
export function freeBlock(slab: Slab, index: number): void {
  const ledger = ledgerOf(slab.owners[index] as number)
  const handle = (slab.number << Handle.indexBits) | index
  ledger.settle(slab.block)
  if (slab.words[index] !== Word.live) {
    // Work on a stream was given the block, and may still use it.
    slab.serials[index] = 0
    hot().freeMarked(handle, ledger.account, slab.requested(index))
    return
  }
  slab.words[index] = Word.held
  ;(slab.stack as Stack).push(handle)
}

/**
 * Frees the block of an array by the short way: of a magazine, live, known to nobody else, and its slab in place. False if that
 * is not so, and nothing was done.
 */
export function giveBack(handle: number, serial: number): boolean {
  const slab = slabs[handle >>> Handle.indexBits] as Slab
  const index = handle & Handle.indexMask
  if (slab.words[index] !== Word.live || slab.serials[index] !== serial) return false
  slab.words[index] = Word.held
  ledgerOf(slab.owners[index] as number).settle(slab.block)
  ;(slab.stack as Stack).push(handle)
  return true
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
  for (const { stacks } of magazines.values()) {
    for (const stack of stacks) if (stack !== but && stack.length > 0) stack.flush(stack.length)
  }
  for (const slab of slabs) if (slab.stack !== null && slab.stack !== but) dropIfEmpty(slab)
}
