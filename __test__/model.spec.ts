// Any sequence of calls against a model of what should be live: contents, figures, errors and addresses after every step.
import test from 'ava'
import * as fc from 'fast-check'
import { Allocator, attach, pointerOf, share, UnimallocError } from 'unimalloc'
import type { Scope, TypedArray, UnifiedArray } from 'unimalloc'

type Bytes = UnifiedArray<TypedArray & { fill(value: never): unknown }>

const TYPES = [Uint8Array, Float32Array, Float64Array, BigInt64Array, Uint16Array, Uint8ClampedArray] as const

/** An array that lives, by the model. */
interface Live {
  array: Bytes
  own: Allocator
  /** What each element holds. */
  value: number
  length: number
  pooled: boolean
  /** Arrays over the same block, this one included. */
  holders: Live[]
  scope: OpenScope | null
  shared: boolean
}

interface OpenScope {
  scope: Scope
  own: Allocator
  parent: OpenScope | null
}

class World {
  readonly owners: Allocator[]
  live: Live[] = []
  scopes: OpenScope[] = []
  dead: Bytes[] = []
  #stamp = 0

  constructor() {
    this.owners = [
      new Allocator({ backend: 'host' }),
      new Allocator({ backend: 'host', maxBytes: 256 * 1024 }),
      new Allocator({ backend: 'host', policy: 'hardened' }),
      new Allocator({ backend: 'host', track: true }),
    ]
  }

