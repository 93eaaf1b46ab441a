// What is measured. Each task does `count` operations; one operation allocates and frees once. As a process of its own: one peer in one
// workload, a round whenever the parent asks for one, so that no peer pays for the garbage of another, or for what the engine learned of it.
import { createRequire } from 'node:module'
import { Bench } from 'tinybench'

/** Something is read of every array, so that no engine leaves it out. A small integer: an engine makes an object of a larger one, each time. */
let sum = 0

const kept = new ArrayBuffer(16 * 1024 * 1024)
let next = 0

/** What any array of memory that is there already costs at least. */
function view(bytes) {
  next = next + 2 * bytes > kept.byteLength ? 0 : next + bytes
  return new Float32Array(kept, next, bytes >> 2)
}

const TYPES = [Float32Array, Uint8Array, Float64Array, Int32Array, Uint16Array, BigInt64Array]
let turnOfType = 0

/** An array of so many bytes, of one type after the other. */
function ofNextType(make, bytes) {
  turnOfType = turnOfType === TYPES.length - 1 ? 0 : turnOfType + 1
  const Type = TYPES[turnOfType]
  return make(Type, bytes / Type.BYTES_PER_ELEMENT)
}

/** Ways to get an array of so many bytes and to let it go. */
function peers() {
  const require = createRequire(import.meta.url)
  const { alloc, allocUnsafe, Allocator } = require('unimalloc')
  const own = new Allocator()
  const bare = require(process.env.UNIMALLOC_BENCH_ADDON)
  const external = bare.externalFunction()
  const detach =
    'transfer' in ArrayBuffer.prototype ? ({ buffer }) => buffer.transfer(0) : ({ buffer }) => bare.detach(buffer)
  return {
    allocUnsafe: { make: (bytes) => allocUnsafe(Float32Array, bytes >> 2), free: (array) => array.free() },
    alloc: { make: (bytes) => alloc(Float32Array, bytes >> 2), free: (array) => array.free() },
    'allocUnsafe of an Allocator': {
      make: (bytes) => own.allocUnsafe(Float32Array, bytes >> 2),
      free: (array) => array.free(),
    },
    'alloc of an Allocator': { make: (bytes) => own.alloc(Float32Array, bytes >> 2), free: (array) => array.free() },
    'allocUnsafe, six types': {
      make: (bytes) => ofNextType((Type, length) => allocUnsafe(Type, length), bytes),
      free: (array) => array.free(),
    },
    'new …Array, six types': { make: (bytes) => ofNextType((Type, length) => new Type(length), bytes), free: () => {} },
    'a view alone, six types': {
      make: (bytes) => ofNextType((Type, length) => new Type(kept, 0, length), bytes),
      free: () => {},
    },
    'Buffer.allocUnsafe': { make: (bytes) => Buffer.allocUnsafe(bytes), free: () => {} },
    'new Float32Array': { make: (bytes) => new Float32Array(bytes >> 2), free: () => {} },
    'a view alone': { make: view, free: () => {} },
    'bare external buffer': { make: (bytes) => new Float32Array(external(bytes), 0, bytes >> 2), free: detach },
  }
}

/** The same source for every peer. */
const fresh = (source) => (peer) => new Function('make', 'free', 'add', `return ${source}`)(peer.make, peer.free, add)

function add(value) {
  sum = (sum + value) | 0
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

export const workloads = [
  ...[64, KiB, 4 * KiB, 16 * KiB, 64 * KiB, 1024 * KiB].map(sized('allocUnsafe', pooled)),
  ...[64, KiB, 4 * KiB, 64 * KiB, 1024 * KiB].map(sized('alloc', zeroed)),
  {
    name: 'allocUnsafe 1 KiB, an Allocator of its own',
    group: 'own Allocator',
    names: ['allocUnsafe of an Allocator', ...pooled.slice(1)],
    of: pair(KiB),
  },
  {
    name: 'alloc 4 KiB, an Allocator of its own',
    group: 'own Allocator',
    names: ['alloc of an Allocator', ...zeroed.slice(1)],
    of: pair(4 * KiB),
  },
  {
    name: 'allocUnsafe 1 KiB, six types in turn',
    group: 'types',
    names: ['allocUnsafe, six types', 'new …Array, six types', 'a view alone, six types'],
    of: pair(KiB),
  },
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

/** Answers every message, a number of milliseconds, by nanoseconds for one operation. */
function serve(workload, peer) {
  const call = workloads.find(({ name }) => name === workload).of(peers()[peer])
  process.on('message', async (time) => {
    const bench = new Bench({ time, iterations: 3, warmup: false, now: processorTime })
    bench.add(peer, async () => {
      call(OPERATIONS)
      await turn() // the engine ends what was let go
    })
    await bench.run()
    const [{ result }] = bench.tasks
    if (result.state !== 'completed') throw result.error ?? new Error(`${workload}, ${peer}: ${result.state}`)
    process.send((result.totalTime / result.latency.samplesCount / OPERATIONS) * 1e6)
  })
  process.on('exit', () => {
    if (Number.isNaN(sum)) console.error(sum)
  })
  process.send('ready')
}

if (process.send !== undefined && process.argv.length === 4) serve(process.argv[2], process.argv[3])
