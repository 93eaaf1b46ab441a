// `npm test`: the Rust tests, then the JavaScript tests over the built package, then one line that counts both.
import { spawn } from 'node:child_process'
import { join } from 'node:path'
import { stripVTControlCharacters } from 'node:util'
import { build } from './build.mjs'
import { findCargo, root, runScript } from './setup.mjs'

const suites = { '--rust': testRust, '--js': testJavaScript }

/** Runs a program, shows its output as it comes, and hands every finished line to `onLine`. */
function watch(program, args, onLine) {
  return new Promise((resolve, reject) => {
    const env = { ...process.env }
    if (process.stdout.isTTY && !env.NO_COLOR) {
      env.FORCE_COLOR ??= '1'
      env.CARGO_TERM_COLOR ??= 'always'
    }
    const child = spawn(program, args, { cwd: root, env, stdio: ['ignore', 'pipe', 'inherit'] })
    let rest = ''
    child.stdout.setEncoding('utf8')
    child.stdout.on('data', (chunk) => {
      process.stdout.write(chunk)
      const lines = (rest + chunk).split('\n')
      rest = lines.pop()
      for (const line of lines) onLine(stripVTControlCharacters(line).trim())
    })
    child.on('error', reject)
    child.on('close', (code, signal) => {
      if (rest) onLine(stripVTControlCharacters(rest).trim())
      if (signal) console.error(`${program} was ended by ${signal}`)
      resolve(code ?? 1)
    })
  })
}

async function testRust(args) {
  const counts = { passed: 0, failed: 0, skipped: 0 }
  const code = await watch(findCargo(), ['test', '--no-fail-fast', ...args], (line) => {
    const result = /^test result: \S+ (\d+) passed; (\d+) failed; (\d+) ignored;.* (\d+) filtered out/.exec(line)
    if (!result) return
    // A failed test shows the output of the processes it started, which may be test runs of their own, filtered to one test.
    if (args.length === 0 && result[4] !== '0') return
    counts.passed += Number(result[1])
    counts.failed += Number(result[2])
    counts.skipped += Number(result[3])
  })
  return settle(counts, code)
}

async function testJavaScript(args) {
  const counts = { passed: 0, failed: 0, skipped: 0 }
  const cli = join(root, 'node_modules', 'ava', 'entrypoints', 'cli.mjs')
  const code = await watch(process.execPath, [cli, ...args], (line) => {
    // ava's summary leaves out the passed tests as soon as one failed, so those are counted as they are listed.
    if (/^[✔√] /.test(line)) counts.passed += 1
    const result = /^(\d+) tests? (failed|skipped|todo)$/.exec(line)
    if (result) counts[result[2] === 'failed' ? 'failed' : 'skipped'] += Number(result[1])
  })
  return settle(counts, code)
}

/** A suite that failed without a failed test (it did not compile, crashed, timed out) counts as one failure. */
function settle(counts, code) {
  if (code !== 0 && counts.failed === 0) counts.failed = 1
  return counts
}

await runScript(async () => {
  const only = process.argv[2] in suites ? [process.argv[2]] : Object.keys(suites)
  const args = process.argv.slice(only.length === 1 ? 3 : 2)
  if (only.length > 1 && args.length > 0) {
    console.error(
      'npm test takes no arguments; pass them to one suite: npm run test:js -- ARGS, npm run test:rust -- ARGS',
    )
    return 1
  }
  await build()
  const total = { passed: 0, failed: 0, skipped: 0 }
  for (const name of only) {
    const counts = await suites[name](args)
    for (const key of Object.keys(total)) total[key] += counts[key]
  }
  const skipped = total.skipped > 0 ? `, ${total.skipped} skipped` : ''
  console.log(`\n${total.passed} passed, ${total.failed} failed${skipped}`)
  return total.failed > 0 || total.passed === 0 ? 1 : 0
})
