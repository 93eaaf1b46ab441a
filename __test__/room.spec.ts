// The figures of an allocator, against a model that counts each array: what is set aside so that a hit need not look at them must never show.
import test from 'ava'
import { Allocator } from 'unimalloc'
import type { UnifiedArray } from 'unimalloc'

import { throwsCode } from './helpers/errors.js'

const kinds = [
  Float32Array,
  Uint8Array,
  Float64Array,
  Int32Array,
  Uint16Array,
  BigInt64Array,
  Uint8ClampedArray,
] as const

/** What the allocator should say of itself. */
class Model {
  readonly live = new Map<UnifiedArray, number>()
  readonly #memory: Allocator
  requestedBytes = 0
  currentBytes = 0
  peakBytes = 0
  totalBytes = 0
  peakCount = 0
  totalCount = 0

  constructor(memory: Allocator) {
    this.#memory = memory
  }

  enter(array: UnifiedArray): void {
    const bytes = this.#memory.usableBytes(array)
    this.live.set(array, bytes)
    this.requestedBytes += array.byteLength
    this.currentBytes += bytes
    this.totalBytes += bytes
    this.totalCount++
    this.peakBytes = Math.max(this.peakBytes, this.currentBytes)
    this.peakCount = Math.max(this.peakCount, this.live.size)
  }

  /** To be called before the array is freed. */
  leave(array: UnifiedArray): void {
    this.currentBytes -= this.live.get(array)!
    this.requestedBytes -= array.byteLength
    this.live.delete(array)
  }

  resetPeak(): void {
    this.peakBytes = this.currentBytes
    this.peakCount = this.live.size
  }

  get figures(): Record<string, number> {
    const { requestedBytes, currentBytes, peakBytes, totalBytes, peakCount, totalCount } = this
    return { requestedBytes, currentBytes, peakBytes, totalBytes, currentCount: this.live.size, peakCount, totalCount }
  }
}

function figuresOf(memory: Allocator): Record<string, number> {
  const { requestedBytes, currentBytes, peakBytes, totalBytes, currentCount, peakCount, totalCount } = memory.stats()
  return { requestedBytes, currentBytes, peakBytes, totalBytes, currentCount, peakCount, totalCount }
}

function randomly(seed: number): (below: number) => number {
  let state = seed
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return (state >>> 8) % below
  }
}

test('every figure is exact after every step, whatever the order of allocations and of frees of all kinds', (t) => {
  for (const seed of [1, 2, 3, 4]) {
    const random = randomly(seed)
    const memory = new Allocator({ backend: 'host' })
    const model = new Model(memory)
    const arrays: UnifiedArray[] = []
    for (let step = 0; step < 3000; step++) {
      const choice = random(100)
      const Kind = kinds[random(kinds.length)]!
      const grows = arrays.length < 40 || (step % 600 < 300 && arrays.length < 400)
      if (choice < (grows ? 60 : 35)) {
        const array = memory.allocUnsafe(Kind, 1 + random(choice % 7 === 0 ? 8000 : 300))
        arrays.push(array)
        model.enter(array)
      } else if (choice < (grows ? 65 : 40)) {
        const array = memory.alloc(Kind, 1 + random(5000))
        arrays.push(array)
        model.enter(array)
      } else if (choice === 99) {
        memory.resetPeak()
        model.resetPeak()
      } else if (arrays.length > 0) {
        const at = random(arrays.length)
        const array = arrays[at]!
        arrays[at] = arrays.at(-1)!
        arrays.pop()
        model.leave(array)
        if (choice % 5 === 0) memory.free(new DataView(array.buffer, array.byteOffset))
        else if (choice % 5 === 1) memory.free(array)
        else array.free()
        t.true(array.freed)
      }
      if (step % 7 === 0) t.deepEqual(figuresOf(memory), model.figures, `seed ${seed}, step ${step}`)
    }
    for (const array of arrays) {
      model.leave(array)
      array.free()
    }
    t.deepEqual(figuresOf(memory), model.figures, `seed ${seed}, at the end`)
    memory[Symbol.dispose]()
  }
})

