import { spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

import anyTest from 'ava'

const root = fileURLToPath(new URL('..', import.meta.url))
const test = existsSync(join(root, 'node_modules', 'esbuild')) ? anyTest : anyTest.skip

test('a bundler that puts a path in place of the binding is told from a binding, with what to do', async (t) => {
  const { build } = await import('esbuild')
  // In the checkout, so that the package finds itself.
  const folder = mkdtempSync(join(root, 'node_modules', '.bundled-'))
  t.teardown(() => rmSync(folder, { recursive: true, force: true }))
  const entry = join(folder, 'program.cjs')
  writeFileSync(
    entry,
    `try { require(${JSON.stringify(root)}).alloc(Uint8Array, 5) } catch (error) { console.log(error.code, error.message) }`,
  )
  const outfile = join(folder, 'out', 'program.cjs')
  await build({
    entryPoints: [entry],
    outfile,
    bundle: true,
    platform: 'node',
    logLevel: 'silent',
    loader: { '.node': 'file' },
  }).catch(() => {})
  const { stdout, stderr } = spawnSync(process.execPath, [outfile], { encoding: 'utf8' })
  t.regex(stdout, /^NATIVE_MISSING .*--external:unimalloc/, stderr)
})
