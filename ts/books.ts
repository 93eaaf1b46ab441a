import type { Allocator } from './allocator.js'
import type { Block, Owner } from './buffers.js'
import type { Tracker } from './leaks.js'

/** Its callbacks run when the program's code that runs now has come to its end. */
const soon = Promise.resolve()

/**
 * What an allocator remembers of its live blocks. Keeps none of them from the garbage collector: a `WeakRef` keeps its object until the running
 * code has come to its end, and so long a plain reference, in `recent`, does the same. It costs less, and most blocks are freed by then.
 *
 * ```text
 * block.holder === null, or one of the two lists has the block at block.place
 * ```
 */
export class Books implements Owner {
  /** Where the allocations came from, when that is wanted. */
  tracker: Tracker | null = null
  /** Blocks whose `holder` is the buffer. */
  readonly #recent: Block[] = []
  /** Blocks whose `holder` is a `WeakRef` of it. */
  readonly #settled: Block[] = []
  #sweepAt = 1024

  constructor(
    readonly allocator: Allocator,
    /** Whether the allocator can be disposed, and so must find its blocks again. */
    readonly disposable: boolean,
  ) {}

  enter(block: Block, buffer: ArrayBuffer): void {
    if (!this.disposable) return
    const recent = this.#recent
    if (recent.length === 0) void soon.then(() => this.#settle())
    block.holder = buffer
    block.place = recent.length
    recent.push(block)
  }

  forget(block: Block): void {
    if (block.holder !== null) this.#remove(block)
    this.tracker?.remove(block.handle)
  }

  #remove(block: Block): void {
    const list = block.holder instanceof WeakRef ? this.#settled : this.#recent
    const last = list.pop() as Block
    if (last !== block) {
      list[block.place] = last
      last.place = block.place
    }
    block.holder = null
  }

  /** What is left of the recent blocks may be collected from now on. */
  #settle(): void {
    const settled = this.#settled
    if (settled.length >= this.#sweepAt) {
      // Blocks that the garbage collector has taken are still on the list.
      for (let at = settled.length - 1; at >= 0; at--) {
        const block = settled[at] as Block
        if (bufferOf(block) === undefined) this.#remove(block)
      }
      this.#sweepAt = Math.max(1024, settled.length * 2)
    }
    for (const block of this.#recent) {
      block.holder = new WeakRef(block.holder as ArrayBuffer)
      block.place = settled.length
      settled.push(block)
    }
    this.#recent.length = 0
  }

  /** Takes all live blocks off the books. */
  *takeAll(): Generator<[Block, ArrayBuffer]> {
    for (const list of [this.#recent, this.#settled]) {
      for (let block = list.at(-1); block !== undefined; block = list.at(-1)) {
        const buffer = bufferOf(block)
        this.#remove(block)
        if (buffer !== undefined && !block.freed) yield [block, buffer]
      }
    }
  }
}

function bufferOf({ holder }: Block): ArrayBuffer | undefined {
  return holder instanceof WeakRef ? holder.deref() : (holder ?? undefined)
}
