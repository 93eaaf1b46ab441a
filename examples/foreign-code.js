// Hands the address of an array to native code that knows nothing of this package, through koffi.
//   node examples/foreign-code.js
import koffi from 'koffi'
import { allocator, cuda, pointerOf } from 'unimalloc'

const length = 10_000
const values = allocator.alloc(Float32Array, length)
for (let i = 0; i < length; i++) values[i] = (i * 7919) % length

// The C library's qsort sorts our memory where it is. A subarray has an address too.
const libc = koffi.load({ win32: 'msvcrt.dll', darwin: 'libSystem.dylib' }[process.platform] ?? 'libc.so.6')
// Names the callback's type for the next declaration.
koffi.proto('int Compare(const void *a, const void *b)')
const qsort = libc.func('void qsort(void *base, size_t count, size_t size, Compare *compare)')
qsort(pointerOf(values), length, values.BYTES_PER_ELEMENT, (a, b) => {
  const [left, right] = [koffi.decode(a, 'float'), koffi.decode(b, 'float')]
  return left - right
})
check('qsort of the C library', (value, i) => value === i)

if (allocator.backend === 'cuda-unified') await fillByDriver()
values.free()

/** Stands for any CUDA library: it takes addresses, and a stream on which it queues work. */
async function fillByDriver() {
  const driver = koffi.load(process.platform === 'win32' ? 'nvcuda.dll' : 'libcuda.so.1')
  const ask = (declaration, ...args) => {
    const result = driver.func(declaration)(...args)
    if (result !== 0) throw new Error(`${declaration} answered ${result}`)
  }
  const stream = new cuda.Stream()
  const context = [null]
  // Threads have no current context unless they make one so; libraries over the CUDA runtime do this by themselves.
  ask('int cuDevicePrimaryCtxRetain(_Out_ void **context, int device)', context, 0)
  ask('int cuCtxPushCurrent_v2(void *context)', context[0])
  try {
    // 0x3fc00000 are the bits of 1.5.
    ask(
      'int cuMemsetD32Async(uint64_t address, uint32_t value, size_t count, void *stream)',
      pointerOf(values),
      0x3fc00000,
      length,
      stream.handle,
    )
    // The package did not see that call. With this, a free() would not hand the memory to anyone before the work is done.
    stream.recordUse(values)
  } finally {
    ask('int cuCtxPopCurrent_v2(_Out_ void **context)', [null])
    ask('int cuDevicePrimaryCtxRelease_v2(int device)', 0)
  }
  await stream.synchronize()
  check('cuMemsetD32Async of the driver', (value) => value === 1.5)
  stream[Symbol.dispose]()
}

function check(what, right) {
  const wrong = values.findIndex((value, i) => !right(value, i))
  console.log(`${allocator.backend}: ${what}, ${wrong === -1 ? 'all correct' : `wrong at ${wrong}`}`)
  if (wrong !== -1) process.exitCode = 1
}
