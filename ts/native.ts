import { UnimallocError } from './errors.js'

/** The generated binding. Private: what is public is written by hand around it. */
export type Native = typeof import('#native')

let binding: Native | undefined

/** The binding, loaded at the first call, so that the package can be imported where it has no native part. */
export function native(): Native {
  return (binding ??= load())
}

function load(): Native {
  try {
    return require('#native') as Native
  } catch (cause) {
    const platform = `${process.platform}-${process.arch}`
    throw new UnimallocError(
      'NATIVE_MISSING',
      `unimalloc has no native part for ${platform} here. Supported are linux-x64 and linux-arm64 (glibc), win32-x64, and ` +
        'macOS with the host backend. If this is one of them, npm left out the optional package ' +
        `"@unimalloc/native-${platform}*": remove node_modules and package-lock.json, and install again without ` +
        '--omit=optional, on the platform that runs the program. In a checkout, run "npm run build". ' +
        `The loader said: ${cause instanceof Error ? cause.message.split('\n')[0] : String(cause)}`,
      { cause },
    )
  }
}

/** Numbers that name backends, policies and placements to native code; `dispatch.rs` has the same. */
export const BACKENDS = ['cuda-unified', 'host'] as const
export const POLICIES = ['standard', 'secure', 'hardened'] as const
export const PLACEMENTS = ['auto', 'host', 'device', 'read-mostly'] as const

/** Ways of the contract to choose a slot; `contract.rs` has the same. */
export const WAY = { plain: 0, forPolicy: 1, selection: 2 } as const

/** What `allocate` writes instead of a handle; `alloc.rs` has the same. */
export const REFUSED = { byLimit: -1, byBackend: -2, buffersBanned: -3, bufferRefused: -4 } as const

/** Addresses and sizes cross the boundary as doubles, exact up to here. */
export const MAX_EXACT = Number.MAX_SAFE_INTEGER
