import { isOpen, makeDefaultAllocator } from './allocator.js'
import type { Allocator } from './allocator.js'
import { addressOf } from './arrays.js'
import { invalid, typed } from './errors.js'
import { native } from './native.js'
import { checkAllocatorOptions } from './options.js'
import type { AllocatorOptions } from './types.js'

let options: AllocatorOptions = {}

/** The default allocator, which opens its account at its first use. It serves the whole thread and cannot be disposed. */
export const allocator: Allocator = makeDefaultAllocator(() => options)

/** {@link Allocator.alloc} on the default allocator. @function */
export const alloc: Allocator['alloc'] = (type, length, allocOptions) => allocator.alloc(type, length, allocOptions)

/** {@link Allocator.allocUnsafe} on the default allocator. @function */
export const allocUnsafe: Allocator['allocUnsafe'] = (type, length, allocOptions) =>
  allocator.allocUnsafe(type, length, allocOptions)

/** {@link Allocator.from} on the default allocator. @function */
export const from: Allocator['from'] = (...args: unknown[]) =>
  allocator.from(...(args as [never, never, never])) as never

/** Sets the options of the default allocator. Throws `INVALID_ARGUMENT` once it is in use. */
export function configure(newOptions: AllocatorOptions): void {
  if (isOpen(allocator)) {
    throw invalid(
      'configure: the default allocator is in use already; call configure() before the first allocation, or make a new Allocator()',
    )
  }
  checkAllocatorOptions('configure', newOptions)
  options = { ...newOptions }
}

/** Address of a view's first byte, for the device and the host alike; of subarrays too. `0n` for an empty array. */
export function pointerOf(view: ArrayBufferView): bigint {
  return BigInt(addressOf('pointerOf', view))
}

/** Whether CUDA can be used here. Creates no CUDA context. */
export function isCudaAvailable(): boolean {
  return whyNoCuda() === null
}

/** What is missing for CUDA, in words, with the next step; null when nothing is. Creates no CUDA context. */
export function whyNoCuda(): string | null {
  return typed(() => native().cudaUnavailableReason())
}
