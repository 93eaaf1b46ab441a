import type { Books } from './books.js'
import { typed } from './errors.js'
import type { Stack } from './magazine.js'
import { native } from './native.js'
import type { Slot } from './slabs.js'

/**
 * Places of an account's figures in the cells that native code shares with us; `account.rs` has the same order. An enum, as
 * the other constants of the hot path: the bundler puts its values where they are used.
 */
export enum Cell {
  heldBytes = 0,
  pendingBytes = 1,
  count = 2,
  pooledBytes = 4,
  pooledCount = 5,
  peakBytes = 6,
  peakCount = 7,
  limit = 11,
  /** What other threads did, to be added to the first three. */
  heldBytesElsewhere = 12,
  pendingBytesElsewhere = 13,
  countElsewhere = 14,
}

/** Sizes are counted in steps: every block of a magazine is a multiple of one. */
export const STEP = 256

/**
 * How a ledger's room is packed into one small integer: steps above, a number of blocks below, and above each a bit that is set only
 * when there was too little of it, or has become too much.
 */
export enum Room {
  stepsShift = 12,
  countMask = 0x7ff,
  guard = 0x40000800,
  /** What is set aside at most; half of what there is place for. */
  mostSteps = 0x20000,
  mostCount = 0x400,
}

/** What an allocator has of one size. */
export class Tally {
  /** Of all blocks that were ever handed out. */
  taken = 0
  /** One block, as the ledger's room is packed. */
  readonly cost: number

  constructor(
    readonly ledger: Ledger,
    readonly stack: Stack,
    readonly steps: number,
  ) {
    this.cost = (steps << Room.stepsShift) + 1
  }

  /** A block comes back. */
  settle(): void {
    const { ledger } = this
    const room = (ledger.room + this.cost) | 0
    if ((room & Room.guard) === 0) ledger.room = room
    else ledger.open(this.steps, 1)
  }

  /** Native code takes a block over: its memory still counts. */
  moveOut(): void {
    this.settle()
    this.ledger.shut()
  }
}

/**
 * An allocator's books over the blocks that magazines handed out. Keeps the allocator from nothing.
 *
 * Handing out must enter the peaks and keep the limit. So that it need not look at them each time, *room* is set aside: so much
 * can be handed out with nothing to enter. It costs one addition, and the figures follow from it:
 *
 * ```text
 * pooled + spare = top - room        held + top <= limit        held - pending + top <= peak
 * ```
 *
 * Other threads only ever make `held` and `held - pending` less. Whoever makes them more shuts the room first.
 *
 * One block that was freed is kept at hand, as the *spare*: most programs ask for one of its size next, and then neither the room nor
 * the stack need be told. It is free, but for the room it is still handed out. Whoever looks at either puts it back first.
 */
export class Ledger {
  /** Packed; see {@link Room}. */
  room = 0
  /** A free block with its tally; its word says HELD. */
  spare: Slot | null = null
  /** Most steps and blocks that can be handed out before the account must be looked at. */
  #topSteps = 0
  #topCount = 0
  /** By the number of steps that an array takes. */
  readonly tallies: Tally[] = []
  readonly #limit: number
  readonly #books: WeakRef<Books>
  /** The allocator was collected, but blocks of it are left. */
  abandoned = false

  constructor(
    readonly account: number,
    readonly cells: Float64Array,
    books: Books,
    stacks: readonly Stack[],
  ) {
    this.#limit = cells[Cell.limit] as number
    this.#books = new WeakRef(books)
    for (const stack of stacks) {
      const latest = this.tallies.at(-1)
      this.tallies.push(latest?.stack === stack ? latest : new Tally(this, stack, stack.block >> 8))
    }
  }

  get books(): Books | null {
    return this.#books.deref() ?? null
  }

  /** Blocks that magazines handed out and native code does not know of. */
  get pooledCount(): number {
    return this.#takenCount - (this.spare === null ? 0 : 1)
  }

  get pooledBytes(): number {
    return (this.#takenSteps - (this.spare?.tally?.steps ?? 0)) * STEP
  }

  /** Blocks that are out of the room: the spare is one of them. */
  get #takenCount(): number {
    return this.#topCount - (this.room & Room.countMask)
  }

