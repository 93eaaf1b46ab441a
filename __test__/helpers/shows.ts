import type { ExecutionContext } from 'ava'

import { runWithFakeCuda } from './fake-cuda.js'

const PRELUDE = `
  const { alloc, allocUnsafe, Allocator, attach, cuda, CudaUnifiedBackend, from, HostBackend, isCudaAvailable, lastError, pointerOf, share, UnimallocError, whyNoCuda } = require('unimalloc')
  const code = (call) => { try { return call() ?? 'nothing' } catch (error) { return error instanceof UnimallocError ? error.code : String(error) } }
  const message = (call) => { try { call(); return 'nothing' } catch (error) { return error.message } }
  const rejected = (promise) => promise.then(() => 'nothing', (error) => error instanceof UnimallocError ? error.code : String(error))
  const SOURCE = \`
    extern "C" __global__ void fill_f32(float *p, unsigned int n, float value) {}
    extern "C" __global__ void vector_add(const float *a, const float *b, float *c, unsigned int n) {}
    extern "C" __global__ void scale(float *p, unsigned int n, float factor) {}
    extern "C" __global__ void spin(unsigned int ms) {}
    extern "C" __global__ void fault() {}\`
  const show = (...values) => console.log(JSON.stringify(values, (_, value) => typeof value === 'bigint' ? Number(value) : value))
`

/** A program over the stand-in driver: the package, shorthands, and the body of an async function. */
export function program(body: string): string {
  return `${PRELUDE};(async () => { ${body} })()`
}

/** Gives {@link Shows} for the stand-in driver in a directory. */
export function showsOver(directory: string | null): Shows {
  return async (t, body, expected, environment = {}) => {
    const outcome = await runWithFakeCuda(directory as string, program(body), environment)
    t.is(outcome.signal, null, outcome.stderr)
    t.is(outcome.code, 0, outcome.stderr)
    const lines = outcome.stdout.trim().split('\n')
    t.deepEqual(
      lines.map((line) => JSON.parse(line) as unknown),
      expected,
      outcome.stderr,
    )
  }
}

/** Runs the body of an async function in a process with the stand-in driver; what it shows must be this. */
export type Shows = (
  t: ExecutionContext,
  body: string,
  expected: unknown[][],
  environment?: Record<string, string>,
) => Promise<void>
