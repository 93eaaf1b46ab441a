// What is measured, in the process of one Node. Each task does `count` operations; one operation allocates and frees once.
import { createRequire } from 'node:module'
import { Bench } from 'tinybench'

const require = createRequire(import.meta.url)
const { alloc, allocUnsafe } = require('unimalloc')
const bare = require(process.env.UNIMALLOC_BENCH_ADDON)
const external = bare.externalFunction()

/** Something is read of every array, so that no engine leaves it out. */
let sum = 0

const hasTransfer = 'transfer' in ArrayBuffer.prototype

function bareArray(bytes) {
  return new Float32Array(external(bytes), 0, bytes >> 2)
}

const kept = new ArrayBuffer(16 * 1024 * 1024)
let next = 0

/** What any array of memory that is there already costs at least. */
function view(bytes) {
  next = next + 2 * bytes > kept.byteLength ? 0 : next + bytes
  return new Float32Array(kept, next, bytes >> 2)
}

function detach({ buffer }) {
  if (hasTransfer) buffer.transfer(0)
  else bare.detach(buffer)
}

/** Ways to get an array of so many bytes and to let it go. */
const peers = {
  allocUnsafe: { make: (bytes) => allocUnsafe(Float32Array, bytes >> 2), free: (array) => array.free() },
  alloc: { make: (bytes) => alloc(Float32Array, bytes >> 2), free: (array) => array.free() },
  'Buffer.allocUnsafe': { make: (bytes) => Buffer.allocUnsafe(bytes), free: () => {} },
  'new Float32Array': { make: (bytes) => new Float32Array(bytes >> 2), free: () => {} },
  'a view alone': { make: view, free: () => {} },
  'bare external buffer': { make: bareArray, free: detach },
}

/** The same source for every pair of functions, compiled anew: no peer pays for what the engine learned of another. */
const fresh = (source) => (peer) => new Function('make', 'free', 'add', `return ${source}`)(peer.make, peer.free, add)

function add(value) {
  sum += value
}

const pair = (bytes) =>
  fresh(`(count) => {
    for (let i = 0; i < count; i++) { const array = make(${bytes}); add(array.length); free(array) }
  }`)

const batch = (bytes, live, order) =>
  fresh(`(count) => {
    for (let done = 0; done < count; done += ${live}) {
      const arrays = []
      for (let i = 0; i < ${live}; i++) arrays.push(make(${bytes}))
      add(arrays.length)
      ${order === 'fifo' ? 'for (const array of arrays) free(array)' : 'for (let i = arrays.length - 1; i >= 0; i--) free(arrays[i])'}
    }
  }`)

/** Replaces one of many live arrays after the other, in no order, by one of another size. */
const random = (live) =>
  fresh(`(() => {
    const arrays = []
    let state = 1
    return (count) => {
      for (let i = 0; i < count; i++) {
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0
        const at = (state >>> 8) % ${live}
        const old = arrays[at]
        if (old !== undefined) free(old)
        arrays[at] = make(256 + ((state >>> 4) % 16129 & ~3))
      }
      add(arrays.length)
    }
  })()`)

const KiB = 1024
const pooled = ['allocUnsafe', 'Buffer.allocUnsafe', 'new Float32Array', 'bare external buffer', 'a view alone']
const zeroed = ['alloc', 'new Float32Array', 'bare external buffer']
const sized = (title, names) => (bytes) => ({
  name: `${title} ${bytes >= KiB ? `${bytes / KiB} KiB` : `${bytes} B`}`,
  group: title,
  bytes,
  names,
  of: pair(bytes),
})

const workloads = [
  ...[64, KiB, 4 * KiB, 16 * KiB, 64 * KiB, 1024 * KiB].map(sized('allocUnsafe', pooled)),
  ...[64, KiB, 4 * KiB, 64 * KiB, 1024 * KiB].map(sized('alloc', zeroed)),
  ...['fifo', 'lifo'].map((order) => ({
    name: `batches of 100, 1 KiB, ${order}`,
    group: 'patterns',
    names: pooled,
    of: batch(KiB, 100, order),
  })),
  { name: 'random replacement, 1,000 live, 256 B to 16 KiB', group: 'patterns', names: pooled, of: random(1000) },
]

/** Milliseconds of processor time, of all threads: collecting garbage counts, and whoever else uses the machine does not. */
function processorTime() {
  const { user, system } = process.cpuUsage()
  return (user + system) / 1000
}

const OPERATIONS = 1000
const turn = () => new Promise((resolve) => setImmediate(resolve))

const quantile = (sorted, at) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * at))]
const summary = (values) => {
  const sorted = values.toSorted((a, b) => a - b)
  return { low: quantile(sorted, 0.25), median: quantile(sorted, 0.5), high: quantile(sorted, 0.75) }
}

const { rounds, milliseconds } = JSON.parse(process.argv[2])
const rows = []
for (const { name, group, bytes, names, of } of workloads) {
  const functions = names.map((peer) => of(peers[peer]))
  const times = names.map(() => [])
  for (let round = -2; round < rounds; round++) {
    // All peers in turns, so that a slow moment meets all of them.
    const bench = new Bench({ time: milliseconds, iterations: 3, warmup: false, now: processorTime })
    functions.forEach((call, index) => {
      bench.add(names[index], async () => {
        call(OPERATIONS)
        await turn() // the engine ends what was let go
      })
    })
    await bench.run()
    bench.tasks.forEach(({ result }, index) => {
      if (result.state !== 'completed') throw result.error ?? new Error(`${names[index]}: ${result.state}`)
      // The first rounds warm up.
      if (round >= 0) times[index].push((result.totalTime / result.latency.samplesCount / OPERATIONS) * 1e6)
    })
  }
  rows.push({
    name,
    group,
    ...(bytes ? { bytes } : {}),
    peers: names.map((peer, index) => ({
      name: peer,
      nanoseconds: summary(times[index]),
      // Of the first peer's time, which is ours, to this one's in the same round.
      ratio: summary(times[0].map((time, round) => time / times[index][round])),
    })),
  })
  process.stderr.write('.')
}
process.stderr.write('\n')
console.log(JSON.stringify({ version: process.version, rows }))
if (sum < 0) console.log(sum)