  get #takenSteps(): number {
    return this.#topSteps - (this.room >> Room.stepsShift)
  }

  /** Of all that magazines ever handed out. */
  get totalCount(): number {
    return this.#total(() => 1)
  }

  get totalBytes(): number {
    return this.#total(({ steps }) => steps * STEP)
  }

  #total(of: (tally: Tally) => number): number {
    let sum = 0
    for (const tally of new Set(this.tallies)) sum += tally.taken * of(tally)
    return sum
  }

  /** Whether no block of a magazine is on the books. */
  get isEmpty(): boolean {
    return this.pooledCount === 0
  }

  /** To be called before native code looks at the account. */
  publish(): void {
    this.cells[Cell.pooledBytes] = this.pooledBytes
    this.cells[Cell.pooledCount] = this.pooledCount
  }

  /** To be called when the account has more on it, or its peaks have become less. */
  shut(): void {
    this.putSpareBack()
    this.#setRoom(this.#takenSteps, this.#takenCount, 0, 0)
  }

  /** To be called before anybody looks at the room or the spare's stack. */
  putSpareBack(): void {
    const { spare } = this
    if (spare === null) return
    this.spare = null
    putBack(spare)
  }

  /**
   * Enters the peaks of one more block, and sets room aside for it and, if there is any, for more. Answers the room without that block;
   * -1 where the limit forbids it. There is no spare.
   */
  admit({ steps, cost }: Tally): number {
    const { cells, pooledBytes, pooledCount } = this
    const figure = (own: Cell, elsewhere: Cell): number => (cells[own] as number) + (cells[elsewhere] as number)
    const held = figure(Cell.heldBytes, Cell.heldBytesElsewhere)
    // Not below zero: another thread may let a block go between the loads.
    const current = Math.max(0, held - figure(Cell.pendingBytes, Cell.pendingBytesElsewhere))
    const count = figure(Cell.count, Cell.countElsewhere)
    const bytes = pooledBytes + steps * STEP
    if (held + bytes > this.#limit) return -1
    const peakBytes = Math.max(cells[Cell.peakBytes] as number, current + bytes)
    const peakCount = Math.max(cells[Cell.peakCount] as number, count + pooledCount + 1)
    cells[Cell.peakBytes] = peakBytes
    cells[Cell.peakCount] = peakCount
    const mostBytes = Math.min(this.#limit - held, peakBytes - current) - pooledBytes
    const mostCount = peakCount - count - pooledCount
    this.#setRoom(pooledBytes / STEP, pooledCount, mostBytes / STEP, mostCount)
    return this.room - cost
  }

  /** So many steps and blocks have come back, for which there is no place in the room. */
  open(steps: number, count: number): void {
    const { room } = this
    this.#setRoom(
      this.#takenSteps - steps,
      this.#takenCount - count,
      (room >> Room.stepsShift) + steps,
      (room & Room.countMask) + count,
    )
  }

  #setRoom(takenSteps: number, takenCount: number, mostSteps: number, mostCount: number): void {
    const steps = Math.floor(Math.min(mostSteps, Room.mostSteps))
    const count = Math.min(mostCount, Room.mostCount)
    // A small integer, whatever kind of number came in: the hot path is compiled for that.
    this.room = ((steps << Room.stepsShift) + count) | 0
    this.#topSteps = takenSteps + steps
    this.#topCount = takenCount + count
  }
}

/** Puts a free block that is out of the room back, into it and onto its stack. */
export function putBack(slot: Slot): void {
  const tally = slot.tally as Tally
  tally.settle()
  tally.stack.push(slot)
}

const ledgers = new Set<Ledger>()

/** Opens a ledger over the stacks by steps; null where the runtime forbids it. */
export function openLedger(account: number, books: Books, stacks: readonly Stack[]): Ledger | null {
  sweep()
  const buffer = typed(() => native().accountCells(account))
  if (buffer === null) return null
  const ledger = new Ledger(account, new Float64Array(buffer), books, stacks)
  ledgers.add(ledger)
  return ledger
}

/** Puts every spare of this thread back: somebody looks at the stacks. */
export function putSparesBack(): void {
  for (const ledger of ledgers) ledger.putSpareBack()
}

/** Ends a ledger with no block on it. */
export function closeLedger(ledger: Ledger): void {
  ledger.putSpareBack()
  ledgers.delete(ledger)
}

let sweepAt = 64

/** Ends the ledgers of collected allocators whose last block has come back. */
function sweep(): void {
  if (ledgers.size < sweepAt) return
  for (const ledger of ledgers) {
    if (ledger.abandoned && ledger.isEmpty) {
      closeLedger(ledger)
      native().closeAccount(ledger.account)
    }
  }
  sweepAt = Math.max(64, 2 * ledgers.size)
}
