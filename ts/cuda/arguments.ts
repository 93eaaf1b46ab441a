import { checkReadable, deviceAddress } from '../arrays.js'
import { invalid, show } from '../errors.js'
import { BACKENDS } from '../native.js'

/**
 * Arrays go as pointers; numbers need their C type said. A launch does not know what memory a `pointer`, or an address within `bytes`,
 * leads to: before that is freed, say its use with `recordUse`.
 */
export type KernelArgument =
  | ArrayBufferView
  | { i8: number }
  | { u8: number }
  | { i16: number }
  | { u16: number }
  | { i32: number }
  | { u32: number }
  | { f16: number }
  | { f32: number }
  | { f64: number }
  | { i64: bigint }
  | { u64: bigint }
  | { pointer: bigint }
  | { bytes: Uint8Array }

/** Arguments as native code takes them: kinds, the values one after the other, and the arrays that must stay alive. */
export interface PackedArguments {
  kinds: Uint32Array
  values: Uint8Array
  held: Float64Array
}

/** Number of a kind that is no structure; `kernel.rs` has the same. */
const POINTER = 0
/** Structures of n bytes have the kind BYTES + n. */
const BYTES = 16
/** Most bytes that the arguments of a launch may have together, by CUDA's own rule. */
const MAX_BYTES = 32764

interface Kind {
  number: number
  size: number
  write(view: DataView, at: number, value: never): void
}

function integer(
  number: number,
  size: number,
  min: number,
  max: number,
  write: (view: DataView, at: number, value: number) => void,
) {
  return {
    number,
    size,
    write(view: DataView, at: number, value: unknown): void {
      if (typeof value !== 'number' || !Number.isInteger(value) || value < min || value > max) {
        throw invalid(`is ${show(value)}; pass a whole number from ${min} to ${max}`)
      }
      write(view, at, value)
    },
  }
}

function float(number: number, size: number, write: (view: DataView, at: number, value: number) => void) {
  return {
    number,
    size,
    write(view: DataView, at: number, value: unknown): void {
      if (typeof value !== 'number') throw invalid(`is ${show(value)}; pass a number`)
      write(view, at, value)
    },
  }
}

function big(number: number, min: bigint, max: bigint, write: (view: DataView, at: number, value: bigint) => void) {
  return {
    number,
    size: 8,
    write(view: DataView, at: number, value: unknown): void {
      if (typeof value !== 'bigint' || value < min || value > max) {
        throw invalid(`is ${show(value)}; pass a bigint from ${min}n to ${max}n`)
      }
      write(view, at, value)
    },
  }
}

const U64_MAX = 2n ** 64n - 1n

const KINDS: Record<string, Kind> = {
  pointer: big(POINTER, 0n, U64_MAX, (view, at, value) => view.setBigUint64(at, value, true)),
  i8: integer(1, 1, -(2 ** 7), 2 ** 7 - 1, (view, at, value) => view.setInt8(at, value)),
  u8: integer(2, 1, 0, 2 ** 8 - 1, (view, at, value) => view.setUint8(at, value)),
  i16: integer(3, 2, -(2 ** 15), 2 ** 15 - 1, (view, at, value) => view.setInt16(at, value, true)),
  u16: integer(4, 2, 0, 2 ** 16 - 1, (view, at, value) => view.setUint16(at, value, true)),
  i32: integer(5, 4, -(2 ** 31), 2 ** 31 - 1, (view, at, value) => view.setInt32(at, value, true)),
  u32: integer(6, 4, 0, 2 ** 32 - 1, (view, at, value) => view.setUint32(at, value, true)),
  i64: big(7, -(2n ** 63n), 2n ** 63n - 1n, (view, at, value) => view.setBigInt64(at, value, true)),
  u64: big(8, 0n, U64_MAX, (view, at, value) => view.setBigUint64(at, value, true)),
  f16: float(9, 2, (view, at, value) => view.setUint16(at, halfBits(value), true)),
  f32: float(10, 4, (view, at, value) => view.setFloat32(at, value, true)),
  f64: float(11, 8, (view, at, value) => view.setFloat64(at, value, true)),
}

