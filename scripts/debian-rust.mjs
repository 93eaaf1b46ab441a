// Rust for another architecture from Debian's packages, unpacked beside the system and not installed: for machines where rustup
// cannot bring the standard library of a second target.
import { chmodSync, existsSync, mkdirSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { capture, run, SetupError } from './setup.mjs'
import { once, toolCache } from './tools.mjs'

/** Downloads packages with what apt's sources have, or those that the options name, and unpacks them into a folder. */
export function unpackDebian(folder, packages, options = []) {
  const downloads = join(folder, 'downloads')
  mkdirSync(downloads, { recursive: true })
  run('apt-get', [...options, 'download', '-qq', ...packages], {
    cwd: downloads,
    stdio: ['ignore', 'inherit', 'ignore'],
  })
  for (const file of readdirSync(downloads)) run('dpkg', ['-x', join(downloads, file), folder])
  rmSync(downloads, { recursive: true })
}

/** Whether this is a Debian with apt, able to fetch packages of that architecture. */
export function hasDebian(architecture) {
  if (!capture('dpkg', ['--print-architecture'])) return false
  return [
    capture('dpkg', ['--print-architecture']),
    ...(capture('dpkg', ['--print-foreign-architectures']) ?? '').split('\n'),
  ].includes(architecture)
}

/** The Debian package `libstd-rust-web-1.96` of the same release as `rustc-web`. */
function runtimePackage() {
  const depends = capture('apt-cache', ['depends', '--no-recommends', 'libstd-rust-web-dev']) ?? ''
  return /Depends: (libstd-rust-web-[\d.]+)/.exec(depends)?.[1] ?? null
}

/** The packages of a rustc for this machine, or null where Debian's packages are not to be had. */
function compilerPackages() {
  if (!capture('dpkg', ['--print-architecture'])) return null
  const runtime = runtimePackage()
  if (runtime === null) return null
  const llvm = /Depends: (libllvm\d+)/.exec(capture('apt-cache', ['depends', runtime]) ?? '')?.[1]
  return ['rustc-web', runtime, 'libstd-rust-web-dev', ...(llvm ? [llvm] : [])]
}

/** Unpacks a compiler into the cache, once, and gives the program that starts it. */
function unpackCompiler(name, what, packages, finish = () => {}) {
  const folder = once(join(toolCache, name), (fresh) => {
    console.log(`Unpacking Debian's Rust ${what} (once) …`)
    unpackDebian(fresh, packages)
    finish(fresh)
    // Its libraries must be found by the compiler alone, not by every program that the build starts.
    const libraries = '$here/usr/lib/x86_64-linux-gnu'
    const script = `#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH="${libraries}" exec "$here/usr/bin/rustc" "$@"\n`
    writeFileSync(join(fresh, 'rustc'), script)
    chmodSync(join(fresh, 'rustc'), 0o755)
    if (capture(join(fresh, 'rustc'), ['--version']) === null) {
      throw new SetupError("Debian's rustc does not start here: it needs the Debian release that it was made for.")
    }
  })
  return join(folder, 'rustc')
}

/** A rustc that compiles for `architecture` too, or null where Debian's packages are not to be had. */
export function ensureDebianRust(architecture) {
  const name = `debian-rust-${architecture}`
  if (existsSync(join(toolCache, name))) return join(toolCache, name, 'rustc')
  const packages = compilerPackages()
  if (packages === null) return null
  if (!hasDebian(architecture)) {
    throw new SetupError(
      `Debian's packages for ${architecture} are not in reach: run \`dpkg --add-architecture ${architecture} && apt-get update\`, then try again.`,
    )
  }
  return unpackCompiler(name, `for ${architecture}`, [...packages, `libstd-rust-web-dev:${architecture}`])
}

/** A rustc with the sources of its standard library, from which cargo builds one for any target; null as above. */
export function ensureDebianRustSources() {
  const name = 'debian-rust-sources'
  if (existsSync(join(toolCache, name))) return join(toolCache, name, 'rustc')
  const packages = compilerPackages()
  if (packages === null) return null
  return unpackCompiler(name, 'with its sources', [...packages, 'rust-web-src'], (fresh) => {
    // Of the whole compiler's sources, which come along, the library's alone are of use.
    for (const folder of readdirSync(join(fresh, 'usr', 'src'))) {
      for (const part of readdirSync(join(fresh, 'usr', 'src', folder))) {
        if (part !== 'library') rmSync(join(fresh, 'usr', 'src', folder, part), { recursive: true })
      }
    }
  })
}
