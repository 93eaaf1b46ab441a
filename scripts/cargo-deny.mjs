// cargo-deny, at the version the project is checked with: the one on the PATH, else one built once into a cache.
import { spawn } from 'node:child_process'
import { existsSync } from 'node:fs'
import { homedir } from 'node:os'
import { join } from 'node:path'
import { capture, findCargo, root, SetupError } from './setup.mjs'

const version = '0.20.2'

/** Starts at once and resolves to the program; building it takes minutes, so callers do other work meanwhile. */
export async function ensureCargoDeny() {
  if (capture('cargo-deny', ['--version']) === `cargo-deny ${version}`) return 'cargo-deny'
  const cache = join(process.env.XDG_CACHE_HOME ?? join(homedir(), '.cache'), 'unimalloc', `cargo-deny-${version}`)
  const program = join(cache, 'bin', process.platform === 'win32' ? 'cargo-deny.exe' : 'cargo-deny')
  if (existsSync(program)) return program
  console.log(`Building cargo-deny ${version} in the background (once) …`)
  const args = ['install', '--locked', '--quiet', `cargo-deny@${version}`, '--root', cache]
  await new Promise((resolve, reject) => {
    // Without a target directory of its own, cargo builds in a temporary one and removes it.
    const env = { ...process.env, CARGO_TARGET_DIR: undefined }
    const child = spawn(findCargo(), args, { cwd: root, env, stdio: ['ignore', 'inherit', 'inherit'] })
    child.on('error', reject)
    child.on('close', (code) =>
      code === 0
        ? resolve()
        : reject(
            new SetupError(
              `cargo-deny could not be built; install it with \`cargo install --locked cargo-deny@${version}\`.`,
            ),
          ),
    )
  })
  return program
}
