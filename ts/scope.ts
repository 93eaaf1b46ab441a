import type { Allocator } from './allocator.js'
import { locate } from './arrays.js'
import type { Block, Collector } from './buffers.js'
import { disposableEverywhere, dispose } from './dispose.js'
import { name } from './naming.js'
import { invalid, UnimallocError } from './errors.js'
import { checkReceivers } from './receivers.js'
import { end } from './release.js'
import type { AllocOptions, ArrayType, Copied, TypedArray, UnifiedArray } from './types.js'

/** Frees, when it ends, what was allocated through it. Nothing ambient: safe across `await`. */
export interface Scope extends Disposable, Pick<Allocator, 'alloc' | 'allocUnsafe' | 'from'> {
  /** Moves an array out of this scope, to the enclosing one if there is one. */
  keep<T>(array: UnifiedArray<T>): UnifiedArray<T>
  /** A scope inside this one, which it frees as well. */
  scope(): Scope
}

/** What a scope has to free. It holds its arrays' buffers: they are not collected before it ends. */
export class Collected implements Collector {
  readonly blocks = new Map<Block, ArrayBuffer>()
  readonly children = new Set<ArrayScope>()

  constructor(readonly parent: Collected | null) {}

  /** Takes over a block. */
  add(block: Block, buffer: ArrayBuffer): void {
    block.scope = this
    this.blocks.set(block, buffer)
  }

  drop(block: Block): void {
    this.blocks.delete(block)
  }
}

/** The scope behind the interface. */
export class ArrayScope implements Scope {
  readonly #allocator: Allocator
  readonly #collected: Collected
  #ended = false

  static {
    name(this, 'Scope')
    disposableEverywhere(this.prototype)
    checkReceivers(this, 'scope', (value) => #ended in value)
  }

  constructor(allocator: Allocator, parent: Collected | null) {
    this.#allocator = allocator
    this.#collected = new Collected(parent)
    parent?.children.add(this)
  }

  alloc<C extends ArrayType>(type: C, length: number, options?: AllocOptions): UnifiedArray<InstanceType<C>> {
    this.#check()
    return this.#collect(this.#allocator.alloc(type, length, options))
  }

  allocUnsafe<C extends ArrayType>(type: C, length: number, options?: AllocOptions): UnifiedArray<InstanceType<C>> {
    this.#check()
    return this.#collect(this.#allocator.allocUnsafe(type, length, options))
  }

  from<T extends TypedArray>(source: T, options?: AllocOptions): UnifiedArray<Copied<T>>
  from<C extends ArrayType>(
    type: C,
    source: ArrayLike<InstanceType<C>[number]>,
    options?: AllocOptions,
  ): UnifiedArray<InstanceType<C>>
  from(...args: unknown[]): never {
    this.#check()
    return this.#collect(this.#allocator.from(...(args as [never, never, never])) as UnifiedArray) as never
  }

  keep<T>(array: UnifiedArray<T>): UnifiedArray<T> {
    this.#check()
    const { block, buffer } = locate('keep', array as unknown as ArrayBufferView)
    const collected = this.#collected
    if (block.scope !== collected)
      throw invalid('keep: the array was not allocated through this scope; call keep on the one it was')
    collected.drop(block)
    block.scope = collected.parent
    collected.parent?.add(block, buffer)
    return array
  }

  scope(): Scope {
    this.#check()
    return new ArrayScope(this.#allocator, this.#collected)
  }

  /** Frees everything, also when one of the frees fails; the first error is thrown at the end. */
  [dispose](): void {
    if (this.#ended) return
    this.#ended = true
    const { parent, children, blocks: live } = this.#collected
    parent?.children.delete(this)
    const errors: unknown[] = []
    const attempt = (free: () => void): void => {
      try {
        free()
      } catch (error) {
        errors.push(error)
      }
    }
    for (const child of children) attempt(() => child[dispose]())
    const blocks = Array.from(live)
    for (let entry = blocks.pop(); entry !== undefined; entry = blocks.pop()) {
      const [block, buffer] = entry
      attempt(() => end(block, buffer))
    }
    live.clear()
    if (errors.length > 0) throw errors[0]
  }

  #collect<T extends UnifiedArray>(array: T): T {
    if (this.#ended) {
      // An out-of-memory handler has ended the scope meanwhile.
      array[dispose]()
      this.#check()
    }
    const { block, buffer } = locate('scope', array)
    this.#collected.add(block, buffer)
    return array
  }

  #check(): void {
    if (this.#ended) throw new UnimallocError('DISPOSED', 'the scope has ended: allocate through a new one')
  }
}
