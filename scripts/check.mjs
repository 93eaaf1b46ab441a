// `npm run check`: everything that is not a test. All checks run; the exit code says whether all of them passed.
import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { join } from 'node:path'
import { build } from './build.mjs'
import { ensureCargoDeny } from './cargo-deny.mjs'
import { findCargo, root, runScript } from './setup.mjs'

const bin = (...parts) => join(root, 'node_modules', ...parts)
const node = (script, ...args) => [process.execPath, [script, ...args]]

function checks(cargo, deny) {
  const consumers = ['typescript', 'typescript-5.9', 'typescript-7'].map((name) => [
    `shipped types, ${name}`,
    ...node(bin(name, 'bin', 'tsc'), '-p', join('__test__', 'types')),
  ])
  return [
    ['rustfmt', cargo, ['fmt', '--all', '--check']],
    ['clippy', cargo, ['clippy', '--workspace', '--all-targets', '--locked', '--', '-D', 'warnings']],
    ['rustdoc', cargo, ['doc', '--no-deps', '--locked', '--package', 'unimalloc'], { RUSTDOCFLAGS: '-D warnings' }],
    ['oxlint', ...node(bin('oxlint', 'bin', 'oxlint'), '--deny-warnings')],
    ['prettier', ...node(bin('prettier', 'bin', 'prettier.cjs'), '--check', '--log-level=warn', '.')],
    ['kinds', ...node(join('scripts', 'kinds.mjs'), '--check')],
    ['figures', ...node(join('scripts', 'figures.mjs'), '--check')],
    ['tsc', ...node(bin('typescript', 'bin', 'tsc'), '-p', 'tsconfig.json')],
    ...consumers,
    ['publint', ...node(bin('publint', 'src', 'cli.js'), '--strict')],
    ['attw', ...node(bin('@arethetypeswrong', 'cli', 'dist', 'index.js'), '--pack', '.', '--no-emoji')],
    ['instruction counts', ...node(join(root, 'crates', 'bench', 'check-instructions.mjs'))],
    ['cargo deny', deny, ['check', 'licenses', 'bans', 'sources']],
    ['actionlint', ...node(join('scripts', 'workflows.mjs'))],
  ]
}

await runScript(async () => {
  const denied = ensureCargoDeny()
  // Awaited below; a failure must not end the process while the build is still running.
  denied.catch(() => {})
  await build()
  const failed = []
  for (const [name, program, args, env] of checks(findCargo(), await denied)) {
    console.log(`\n# ${name}`)
    const result = spawnSync(program, args, { cwd: root, stdio: 'inherit', env: { ...process.env, ...env } })
    if (result.error) console.error(result.error.message)
    if (result.status !== 0) failed.push(name)
  }
  if (!existsSync(join(root, 'Cargo.lock'))) failed.push('Cargo.lock is missing')
  console.log(failed.length > 0 ? `\nchecks that failed: ${failed.join(', ')}` : '\nall checks passed')
  return failed.length > 0 ? 1 : 0
})
