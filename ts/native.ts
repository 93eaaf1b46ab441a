import { nativeMissing, notTheBinding } from './native-missing.js'
import { watchThreadEnd } from './thread-end.js'

/** The generated binding. Private: what is public is written by hand around it. */
export type Native = typeof import('#native')

let binding: Native | undefined

/** The binding, loaded at the first call, so that the package can be imported where it has no native part. */
export function native(): Native {
  return (binding ??= load())
}

function load(): Native {
  let loaded: Native
  try {
    loaded = require('#native') as Native
  } catch (cause) {
    // The loader gets along with what is not there; it stumbles over what is no binding.
    throw cause instanceof TypeError ? notTheBinding() : nativeMissing(cause)
  }
  if (typeof loaded?.watchThreadEnd !== 'function') throw notTheBinding()
  watchThreadEnd(loaded)
  return loaded
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
