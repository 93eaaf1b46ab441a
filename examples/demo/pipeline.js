// The chain of filters: ink and wash. It knows no backend: it allocates, calls filters in order and frees.

/**
 * A photograph in unified memory. `base`, `stepX` and `stepY` walk its bytes upright, whatever way the camera was held.
 * @typedef {{ pixels: Uint8Array, width: number, height: number, base: number, stepX: number, stepY: number }} Photo
 * @typedef {{ width: number, height: number }} Size
 * @typedef {Float32Array} Plane
 * @typedef {object} Filters
 * @property {(photo: Photo, red: Plane, green: Plane, blue: Plane, luma: Uint8Array) => void} unpack
 * @property {(luma: Uint8Array, bins: Uint32Array, size: Size) => void} histogram
 * @property {(bins: Uint32Array, curve: Float32Array, pixels: number) => void} equalise
 * @property {(luma: Uint8Array, curve: Float32Array, out: Plane, amount: number, size: Size) => void} tone
 * @property {(from: Plane, out: Plane, weights: Float32Array, size: Size) => void} blurRows
 * @property {(from: Plane, out: Plane, weights: Float32Array, size: Size) => void} blurColumns
 * @property {(from: Plane, out: Plane, size: Size) => void} sobel
 * @property {(planes: Record<'red' | 'green' | 'blue' | 'washedRed' | 'washedGreen' | 'washedBlue' | 'tones' | 'edges', Plane>
 *   & { luma: Uint8Array, look: Float32Array, out: Uint8Array }, size: Size) => void} composite
 * @property {(photo: Photo, after: Uint8Array, sheet: Uint8Array, gap: number) => void} mount
 */

/** What the picture shall look like. The reference computation reads the same numbers. */
export const look = {
  washSigma: 2.2,
  edgeSigma: 1.1,
  equalise: 0.55,
  detail: 0.3,
  saturation: 1.3,
  lightestEdge: 0.16,
  heaviestEdge: 0.85,
  ink: 0.85,
  gap: 12,
}

export const stageNames = ['unpack', 'equalise', 'blur', 'edges', 'composite', 'mount']

/** Weights of a Gaussian out to three sigma; they sum to 1. @param {number} sigma */
export function gaussian(sigma) {
  const radius = Math.ceil(3 * sigma)
  const weights = Array.from({ length: 2 * radius + 1 }, (_, tap) =>
    Math.exp(-((tap - radius) ** 2) / (2 * sigma ** 2)),
  )
  const sum = weights.reduce((total, weight) => total + weight)
  return weights.map((weight) => weight / sum)
}

/**
 * Runs the chain once. Everything but the returned sheet is scratch and freed on the way: on the GPU also while kernels that use it
 * are still queued, since the next user of the memory is queued behind them.
 * @param {{ allocator: import('unimalloc').Allocator, filters: Filters, photo: Photo,
 *   stage: <T>(name: string, run: () => T) => T }} options
 * @returns {{ sheet: import('unimalloc').UnifiedArray<Uint8Array>, sheetWidth: number, scratch: { arrays: number, bytes: number } }}
 */
export function runPipeline({ allocator, filters, photo, stage }) {
  const { width, height } = photo
  const size = { width, height }
  const pixels = width * height
  const scratch = { arrays: 0, bytes: 0 }
  /** @type {Set<import('unimalloc').UnifiedArray>} */
  const live = new Set()

  const count = (array) => {
    scratch.arrays += 1
    scratch.bytes += array.byteLength
    live.add(array)
    return array
  }
  const plane = () => count(allocator.allocUnsafe(Float32Array, pixels, { placement: 'device' }))
  const bytes = (length) => count(allocator.allocUnsafe(Uint8Array, length, { placement: 'device' }))
  const numbers = (values) => count(allocator.from(Float32Array, values))
  const free = (...arrays) => {
    for (const array of arrays) {
      live.delete(array)
      array.free()
    }
  }
  const blur = (from, weights) => {
    const rows = plane()
    const out = plane()
    filters.blurRows(from, rows, weights, size)
    filters.blurColumns(rows, out, weights, size)
    free(rows)
    return out
  }

  try {
    const [red, green, blue, luma] = stage('unpack', () => {
      const planes = [plane(), plane(), plane(), bytes(pixels)]
      filters.unpack(photo, ...planes)
      return planes
    })
    const tones = stage('equalise', () => {
      const bins = count(allocator.alloc(Uint32Array, 256))
      const curve = count(allocator.allocUnsafe(Float32Array, 256))
      const out = plane()
      filters.histogram(luma, bins, size)
      filters.equalise(bins, curve, pixels)
      filters.tone(luma, curve, out, look.equalise, size)
      free(bins, curve)
      return out
    })
    const [washedRed, washedGreen, washedBlue, softTones] = stage('blur', () => {
      const wash = numbers(gaussian(look.washSigma))
      const soften = numbers(gaussian(look.edgeSigma))
      const out = [blur(red, wash), blur(green, wash), blur(blue, wash), blur(tones, soften)]
      free(wash, soften)
      return out
    })
    const edges = stage('edges', () => {
      const out = plane()
      filters.sobel(softTones, out, size)
      free(softTones)
      return out
    })
    const after = stage('composite', () => {
      const settings = numbers([look.detail, look.saturation, look.lightestEdge, look.heaviestEdge, look.ink])
      const out = bytes(4 * pixels)
      const planes = { red, green, blue, washedRed, washedGreen, washedBlue, luma, tones, edges, look: settings, out }
      filters.composite(planes, size)
      free(settings, red, green, blue, washedRed, washedGreen, washedBlue, luma, tones, edges)
      return out
    })
    return stage('mount', () => {
      const sheetWidth = 2 * width + look.gap
      const sheet = allocator.allocUnsafe(Uint8Array, 4 * sheetWidth * height)
      live.add(sheet)
      filters.mount(photo, after, sheet, look.gap)
      free(after)
      live.delete(sheet)
      return { sheet, sheetWidth, scratch }
    })
  } catch (error) {
    free(...live)
    throw error
  }
}
