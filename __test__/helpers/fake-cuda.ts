import { spawnSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { homedir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

import { runProgram } from './child.js'
import type { Outcome } from './child.js'

const root = fileURLToPath(new URL('../..', import.meta.url))

/**
 * A directory with a stand-in `libcuda.so.1`, to be put on the library search path. Null where it cannot be: it takes Linux, and
 * cargo to build it.
 */
export function fakeCudaDirectory(...args: string[]): string | null {
  const prebuilt = process.env['UNIMALLOC_FAKE_CUDA_DIR']
  if (prebuilt !== undefined) return spawnSync(prebuilt, args, { encoding: 'utf8' }).stdout.trim()
  if (process.platform !== 'linux' || !existsSync(join(root, 'crates', 'fake-cuda'))) return null
  const cargo = ['cargo', join(homedir(), '.cargo', 'bin', 'cargo')].find(
    (command) => spawnSync(command, ['--version']).status === 0,
  )
  if (cargo === undefined) return null
  const built = spawnSync(cargo, ['run', '--quiet', '-p', 'fake-cuda', '--bin', 'fake-cuda-dir', '--', ...args], {
    cwd: root,
    encoding: 'utf8',
  })
  if (built.status !== 0) throw new Error(`the stand-in driver could not be built:\n${built.stderr}`)
  return built.stdout.trim()
}

/** Runs a program whose CUDA is the stand-in, with its faults set by environment variables. */
export function runWithFakeCuda(
  directory: string,
  program: string,
  environment: Record<string, string> = {},
): Promise<Outcome> {
  return runProgram(program, { ...environment, LD_LIBRARY_PATH: directory })
}
