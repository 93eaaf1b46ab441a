// A pool of worker threads that stay, and are handed arrays: a token goes to the worker, a word comes back, and no bytes travel.
//   node examples/task-pool.js [WORKERS] [TASKS]
import { once } from 'node:events'
import { isMainThread, parentPort, Worker } from 'node:worker_threads'
import { alloc, allocator, attach, cuda, share } from 'unimalloc'

/** Workers that wait, and tasks that wait for a worker. With Piscina, `run` is `pool.run({ token: share(array), … })`. */
class Pool {
  #workers = new Set()
  #idle = []
  #queue = []

  constructor(size) {
    for (let i = 0; i < size; i++) this.#idle.push(this.#start())
  }

  #start() {
    const worker = new Worker(new URL(import.meta.url))
    this.#workers.add(worker)
    return worker
  }

  /** The worker's answer. The array must live until then: the token does not hold it. */
  async run(array, message) {
    let worker = this.#idle.pop() ?? (await new Promise((resolve) => this.#queue.push(resolve)))
    try {
      worker.postMessage({ ...message, token: share(array) })
      const [answer] = await once(worker, 'message')
      return answer
    } catch (error) {
      // What a worker does not catch ends it.
      this.#workers.delete(worker)
      worker = this.#start()
      throw error
    } finally {
      const next = this.#queue.shift()
      if (next === undefined) this.#idle.push(worker)
      else next(worker)
    }
  }

  async close() {
    await Promise.all([...this.#workers].map((worker) => worker.terminate()))
  }
}

/** A worker: takes part in the memory for the time of one task. */
function work() {
  parentPort.on('message', ({ token, seed }) => {
    const samples = attach(token)
    try {
      for (let i = 0; i < samples.length; i++) samples[i] = valueAt(seed, i)
    } finally {
      samples.free() // this thread's hold; the array lives on in the main thread
    }
    parentPort.postMessage('done')
  })
}

async function main() {
  const [workers, tasks] = [Number(process.argv[2] ?? 3), Number(process.argv[3] ?? 24)]
  const pool = new Pool(workers)
  const scale = allocator.backend === 'cuda-unified' ? compile() : null
  let wrong = 0

  const arrays = Array.from({ length: tasks }, (_, seed) => alloc(Float32Array, 50_000 + seed))
  try {
    await Promise.all(arrays.map((samples, seed) => pool.run(samples, { seed })))
    // The GPU goes on where the workers stopped. Not while they work: there are devices where the CPU may touch no unified memory
    // during a kernel, and a launch makes only its own thread wait.
    for (const samples of arrays) {
      if (scale === null) for (let i = 0; i < samples.length; i++) samples[i] *= 2
      else scale.launch({ threads: samples.length, args: [samples, { u32: samples.length }, { f32: 2 }] })
    }
    if (scale !== null) await cuda.synchronize()
    wrong = arrays.filter((samples, seed) => samples.some((value, i) => value !== valueAt(seed, i) * 2)).length
  } finally {
    for (const samples of arrays) samples.free()
    await pool.close()
  }

  const left = allocator.stats().currentCount
  console.log(`${allocator.backend}: ${tasks} tasks on ${workers} workers, ${wrong} wrong, ${left} arrays left`)
  if (wrong > 0 || left > 0) process.exitCode = 1
}

function compile() {
  return cuda
    .compile(
      `extern "C" __global__ void scale(float *samples, unsigned int n, float factor) {
         unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
         if (i < n) samples[i] *= factor;
       }`,
    )
    .kernel('scale')
}

function valueAt(seed, i) {
  return (seed * 7 + i) % 1000
}

if (isMainThread) await main()
else work()
