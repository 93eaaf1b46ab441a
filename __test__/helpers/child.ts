import { spawn } from 'node:child_process'
import { fileURLToPath } from 'node:url'

export interface Outcome {
  code: number | null
  signal: string | null
  stdout: string
  stderr: string
}

const root = fileURLToPath(new URL('../..', import.meta.url))

/** Runs a CommonJS program in a process of its own; `unimalloc` is the package under test. */
export function runProgram(
  program: string,
  environment: Record<string, string> = {},
  flags: string[] = [],
): Promise<Outcome> {
  return new Promise((resolve, reject) => {
    const env: NodeJS.ProcessEnv = { ...process.env, ...environment }
    delete env['NODE_OPTIONS']
    for (const name of ['UNIMALLOC_BACKEND', 'UNIMALLOC_MAX_BYTES', 'UNIMALLOC_TRACK', 'UNIMALLOC_LOG']) {
      if (!(name in environment)) delete env[name]
    }
    const child = spawn(process.execPath, ['--expose-gc', ...flags, '--input-type=commonjs', '-e', program], {
      cwd: root,
      env,
    })
    let stdout = ''
    let stderr = ''
    child.stdout.setEncoding('utf8').on('data', (text: string) => (stdout += text))
    child.stderr.setEncoding('utf8').on('data', (text: string) => (stderr += text))
    child.once('error', reject)
    child.once('close', (code, signal) => resolve({ code, signal, stdout, stderr }))
  })
}