/** Checks the arguments of a launch and packs them. */
export function packArguments(args: unknown): PackedArguments {
  if (!Array.isArray(args))
    throw invalid(`launch: args is ${show(args)}; pass an array with one entry for each parameter`)
  // All that may run code of the program comes first: it might free an array whose address was looked up already.
  const read = Array.from(args as unknown[], (arg, index) => readArgument(arg, index))
  const kinds = new Uint32Array(read.length)
  const held: number[] = []
  const total = read.reduce((sum, { size }) => sum + size, 0)
  if (total > MAX_BYTES) {
    throw invalid(
      `launch: the arguments have ${total} bytes and CUDA allows ${MAX_BYTES}: put large structures into an array`,
    )
  }
  const values = new Uint8Array(total)
  const view = new DataView(values.buffer)
  let at = 0
  read.forEach((argument, index) => {
    kinds[index] = write(argument, index, view, at, held)
    at += argument.size
  })
  return { kinds, values, held: Float64Array.from(held) }
}

/** The one key of a tagged argument. */
function tagOf(arg: unknown, index: number): string {
  const keys = typeof arg === 'object' && arg !== null ? Object.keys(arg) : []
  const tag = keys[0]
  if (keys.length === 1 && tag !== undefined && (Object.hasOwn(KINDS, tag) || tag === 'bytes')) return tag
  const hint =
    typeof arg === 'number'
      ? `say the C type, as { f32: ${arg} } or { i32: ${arg} }`
      : `pass an array, or an object with one of the keys ${Object.keys(KINDS).join(', ')}, bytes`
  throw invalid(`launch: argument ${index} is ${show(arg)}; ${hint}`)
}

/** An argument after the program's objects were read: an array, or the value under its tag. */
interface ReadArgument {
  array: ArrayBufferView | null
  tag: string
  value: unknown
  size: number
}

function readArgument(arg: unknown, index: number): ReadArgument {
  if (ArrayBuffer.isView(arg)) return { array: arg, tag: 'pointer', value: null, size: 8 }
  const tag = tagOf(arg, index)
  const value = (arg as Record<string, unknown>)[tag]
  if (tag !== 'bytes') return { array: null, tag, value, size: (KINDS[tag] as Kind).size }
  if (!(value instanceof Uint8Array) || value.length === 0) {
    throw invalid(`launch: argument ${index}, bytes, is ${show(value)}; pass a Uint8Array with the structure's bytes`)
  }
  checkReadable(value)
  const bytes = Uint8Array.from(value)
  return { array: null, tag, value: bytes, size: bytes.length }
}

/** Writes one argument and answers its kind. */
function write(argument: ReadArgument, index: number, view: DataView, at: number, held: number[]): number {
  const { array, tag, value } = argument
  if (array !== null) {
    const { address, hold, backend } = deviceAddress(`launch: argument ${index}`, array)
    if (hold !== 0) held.push(hold)
    else if (backend === BACKENDS.indexOf('host')) {
      throw invalid(
        `launch: argument ${index}: the array is on the host backend, which the GPU cannot reach; allocate it with backend 'cuda-unified'`,
      )
    }
    view.setBigUint64(at, BigInt(address), true)
    return POINTER
  }
  if (tag === 'bytes') {
    new Uint8Array(view.buffer).set(value as Uint8Array, at)
    return BYTES + argument.size
  }
  const kind = KINDS[tag] as Kind
  try {
    kind.write(view, at, value as never)
  } catch (error) {
    throw invalid(`launch: argument ${index}, ${tag}, ${(error as Error).message}`)
  }
  return kind.number
}

/** The bits of the half-precision number nearest to `value`, ties to even. */
export function halfBits(value: number): number {
  // Rounding to single precision first would round twice: doubles are taken apart by arithmetic instead.
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0
  const magnitude = Math.abs(value)
  if (Number.isNaN(value)) return 0x7e00
  if (magnitude >= 65520) return sign | 0x7c00
  if (magnitude < 2 ** -14) return sign | roundTiesToEven(magnitude * 2 ** 24)
  let exponent = Math.floor(Math.log2(magnitude))
  // The logarithm may round up or down at a power of two.
  if (2 ** exponent > magnitude) exponent--
  else if (2 ** (exponent + 1) <= magnitude) exponent++
  // A mantissa that rounds up to 1024 carries into the exponent, as it should.
  return sign | (((exponent + 15) << 10) + roundTiesToEven((magnitude / 2 ** exponent - 1) * 1024))
}

function roundTiesToEven(value: number): number {
  const floor = Math.floor(value)
  const rest = value - floor
  if (rest !== 0.5) return Math.round(value)
  return floor % 2 === 0 ? floor : floor + 1
}
