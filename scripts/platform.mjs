// `npm run build:platform [-- NAME]`: the binary of one platform as it is published, in npm/NAME/. The default is this machine's.
// A binary for Linux with glibc is linked against an old glibc, so that it loads on every system that its Node runs on.
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { isAbsolute, join } from 'node:path'
import { pathToFileURL } from 'node:url'
import { ensureDebianRust, ensureDebianRustSources } from './debian-rust.mjs'
import { compareVersions, neededGlibc, readElf } from './elf.mjs'
import { binaryOf, folderOf, glibcFloor, hostPlatform, libraryOf, targets } from './platforms.mjs'
import {
  cacheDir,
  capture,
  checkCompiler,
  checkRust,
  digestOf,
  installPackages,
  isStamped,
  root,
  run,
  runScript,
  SetupError,
  stamp,
} from './setup.mjs'
import { crossLinker } from './tools.mjs'

const variable = (target, name) => `CARGO_TARGET_${target.toUpperCase().replaceAll('-', '_')}_${name}`

const onLinuxX64 = process.platform === 'linux' && process.arch === 'x64'

/**
 * What gives cargo a standard library for the target: the one that is installed, else one of Debian's, else one that cargo builds from
 * Debian's sources with the flags (which are unstable, and the reason for RUSTC_BOOTSTRAP).
 */
export function standardLibrary(target) {
  const libraries = capture('rustc', ['--print', 'target-libdir', '--target', target])
  if (libraries !== null && existsSync(libraries)) return { env: {}, flags: [] }
  if (onLinuxX64 && target === targets['linux-arm64-gnu']) {
    const rustc = ensureDebianRust('arm64')
    if (rustc !== null) return { env: { RUSTC: rustc }, flags: [] }
  } else if (onLinuxX64) {
    const rustc = ensureDebianRustSources()
    const flags = ['-Zbuild-std=std,panic_abort,panic_unwind,test']
    if (rustc !== null) return { env: { RUSTC: rustc, RUSTC_BOOTSTRAP: '1' }, flags }
  }
  throw new SetupError(`Rust has no standard library for ${target} here: run \`rustup target add ${target}\`.`)
}

/** A folder whose `libgcc_s.so` is the compiler's own. musl-gcc finds a script of that name which names a file that it does not find. */
function unwinderFolder() {
  const compiler = process.env.REALGCC ?? 'gcc'
  const library = capture(compiler, ['-print-file-name=libgcc_s.so.1'])
  if (library === null || !isAbsolute(library)) {
    throw new SetupError(
      `${compiler} has no libgcc_s.so.1; the binary for musl is made on a Linux with gcc and musl-tools.`,
    )
  }
  const folder = join(cacheDir, 'musl')
  mkdirSync(folder, { recursive: true })
  writeFileSync(join(folder, 'libgcc_s.so'), `INPUT(${library})\n`)
  return folder
}

/** The environment and the flags with which cargo builds for the target, with the compiler and the linker that fit. */
export function buildEnvironment(name) {
  const target = targets[name]
  const library = standardLibrary(target)
  const env = {
    ...process.env,
    ...library.env,
    CARGO_PROFILE_RELEASE_DEBUG: 'false',
    CARGO_PROFILE_RELEASE_STRIP: 'symbols',
  }
  if (name.endsWith('-gnu') && onLinuxX64) env[variable(target, 'LINKER')] ??= crossLinker(target)
  if (name.endsWith('-musl')) {
    // A library that is loaded into a process has to share the process's libc, and unwinds with what is there too.
    const flags = ['-C target-feature=-crt-static']
    if (hostPlatform() !== name) {
      env[variable(target, 'LINKER')] ??= 'musl-gcc'
      flags.push(`-L native=${unwinderFolder()}`)
    }
    env[variable(target, 'RUSTFLAGS')] ??= flags.join(' ')
  }
  return { env, flags: library.flags }
}

/** Refuses a binary that would not load where its package says that it does. */
export function checkBinary(name, path = join(folderOf(name), binaryOf(name))) {
  if (!name.startsWith('linux')) return
  const { arch } = readElf(path)
  if (arch !== name.split('-')[1]) throw new SetupError(`${path} is for ${arch}, not for ${name}.`)
  const needed = neededGlibc(path)
  if (name.endsWith('-musl') && needed !== null) throw new SetupError(`${path} needs glibc ${needed}; musl has none.`)
  if (name.endsWith('-gnu') && compareVersions(needed ?? '0', glibcFloor) > 0) {
    throw new SetupError(
      `${path} needs glibc ${needed}; what is published loads from ${glibcFloor} on. Make it with \`npm run build:platform -- ${name}\` on Linux x64.`,
    )
  }
}

/** Builds npm/NAME/unimalloc.NAME.node unless it is there, made from the same sources. */
export function buildPlatform(name) {
  const target = targets[name]
  if (!target) throw new SetupError(`There is no platform ${name}; there are ${Object.keys(targets).join(', ')}.`)
  const rustVersion = checkRust()
  checkCompiler()
  installPackages()
  const sources = ['Cargo.toml', 'Cargo.lock', 'crates/unimalloc', 'crates/unimalloc-node']
  const scripts = ['scripts/platform.mjs', 'scripts/platforms.mjs', 'scripts/tools.mjs', 'scripts/debian-rust.mjs']
  const digest = digestOf([...sources, ...scripts], rustVersion, process.env.RUSTFLAGS ?? '')
  const binary = join(folderOf(name), binaryOf(name))
  if (existsSync(binary) && isStamped(name, digest)) return binary
  const { env, flags } = buildEnvironment(name)
  console.log(`Building the binary for ${name} (release) …`)
  // A directory of its own: other compilers, other flags. It is removed, as it would be of no use to any other build.
  const directory = mkdtempSync(join(tmpdir(), `unimalloc-${name}-`))
  try {
    const what = ['--package', 'unimalloc-node', '--target', target, '--target-dir', directory]
    run('cargo', ['build', '--release', '--locked', ...flags, ...what], { env })
    copyFileSync(join(directory, target, 'release', libraryOf(name)), binary)
  } finally {
    rmSync(directory, { recursive: true, force: true })
  }
  checkBinary(name)
  stamp(name, digest)
  return binary
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  await runScript(() => {
    const name = process.argv[2] ?? hostPlatform()
    if (name === null) throw new SetupError('There is no package for this platform; name one of those there are.')
    const binary = buildPlatform(name)
    const needed = name.endsWith('-gnu') ? `, needs glibc ${neededGlibc(binary)}` : ''
    console.log(`Built ${binary.slice(root.length + 1)}${needed}.`)
  })
}
