import { typed } from '../errors.js'
import { native } from '../native.js'

/** A CUDA device. */
export interface DeviceInfo {
  /** Index in CUDA's enumeration, after `CUDA_VISIBLE_DEVICES`. */
  index: number
  name: string
  totalBytes: number
  /** Free now; 0 when the device refuses a context. */
  freeBytes: number
  /** Major and minor. */
  computeCapability: [number, number]
  /** Whether the CPU may touch unified memory while a kernel runs. Where not, launches wait for completion. */
  concurrentManagedAccess: boolean
  /** Whether kernels can read ordinary memory. */
  pageableMemoryAccess: boolean
  /** Whether more unified memory than the device has can be used: pages move on demand. */
  canOversubscribe: boolean
  /** The CUDA version that the driver supports, as 1000 * major + 10 * minor. */
  driverVersion: number
}

/** All devices, by index; none where CUDA is not usable, see `whyNoCuda()`. Makes a CUDA context on each. */
export function devices(): DeviceInfo[] {
  if (typed(() => native().cudaUnavailableReason()) !== null) return []
  return typed(() => native().cudaDevices()).map(({ major, minor, ...info }) => ({
    ...info,
    computeCapability: [major, minor],
  }))
}
