import type { Books } from './books.js'
import { typed } from './errors.js'
import { native } from './native.js'

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
}

/** An owner word says whose block it is and how many of its bytes were not asked for. No block of a magazine wastes 8 KiB. */
export enum Owned {
  slackBits = 13,
  slackMask = 0x1fff,
}

const MOST_LEDGERS = 2 ** (32 - Owned.slackBits)

/**
 * An allocator's books over the blocks that magazines handed out. Keeps the allocator from nothing. The figures that change with every array are fields,
 * which cost less than elements of an array that might be detached: {@link publish} shows them to native code.
 */
export class Ledger {
  /** Blocks that magazines handed out and native code does not know of. */
  pooledBytes = 0
  pooledCount = 0
  /** Of all that magazines ever handed out. */
  totalBytes = 0
  totalCount = 0
  readonly limit: number
  readonly #books: WeakRef<Books>
  /** The allocator was collected, but blocks of it are left. */
  abandoned = false

  constructor(
    /** Names the ledger in the owner words of slabs. */
    readonly owner: number,
    readonly account: number,
    readonly cells: Float64Array,
    books: Books,
  ) {
    this.limit = cells[Cell.limit] as number
    this.#books = new WeakRef(books)
  }

  get books(): Books | null {
    return this.#books.deref() ?? null
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

  /** A block comes back, or native code takes it over. */
  settle(block: number): void {
    this.pooledBytes -= block
    this.pooledCount--
  }
}

const ledgers: (Ledger | null)[] = []
const vacant: number[] = []

/** The ledger that an owner word names. */
export function ledgerOf(word: number): Ledger {
  return ledgers[word >>> Owned.slackBits] as Ledger
}

/** Opens a ledger; null where the runtime or the number of allocators forbids it. */
export function openLedger(account: number, books: Books): Ledger | null {
  sweep()
  const owner = vacant.pop() ?? ledgers.length
  const buffer = owner < MOST_LEDGERS ? typed(() => native().accountCells(account)) : null
  if (buffer === null) {
    if (owner < ledgers.length) vacant.push(owner)
    return null
  }
  return (ledgers[owner] = new Ledger(owner, account, new Float64Array(buffer), books))
}

/** Ends a ledger with no block on it. */
export function closeLedger(ledger: Ledger): void {
  if (ledgers[ledger.owner] !== ledger) return
  ledgers[ledger.owner] = null
  vacant.push(ledger.owner)
}

let sweepAt = 64

/** Ends the ledgers of collected allocators whose last block has come back. */
function sweep(): void {
  if (ledgers.length - vacant.length < sweepAt) return
  for (const ledger of ledgers) {
    if (ledger?.abandoned === true && ledger.isEmpty) {
      closeLedger(ledger)
      native().closeAccount(ledger.account)
    }
  }
  sweepAt = Math.max(64, 2 * (ledgers.length - vacant.length))
}
