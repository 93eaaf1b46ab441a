// Programs that come as npm packages and are too large, or too rarely used, to be dev dependencies: installed once into a cache.
import { spawnSync } from 'node:child_process'
import { createHash } from 'node:crypto'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import { homedir } from 'node:os'
import { join } from 'node:path'
import { npm, run, SetupError } from './setup.mjs'

export const toolCache = join(process.env.XDG_CACHE_HOME ?? join(homedir(), '.cache'), 'unimalloc')

/** Makes `folder` by calling `fill` on an empty one beside it: it is there completely, or not at all. */
export function once(folder, fill) {
  if (existsSync(folder)) return folder
  mkdirSync(toolCache, { recursive: true })
  const fresh = mkdtempSync(join(toolCache, '.fresh-'))
  try {
    fill(fresh)
    renameSync(fresh, folder)
  } catch (error) {
    rmSync(fresh, { recursive: true, force: true })
    // Another process may have made it meanwhile.
    if (!existsSync(folder)) throw error
  }
  return folder
}

/**
 * The folder that has these npm packages in its `node_modules`. Their install scripts do not run: what they need is in the packages.
 * @param {string} name of the folder
 * @param {Record<string, string>} packages name → version
 * @param {string[]} options of npm
 */
export function npmTool(name, packages, options = []) {
  const versions = Object.entries(packages).map(([packageName, version]) => `${packageName}@${version}`)
  const digest = createHash('sha256').update(versions.join(' ')).digest('hex').slice(0, 8)
  return once(join(toolCache, `${name}-${digest}`), (folder) => {
    console.log(`Installing ${versions.join(', ')} (once) …`)
    writeFileSync(join(folder, 'package.json'), '{ "private": true }\n')
    const quiet = ['--no-audit', '--no-fund', '--loglevel=error']
    npm(['install', '--prefix', folder, '--ignore-scripts', '--no-save', ...options, ...quiet, ...versions])
  })
}

/** Toolchains whose sysroot has glibc 2.17, so that what they link asks for no newer one. */
const toolchains = {
  'x86_64-unknown-linux-gnu': {
    name: '@napi-rs/cross-toolchain-x64-target-x86_64',
    version: '1.0.0',
    integrity: 'sha512-lecoghCfoTAX9MLFcIx9/nL9M8xdkZ9n8Pki8qjKUNzjiq1zbECdEbzIZAMMHRtrXxifK9dAyYuh8gSxNbr2og==',
  },
  'aarch64-unknown-linux-gnu': {
    name: '@napi-rs/cross-toolchain-x64-target-aarch64',
    version: '1.0.3',
    integrity: 'sha512-EMFcy/ahFsmCY3BI1tMC3wRUYZ+cDuILg7nP1micaKXW1tO1+RvUB1CC6QYe+cv2W4Tuz9wr3qcFExWyjgWf2w==',
  },
}

/** The linker, from a toolchain that runs on Linux x64, for a Linux target with glibc. */
export function crossLinker(target) {
  const { name, version, integrity } = toolchains[target]
  const folder = once(join(toolCache, `${name.split('/')[1]}-${version}`), (fresh) => {
    console.log(`Installing ${name}@${version} (once) …`)
    npm(['pack', `${name}@${version}`, '--pack-destination', fresh, '--silent'])
    const tarball = join(fresh, `${name.slice(1).replace('/', '-')}-${version}.tgz`)
    const digest = `sha512-${createHash('sha512').update(readFileSync(tarball)).digest('base64')}`
    if (digest !== integrity) throw new SetupError(`${name}@${version} is not what it was: ${digest}, not ${integrity}`)
    run('tar', ['-xzf', tarball, '-C', fresh])
    if (spawnSync('xz', ['--version']).error) {
      throw new SetupError('The toolchain is packed with xz: install it (`apt-get install xz-utils`), then try again.')
    }
    run('tar', ['-xJf', join(fresh, 'package', `${target}.tar.xz`), '-C', fresh])
    rmSync(tarball)
    rmSync(join(fresh, 'package'), { recursive: true })
  })
  return join(folder, 'bin', `${target}-gcc`)
}
