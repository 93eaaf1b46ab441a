// The package as npm lays it out on another platform than this one, where npm itself would refuse to.
import { copyFileSync, mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { readManifest } from '../platforms.mjs'
import { root, run } from '../setup.mjs'

/** Unpacks the tarballs of the package, and of one platform's if one is named, into a project; the smoke suite lies beside them. */
export function install(folder, tarballs, platform) {
  const names = [readManifest().name]
  if (platform !== null) names.push(readManifest(join(root, 'npm', platform)).name)
  for (const name of names) {
    const target = join(folder, 'node_modules', name)
    const tarball = `${name.replace(/^@/, '').replace('/', '-')}-${readManifest().version}.tgz`
    mkdirSync(target, { recursive: true })
    run('tar', ['-xzf', join(tarballs, tarball), '-C', target, '--strip-components=1'])
  }
  writeFileSync(join(folder, 'package.json'), '{ "private": true, "type": "module" }\n')
  copyFileSync(join(root, 'scripts', 'runtimes', 'smoke.mjs'), join(folder, 'smoke.mjs'))
}
