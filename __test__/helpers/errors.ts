import type { ExecutionContext } from 'ava'
import { UnimallocError } from 'unimalloc'
import type { UnimallocErrorCode } from 'unimalloc'

/** Asserts that the call throws the typed error, and that its message says something beyond the code. */
export function throwsCode(
  t: ExecutionContext,
  call: () => unknown,
  code: UnimallocErrorCode,
  message?: RegExp,
): UnimallocError | undefined {
  const error = t.throws(call, { instanceOf: UnimallocError })
  if (error === undefined) return undefined
  t.is(error.code, code, error.message)
  t.true(error.message.length > 15, `too short to help: ${error.message}`)
  if (message !== undefined) t.regex(error.message, message)
  return error
}
