// The independent check: the same picture by another road. No planes, no scratch, no separable passes: every output pixel is computed
// by itself from the decoded bytes, in double precision, with two-dimensional kernels.
import { look } from './pipeline.js'

const tileSide = 48
/** Above this many pixels, tiles spread over the picture are checked instead of all of it. */
const allBelow = 300_000
const sampledTiles = 96

const clamp = (value, limit) => Math.min(Math.max(value, 0), limit - 1)
const saturate = (value) => Math.min(Math.max(value, 0), 1)
const toByte = (value) => Math.floor(saturate(value) * 255 + 0.5)

/** @param {import('./pipeline.js').Photo} photo */
function reader({ pixels, width, height, base, stepX, stepY }) {
  return (x, y, channel) => pixels[base + clamp(x, width) * stepX + clamp(y, height) * stepY + channel]
}

function lumaOf(read, x, y) {
  return (77 * read(x, y, 0) + 150 * read(x, y, 1) + 29 * read(x, y, 2) + 128) >> 8
}

/** Sorts the brightness of all pixels by counting; the curve is the rank of each level. */
function toneCurve(read, { width, height }) {
  const counts = Array.from({ length: 256 }, () => 0)
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) counts[lumaOf(read, x, y)]++
  const levels = counts.flatMap((count, level) => (count > 0 ? [level] : []))
  const darkest = counts[levels[0]]
  const rank = new Map()
  let below = 0
  for (const level of levels) {
    below += counts[level]
    rank.set(level, levels.length > 1 ? (below - darkest) / (width * height - darkest) : 0)
  }
  return rank
}

/** A Gaussian as taps of one two-dimensional kernel, on the square that the separable one covers. */
function kernel(sigma) {
  const radius = Math.ceil(3 * sigma)
  const taps = []
  for (let dy = -radius; dy <= radius; dy++) {
    for (let dx = -radius; dx <= radius; dx++) {
      taps.push({ dx, dy, weight: Math.exp(-(dx * dx + dy * dy) / (2 * sigma * sigma)) })
    }
  }
  const total = taps.reduce((sum, { weight }) => sum + weight, 0)
  return taps.map(({ dx, dy, weight }) => ({ dx, dy, weight: weight / total }))
}

/** Colours of the pixel (x, y) of the finished picture. */
function renderer(photo) {
  const read = reader(photo)
  const rank = toneCurve(read, photo)
  const wash = kernel(look.washSigma)
  const soften = kernel(look.edgeSigma)
  const { width, height } = photo

  const toneAt = (x, y) => {
    const luma = lumaOf(read, x, y)
    return luma / 255 + look.equalise * (rank.get(luma) - luma / 255)
  }
  const softToneAt = (x, y) => {
    let sum = 0
    for (const { dx, dy, weight } of soften) sum += weight * toneAt(clamp(x + dx, width), clamp(y + dy, height))
    return sum
  }

  /** The soft tones of a tile and one pixel around it, where the picture has one. */
  const softTile = (left, top, right, bottom) => {
    const side = right - left + 2
    const values = new Float64Array(side * (bottom - top + 2))
    for (let y = top - 1; y <= bottom; y++) {
      for (let x = left - 1; x <= right; x++) {
        values[(y - top + 1) * side + x - left + 1] = softToneAt(clamp(x, width), clamp(y, height))
      }
    }
    return (x, y) => values[(y - top + 1) * side + x - left + 1]
  }

  const pixelAt = (x, y, soft) => {
    const washed = [0, 0, 0]
    for (const { dx, dy, weight } of wash) {
      for (let channel = 0; channel < 3; channel++) washed[channel] += (weight * read(x + dx, y + dy, channel)) / 255
    }
    let across = 0
    let down = 0
    for (const [offset, weight] of [
      [-1, 1],
      [0, 2],
      [1, 1],
    ]) {
      across += weight * (soft(x + 1, y + offset) - soft(x - 1, y + offset))
      down += weight * (soft(x + offset, y + 1) - soft(x + offset, y - 1))
    }
    const step = saturate((Math.hypot(across, down) - look.lightestEdge) / (look.heaviestEdge - look.lightestEdge))
    const keep = 1 - look.ink * step ** 2 * (3 - 2 * step)
    const gain = Math.min(Math.max((toneAt(x, y) + 0.05) / (lumaOf(read, x, y) / 255 + 0.05), 0.6), 1.8)
    const grey = 0.299 * washed[0] + 0.587 * washed[1] + 0.114 * washed[2]
    return washed.map((value, channel) => {
      const base = value + look.detail * (read(x, y, channel) / 255 - value)
      return toByte((grey + look.saturation * (base - grey)) * gain * keep)
    })
  }
  return { read, softTile, pixelAt }
}

function tilesOf({ width, height }) {
  const tiles = []
  for (let top = 0; top < height; top += tileSide) {
    for (let left = 0; left < width; left += tileSide) {
      tiles.push([left, top, Math.min(left + tileSide, width), Math.min(top + tileSide, height)])
    }
  }
  if (width * height <= allBelow) return tiles
  const step = Math.max(1, tiles.length / sampledTiles)
  // The corners hold all the clamping; the rest is spread evenly.
  const chosen = new Set([tiles[0], tiles.at(-1)])
  for (let at = 0; at < tiles.length; at += step) chosen.add(tiles[Math.floor(at)])
  return [...chosen]
}

/**
 * Compares the sheet, both halves of it, with what it should be.
 * @param {{ photo: import('./pipeline.js').Photo, sheet: Uint8Array, sheetWidth: number, onProgress: (fraction: number) => void }} options
 * @returns {{ pixels: number, share: number, different: number, worst: number, ok: boolean }} `worst` in levels of 255
 */
export function verify({ photo, sheet, sheetWidth, onProgress }) {
  const { read, softTile, pixelAt } = renderer(photo)
  const { width, height } = photo
  const result = { pixels: 0, share: 0, different: 0, worst: 0, ok: false }
  const compare = (x, y, expected) => {
    const at = 4 * (y * sheetWidth + x)
    const off = Math.max(
      ...expected.map((value, channel) => Math.abs(value - sheet[at + channel])),
      255 - sheet[at + 3],
    )
    if (off > 0) result.different += 1
    result.worst = Math.max(result.worst, off)
  }
  const tiles = tilesOf(photo)
  for (const [index, [left, top, right, bottom]] of tiles.entries()) {
    const soft = softTile(left, top, right, bottom)
    for (let y = top; y < bottom; y++) {
      for (let x = left; x < right; x++) {
        compare(x, y, [read(x, y, 0), read(x, y, 1), read(x, y, 2)])
        compare(x + width + look.gap, y, pixelAt(x, y, soft))
        result.pixels += 1
      }
    }
    onProgress((index + 1) / tiles.length)
  }
  result.share = result.pixels / (width * height)
  // Single precision may round a value that lies between two levels to the other one, and rarely does.
  result.ok = result.worst <= 1 && result.different <= result.pixels * 0.005
  return result
}
