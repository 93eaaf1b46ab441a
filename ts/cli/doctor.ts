import { EXIT } from './exit.js'
import type { ExitCode } from './exit.js'
import { inspect } from './inspect.js'
import type { Report, State } from './inspect.js'
import { bytes, facts, lineWidth, styled, wrap } from './text.js'

const MARKS: Record<State, string> = {
  yes: 'yes     ',
  limited: 'limited ',
  no: 'no      ',
}
const BROKEN = 'BROKEN'
const COLOURS = { yes: 'green', limited: 'yellow', no: 'dim' } as const

function heading(text: string): void {
  console.log(`\n${styled('bold', text)}`)
}

function mayUse(backend: string | null, limit: number | null): string {
  if (backend === null) return 'unknown'
  return limit === null ? 'as much as there is' : bytes(limit)
}

function printMachine({ runtime, native, cuda, backend, limits }: Report): void {
  const names: Record<string, string> = { node: 'Node.js', bun: 'Bun', deno: 'Deno' }
  const { name, version, platform, arch, libc } = runtime
  console.log(
    facts([
      ['runtime', `${names[name] ?? name} ${version} on ${platform}-${arch}${libc ? `, ${libc}` : ''}`],
      ['native part', native.loaded ? 'loaded' : (native.error ?? 'missing')],
      ...(native.loaded
        ? ([
            ['driver', cuda.driver ? `for CUDA ${cuda.driver}` : (cuda.reason ?? 'has no device')],
            ['backend', backend.taken === null ? `${BROKEN}: ${backend.why}` : `${backend.taken}: ${backend.why}`],
            ['may use', mayUse(backend.taken, limits.processBytes)],
            ['host memory', bytes(limits.hostBytes)],
          ] as const)
        : []),
    ]),
  )
}

function printDevices(report: Report): void {
  for (const device of report.cuda.devices) {
    heading(`Device ${device.index}: ${device.name}`)
    console.log(
      facts([
        ['memory', `${bytes(device.totalBytes)}, ${bytes(device.freeBytes)} of it free`],
        ['compute capability', device.computeCapability.join('.')],
        [
          'concurrent access',
          device.concurrentManagedAccess
            ? 'yes: the CPU may touch an array while a kernel runs'
            : 'no: the CPU and the GPU take turns, so a launch waits for its kernel',
        ],
        ['ordinary memory', device.pageableMemoryAccess ? 'kernels can read it too' : 'kernels cannot read it'],
      ]),
    )
  }
}

function printCapabilities({ capabilities, backend }: Report): void {
  heading('What works here')
  const wide = Math.max(...capabilities.map(({ name }) => name.length))
  const indent = 2 + MARKS.yes.length + wide + 2
  const width = Math.max(30, lineWidth() - indent)
  for (const { name, state, words, defect } of capabilities) {
    const mark = styled(defect ? 'red' : COLOURS[state], defect ? BROKEN.padEnd(MARKS.yes.length) : MARKS[state])
    // A wrong variable stops everything with the same sentence.
    const said = words === backend.why ? 'for the reason given for the backend' : words
    console.log(`  ${mark}${name.padEnd(wide)}  ${wrap(said, width).join(`\n${' '.repeat(indent)}`)}`)
  }
}

function printVerdict({ native, cuda, problems }: Report): void {
  if (!native.loaded) {
    console.log(styled('red', 'Nothing works without the native part; the line above says what to do.'))
  } else if (problems.length > 0) {
    console.log(styled('red', 'To mend:'))
    for (const problem of problems) console.log(`  - ${wrap(problem, lineWidth() - 4).join('\n    ')}`)
  } else if (cuda.usable) {
    console.log(styled('green', 'All is well, on the GPU.'))
  } else {
    console.log('All is well, without a GPU: the same arrays in ordinary memory, and no kernels.')
  }
}

export async function doctor({ json, requireGpu }: { json: boolean; requireGpu: boolean }): Promise<ExitCode> {
  const report = await inspect({ requireGpu })
  if (json) console.log(JSON.stringify(report, null, 2))
  else {
    console.log(`${styled('bold', 'unimalloc')} ${report.unimalloc}\n`)
    printMachine(report)
    printDevices(report)
    if (report.capabilities.length > 0) printCapabilities(report)
    console.log()
    printVerdict(report)
  }
  if (report.ok) return EXIT.ok
  // The only problem is that there is no GPU.
  const onlyGpu =
    report.native.loaded && report.gpuRequiredBy !== null && !report.cuda.usable && report.problems.length === 1
  return onlyGpu ? EXIT.noGpu : EXIT.failed
}
