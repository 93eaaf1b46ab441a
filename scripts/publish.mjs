// `node scripts/publish.mjs DIR [--dry-run]`: publishes the tarballs in DIR to npm with provenance, the platforms' first: the main
// package must never be there without them. A version that is there already is left alone, so that a run can be repeated.
import { readdirSync } from 'node:fs'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { folderOf, readManifest, targets } from './platforms.mjs'
import { capture, npm, runScript, SetupError } from './setup.mjs'

await runScript(() => {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { 'dry-run': { type: 'boolean', default: false } },
  })
  const [directory] = positionals
  if (!directory) throw new SetupError('Say where the tarballs are: node scripts/publish.mjs DIR')
  const main = readManifest()
  const manifests = [...Object.keys(targets).map((name) => readManifest(folderOf(name))), main]
  const tarballs = new Set(readdirSync(directory))
  const wanted = manifests.map(({ name }) => [name, `${name.replace(/^@/, '').replace('/', '-')}-${main.version}.tgz`])
  const missing = wanted.filter(([, tarball]) => !tarballs.has(tarball))
  if (missing.length > 0) {
    throw new SetupError(
      `${directory} lacks ${missing.map(([, tarball]) => tarball).join(', ')}; nothing was published.`,
    )
  }
  for (const [name, tarball] of wanted) {
    if (capture('npm', ['view', `${name}@${main.version}`, 'version']) === main.version) {
      console.log(`${name}@${main.version} is published already.`)
      continue
    }
    // A version such as 1.0.0-beta.1 must not become what everyone gets.
    const tag = main.version.includes('-') ? 'next' : 'latest'
    const mode = values['dry-run'] ? ['--dry-run'] : ['--provenance']
    npm(['publish', join(directory, tarball), '--access', 'public', '--tag', tag, ...mode])
  }
})
