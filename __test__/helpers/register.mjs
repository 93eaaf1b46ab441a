// Compiles the tests as they are loaded, and leaves alone what they test: that runs as it ships.
import { register } from 'node:module'

register('@oxc-node/core/esm', import.meta.url)
register('./as-it-ships.mjs', import.meta.url)
