import { native } from './native.js'

/** `alloc.rs` has the same order. */
const LEVELS = ['error', 'warn', 'info', 'debug'] as const

/** Writes a line to standard error where `UNIMALLOC_LOG` asks for that level. The words are put together only then. */
export function log(level: (typeof LEVELS)[number], words: () => string): void {
  const number = LEVELS.indexOf(level)
  const binding = native()
  if (binding.isLogged(number)) binding.logLine(number, words())
}
