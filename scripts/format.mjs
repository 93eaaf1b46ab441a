// `npm run format`: rustfmt, prettier, ts/kinds.ts and the figures of the documentation, writing.
import { join } from 'node:path'
import { figures } from './figures.mjs'
import { kinds } from './kinds.mjs'
import { checkNode, findCargo, installPackages, root, run, runScript } from './setup.mjs'

await runScript(async () => {
  checkNode()
  installPackages()
  run(findCargo(), ['fmt', '--all'])
  await kinds()
  run(process.execPath, [
    join(root, 'node_modules', 'prettier', 'bin', 'prettier.cjs'),
    '--write',
    '--log-level=warn',
    '.',
  ])
  figures()
})
