// The program `unimalloc`, as a user runs it: its words, its JSON, its exit codes.
import { spawnSync } from 'node:child_process'
import { closeSync, existsSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { inflateSync } from 'node:zlib'

import anyTest from 'ava'

import { fakeCudaDirectory } from './helpers/fake-cuda.js'

const program = fileURLToPath(new URL('../dist/cli.mjs', import.meta.url))
const cwd = mkdtempSync(join(tmpdir(), 'unimalloc-cli-'))
anyTest.after.always(() => rmSync(cwd, { recursive: true, force: true }))

const available = existsSync(program)
const test = available ? anyTest : anyTest.skip
const directory = available ? fakeCudaDirectory() : null
const withFake = directory === null ? anyTest.skip : anyTest

function unimalloc(args: string[], environment: Record<string, string> = {}) {
  const own = Object.entries(process.env).filter(
    ([name]) => !/^(UNIMALLOC_|NO_COLOR$|FORCE_COLOR$|NODE_OPTIONS$)/.test(name),
  )
  const env = { ...Object.fromEntries(own), ...environment }
  return spawnSync(process.execPath, [program, ...args], { cwd, env, encoding: 'utf8' })
}

/** Nothing of the stand-in, nor of a driver that this machine may have. */
const noDriver = { LD_LIBRARY_PATH: '', CUDA_VISIBLE_DEVICES: '-1' }
const unwrapped = (text: string | undefined) => (text ?? '').replaceAll(/\s+/g, ' ').trim()

const hidden = { UNIMALLOC_BACKEND: 'host' }
const fake = (environment: Record<string, string> = {}) => ({ LD_LIBRARY_PATH: directory as string, ...environment })

test('help: of the program and of each command', (t) => {
  const { status, stdout } = unimalloc([])
  t.is(status, 0)
  for (const word of ['doctor', 'demo', 'bench', 'Exit codes']) t.true(stdout.includes(word), word)
  for (const command of ['doctor', 'demo', 'bench']) {
    const asked = unimalloc([command, '--help'])
    t.is(asked.status, 0)
    t.true(asked.stdout.startsWith(`Usage: unimalloc ${command}`), asked.stdout)
    t.is(unimalloc(['help', command]).stdout, asked.stdout)
    t.is(unimalloc([command, '-h']).stdout, asked.stdout)
  }
})

for (const [args, said] of [
  [['doctr'], /unknown command 'doctr'.*doctor, demo, bench/],
  [['help', 'nothing'], /unknown command 'nothing'/],
  [['--nothing'], /unknown option '--nothing'/],
  [['doctor', '--jsn'], /'--jsn'.*doctor --help/],
  [['doctor', 'extra'], /'extra'.*doctor --help/],
  [['demo', '--backend', 'gpu'], /--backend is 'gpu'.*auto, host, cuda-unified/],
  [['demo', '--out', 'picture.jpg'], /picture\.jpg.*\.png/],
  [['bench', '--backend'], /backend/],
] as const) {
  test(`a command line that makes no sense ends with 2: ${args.join(' ')}`, (t) => {
    const { status, stdout, stderr } = unimalloc([...args])
    t.is(status, 2, stderr)
    t.is(stdout, '')
    t.regex(stderr, said)
    t.is(stderr.trim().split('\n').length, 1, 'one line, no stack')
  })
}

test('doctor in words: no escape codes where the output is no terminal', (t) => {
  const { status, stdout, stderr } = unimalloc(['doctor'], hidden)
  t.is(status, 0, stderr)
  // oxlint-disable-next-line no-control-regex -- it is what must not be there
  t.notRegex(stdout, /\x1b/)
  t.regex(stdout, /backend +host: UNIMALLOC_BACKEND=host/)
  t.regex(stdout, /yes +arrays in native memory/)
  t.regex(stdout, /All is well/)
})

for (const [variable, value, said] of [
  ['UNIMALLOC_BACKEND', 'foo', /UNIMALLOC_BACKEND is "foo"; use one of/],
  ['UNIMALLOC_MAX_BYTES', 'foo', /UNIMALLOC_MAX_BYTES is "foo"; write a number of bytes/],
  ['UNIMALLOC_REGISTRY_CAPACITY', 'foo', /UNIMALLOC_REGISTRY_CAPACITY is "foo"; pass a whole number/],
  ['UNIMALLOC_TRACK', 'foo', /UNIMALLOC_TRACK is "foo"; use 1 or 0/],
] as const) {
  test(`doctor with ${variable}=${value}: the backend is broken, and the last lines say what to mend`, (t) => {
    const { status, stdout } = unimalloc(['doctor'], { ...noDriver, [variable]: value })
    t.is(status, 1, stdout)
    t.regex(stdout, /backend +BROKEN: /)
    t.notRegex(stdout, /All is well/)
    const [, toMend] = stdout.split('To mend:\n')
    t.regex(unwrapped(toMend), said)
    t.is(toMend?.match(/^ {2}- /gm)?.length, 1, 'one cause, said once')
    const report = JSON.parse(unimalloc(['doctor', '--json'], { ...noDriver, [variable]: value }).stdout)
    t.false(report.ok)
    t.is(report.problems.length, 1)
    t.regex(report.problems[0], said)
  })
}

test('doctor where a GPU is asked for and none is usable ends with 3, and says so last', (t) => {
  for (const [args, environment] of [
    [['--require-gpu'], {}],
    [[], { UNIMALLOC_BACKEND: 'cuda-unified' }],
  ] as [string[], Record<string, string>][]) {
    const { status, stdout } = unimalloc(['doctor', ...args], { ...noDriver, ...environment })
    t.is(status, 3, stdout)
    t.notRegex(stdout, /All is well/)
    const [, toMend] = stdout.split('To mend:\n')
    t.regex(unwrapped(toMend), /^- a GPU was asked for, by \S+, and none is usable: .{20}/)
    const json = unimalloc(['doctor', '--json', ...args], { ...noDriver, ...environment })
    t.is(json.status, 3)
    const { ok, problems, gpuRequiredBy } = JSON.parse(json.stdout)
    t.false(ok)
    t.is(problems.length, 1)
    t.regex(gpuRequiredBy, /gpu|cuda/)
  }
  const { status, stdout } = unimalloc(['doctor', '--json'], noDriver)
  t.deepEqual([status, JSON.parse(stdout).ok], [0, true], 'nobody asked')
})

test('a broken variable is no matter of the GPU: doctor --require-gpu ends with 1', (t) => {
  const { status, stdout } = unimalloc(['doctor', '--json', '--require-gpu'], { ...noDriver, UNIMALLOC_BACKEND: 'foo' })
  t.is(status, 1, stdout)
  t.is(JSON.parse(stdout).problems.length, 2)
})

const onLinux = available && process.platform === 'linux' ? anyTest : anyTest.skip

onLinux('output that cannot be written: one line and exit code 1; a reader that has seen enough: 0', (t) => {
  const full = openSync('/dev/full', 'w')
  const { status, stderr } = spawnSync(process.execPath, [program, 'doctor'], {
    cwd,
    env: { ...process.env, ...hidden },
    encoding: 'utf8',
    stdio: ['ignore', full, 'pipe'],
  })
  closeSync(full)
  t.is(status, 1, stderr)
  t.regex(stderr, /^unimalloc: the output cannot be written: ENOSPC/)
  t.is(stderr.trim().split('\n').length, 1)

  const script = '"$0" "$1" doctor; echo $? >&2'
  const piped = spawnSync('sh', ['-c', `( ${script} ) | head -n 1`, process.execPath, program], {
    cwd,
    env: { ...process.env, ...hidden },
    encoding: 'utf8',
  })
  t.regex(piped.stdout, /^unimalloc /)
  t.is(piped.stderr.trim(), '0')
})

withFake('doctor with a GPU: every trial is made', (t) => {
  const { status, stdout, stderr } = unimalloc(['doctor', '--json'], fake())
  t.is(status, 0, stdout + stderr)
  const report = JSON.parse(stdout)
  t.true(report.ok)
  t.true(report.native.loaded)
  t.is(report.cuda.usable, true)
  t.is(report.cuda.reason, null)
  t.is(report.cuda.driver, '13.0')
  t.is(report.cuda.devices[0].name, 'Fake CUDA device')
  t.deepEqual(report.backend, { taken: 'cuda-unified', why: 'there is a usable GPU' })
  const states = Object.fromEntries(report.capabilities.map(({ name, state }: Record<string, string>) => [name, state]))
  t.is(states['memory that the GPU sees'], 'yes')
  t.is(states['kernels'], 'yes')
  t.is(states['CUDA C++ at run time'], 'yes')
  t.is(unimalloc(['doctor', '--require-gpu'], fake()).status, 0)
})

withFake('doctor without concurrent access: it works, and says what is different', (t) => {
  const { status, stdout } = unimalloc(['doctor'], fake({ FAKE_CUDA_CONCURRENT: '0' }))
  t.is(status, 0, stdout)
  t.regex(stdout, /concurrent access +no/)
  t.regex(stdout, /limited +kernels +works, but the CPU may not touch/)
})

withFake('doctor without the compiler, without a device, without managed memory', (t) => {
  const plain = fakeCudaDirectory('--no-nvrtc') as string
  const compiler = JSON.parse(unimalloc(['doctor', '--json'], { LD_LIBRARY_PATH: plain }).stdout)
  const found = compiler.capabilities.find(({ name }: { name: string }) => name === 'CUDA C++ at run time')
  t.true(compiler.ok, 'PTX works: nothing is broken')
  t.is(found.state, 'no')
  t.regex(found.words, /NVRTC/i)

  for (const environment of [{ FAKE_CUDA_DEVICES: '0' }, { FAKE_CUDA_MANAGED: '0' }] as Record<string, string>[]) {
    const { status, stdout } = unimalloc(['doctor', '--json'], fake(environment))
    t.is(status, 0, stdout)
    const report = JSON.parse(stdout)
    t.false(report.cuda.usable)
    t.true(report.cuda.reason.length > 20)
    t.is(report.backend.taken, 'host')
    t.is(unimalloc(['doctor', '--require-gpu'], fake(environment)).status, 3)
  }
})

withFake('doctor where the driver refuses memory: that is a defect, with its reason, and exit code 1', (t) => {
  const { status, stdout } = unimalloc(['doctor', '--json'], fake({ FAKE_CUDA_FAIL: 'cuMemAllocManaged@1+=999' }))
  t.is(status, 1, stdout)
  const report = JSON.parse(stdout)
  t.false(report.ok)
  const memory = report.capabilities.find(({ name }: { name: string }) => name === 'memory that the GPU sees')
  t.deepEqual([memory.state, memory.defect], ['no', true])
  t.true(memory.words.length > 20)
})

/** Width, height and the count of different values of a PNG file. */
function readPng(path: string): [width: number, height: number, values: number] {
  const file = readFileSync(path)
  const [width, height] = [file.readUInt32BE(16), file.readUInt32BE(20)]
  const data: Buffer[] = []
  for (let at = 8; at < file.length;) {
    const length = file.readUInt32BE(at)
    if (file.toString('latin1', at + 4, at + 8) === 'IDAT') data.push(file.subarray(at + 8, at + 8 + length))
    at += 12 + length
  }
  const rows = inflateSync(Buffer.concat(data))
  if (rows.length !== height * (1 + 3 * width)) throw new Error(`${rows.length} bytes of pixels`)
  return [width, height, new Set(rows).size]
}

test('demo on the host: a picture, and a result that was checked', (t) => {
  t.timeout(180_000)
  const { status, stdout, stderr } = unimalloc(['demo', '--backend', 'host', '--out', 'grown.png'])
  t.is(status, 0, stdout + stderr)
  t.regex(stdout, /check +as computed independently/)
  const [width, height, values] = readPng(join(cwd, 'grown.png'))
  t.deepEqual([width, height], [384, 256])
  t.true(values > 50, 'a pattern, not a plain')
})

test('demo where the picture cannot be written: one line that says what to change, before any work, and exit code 1', (t) => {
  mkdirSync(join(cwd, 'folder.png'))
  for (const [out, said] of [
    [join('no', 'such', 'folder.png'), /--out: there is no folder .*such; make it, or choose another name/],
    [join('folder.png', 'in.png', 'it.png'), /--out: there is no folder .*in\.png; make it/],
    ['folder.png', /--out: .*folder\.png is a folder; choose another name/],
  ] as const) {
    const { status, stderr } = unimalloc(['demo', '--backend', 'host', '--out', out])
    t.is(status, 1, stderr)
    t.regex(stderr, said)
    t.is(stderr.trim().split('\n').length, 1, stderr)
  }
})

withFake('demo and bench on a GPU that is not there end with 3', (t) => {
  for (const command of ['demo', 'bench']) {
    const { status, stderr } = unimalloc([command, '--backend', 'cuda-unified'], fake({ FAKE_CUDA_DEVICES: '0' }))
    t.is(status, 3, stderr)
    t.regex(stderr, /CUDA_UNAVAILABLE/)
  }
})

test('bench: figures for every size, none of them nothing', (t) => {
  t.timeout(180_000)
  const { status, stdout, stderr } = unimalloc(['bench', '--json', '--backend', 'host'])
  t.is(status, 0, stderr)
  const { backend, pairs, roundTrip } = JSON.parse(stdout)
  t.is(backend, 'host')
  t.is(roundTrip, null)
  t.true(pairs.length >= 5)
  for (const row of pairs) {
    for (const name of ['allocUnsafe', 'alloc', 'buffer', 'typedArray']) t.true(row[name] > 0 && row[name] < 1, name)
  }
  // What is measured first is measured warm: cold it was 100 to 200 times the next size.
  t.true(pairs[0].allocUnsafe < 30 * pairs[1].allocUnsafe, stdout)
})