  #is(condition: boolean, what: string): void {
    if (!condition) throw new Error(what)
  }

  #fails(code: string, call: () => unknown): void {
    try {
      call()
    } catch (error) {
      this.#is(error instanceof UnimallocError, `not a typed error: ${String(error)}`)
      this.#is((error as UnimallocError).code === code, `${(error as UnimallocError).code} for ${code}`)
      return
    }
    throw new Error(`nothing was thrown, for ${code}`)
  }

  #pick<T>(list: readonly T[], at: number): T | undefined {
    return list.length === 0 ? undefined : list[at % list.length]
  }

  #enter(array: Bytes, own: Allocator, length: number, pooled: boolean, scope: OpenScope | null): void {
    const value = (this.#stamp = (this.#stamp % 100) + 1)
    const one: Live = { array, own, value, length, pooled, holders: [], scope, shared: false }
    one.holders.push(one)
    this.#write(one)
    this.live.push(one)
  }

  #write({ array, value }: Live): void {
    array.fill((array instanceof BigInt64Array ? BigInt(value) : value) as never)
  }

  /** One array lets go. */
  #leave(one: Live): void {
    this.live.splice(this.live.indexOf(one), 1)
    this.dead.push(one.array)
    one.holders.splice(one.holders.indexOf(one), 1)
  }

  /** The scope's and the allocator's end frees a block whatever arrays are over it. */
  #end(one: Live): void {
    for (const holder of Array.from(one.holders)) this.#leave(holder)
  }

  allocate(which: number, kind: number, size: number, unsafe: boolean, inScope: boolean): void {
    const scope = inScope ? (this.#pick(this.scopes, which) ?? null) : null
    const own = scope?.own ?? (this.#pick(this.owners, which) as Allocator)
    const type = this.#pick(TYPES, kind) as typeof Uint8Array
    const length = Math.floor(size / type.BYTES_PER_ELEMENT)
    const from = scope?.scope ?? own
    let array: Bytes
    try {
      array = (unsafe ? from.allocUnsafe(type, length) : from.alloc(type, length)) as unknown as Bytes
    } catch (error) {
      const { code } = error as UnimallocError
      const { currentBytes, limitBytes } = own.stats()
      this.#is(code === 'OUT_OF_MEMORY' && currentBytes + size * 1.25 + 8192 > limitBytes, `refused: ${String(error)}`)
      return
    }
    this.#is(array.length === length && !array.freed, 'an array of another length')
    if (!unsafe)
      this.#is(
        (array as unknown as number[]).every((value) => Number(value) === 0),
        'not zeroed',
      )
    this.#enter(array, own, length, unsafe, scope)
  }

  from(which: number, size: number): void {
    const own = this.#pick(this.owners, which) as Allocator
    const source = new Uint16Array(size % 500).fill(7)
    try {
      const array = own.from(source)
      this.#is(
        array.every((value) => value === 7),
        'a wrong copy',
      )
      this.#enter(array as unknown as Bytes, own, source.length, false, null)
    } catch (error) {
      if ((error as UnimallocError).code !== 'OUT_OF_MEMORY') throw error
    }
  }

  free(which: number, way: number): void {
    const one = this.#pick(this.live, which)
    if (one === undefined) return
    const { array, own } = one
    const other = this.#pick(this.owners, way) as Allocator
    switch (way % 4) {
      case 0:
        array.free()
        break
      case 1:
        other.free(array)
        break
      case 2:
        array[Symbol.dispose]()
        break
      default: {
        if (one.length === 0 || one.holders.length > 1) return
        const view = new DataView(array.buffer, array.byteOffset + 1, 0)
        this.#fails('INTERIOR', () => own.free(view))
        own.free(new Uint8Array(array.buffer, array.byteOffset, 1))
        this.#is(array.freed, 'freed through a view, and does not know')
      }
    }
    this.#leave(one)
  }

  again(which: number): void {
    const array = this.#pick(this.dead, which)
    if (array === undefined) return
    this.#fails('DOUBLE_FREE', () => array.free())
    this.#fails('INVALID_ARGUMENT', () => array.pointer)
    this.#fails('INVALID_ARGUMENT', () => pointerOf(array))
    this.#fails('INVALID_ARGUMENT', () => this.owners[0]?.realloc(array, 5))
    array[Symbol.dispose]()
  }

  realloc(which: number, size: number): void {
    const one = this.#pick(this.live, which)
    if (one === undefined) return
    const length = Math.floor(size / one.array.BYTES_PER_ELEMENT)
    if (one.shared) return this.#fails('INVALID_ARGUMENT', () => one.own.realloc(one.array, length))
    let array: Bytes
    try {
      array = (this.#pick(this.owners, size) as Allocator).realloc(one.array, length) as Bytes
    } catch (error) {
      this.#is((error as UnimallocError).code === 'OUT_OF_MEMORY', String(error))
      return this.#is(!one.array.freed, 'gone after a failure')
    }
    const kept = Math.min(length, one.length)
    const values = Array.from(array as unknown as ArrayLike<number>, Number)
    this.#is(
      values.slice(0, kept).every((value) => value === one.value),
      'contents lost',
    )
    if (!one.pooled)
      this.#is(
        values.slice(kept).every((value) => value === 0),
        'a dirty tail',
      )
    this.#is(one.array.freed, 'the old array lives on')
    this.#leave(one)
    this.#enter(array, one.own, length, one.pooled, one.scope)
  }

  share(which: number): void {
    const one = this.#pick(this.live, which)
    if (one === undefined) return
    const token = structuredClone(share(one.array))
    if (one.length > 0) for (const holder of one.holders) holder.shared = true
    const array = attach(token) as Bytes
    this.#is(array.length === one.length, 'another length')
    if (one.length === 0) return array.free()
    this.#is(array.pointer === one.array.pointer, 'another address')
    const twin: Live = { ...one, array }
    one.holders.push(twin)
    this.live.push(twin)
  }

  openScope(which: number, nested: boolean): void {
    if (this.scopes.length > 5) return
    const parent = nested ? (this.#pick(this.scopes, which) ?? null) : null
    const own = parent?.own ?? (this.#pick(this.owners, which) as Allocator)
    const scope = parent === null ? own.scope() : (parent.scope as Scope & { scope(): Scope }).scope()
    this.scopes.push({ scope, own, parent })
  }

  endScope(which: number): void {
    const open = this.#pick(this.scopes, which)
    if (open === undefined) return
    open.scope[Symbol.dispose]()
    const within = (scope: OpenScope | null): boolean => scope !== null && (scope === open || within(scope.parent))
    for (const one of Array.from(this.live)) if (within(one.scope) && this.live.includes(one)) this.#end(one)
    for (const scope of this.scopes.filter(within)) {
      this.#fails('DISPOSED', () => scope.scope.alloc(Uint8Array, 1))
    }
    this.scopes = this.scopes.filter((scope) => !within(scope))
  }

  keep(which: number): void {
    const one = this.#pick(
      this.live.filter(({ scope }) => scope !== null),
      which,
    )
    if (one === undefined) return
    const { scope } = one as { scope: OpenScope }
    scope.scope.keep(one.array)
    for (const holder of one.holders) holder.scope = scope.parent
  }

  trim(which: number, keep: number): void {
    const own = this.#pick(this.owners, which) as Allocator
    this.#is(own.trim(keep * 1000) >= 0, 'a negative trim')
    own.resetPeak()
    const { peakBytes, currentBytes, peakCount, currentCount } = own.stats()
    this.#is(peakBytes === currentBytes && peakCount === currentCount, 'peaks are not reset')
  }

  dispose(which: number): void {
    const at = which % this.owners.length
    const own = this.owners[at] as Allocator
    // Empty arrays own no memory, and are on nobody's books.
    for (const one of this.live.filter((each) => each.own === own && each.length === 0)) {
      one.array.free()
      this.#leave(one)
    }
    own[Symbol.dispose]()
    for (const one of Array.from(this.live)) if (one.own === own && this.live.includes(one)) this.#end(one)
    this.scopes = this.scopes.filter((scope) => scope.own !== own)
    this.#fails('DISPOSED', () => own.alloc(Uint8Array, 1))
    this.#fails('DISPOSED', () => own.allocUnsafe(Uint8Array, 1))
    const { currentBytes, currentCount } = own.stats()
    this.#is(currentBytes === 0 && currentCount === 0, 'disposed, and holds something')
    this.owners[at] = new Allocator({ backend: 'host', maxBytes: which % 2 === 0 ? Infinity : 100_000 })
  }

  /** Everything that must hold at any time. */
  check(): void {
    const seen: [number, number][] = []
    for (const own of this.owners) {
      const blocks = this.live.filter((one) => one.own === own && one.holders[0] === one && one.length > 0)
      const stats = own.stats()
      this.#is(stats.currentCount === blocks.length, `count ${stats.currentCount} for ${blocks.length}`)
      let [bytes, requested] = [0, 0]
      for (const { array, length } of blocks) {
        bytes += own.usableBytes(array)
        requested += length * array.BYTES_PER_ELEMENT
        this.#is(own.owns(array), 'not its own')
        seen.push([Number(array.pointer), own.usableBytes(array)])
      }
      this.#is(stats.currentBytes === bytes, `bytes ${stats.currentBytes} for ${bytes}`)
      this.#is(stats.requestedBytes === requested, `requested ${stats.requestedBytes} for ${requested}`)
      this.#is(stats.peakBytes >= bytes && stats.peakCount >= blocks.length, 'peaks below what is')
      this.#is(stats.totalCount >= blocks.length && stats.pendingBytes === 0, 'totals')
      this.#is(bytes <= stats.limitBytes, 'above the limit')
    }
    seen.sort(([a], [b]) => a - b)
    for (let at = 1; at < seen.length; at++) {
      const [[start, bytes], [next]] = [seen[at - 1], seen[at]] as [[number, number], [number, number]]
      this.#is(start + bytes <= next, 'two blocks overlap')
    }
    for (const { array, value, length } of this.live) {
      this.#is(!array.freed && array.length === length, 'a live array is dead')
      for (const at of [0, length >> 1, length - 1]) {
        if (at >= 0 && at < length) this.#is(Number(array[at]) === value, `holds ${String(array[at])} for ${value}`)
      }
    }
    for (const array of this.dead) this.#is(array.freed, 'a dead array lives')
  }

  end(): void {
    this.endAll()
    this.check()
    for (const own of this.owners) {
      const { currentBytes, currentCount, requestedBytes } = own.stats()
      this.#is(currentBytes === 0 && currentCount === 0 && requestedBytes === 0, 'something is left')
      own[Symbol.dispose]()
    }
  }

  endAll(): void {
    while (this.live.length > 0) this.free(0, 0)
  }
}

