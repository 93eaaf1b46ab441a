// `npm run format`: rustfmt and prettier, writing.
import { join } from 'node:path'
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
})
