// Copies npm packages with what they need at run time, keeping the layout of node_modules.
import { cpSync, existsSync, readFileSync } from 'node:fs'
import { dirname, join, relative, sep } from 'node:path'
import { SetupError } from '../setup.mjs'

/** Dependencies that a package lists for building itself, which it has done already. */
const buildOnly = new Set(['cmake-js', 'node-addon-api'])

/** Files that nothing loads at run time on Linux x64. */
const leftOut = /(\.(map|d\.[cm]?ts|md|markdown|cc|h|txt)|prebuilds\/(?!jpeg-turbo-linux-x64\/).*\/.*)$/i

function find(name, from) {
  for (let folder = from; ; folder = dirname(folder)) {
    const candidate = join(folder, 'node_modules', name)
    if (existsSync(join(candidate, 'package.json'))) return candidate
    if (folder === dirname(folder)) return null
  }
}

/** @param {string[]} names @param {string} root @param {string} target */
export function copyPackages(names, root, target) {
  const done = new Set()
  const visit = (name, from, optional) => {
    const folder = find(name, from)
    if (!folder) {
      if (optional) return
      throw new SetupError(`${name}, needed in ${from}, is not installed; run \`npm ci\`.`)
    }
    if (done.has(folder)) return
    done.add(folder)
    const ownFiles = (path) => {
      const inside = relative(folder, path).split(sep).join('/')
      return !inside.startsWith('node_modules') && (/^licen[cs]e/i.test(inside) || !leftOut.test(inside))
    }
    cpSync(folder, join(target, relative(root, folder)), { recursive: true, dereference: true, filter: ownFiles })
    const manifest = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
    for (const dependency of Object.keys(manifest.dependencies ?? {})) {
      if (!buildOnly.has(dependency)) visit(dependency, folder, false)
    }
    for (const dependency of Object.keys(manifest.optionalDependencies ?? {})) visit(dependency, folder, true)
  }
  for (const name of names) visit(name, root, false)
}
