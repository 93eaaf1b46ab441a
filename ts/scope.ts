import type { Allocator } from './allocator.js'
import { locate } from './arrays.js'
import type { Block, Collector } from './buffers.js'
import { invalid, UnimallocError } from './errors.js'
import { end } from './release.js'
import type { AllocOptions, ArrayType, Copied, TypedArray, UnifiedArray } from './types.js'

/** Frees, when it ends, what was allocated through it. Nothing ambient: safe across `await`. */
export interface Scope extends Disposable, Pick<Allocator, 'alloc' | 'allocUnsafe' | 'from'> {
  /** Moves an array out of this scope, to the enclosing one if there is one. */
  keep<T>(array: UnifiedArray<T>): UnifiedArray<T>
  /** A scope inside this one, which it frees as well. */
  scope(): Scope
}

/** The scope behind the interface. It holds its arrays' buffers: they are not collected before it ends. */
export class ArrayScope implements Scope, Collector {
  readonly #allocator: Allocator
  readonly #parent: ArrayScope | null
  readonly #blocks = new Map<Block, ArrayBuffer>()
  readonly #children = new Set<ArrayScope>()
  #ended = false

  constructor(allocator: Allocator, parent: ArrayScope | null) {
    this.#allocator = allocator
    this.#parent = parent
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
    if (block.scope !== this)
      throw invalid('keep: the array was not allocated through this scope; call keep on the one it was')
    this.#blocks.delete(block)
    block.scope = this.#parent
    this.#parent?.add(block, buffer)
    return array
  }

  scope(): Scope {
    this.#check()
    const child = new ArrayScope(this.#allocator, this)
    this.#children.add(child)
    return child
  }

  /** Takes over a block. */
  add(block: Block, buffer: ArrayBuffer): void {
    block.scope = this
    this.#blocks.set(block, buffer)
  }

  /** A scope inside this one has ended. */
  forgetChild(child: ArrayScope): void {
    this.#children.delete(child)
  }

  drop(block: Block): void {
    this.#blocks.delete(block)
  }

  /** Frees everything, also when one of the frees fails; the first error is thrown at the end. */
  [Symbol.dispose](): void {
    if (this.#ended) return
    this.#ended = true
    this.#parent?.forgetChild(this)
    const errors: unknown[] = []
    const attempt = (free: () => void): void => {
      try {
        free()
      } catch (error) {
        errors.push(error)
      }
    }
    for (const child of this.#children) attempt(() => child[Symbol.dispose]())
    const blocks = Array.from(this.#blocks)
    for (let entry = blocks.pop(); entry !== undefined; entry = blocks.pop()) {
      const [block, buffer] = entry
      attempt(() => end(block, buffer))
    }
    this.#blocks.clear()
    if (errors.length > 0) throw errors[0]
  }

  #collect<T extends UnifiedArray>(array: T): T {
    if (this.#ended) {
      // An out-of-memory handler has ended the scope meanwhile.
      array[Symbol.dispose]()
      this.#check()
    }
    const { block, buffer } = locate('scope', array)
    this.add(block, buffer)
    return array
  }

  #check(): void {
    if (this.#ended) throw new UnimallocError('DISPOSED', 'the scope has ended: allocate through a new one')
  }
}
