// What every command needs before it can start: the right Node, Rust, a C compiler and the npm packages.
// No dependencies: this runs in a fresh clone.
import { spawnSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { homedir } from 'node:os'
import { delimiter, join, relative, resolve } from 'node:path'

export const root = resolve(import.meta.dirname, '..')
export const cacheDir = join(root, 'node_modules', '.cache', 'unimalloc')
const isWindows = process.platform === 'win32'

/** Something the user has to change; printed without a stack. */
export class SetupError extends Error {}

/** Runs `main`, turns a SetupError into one line on stderr, and sets the exit code. */
export async function runScript(main) {
  try {
    process.exitCode = (await main()) ?? 0
  } catch (error) {
    if (!(error instanceof SetupError)) throw error
    console.error(`\n${error.message}`)
    process.exitCode = 1
  }
}

/** Runs a program with its output shown; throws when it cannot start or fails. */
export function run(program, args, options = {}) {
  const result = spawnSync(program, args, { cwd: root, stdio: 'inherit', ...options })
  if (result.error) throw new SetupError(`cannot start ${program}: ${result.error.message}`)
  if (result.status !== 0) {
    const how = result.signal ? `was ended by ${result.signal}` : `failed with exit code ${result.status}`
    throw new SetupError(`\`${[program, ...args].join(' ')}\` ${how}; its message is above.`)
  }
}

/** The output of a program, or null when it cannot be run. */
export function capture(program, args, options = {}) {
  const result = spawnSync(program, args, { cwd: root, encoding: 'utf8', maxBuffer: 1 << 28, ...options })
  return result.error || result.status !== 0 ? null : result.stdout.trim()
}

export function checkNode() {
  const required = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')).engines.node.replace('>=', '')
  const [major, minor] = process.versions.node.split('.').map(Number)
  const [needMajor, needMinor] = required.split('.').map(Number)
  if (major < needMajor || (major === needMajor && minor < needMinor)) {
    throw new SetupError(
      `unimalloc needs Node ${required} or newer, this is ${process.version}. Install a current Node and run the command again.`,
    )
  }
}

/** Finds cargo, also where rustup puts it without telling this shell, and makes it visible to child processes. */
export function findCargo() {
  if (capture('cargo', ['--version'])) return 'cargo'
  const home = process.env.CARGO_HOME ?? join(homedir(), '.cargo')
  const bin = join(home, 'bin')
  const candidate = join(bin, isWindows ? 'cargo.exe' : 'cargo')
  if (existsSync(candidate)) {
    process.env.PATH = `${bin}${delimiter}${process.env.PATH ?? ''}`
    if (capture(candidate, ['--version'])) return candidate
    throw new SetupError(
      `${candidate} is there but does not run. Run \`rustup default stable\` to give it a toolchain, then try again.`,
    )
  }
  throw new SetupError(
    `Rust was not found: no \`cargo\` on the PATH and none in ${bin}. Install it with rustup (https://rustup.rs), then run the command again.`,
  )
}

export function checkRust() {
  findCargo()
  const version = capture('rustc', ['--version'])
  if (!version) {
    throw new SetupError('cargo runs but rustc does not. Run `rustup default stable`, then try again.')
  }
  const required = /^rust-version = "(\d+)\.(\d+)"/m.exec(readFileSync(join(root, 'Cargo.toml'), 'utf8'))
  const [, major, minor] = /(\d+)\.(\d+)/.exec(version).map(Number)
  if (required && (major < Number(required[1]) || (major === Number(required[1]) && minor < Number(required[2])))) {
    throw new SetupError(
      `unimalloc needs Rust ${required[1]}.${required[2]} or newer, this is ${version}. Run \`rustup update stable\`, then try again.`,
    )
  }
  return version
}

export function checkCompiler() {
  // MSVC's linker is found by rustc itself, through the registry.
  if (isWindows) return
  const candidates = process.env.CC ? [process.env.CC] : ['cc', 'gcc', 'clang']
  if (candidates.some((compiler) => capture(compiler, ['--version']))) return
  const install =
    process.platform === 'darwin'
      ? '`xcode-select --install`'
      : '`apt-get install build-essential`, or your system’s own package'
  throw new SetupError(
    `No C compiler was found (looked for ${candidates.join(', ')}); Rust needs one to link. Install one with ${install}, then run the command again.`,
  )
}

/** Runs npm as the user has it: the npm that started us, else the one beside this Node, else the one on the PATH. */
export function npm(args) {
  const started = process.env.npm_execpath
  if (started && /npm-cli\.(c|m)?js$/.test(started)) return run(process.execPath, [started, ...args])
  return run('npm', args, { shell: isWindows })
}

/** True when what `digest` was made from is what the last successful step named `name` was made from. */
export function isStamped(name, digest) {
  const path = join(cacheDir, `${name}.stamp`)
  return existsSync(path) && readFileSync(path, 'utf8') === digest
}

export function stamp(name, digest) {
  mkdirSync(cacheDir, { recursive: true })
  writeFileSync(join(cacheDir, `${name}.stamp`), digest)
}

export function unstamp(name) {
  rmSync(join(cacheDir, `${name}.stamp`), { force: true })
}

/** A digest of the contents of files and folders, and of anything else that decides the outcome. */
export function digestOf(paths, ...extra) {
  const hash = createHash('sha256')
  const visit = (path) => {
    if (!existsSync(path)) return
    if (statSync(path).isDirectory()) {
      for (const entry of readdirSync(path).toSorted()) {
        if (entry !== 'target' && entry !== 'node_modules') visit(join(path, entry))
      }
      return
    }
    hash.update(relative(root, path)).update('\0').update(readFileSync(path)).update('\0')
  }
  for (const path of paths) visit(resolve(root, path))
  for (const value of extra) hash.update(String(value)).update('\0')
  return hash.digest('hex')
}

/** `npm ci`, once per lock file. */
export function installPackages() {
  const digest = digestOf(['package-lock.json'], process.platform, process.arch)
  if (isStamped('packages', digest)) return
  console.log('Installing the npm packages (once per package-lock.json) …')
  // `npm ci` empties node_modules, and the stamps with it: what was built from other packages is built again.
  npm(['ci', '--no-audit', '--no-fund', '--loglevel=error'])
  stamp('packages', digest)
}
