// Worker threads fill one array together; then the GPU, where there is one, works on the same bytes. Nothing is sent but a token.
//   node examples/worker-pool.js [WORKERS]
import { once } from 'node:events'
import { availableParallelism } from 'node:os'
import { isMainThread, Worker, workerData } from 'node:worker_threads'
import { alloc, allocator, attach, cuda, share } from 'unimalloc'

const width = 768
const height = 512
const limit = 200

if (isMainThread) await main()
else work()

async function main() {
  const workers = Number(process.argv[2] ?? Math.min(availableParallelism(), 8))
  const counts = alloc(Float32Array, width * height)

  // The token can be cloned and holds no memory: `counts` must stay until the workers have attached.
  const token = share(counts)
  await Promise.all(
    Array.from({ length: workers }, async (_, first) => {
      const worker = new Worker(new URL(import.meta.url), { workerData: { token, first, step: workers } })
      const [code] = await once(worker, 'exit')
      if (code !== 0) throw new Error(`worker ${first} ended with ${code}`)
    }),
  )

  await scaleToOne(counts)
  draw(counts)
  const wrong = [0, 1, height / 2, height - 1].filter((y) => {
    const row = counts.subarray(y * width, (y + 1) * width)
    return row.some((value, x) => Math.abs(value - escapeTime(x, y) / limit) > 1e-6)
  })
  console.log(
    `${allocator.backend}: ${workers} workers, ${height} rows, ${wrong.length} of the rows looked at are wrong`,
  )
  if (wrong.length > 0) process.exitCode = 1
  counts.free()
}

/** A worker: every `step`th row is its own, so that no two write the same element. */
function work() {
  const { token, first, step } = workerData
  const counts = attach(token)
  for (let y = first; y < height; y += step) {
    for (let x = 0; x < width; x++) counts[y * width + x] = escapeTime(x, y)
  }
  // Ends this thread's hold; the memory stays for the others.
  counts.free()
}

async function scaleToOne(counts) {
  if (allocator.backend !== 'cuda-unified') {
    for (let i = 0; i < counts.length; i++) counts[i] *= 1 / limit
    return
  }
  const module = cuda.compile(`
    extern "C" __global__ void scale(float *values, unsigned int n, float factor) {
      unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) values[i] *= factor;
    }`)
  const args = [counts, { u32: counts.length }, { f32: 1 / limit }]
  module.kernel('scale').launch({ threads: counts.length, args })
  await cuda.synchronize()
}

/** How many steps a point of the Mandelbrot picture takes to escape. */
function escapeTime(x, y) {
  const [cx, cy] = [(x / width) * 3 - 2.2, (y / height) * 2.4 - 1.2]
  let [zx, zy, steps] = [0, 0, 0]
  while (zx * zx + zy * zy <= 4 && steps < limit) {
    ;[zx, zy] = [zx * zx - zy * zy + cx, 2 * zx * zy + cy]
    steps++
  }
  return steps
}

/** The picture in letters. */
function draw(counts) {
  for (let y = 0; y < height; y += 24) {
    let line = ''
    for (let x = 0; x < width; x += 12) line += ' .:-=+*#%@'[Math.floor(Math.sqrt(counts[y * width + x]) * 9)]
    console.log(line.trimEnd())
  }
}
