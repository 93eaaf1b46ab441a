// `node scripts/try-tarballs.mjs DIR PLATFORM`: installs the package and its platform's from DIR into an empty project, and tries them:
// what must hold on every runtime, and `unimalloc doctor`. Needs npm, and nothing of this checkout built.
import { copyFileSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { npm, root, run, runScript, SetupError } from './setup.mjs'

await runScript(() => {
  const [directory, platform] = process.argv.slice(2)
  if (!directory || !platform) throw new SetupError('Say where the tarballs are, and the platform: DIR PLATFORM')
  const all = readdirSync(directory)
  const tarballs = [/^unimalloc-\d/, new RegExp(`^unimalloc-native-${platform}-\\d`)].map((pattern) => {
    const name = all.find((file) => pattern.test(file))
    if (!name) throw new SetupError(`${directory} has no tarball like ${pattern}; make it with \`npm run pack:local\`.`)
    return resolve(directory, name)
  })
  const folder = mkdtempSync(join(tmpdir(), 'unimalloc-try-'))
  try {
    writeFileSync(join(folder, 'package.json'), '{ "private": true, "type": "module" }\n')
    npm(['install', '--prefix', folder, '--no-audit', '--no-fund', '--loglevel=error', ...tarballs])
    copyFileSync(join(root, 'scripts', 'runtimes', 'smoke.mjs'), join(folder, 'smoke.mjs'))
    run(process.execPath, ['--expose-gc', 'smoke.mjs'], { cwd: folder })
    run(process.execPath, [join('node_modules', 'unimalloc', 'dist', 'cli.mjs'), 'doctor'], { cwd: folder })
  } finally {
    rmSync(folder, { recursive: true, force: true })
  }
})