test('a block that was freed counts no more, whatever is allocated next', (t) => {
  const memory = new Allocator({ backend: 'host', maxBytes: 70_000 })
  const model = new Model(memory)
  const pair = (length: number): void => {
    const array = memory.allocUnsafe(Uint8Array, length)
    model.enter(array)
    model.leave(array)
    array.free()
  }
  for (let round = 0; round < 50; round++) {
    // Two of them at a time are more than the limit: each fits only where the one before it is gone.
    for (const length of [300, 65_536, 40_000, 300, 300, 40_000]) {
      pair(length)
      if (round % 3 > 0) t.deepEqual(figuresOf(memory), model.figures, `round ${round}, ${length}`)
    }
    if (round % 10 === 9) {
      memory.resetPeak()
      model.resetPeak()
    }
    memory.alloc(Uint8Array, 60_000).free()
    model.totalBytes += 61_440
    model.totalCount++
    model.peakBytes = Math.max(model.peakBytes, 61_440)
    model.peakCount = Math.max(model.peakCount, 1)
  }
  t.deepEqual(figuresOf(memory), model.figures)
  t.is(memory.stats().peakCount, 1)
  memory[Symbol.dispose]()
})

test('figures stay exact where more is live, and comes back, than is ever set aside', (t) => {
  const memory = new Allocator({ backend: 'host' })
  const model = new Model(memory)
  for (let round = 0; round < 3; round++) {
    const arrays: UnifiedArray[] = []
    const make = (length: number): void => {
      const array = memory.allocUnsafe(Uint8Array, length)
      arrays.push(array)
      model.enter(array)
    }
    for (let index = 0; index < 5000; index++) make(200)
    for (let index = 0; index < 1200; index++) make(65_536)
    t.deepEqual(figuresOf(memory), model.figures, `round ${round}, full`)
    for (const [index, array] of arrays.entries()) {
      model.leave(array)
      array.free()
      if (index % 500 === 0) t.deepEqual(figuresOf(memory), model.figures, `round ${round}, ${index} freed`)
    }
    t.deepEqual(figuresOf(memory), model.figures, `round ${round}, empty`)
  }
  memory[Symbol.dispose]()
})

test('the limit holds to the byte while both ways of allocating take turns', (t) => {
  const maxBytes = 1_000_000
  for (const seed of [5, 6, 7]) {
    const random = randomly(seed)
    const memory = new Allocator({ backend: 'host', maxBytes })
    const arrays: UnifiedArray[] = []
    let refusals = 0
    for (let step = 0; step < 4000; step++) {
      if (random(100) < 60) {
        const bytes = 1 + random(20_000)
        const { currentBytes } = memory.stats()
        try {
          arrays.push(random(4) === 0 ? memory.alloc(Uint8Array, bytes) : memory.allocUnsafe(Uint8Array, bytes))
          t.true(memory.stats().currentBytes <= maxBytes)
        } catch (error) {
          refusals++
          t.is((error as { code?: string }).code, 'OUT_OF_MEMORY')
          // No block wastes more than an eighth, or than the alignment.
          t.true(currentBytes + Math.max(bytes * 1.125, bytes + 255) > maxBytes, `${currentBytes} and ${bytes}`)
        }
      } else if (arrays.length > 0) {
        const at = random(arrays.length)
        arrays.splice(at, 1)[0]!.free()
      }
    }
    t.true(refusals > 10)
    memory[Symbol.dispose]()
    t.is(memory.stats().currentBytes, 0)
  }
})

test('an array whose block was freed by a view stays dead through all lives of the block', (t) => {
  const memory = new Allocator({ backend: 'host' })
  const dead: UnifiedArray[] = []
  const first = memory.allocUnsafe(Float32Array, 100)
  let { pointer } = first
  let reused = 0
  memory.free(new Uint8Array(first.buffer, first.byteOffset, 8))
  dead.push(first)
  for (let life = 0; life < 100; life++) {
    const array = memory.allocUnsafe(Float32Array, 100)
    if (array.pointer === pointer) reused++
    pointer = array.pointer
    t.false(array.freed)
    for (const old of dead) {
      t.true(old.freed)
      throwsCode(t, () => old.free(), 'DOUBLE_FREE')
      throwsCode(t, () => memory.free(old), 'DOUBLE_FREE')
      t.throws(() => old.pointer)
    }
    t.false(array.freed)
    if (life % 3 === 0) memory.free(new DataView(array.buffer, array.byteOffset))
    else if (life % 3 === 1) array.free()
    else {
      const scope = memory.scope()
      array.free()
      const inner = scope.allocUnsafe(Float32Array, 100)
      scope[Symbol.dispose]()
      dead.push(inner)
    }
    dead.push(array)
  }
  t.true(reused > 50, `${reused}`)
  t.is(memory.stats().currentCount, 0)
  memory[Symbol.dispose]()
})
