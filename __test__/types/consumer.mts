// A user's module, compiled against the shipped types with neither the DOM nor Node's types in sight.
import {
  Allocator,
  alloc,
  allocUnsafe,
  allocator,
  attach,
  configure,
  cuda,
  from,
  isCudaAvailable,
  pointerOf,
  share,
  UnimallocError,
  whyNoCuda,
} from 'unimalloc'
import type { AllocatorStats, BackendName, Bytes, KernelArgument, SharedToken, UnifiedArray } from 'unimalloc'

type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false
function assertType<_T extends true>(): void {}

configure({ backend: 'auto', maxBytes: '50%' })
const limit: Bytes = '8GiB'
// @ts-expect-error a size needs a unit that exists
const wrong: Bytes = '8GB'
void wrong

using own = new Allocator({ backend: 'host', policy: 'standard', placement: 'host', maxBytes: limit, track: true })
using floats = own.alloc(Float32Array, 1024, { alignment: 4096 })
const first: number = floats[0]!
const address: bigint = floats.pointer
// @ts-expect-error the address is read-only
floats.pointer = 1n
// @ts-expect-error there is no such option
own.alloc(Float32Array, 1, { aligment: 64 })
// @ts-expect-error a placement is one of four words
own.alloc(Float32Array, 1, { placement: 'gpu' })

const wide: bigint = alloc(BigInt64Array, 4)[0]!
const raw = allocUnsafe(Uint8Array, 16)
raw.set([1, 2, 3])
raw.free({ after: Promise.resolve() })
const grown: UnifiedArray<Float32Array> = own.realloc(own.alloc(Float32Array, 4), 8)
const copied = from(new Int16Array([1, 2]))
const listed = from(Float64Array, [1, 2, 3])
assertType<Equal<(typeof listed)[number], number>>()
const doubled = listed.map((value) => value * 2)
void doubled

const token: SharedToken<Float32Array> = share(own.alloc(Float32Array, 4), { transfer: true })
const attached = attach(token)
const element: number = attached[0]!

{
  using scope = own.scope()
  const kept = scope.keep(scope.alloc(Uint16Array, 3))
  kept.free()
}

const stats: AllocatorStats = allocator.stats()
const backend: BackendName = allocator.backend
const usable: number = own.usableBytes(floats) + own.trim() + own.trim(1024)
const missing: string | null = isCudaAvailable() ? null : whyNoCuda()
own.onOutOfMemory((needed: number) => needed < 1024)
own.onOutOfMemory(null)

async function launch(): Promise<void> {
  using stream = new cuda.Stream({ device: 0 })
  using module = cuda.compile('extern "C" __global__ void k() {}', { flags: ['--use_fast_math'] })
  const args: KernelArgument[] = [floats, { i32: 4 }, { u64: 4n }, { bytes: new Uint8Array(8) }]
  module.kernel('k').launch({ threads: [16, 16], block: 256, args, stream })
  // @ts-expect-error a launch says `grid` or `threads`
  module.kernel('k').launch({ args })
  // @ts-expect-error a plain number has no C type
  module.kernel('k').launch({ threads: 1, args: [1] })
  using start = stream.record()
  using end = cuda.defaultStream.record()
  stream.wait(end)
  stream.prefetch(floats, 'device')
  const unmoved: string | null = stream.whyNoPrefetch ?? own.whyNoPlacement() ?? own.whyNoPlacement('host')
  stream.fill(floats, 0)
  await stream.synchronize()
  await cuda.synchronize()
  const elapsed: number = end.millisecondsSince(start)
  const names: string[] = cuda.devices().map((device) => device.name)
  void [elapsed, names, unmoved]
}

try {
  own.free(floats)
} catch (error) {
  if (error instanceof UnimallocError && error.code === 'DOUBLE_FREE') void error.stats?.currentBytes
  // @ts-expect-error codes are a closed list
  if (error instanceof UnimallocError && error.code === 'NO_SUCH_CODE') throw error
}

export { address, backend, copied, element, first, grown, launch, missing, stats, usable, wide, pointerOf }
