// The same filters as launches of the kernels in kernels.cu, all on one stream, so each sees what the one before it wrote.
import { readFileSync } from 'node:fs'
import { cuda } from 'unimalloc'

const source = readFileSync(new URL('kernels.cu', import.meta.url), 'utf8')

const walk = ({ pixels, base, stepX, stepY }) => [
  pixels,
  { i64: BigInt(base) },
  { i64: BigInt(stepX) },
  { i64: BigInt(stepY) },
]
const radiusOf = (weights) => ({ i32: (weights.length - 1) / 2 })

/** @returns {{ filters: import('./pipeline.js').Filters, launches: () => number, [Symbol.dispose](): void }} */
export function cudaFilters() {
  const module = cuda.compile(source, { name: 'kernels.cu' })
  const kernels = new Map()
  let launched = 0

  const kernel = (name) => {
    if (!kernels.has(name)) kernels.set(name, module.kernel(name))
    return kernels.get(name)
  }
  const overPixels = (name, { width, height }, args) => {
    kernel(name).launch({ threads: [width, height], block: [32, 8], args: [...args, { i32: width }, { i32: height }] })
    launched += 1
  }
  return {
    launches: () => launched,
    [Symbol.dispose]: () => module[Symbol.dispose](),
    filters: {
      unpack: (photo, red, green, blue, luma) => overPixels('unpack', photo, [...walk(photo), red, green, blue, luma]),
      histogram: (luma, bins, size) => overPixels('histogram', size, [luma, bins]),
      equalise: (bins, curve, pixels) => {
        kernel('equalise').launch({ grid: 1, block: 256, args: [bins, curve, { u32: pixels }] })
        launched += 1
      },
      tone: (luma, curve, out, amount, size) => overPixels('tone', size, [luma, curve, out, { f32: amount }]),
      blurRows: (from, out, weights, size) => overPixels('blur_rows', size, [from, out, weights, radiusOf(weights)]),
      blurColumns: (from, out, weights, size) =>
        overPixels('blur_columns', size, [from, out, weights, radiusOf(weights)]),
      sobel: (from, out, size) => overPixels('sobel', size, [from, out]),
      composite: (p, size) => {
        const planes = [p.red, p.green, p.blue, p.washedRed, p.washedGreen, p.washedBlue]
        overPixels('composite', size, [...planes, p.luma, p.tones, p.edges, p.look, p.out])
      },
      mount: (photo, after, sheet, gap) => overPixels('mount', photo, [...walk(photo), after, sheet, { i32: gap }]),
    },
  }
}
