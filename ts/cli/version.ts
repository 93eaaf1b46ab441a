import { createRequire } from 'node:module'

/** The version of the package that this program is part of. */
export function packageVersion(): string {
  const { version } = createRequire(import.meta.url)('unimalloc/package.json') as { version: string }
  return version
}
