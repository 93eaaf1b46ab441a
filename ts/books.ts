import type { Allocator } from './allocator.js'
import type { Block, Owner } from './buffers.js'
import type { Tracker } from './leaks.js'

/** What an allocator remembers of its live blocks. Keeps none of them from the garbage collector. */
export class Books implements Owner {
  /** Where the allocations came from, when that is wanted. */
  tracker: Tracker | null = null
  readonly #blocks: Map<Block, WeakRef<ArrayBuffer>> | null
  #sweepAt = 1024

  constructor(
    readonly allocator: Allocator,
    /** Whether the allocator can be disposed, and so must find its blocks again. */
    readonly disposable: boolean,
  ) {
    this.#blocks = disposable ? new Map() : null
  }

  enter(block: Block, buffer: ArrayBuffer): void {
    const blocks = this.#blocks
    if (blocks === null) return
    if (blocks.size >= this.#sweepAt) {
      // Blocks that the garbage collector has taken leave their entry behind.
      for (const [dead, reference] of blocks) if (reference.deref() === undefined) blocks.delete(dead)
      this.#sweepAt = Math.max(1024, blocks.size * 2)
    }
    blocks.set(block, new WeakRef(buffer))
  }

  forget(block: Block): void {
    this.#blocks?.delete(block)
    this.tracker?.remove(block.handle)
  }

  /** Takes all live blocks off the books. */
  *takeAll(): Generator<[Block, ArrayBuffer]> {
    for (const [block, reference] of this.#blocks ?? []) {
      const buffer = reference.deref()
      if (buffer !== undefined && !block.freed) yield [block, buffer]
    }
    this.#blocks?.clear()
  }
}
