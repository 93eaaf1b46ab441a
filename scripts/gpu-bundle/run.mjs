// Runs what the bundle holds and prints a table last. Started by run.sh.
import { spawn } from 'node:child_process'
import { createWriteStream, existsSync, mkdirSync, readFileSync, readdirSync } from 'node:fs'
import { join, resolve } from 'node:path'
import { parseArgs } from 'node:util'
import { cuda, whyNoCuda } from 'unimalloc'

const here = import.meta.dirname
const patience = 8 * 60_000
const parts = { tests: [rustTests, javaScriptTests], demo: [demo], bench: [rustBenchmarks, javaScriptBenchmarks] }

const noGpu = whyNoCuda()
const { builtFrom } = JSON.parse(readFileSync(join(here, 'package.json'), 'utf8'))
const results = []
let out

/** Runs a program; its output goes to the log and, if `show`, to the terminal. Lines are handed to `onLine`. */
function execute(name, program, args, { show = false, onLine = () => {}, env = {} } = {}) {
  return new Promise((done) => {
    const started = performance.now()
    const log = createWriteStream(join(out, `${name.replaceAll(/[^\w.-]+/g, '-')}.log`))
    const child = spawn(program, args, {
      cwd: here,
      env: { ...process.env, ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    const timer = setTimeout(() => child.kill('SIGKILL'), patience)
    let rest = ''
    const take = (chunk) => {
      log.write(chunk)
      if (show) process.stdout.write(chunk)
      const lines = (rest + chunk).split('\n')
      rest = lines.pop()
      for (const line of lines) onLine(line.trim())
    }
    child.stdout.setEncoding('utf8').on('data', take)
    child.stderr.setEncoding('utf8').on('data', take)
    child.on('error', (error) => take(`${error.message}\n`))
    child.on('close', (code, signal) => {
      clearTimeout(timer)
      log.end()
      done({ code: signal ? signal : code, seconds: (performance.now() - started) / 1000 })
    })
  })
}

function record(name, { code, seconds }, { passed = 0, failed = 0, skipped = [], note = '' } = {}) {
  const broken = code !== 0 && failed === 0 ? 1 : 0
  const result = { name, passed, failed: failed + broken, skipped, seconds, note: broken ? `ended with ${code}` : note }
  results.push(result)
  console.log(`${name}: ${result.passed} passed, ${result.failed} failed, ${skipped.length} skipped ${result.note}`)
}

function skip(name, reason) {
  results.push({ name, passed: 0, failed: 0, skipped: [name], seconds: 0, note: reason })
  console.log(`${name}: skipped, ${reason}`)
}

function filesIn(...folder) {
  const path = join(here, ...folder)
  if (!existsSync(path)) return []
  const entries = readdirSync(path, { withFileTypes: true }).filter(
    (entry) => entry.isFile() && !entry.name.includes('.so'),
  )
  return entries.map((entry) => join(path, entry.name)).toSorted()
}

const nameOf = (path) => path.split('/').at(-1)

/**
 * Rust tests that use the real driver where there is one: they run under the cap. All others run as on a machine without a GPU, which is
 * hidden from them, and without the cap, because some of them set ceilings of their own.
 */
const usesTheDevice = /^contract$|^observed$|gpu/
/** They need two of them; with fewer, libtest names them as ignored. */
const usesTwo = /^cuda_gpu_devices$/
/** They time the device, and read counters of the whole process. */
const oneAtATime = ['--test-threads=1']

async function rustTests() {
  for (const program of filesIn('rust', 'tests')) {
    const onDevice = usesTheDevice.test(nameOf(program))
    const env = onDevice ? {} : { CUDA_VISIBLE_DEVICES: '', UNIMALLOC_MAX_BYTES: undefined }
    const counts = { passed: 0, failed: 0, skipped: [] }
    const tooFew = noGpu || (usesTwo.test(nameOf(program)) && cuda.devices().length < 2)
    const ended = await execute(
      `rust ${nameOf(program)}`,
      program,
      tooFew ? [] : ['--include-ignored', ...(onDevice ? oneAtATime : [])],
      {
        env,
        onLine(line) {
          const test = /^test (\S+) .*\.\.\. ignored/.exec(line)
          if (test) counts.skipped.push(test[1])
          // A failed test shows the output of test runs of its own, filtered to one test.
          const total = /^test result: \S+ (\d+) passed; (\d+) failed;.* 0 filtered out/.exec(line)
          if (total) {
            counts.passed += Number(total[1])
            counts.failed += Number(total[2])
          }
          if (/^test .*FAILED$/.test(line)) console.log(`  ${line}`)
        },
      },
    )
    if (counts.passed + counts.failed + counts.skipped.length > 0 || ended.code !== 0) {
      record(`rust ${nameOf(program)}`, ended, counts)
    }
  }
}

async function javaScriptTests() {
  const counts = { passed: 0, failed: 0, skipped: [] }
  const env = { UNIMALLOC_FAKE_CUDA_DIR: join(here, 'rust', 'tests', '.tools', 'fake-cuda-dir') }
  const ava = join(here, 'node_modules', 'ava', 'entrypoints', 'cli.mjs')
  const ended = await execute('javascript', process.execPath, [ava], {
    env,
    onLine(line) {
      if (/^✔ /.test(line)) counts.passed += 1
      if (/^- \[skip\] /.test(line)) counts.skipped.push(line.slice('- [skip] '.length))
      if (/^✘ \[fail\]/.test(line)) console.log(`  ${line}`)
      const total = /^(\d+) tests? failed$/.exec(line)
      if (total) counts.failed = Number(total[1])
    },
  })
  record('javascript', ended, counts)
}

async function demo() {
  const main = join(here, 'examples', 'demo', 'main.js')
  for (const backend of ['host', 'cuda-unified']) {
    const name = `demo ${backend}`
    if (backend === 'cuda-unified' && noGpu) {
      skip(name, noGpu)
      continue
    }
    const ended = await execute(
      name,
      process.execPath,
      [main, '--backend', backend, '--out', join(out, `demo-${backend}`)],
      { show: true },
    )
    record(name, ended, { passed: ended.code === 0 ? 1 : 0 })
  }
}

async function rustBenchmarks() {
  const program = join(here, 'rust', 'bench', 'unimalloc-bench')
  const compared = join(out, 'compare.json')
  const resident = join(out, 'resident.json')
  const steps = [
    ['compare', '--out', compared],
    ['resident', '--out', resident],
    ['report', compared, resident, join(out, 'report')],
  ]
  for (const args of steps) {
    const name = `bench ${args[0]}`
    const ended = await execute(name, program, args, { show: true })
    record(name, ended, { passed: ended.code === 0 ? 1 : 0 })
  }
  if (noGpu) return skip('bench gpu', noGpu)
  const gpu = ['--commit', builtFrom.split(',')[0], '--out', join(out, 'gpu.json')]
  const ended = await execute('bench gpu', join(here, 'rust', 'bench', 'gpu'), gpu, { show: true })
  record('bench gpu', ended, { passed: ended.code === 0 ? 1 : 0 })
}

async function javaScriptBenchmarks() {
  for (const program of filesIn('benchmark').filter((path) => path.endsWith('.bench.js'))) {
    const name = `bench ${nameOf(program)}`
    const ended = await execute(name, process.execPath, ['--expose-gc', program], { show: true })
    record(name, ended, { passed: ended.code === 0 ? 1 : 0 })
  }
}

function printTable() {
  const sum = (key) => results.reduce((total, result) => total + result[key], 0)
  const skipped = results.flatMap((result) => result.skipped.map((name) => `${result.name}: ${name}`))
  if (skipped.length > 0) console.log(`\nskipped:\n${skipped.map((name) => `  ${name}`).join('\n')}`)
  console.log(`\ncommit  ${builtFrom}`)
  console.log(
    `device  ${
      noGpu
        ? `none (${noGpu})`
        : cuda
            .devices()
            .map(({ name }) => name)
            .join(', ')
    }`,
  )
  console.log(`limit   ${process.env.UNIMALLOC_MAX_BYTES}\n`)
  const wide = Math.max(4, ...results.map(({ name }) => name.length))
  console.log(`${'what'.padEnd(wide)}  passed  failed  skipped  seconds`)
  for (const { name, passed, failed, skipped: names, seconds, note } of results) {
    const cells = [
      String(passed).padStart(6),
      String(failed).padStart(6),
      String(names.length).padStart(7),
      seconds.toFixed(1).padStart(7),
    ]
    console.log(`${name.padEnd(wide)}  ${cells.join('  ')}${failed > 0 && note ? `  ${note}` : ''}`)
  }
  console.log(`\n${sum('passed')} passed, ${sum('failed')} failed, ${skipped.length} skipped`)
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { out: { type: 'string', default: join(here, 'results') } },
})
const wanted = positionals[0] ?? 'all'
if (positionals.length > 1 || (wanted !== 'all' && !(wanted in parts))) {
  console.error('usage: ./run.sh [tests|demo|bench|all] [--out DIR]')
  process.exit(2)
}
out = resolve(values.out)
mkdirSync(out, { recursive: true })
for (const [name, steps] of Object.entries(parts)) {
  if (wanted !== 'all' && wanted !== name) continue
  for (const step of steps) await step()
}
printTable()
process.exitCode = results.some(({ failed }) => failed > 0) ? 1 : 0
