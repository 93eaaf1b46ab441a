// Adds two vectors: on the GPU where there is one, else in JavaScript.
//   node examples/vector-add.js [LENGTH]
import { alloc, allocator, cuda } from 'unimalloc'

const length = Number(process.argv[2] ?? 1_000_000)

// Real Float32Arrays. With CUDA the GPU sees the same bytes, so nothing is copied, in either direction.
const a = alloc(Float32Array, length)
const b = alloc(Float32Array, length)
const sum = alloc(Float32Array, length)
for (let i = 0; i < length; i++) {
  a[i] = i % 1000
  b[i] = 0.5
}

if (allocator.backend === 'cuda-unified') {
  const module = cuda.compile(`
    extern "C" __global__ void vector_add(const float *a, const float *b, float *sum, unsigned int n) {
      unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) sum[i] = a[i] + b[i];
    }`)
  // Arrays go as they are; a number needs its C type said.
  module.kernel('vector_add').launch({ threads: length, args: [a, b, sum, { u32: length }] })
  // A launch only queues the work: read the result once it is done.
  await cuda.synchronize()
} else {
  for (let i = 0; i < length; i++) sum[i] = a[i] + b[i]
}

const wrong = sum.findIndex((value, i) => value !== (i % 1000) + 0.5)
console.log(`${allocator.backend}: ${length} sums, ${wrong === -1 ? 'all correct' : `wrong at ${wrong}`}`)
if (wrong !== -1) process.exitCode = 1

// Without these lines the garbage collector would do it, at some later time.
for (const array of [a, b, sum]) array.free()
