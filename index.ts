/// <reference lib="esnext.disposable" preserve="true" />
import './ts/dispose.js' // before any class has a method of that name
export { Allocator } from './ts/allocator.js'
export {
  CudaUnifiedBackend,
  HardenedPolicy,
  HostBackend,
  lastError,
  SecurePolicy,
  StandardPolicy,
  ThreadAllocator,
} from './ts/contract.js'
export type { Backend, PolicyOption, PolicySlots, PoolFigures } from './ts/contract.js'
export * as cuda from './ts/cuda/index.js'
export { alloc, allocator, allocUnsafe, configure, from, isCudaAvailable, pointerOf, whyNoCuda } from './ts/default.js'
export type { Dim, KernelArgument } from './ts/cuda/index.js'
export { UnimallocError } from './ts/errors.js'
export type { UnimallocErrorCode } from './ts/errors.js'
export type { Scope } from './ts/scope.js'
export { attach, share } from './ts/share.js'
export type { SharedToken } from './ts/share.js'
export type {
  AllocatorOptions,
  AllocatorStats,
  AllocOptions,
  ArrayType,
  BackendName,
  Bytes,
  Copied,
  FreeOptions,
  LeakReport,
  Placement,
  PolicyName,
  TypedArray,
  UnifiedArray,
  UnifiedArrayMembers,
} from './ts/types.js'
