// npm run demo [-- photo.jpg] [--backend auto|host|cuda-unified] [--out DIR]
import { join, resolve } from 'node:path'
import { performance } from 'node:perf_hooks'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { Allocator, UnimallocError, whyNoCuda } from 'unimalloc'
import { InputError, readPhoto, writePng } from './photo.js'
import { runPipeline } from './pipeline.js'
import { progress } from './progress.js'
import { verify } from './reference.js'
import { formatBytes, printReport } from './report.js'
import { cudaRunner, hostRunner } from './runners.js'

const usage = `npm run demo [-- PHOTO] [--backend auto|host|cuda-unified] [--out DIR]

Decodes a photograph into unified memory, draws it in ink and wash, checks the result against an independent
computation and writes the picture before and after, side by side, to DIR/before-after.png.

  PHOTO      a JPEG or PNG file; a photograph that comes with the demo if left out
  --backend  where to run; 'auto' takes the GPU where there is one
  --out      folder for the picture, default demo-output`

/** The second pass finds its scratch memory in the pool. */
const passes = 2

function readArguments() {
  let parsed
  try {
    parsed = parseArgs({
      allowPositionals: true,
      options: {
        backend: { type: 'string', default: 'auto' },
        out: { type: 'string', default: 'demo-output' },
        help: { type: 'boolean', short: 'h', default: false },
      },
    })
  } catch (error) {
    throw new InputError(`${error.message.split('. ')[0]}. See npm run demo -- --help.`)
  }
  const { values, positionals } = parsed
  if (positionals.length > 1) throw new InputError('One photograph at a time. See npm run demo -- --help.')
  const { backend } = values
  if (backend !== 'auto' && backend !== 'host' && backend !== 'cuda-unified') {
    throw new InputError(`--backend is auto, host or cuda-unified, not '${backend}'. See npm run demo -- --help.`)
  }
  const photo = positionals[0] ?? fileURLToPath(new URL('coffee.jpg', import.meta.url))
  return { backend, photo: resolve(photo), out: resolve(values.out), help: values.help }
}

/** How often the allocator has gone to the driver (host backend: to the system) for memory. @param {Allocator} allocator */
function driverCalls(allocator) {
  const { backendAllocations, backendFrees, backendFailures } = allocator.stats()
  return backendAllocations + backendFrees + backendFailures
}

/** @param {string} wanted @param {Allocator} allocator */
function why(wanted, allocator) {
  if (wanted !== 'auto') return `asked for by name`
  if (allocator.backend === 'cuda-unified') return `'auto' found a usable GPU`
  return `'auto' found no usable GPU: ${whyNoCuda()}`
}

async function run() {
  const options = readArguments()
  if (options.help) {
    console.log(usage)
    return 0
  }
  const allocator = new Allocator({ backend: options.backend })
  const prepared = performance.now()
  const runner = allocator.backend === 'host' ? hostRunner() : cudaRunner()
  const prepareTime = performance.now() - prepared
  try {
    const decoding = performance.now()
    const photo = readPhoto(options.photo, allocator)
    const calls = [driverCalls(allocator)]
    const decodeTime = performance.now() - decoding

    const times = []
    let output
    for (let pass = 0; pass < passes; pass++) {
      output?.sheet.free()
      const before = driverCalls(allocator)
      runner.prefetch(photo.pixels, 'device')
      output = runPipeline({ allocator, filters: runner.filters, photo, stage: runner.stage })
      runner.prefetch(output.sheet, 'host')
      times.push(await runner.finish())
      calls.push(driverCalls(allocator) - before)
    }

    const { sheet, sheetWidth, scratch } = output
    const bar = progress('checking')
    const check = verify({ photo, sheet, sheetWidth, onProgress: bar.update })
    bar.stop()
    const path = join(options.out, 'before-after.png')
    await writePng(path, sheet, sheetWidth, photo.height)
    sheet.free()
    photo.pixels.free()

    const stats = allocator.stats()
    printReport({
      clock: runner.clock,
      passes: times,
      facts: [
        ['backend', `${allocator.backend} (${why(options.backend, allocator)})`],
        ['device', runner.device],
        ['photograph', `${options.photo}, ${photo.width} × ${photo.height}`],
        ['decoder', `${photo.decoder}, ${decodeTime.toFixed(1)} ms`],
        ...(allocator.backend === 'host'
          ? []
          : [['kernels', `compiled in ${prepareTime.toFixed(0)} ms, ${runner.launches()} launches`]]),
      ],
      memory: [
        ['copied between host and device by the program', '0 bytes: both sides used the same arrays'],
        ['copied on the CPU while decoding', formatBytes(photo.copiedBytes)],
        ['scratch per pass', `${scratch.arrays} arrays, ${formatBytes(scratch.bytes)}`],
        [
          'allocations',
          `${stats.totalCount} arrays, ${formatBytes(stats.totalBytes)} in all, at most ${formatBytes(stats.peakBytes)} at once`,
        ],
        ['still allocated', `${stats.currentCount} arrays, ${formatBytes(stats.currentBytes)}`],
        [
          'held from the system',
          `${formatBytes(stats.reservedBytes)}, of which ${formatBytes(stats.cachedBytes)} free for reuse`,
        ],
        [
          allocator.backend === 'host' ? 'calls to the system for memory' : 'calls to the driver for memory',
          calls.map((count, pass) => `${pass === 0 ? 'decoding' : `pass ${pass}`}: ${count}`).join(', '),
        ],
      ],
      results: [
        ['picture', path],
        [
          'check',
          `${check.ok ? 'as computed independently' : 'DIFFERS from the independent computation'}: ${check.pixels} pixels ` +
            `(${(100 * check.share).toFixed(0)} %) compared, ${check.different} off, at most by ${check.worst} of 255`,
        ],
      ],
    })
    return check.ok && stats.currentCount === 0 ? 0 : 1
  } finally {
    runner.dispose()
    allocator[Symbol.dispose]()
  }
}

try {
  process.exitCode = await run()
} catch (error) {
  if (!(error instanceof InputError) && !(error instanceof UnimallocError)) throw error
  console.error(`demo: ${error.message}`)
  process.exitCode = 1
}
