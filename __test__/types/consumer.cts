// The same package through `require`.
import unimalloc = require('unimalloc')

const floats = unimalloc.alloc(Float32Array, 8)
const first: number = floats[0]!
floats.free()

export = { first }