const size = fc.oneof(
  { weight: 6, arbitrary: fc.integer({ min: 0, max: 3000 }) },
  { weight: 3, arbitrary: fc.constantFrom(0, 1, 255, 256, 257, 4096, 65535, 65536, 65537, 70000) },
  { weight: 1, arbitrary: fc.integer({ min: 0, max: 300_000 }) },
)
const n = fc.nat({ max: 10_000 })
const act = <const T extends unknown[]>(
  run: (world: World, ...values: T) => void,
  ...values: { [K in keyof T]: fc.Arbitrary<T[K]> }
) =>
  fc.tuple(...(values as fc.Arbitrary<unknown>[])).map((chosen) =>
    Object.assign((world: World) => run(world, ...(chosen as T)), {
      toString: () => `${run.toString()} ${JSON.stringify(chosen)}`,
    }),
  )

const step = fc.oneof(
  {
    weight: 12,
    arbitrary: act(
      (world, a: number, b: number, c: number, d: boolean, e: boolean) => world.allocate(a, b, c, d, e),
      n,
      n,
      size,
      fc.boolean(),
      fc.boolean(),
    ),
  },
  { weight: 8, arbitrary: act((world, a: number, b: number) => world.free(a, b), n, n) },
  { weight: 2, arbitrary: act((world, a: number) => world.again(a), n) },
  { weight: 3, arbitrary: act((world, a: number, b: number) => world.realloc(a, b), n, size) },
  { weight: 2, arbitrary: act((world, a: number, b: number) => world.from(a, b), n, n) },
  { weight: 2, arbitrary: act((world, a: number) => world.share(a), n) },
  { weight: 2, arbitrary: act((world, a: number, b: boolean) => world.openScope(a, b), n, fc.boolean()) },
  { weight: 2, arbitrary: act((world, a: number) => world.endScope(a), n) },
  { weight: 2, arbitrary: act((world, a: number) => world.keep(a), n) },
  { weight: 1, arbitrary: act((world, a: number, b: number) => world.trim(a, b), n, n) },
  { weight: 1, arbitrary: act((world, a: number) => world.dispose(a), n) },
)

test('arrays, scopes, shares and allocators agree with the model', (t) => {
  // Set UNIMALLOC_MODEL_RUNS for more; a failure prints a seed and the shortest sequence that fails.
  const numRuns = Number(process.env['UNIMALLOC_MODEL_RUNS'] ?? 60)
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120, size: 'max' }), (steps) => {
      const world = new World()
      for (const run of steps) {
        run(world)
        world.check()
      }
      world.end()
    }),
    { numRuns, includeErrorInReport: true },
  )
  t.pass()
})
