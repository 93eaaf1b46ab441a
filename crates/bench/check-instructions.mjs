// Counts the instructions of the hot paths under callgrind and compares them with `instructions.json`:
//
//   node crates/bench/check-instructions.mjs [--update]
//
// The count of a path is the difference between two runs of different length, so starting up costs nothing. A path that
// takes more than TOLERANCE above its recorded count fails; one that takes that much less asks for `--update`, so that the
// record stays tight.
import { execFileSync, spawnSync } from 'node:child_process'
import { readFileSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { findCargo, root } from '../../scripts/setup.mjs'

const TOLERANCE = 0.03
const record = join(dirname(fileURLToPath(import.meta.url)), 'instructions.json')

/** Instructions of one whole run. */
function count(program, scenario, times, driver) {
  const output = '--callgrind-out-file=/dev/null'
  const { status, stderr } = spawnSync('valgrind', ['--tool=callgrind', output, program, scenario, String(times)], {
    encoding: 'utf8',
    env: { ...process.env, LD_LIBRARY_PATH: driver },
  })
  const collected = /Collected : (\d+)/.exec(stderr)
  if (status !== 0 || !collected) throw new Error(`${program} "${scenario}" ${times} failed under valgrind:\n${stderr}`)
  return Number(collected[1])
}

function build() {
  const args = [
    'build',
    '--release',
    '--locked',
    '-p',
    'unimalloc-bench',
    '--no-default-features',
    '--bin',
    'instructions',
  ]
  const messages = execFileSync(findCargo(), [...args, '--message-format=json'], {
    cwd: root,
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'inherit'],
    maxBuffer: 64 << 20,
  })
  const lines = messages.trim().split('\n')
  return lines.map((line) => JSON.parse(line)).find((line) => line.target?.name === 'instructions' && line.executable)
    .executable
}

/** A directory with a stand-in libcuda.so.1, for the scenarios of the CUDA backend. */
function driverDirectory() {
  const args = ['run', '--quiet', '--locked', '-p', 'fake-cuda', '--bin', 'fake-cuda-dir']
  return execFileSync(findCargo(), args, { cwd: root, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] }).trim()
}

function main() {
  const name = 'instruction counts of the hot paths'
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    console.log(`SKIPPED: ${name}: they are recorded for Linux on x86-64`)
    return 0
  }
  if (spawnSync('valgrind', ['--version']).status !== 0) {
    console.log(`SKIPPED: ${name}: no valgrind here (apt-get install valgrind)`)
    return 0
  }
  const program = build()
  const driver = driverDirectory()
  const recorded = JSON.parse(readFileSync(record, 'utf8'))
  const update = process.argv.includes('--update')
  let failed = 0
  for (const path of recorded.paths) {
    const [once, twice] = [1, 2].map((factor) => count(program, path.scenario, path.times * factor, driver))
    const per = (twice - once) / (path.times * (path.per ?? 1))
    const change = per / path.instructions - 1
    const bad = Number.isNaN(change) || Math.abs(change) > TOLERANCE
    const percent = `${change >= 0 ? '+' : ''}${(change * 100).toFixed(1)} %`
    console.log(`${bad ? '✘' : '✔'} ${path.scenario.padEnd(42)}${per.toFixed(1).padStart(10)}  ${percent}`)
    if (bad) failed += 1
    path.instructions = Number(per.toFixed(1))
  }
  if (update) {
    writeFileSync(record, `${JSON.stringify(recorded, null, 2)}\n`)
    return 0
  }
  if (failed > 0) {
    console.error(
      `${failed} paths are off their record by more than ${TOLERANCE * 100} %. If that is meant, run ` +
        'node crates/bench/check-instructions.mjs --update and say why in the commit.',
    )
  }
  return failed > 0 ? 1 : 0
}

process.exitCode = main()
