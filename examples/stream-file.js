// Streams a file of 32-bit floats through the GPU with two buffers: while a kernel works on one chunk, the next is read into the other.
//   node examples/stream-file.js [IN.f32 OUT.f32] [GAIN]
import { once } from 'node:events'
import { createWriteStream } from 'node:fs'
import { mkdtemp, open, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { performance } from 'node:perf_hooks'
import { allocator, cuda } from 'unimalloc'

const chunkLength = 1024 * 1024
const [input, output, gainText] = process.argv.slice(2)
const gain = Number(gainText ?? 0.5)
const onGpu = allocator.backend === 'cuda-unified'

if (input === undefined) await tryOut()
else await stream(input, output)

/** A buffer and the stream whose kernels use it. */
function makeSlot() {
  return {
    // The CPU fills and drains a chunk once and the kernel passes over it once: pages that stay on the host and are mapped
    // by the GPU are faster than pages that move back and forth.
    samples: allocator.allocUnsafe(Float32Array, chunkLength, { placement: 'host' }),
    stream: onGpu ? new cuda.Stream() : null,
    length: 0,
    done: null,
  }
}

async function stream(from, to) {
  const source = await open(from)
  const sink = createWriteStream(to)
  const kernel = onGpu ? compileScale() : null
  const slots = [makeSlot(), makeSlot()]
  const time = { read: 0, wait: 0, chunks: 0 }
  try {
    for (let turn = 0; ; turn++) {
      const slot = slots[turn % 2]
      // The kernel of two chunks ago had the time of one read and one write to finish.
      await drain(slot, sink, time)
      const bytes = await timed(time, 'read', () => fill(slot.samples, source))
      slot.length = Math.floor(bytes / 4)
      if (slot.length === 0) break
      time.chunks++
      scale(kernel, slot)
    }
    // The slot that is not empty holds the last chunk.
    for (const slot of slots) await drain(slot, sink, time)
  } finally {
    // A free waits by itself, without blocking, for kernels that still use the memory.
    for (const { samples, stream } of slots) {
      samples.free()
      stream?.[Symbol.dispose]()
    }
    sink.end()
    await Promise.all([source.close(), once(sink, 'close')])
  }
  const ms = (value) => `${value.toFixed(1)} ms`
  console.log(
    `${allocator.backend}: ${time.chunks} chunks; reading ${ms(time.read)}, waiting for kernels ${ms(time.wait)}`,
  )
}

/** Reads until the array is full or the file ends; `read` may give less at a time. */
async function fill(samples, file) {
  const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength)
  let total = 0
  while (total < bytes.length) {
    const { bytesRead } = await file.read(bytes, total, bytes.length - total)
    if (bytesRead === 0) break
    total += bytesRead
  }
  return total
}

function scale(kernel, slot) {
  const { samples, stream, length } = slot
  if (kernel === null) {
    for (let i = 0; i < length; i++) samples[i] *= gain
    return
  }
  kernel.launch({ threads: length, args: [samples, { u32: length }, { f32: gain }], stream })
  // An event marks this point of the stream: it is done when the kernel is.
  slot.done = stream.record()
}

/** Waits for the kernel on a slot, then writes what it made. */
async function drain(slot, sink, time) {
  if (slot.length === 0) return
  if (slot.done !== null) await timed(time, 'wait', () => slot.done.wait())
  const { samples, length } = slot
  const bytes = new Uint8Array(samples.buffer, samples.byteOffset, length * 4)
  // The callback says that the bytes are out of our hands: before it the next chunk must not overwrite them.
  await new Promise((resolve, reject) => sink.write(bytes, (error) => (error ? reject(error) : resolve())))
  slot.done?.[Symbol.dispose]()
  slot.done = null
  slot.length = 0
}

function compileScale() {
  const module = cuda.compile(`
    extern "C" __global__ void scale(float *samples, unsigned int n, float gain) {
      unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) samples[i] *= gain;
    }`)
  return module.kernel('scale')
}

async function timed(time, what, run) {
  const started = performance.now()
  try {
    return await run()
  } finally {
    time[what] += performance.now() - started
  }
}

/** Without arguments: a file of its own making, and a look at what came out. */
async function tryOut() {
  const folder = await mkdtemp(join(tmpdir(), 'stream-file-'))
  try {
    const [from, to] = [join(folder, 'in.f32'), join(folder, 'out.f32')]
    // Three full chunks and a part of one.
    const samples = Float32Array.from({ length: 3.25 * chunkLength }, (_, i) => Math.sin(i / 50))
    const made = await open(from, 'w')
    await made.writeFile(samples)
    await made.close()
    await stream(from, to)
    const result = await open(to)
    const bytes = await result.readFile()
    await result.close()
    const scaled = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4)
    const right =
      scaled.length === samples.length && scaled.every((value, i) => value === Math.fround(samples[i] * gain))
    console.log(`${scaled.length} samples, ${right ? 'all correct' : 'wrong'}`)
    if (!right) process.exitCode = 1
  } finally {
    await rm(folder, { recursive: true })
  }
}
