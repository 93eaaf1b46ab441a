// An HTTP server that works in unified memory: a scope for each request, so that nothing outlives it, and a ceiling for all of them.
//   node examples/http-server.js        starts it, asks it many things at once, and checks the answers
//   node examples/http-server.js 8080   serves: curl --data-binary @in.f32 'http://localhost:8080/?by=2' > out.f32
import { once } from 'node:events'
import { createServer } from 'node:http'
import { connect } from 'node:net'
import { finished } from 'node:stream/promises'
import { setTimeout } from 'node:timers/promises'
import { Allocator, cuda, UnimallocError } from 'unimalloc'

const largestBody = 2 ** 20
// What requests may use together. The eleventh large one at a time is told to come back, and the process lives on.
const memory = new Allocator({ maxBytes: 10 * 2 ** 20 })
const kernel = memory.backend === 'cuda-unified' ? compile() : null

const server = createServer((request, response) => {
  answer(request, response).catch((error) => {
    // The client has gone in the middle, or there is a bug: the memory is free in any case.
    if (error.code !== 'ERR_STREAM_PREMATURE_CLOSE' && error.code !== 'ECONNRESET') console.error(error)
    response.destroy()
  })
})

/** Multiplies the samples of the body by `?by=`. */
async function answer(request, response) {
  const by = Number(new URL(request.url, 'http://localhost').searchParams.get('by') ?? 1)
  const size = Number(request.headers['content-length'] ?? Number.NaN)
  if (Number.isNaN(by) || !Number.isInteger(size) || size % 4 !== 0) return refuse(response, 400)
  if (size > largestBody) return refuse(response, 413)

  const scope = memory.scope()
  try {
    const samples = scope.allocUnsafe(Float32Array, size / 4) // all of it is written below
    const bytes = Buffer.from(samples.buffer, samples.byteOffset, samples.byteLength)
    let at = 0
    for await (const chunk of request) at += chunk.copy(bytes, at)

    await scale(samples, by)

    response.writeHead(200, { 'content-type': 'application/octet-stream', 'content-length': size })
    response.end(bytes) // sends from where the kernel wrote
    await finished(response) // and until then the memory must stay
  } catch (error) {
    if (!(error instanceof UnimallocError && error.code === 'OUT_OF_MEMORY')) throw error
    refuse(response, 503)
  } finally {
    scope[Symbol.dispose]() // on Node 24, and with TypeScript: `using scope = memory.scope()`
  }
}

function refuse(response, status) {
  response.writeHead(status, status === 503 ? { 'retry-after': 1 } : {}).end()
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

async function scale(samples, by) {
  if (kernel === null) {
    for (let i = 0; i < samples.length; i++) samples[i] *= by
  } else if (samples.length > 0) {
    kernel.launch({ threads: samples.length, args: [samples, { u32: samples.length }, { f32: by }] })
    await cuda.synchronize() // other requests go on meanwhile
  }
}

server.listen(Number(process.argv[2] ?? 0), 'localhost')
await once(server, 'listening')
const { port } = server.address()
if (process.argv[2] === undefined) await check()
else console.log(`http://localhost:${port}, on the backend ${memory.backend}`)

/** Many clients at once, one that goes in the middle, and one for whom there is no room. */
async function check() {
  const ask = (body, by = 1) => fetch(`http://localhost:${port}/?by=${by}`, { method: 'POST', body })
  const sizes = Array.from({ length: 96 }, (_, index) => (index % 3 === 0 ? largestBody / 4 : index * 50))
  let wrong = 0
  await Promise.all(
    sizes.map(async (length, by) => {
      const body = Float32Array.from({ length }, (_, i) => i % 100)
      let response = await ask(body, by)
      while (response.status === 503) {
        await setTimeout(20)
        response = await ask(body, by)
      }
      const answered = new Float32Array(await response.arrayBuffer())
      if (answered.length !== length || answered.some((value, i) => value !== (i % 100) * by)) wrong++
    }),
  )
  const expect = async (status, response) => (await response).status === status || wrong++
  await expect(413, ask(new Uint8Array(largestBody + 4)))
  await expect(400, ask(new Uint8Array(3)))

  const client = connect(port, 'localhost')
  client.write(`POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: ${largestBody}\r\n\r\nhalf of it`)
  while (memory.stats().currentCount === 0) await setTimeout(1)
  client.destroy()
  while (memory.stats().currentCount > 0) await setTimeout(1)

  const everything = memory.alloc(Uint8Array, memory.stats().limitBytes - largestBody)
  await expect(503, ask(new Uint8Array(largestBody)))
  everything.free()
  await expect(200, ask(new Uint8Array(largestBody)))

  server.close()
  server.closeAllConnections()
  const { currentCount } = memory.stats()
  console.log(
    `${memory.backend}: ${sizes.length} requests at once, ${wrong} answers wrong, ${currentCount} arrays left`,
  )
  if (wrong > 0 || currentCount > 0) process.exitCode = 1
}
