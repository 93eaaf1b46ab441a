import { EXIT } from './arguments.js'
import type { ExitCode } from './arguments.js'
import { inspect } from './inspect.js'
import type { Capability, Report, State } from './inspect.js'
import { bytes, facts, styled, wrap } from './text.js'

const MARKS: Record<State, string> = {
  yes: 'yes     ',
  limited: 'limited ',
  no: 'no      ',
}
const COLOURS = { yes: 'green', limited: 'yellow', no: 'dim' } as const

function heading(text: string): void {
  console.log(`\n${styled('bold', text)}`)
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
            ['backend', `${backend.taken ?? 'none'}: ${backend.why}`],
            ['may use', limits.processBytes === null ? 'as much as there is' : bytes(limits.processBytes)],
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

function printCapabilities(capabilities: readonly Capability[]): void {
  heading('What works here')
  const wide = Math.max(...capabilities.map(({ name }) => name.length))
  const indent = 2 + MARKS.yes.length + wide + 2
  const width = Math.max(30, Math.min(process.stdout.columns ?? 110, 120) - indent)
  for (const { name, state, words, defect } of capabilities) {
    const mark = styled(defect ? 'red' : COLOURS[state], defect ? 'BROKEN  ' : MARKS[state])
    console.log(`  ${mark}${name.padEnd(wide)}  ${wrap(words, width).join(`\n${' '.repeat(indent)}`)}`)
  }
}

function verdict(report: Report): string {
  if (!report.native.loaded)
    return styled('red', 'Nothing works without the native part; the line above says what to do.')
  if (!report.ok) return styled('red', 'Something that should work here does not; the lines above say what.')
  if (!report.cuda.usable) return 'All is well, without a GPU: the same arrays in ordinary memory, and no kernels.'
  return styled('green', 'All is well, on the GPU.')
}

export async function doctor({ json, requireGpu }: { json: boolean; requireGpu: boolean }): Promise<ExitCode> {
  const report = await inspect()
  if (json) console.log(JSON.stringify(report, null, 2))
  else {
    console.log(`${styled('bold', 'unimalloc')} ${report.unimalloc}\n`)
    printMachine(report)
    printDevices(report)
    if (report.capabilities.length > 0) printCapabilities(report.capabilities)
    console.log(`\n${verdict(report)}`)
  }
  if (!report.ok) return EXIT.failed
  return requireGpu && !report.cuda.usable ? EXIT.noGpu : EXIT.ok
}
