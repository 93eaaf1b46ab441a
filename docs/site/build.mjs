// `npm run docs`: the documentation site, in site/.
import { join } from 'node:path'
import { build } from '../../scripts/build.mjs'
import { root, run, runScript } from '../../scripts/setup.mjs'

await runScript(async () => {
  await build()
  const typedoc = join(root, 'node_modules', 'typedoc', 'bin', 'typedoc')
  run(process.execPath, [typedoc, '--options', join('docs', 'site', 'typedoc.mjs')])
})
