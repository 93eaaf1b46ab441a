// `npm run demo`: builds what changed, then runs the demo with the arguments given.
import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { build } from './build.mjs'
import { root, runScript } from './setup.mjs'

await runScript(async () => {
  await build()
  const demo = join(root, 'examples', 'demo', 'main.js')
  // Paths among the arguments are relative to where the user stands; npm keeps that in INIT_CWD.
  const cwd = process.env.INIT_CWD ?? process.cwd()
  const result = spawnSync(process.execPath, [demo, ...process.argv.slice(2)], { cwd, stdio: 'inherit' })
  if (result.error) throw result.error
  return result.status ?? 1
})
