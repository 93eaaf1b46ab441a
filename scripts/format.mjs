// `npm run format`: rustfmt, prettier and the figures of the documentation, writing.
import { join } from 'node:path'
import { figures } from './figures.mjs'
import { checkNode, findCargo, installPackages, root, run, runScript } from './setup.mjs'

await runScript(() => {
  checkNode()
  installPackages()
  run(findCargo(), ['fmt', '--all'])
  run(process.execPath, [
    join(root, 'node_modules', 'prettier', 'bin', 'prettier.cjs'),
    '--write',
    '--log-level=warn',
    '.',
  ])
  figures()
})
