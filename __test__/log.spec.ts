// What UNIMALLOC_LOG has the package say on standard error.
import anyTest from 'ava'
import type { ExecutionContext } from 'ava'

import { runProgram } from './helpers/child.js'
import { fakeCudaDirectory, runWithFakeCuda } from './helpers/fake-cuda.js'
import { program } from './helpers/shows.js'

const directory = fakeCudaDirectory()
const withDriver = directory === null ? anyTest.skip : anyTest.serial
const test = anyTest

/** The lines by event, without what differs from run to run. */
function linesOf(t: ExecutionContext, stderr: string): { level: string; event: string; rest: string }[] {
  return stderr
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => {
      const match = /^unimalloc \d+\.\d{3} \d+ (error|warn|info|debug) ([\w-]+):? ?(.*)$/.exec(line)
      if (match === null) {
        t.fail(`not a line of the log: ${line}`)
        return { level: '', event: '', rest: '' }
      }
      return { level: match[1] as string, event: match[2] as string, rest: match[3] as string }
    })
}

const BLOCKS = `
  const own = new Allocator({ maxBytes: '1MiB' })
  own.alloc(Uint8Array, 1000).free()
  own.trim()
  code(() => own.alloc(Uint8Array, 2 ** 21))
  code(() => own.alloc(Uint8Array, 2 ** 21))`

test('off, empty and unset say nothing', async (t) => {
  for (const value of [undefined, '', 'off']) {
    const environment = { UNIMALLOC_BACKEND: 'host', ...(value === undefined ? {} : { UNIMALLOC_LOG: value }) }
    t.is((await runProgram(program(BLOCKS), environment)).stderr, '', String(value))
  }
})

test('the backend that was chosen and why, what comes and goes, and refusals with their reason', async (t) => {
  const environment = { UNIMALLOC_LOG: 'debug', LD_LIBRARY_PATH: '', CUDA_VISIBLE_DEVICES: '' }
  const lines = linesOf(t, (await runProgram(program(`${BLOCKS}\nshow(whyNoCuda())`), environment)).stderr)
  const chosen = lines.find(({ event }) => event === 'allocator')
  t.regex(
    chosen?.rest ?? '',
    /^backend=(host asked=auto because ".*"|cuda-unified asked=auto) device=0 policy=standard placement=auto limit=1048576$/,
  )
  const bytes = (event: string): string[] =>
    lines
      .filter((line) => line.event === event)
      .map(({ rest }) => /bytes=(\d+) address=0x[\da-f]+/.exec(rest)?.[0] ?? rest)
  t.true(bytes('allocate').length > 0)
  t.deepEqual(bytes('free'), bytes('allocate'))
  const refused = lines.filter(({ event }) => event === 'refused')
  t.is(refused.length, 2)
  for (const { level, rest } of refused) {
    t.is(level, 'warn')
    t.regex(rest, /^bytes=2097152 code=OUT_OF_MEMORY: 2 MiB could not be allocated: .*maxBytes/)
  }
})

test('a level leaves out what is less urgent', async (t) => {
  const counts = []
  for (const UNIMALLOC_LOG of ['error', 'warn', 'info', 'debug']) {
    const { stderr } = await runProgram(program(BLOCKS), { UNIMALLOC_BACKEND: 'host', UNIMALLOC_LOG })
    counts.push(linesOf(t, stderr).length)
  }
  const [error, warn, info, debug] = counts as [number, number, number, number]
  t.true(error === 0 && warn === 2 && info > warn && debug > info, String(counts))
})

test('a value that means nothing is an error', async (t) => {
  const { stdout } = await runProgram(program('show(code(() => new Allocator()), message(() => new Allocator()))'), {
    UNIMALLOC_BACKEND: 'host',
    UNIMALLOC_LOG: 'verbose',
  })
  t.deepEqual(JSON.parse(stdout), [
    'INVALID_ARGUMENT',
    `the environment variable UNIMALLOC_LOG is "verbose"; use one of 'error', 'warn', 'info', 'debug', 'off'`,
  ])
})

test('a loop that is warm says nothing', async (t) => {
  const body = `
    const own = new Allocator()
    const round = () => { for (let index = 0; index < 1000; index++) { own.allocUnsafe(Uint8Array, 1000).free(); own.alloc(Uint8Array, 1000).free() } }
    round()
    process.stderr.write('unimalloc 0.000 0 info warm\\n')
    round()`
  const { stderr } = await runProgram(program(body), { UNIMALLOC_BACKEND: 'host', UNIMALLOC_LOG: 'debug' })
  t.is(linesOf(t, stderr).at(-1)?.event, 'warm', stderr)
})

withDriver('the driver, contexts, memory of a device, hints, and a context that is lost', async (t) => {
  const body = `
    const own = new Allocator({ placement: 'device', device: 1 })
    const array = own.alloc(Float32Array, 5_000_000)
    const stream = new cuda.Stream({ device: 1 })
    stream.prefetch(new Allocator({ backend: 'host' }).alloc(Uint8Array, 100), 'device')
    array.free()
    own.trim()
    cuda.compile(SOURCE, { device: 1 }).kernel('fault').launch({ grid: 1, block: 1, args: [], stream })
    await rejected(stream.synchronize())
    code(() => own.alloc(Float32Array, 5_000_000))`
  const environment = { UNIMALLOC_LOG: 'debug', FAKE_CUDA_DEVICES: '2' }
  const outcome = await runWithFakeCuda(directory as string, program(body), environment)
  t.is(outcome.code, 0, outcome.stderr)
  const lines = linesOf(t, outcome.stderr)
  const said = (event: string): string[] => lines.filter((line) => line.event === event).map(({ rest }) => rest)
  t.deepEqual(said('driver'), ['version=13000 devices=2'])
  t.deepEqual(said('context'), ['device=1 name="Fake CUDA device"'])
  const region = /^backend=cuda-unified bytes=20971520 address=0x[\da-f]+ device=1/
  t.is(said('allocate').filter((line) => region.test(line)).length, 1, outcome.stderr)
  t.is(said('free').filter((line) => region.test(line)).length, 1, outcome.stderr)
  t.regex(said('not-prefetched')[0] ?? '', /host backend/)
  t.deepEqual(said('context-lost'), ['device=1 code=700'])
  t.true(lines.some(({ level, event }) => level === 'error' && event === 'context-lost'))
  t.regex(said('refused').at(-1) ?? '', /code=CONTEXT_LOST/)
})
