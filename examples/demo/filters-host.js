// The filters in JavaScript, for the host backend. kernels.cu holds the same arithmetic for the GPU.

const clamp = (value, limit) => (value < 0 ? 0 : value >= limit ? limit - 1 : value)
const saturate = (value) => (value < 0 ? 0 : value > 1 ? 1 : value)
const toByte = (value) => Math.floor(saturate(value) * 255 + 0.5)

/** Rows of a picture in bands of about a quarter of a million pixels, so that progress can be shown between them. */
function inBands(width, height, onProgress, filterRow) {
  const band = Math.max(1, Math.floor(250_000 / width))
  for (let top = 0; top < height; top += band) {
    const bottom = Math.min(height, top + band)
    for (let y = top; y < bottom; y++) filterRow(y)
    onProgress(bottom / height)
  }
}

/** @param {(fraction: number) => void} onProgress @returns {import('./pipeline.js').Filters} */
export function hostFilters(onProgress) {
  const rows = (size, filterRow) => inBands(size.width, size.height, onProgress, filterRow)
  return {
    unpack(photo, red, green, blue, luma) {
      const { pixels, base, stepX, stepY, width } = photo
      rows(photo, (y) => {
        for (let x = 0; x < width; x++) {
          const from = base + x * stepX + y * stepY
          const at = y * width + x
          red[at] = pixels[from] / 255
          green[at] = pixels[from + 1] / 255
          blue[at] = pixels[from + 2] / 255
          luma[at] = (77 * pixels[from] + 150 * pixels[from + 1] + 29 * pixels[from + 2] + 128) >> 8
        }
      })
    },

    histogram(luma, bins, size) {
      rows(size, (y) => {
        for (let at = y * size.width; at < (y + 1) * size.width; at++) bins[luma[at]] += 1
      })
    },

    equalise(bins, curve, pixels) {
      const darkest = bins.find((count) => count > 0) ?? 0
      let below = 0
      for (let level = 0; level < 256; level++) {
        below += bins[level]
        curve[level] = pixels > darkest && below > darkest ? (below - darkest) / (pixels - darkest) : 0
      }
    },

    tone(luma, curve, out, amount, size) {
      rows(size, (y) => {
        for (let at = y * size.width; at < (y + 1) * size.width; at++) {
          const plain = luma[at] / 255
          out[at] = plain + amount * (curve[luma[at]] - plain)
        }
      })
    },

    blurRows(from, out, weights, size) {
      const { width } = size
      const radius = (weights.length - 1) / 2
      rows(size, (y) => {
        const row = y * width
        for (let x = 0; x < width; x++) {
          let sum = 0
          for (let tap = -radius; tap <= radius; tap++) sum += weights[tap + radius] * from[row + clamp(x + tap, width)]
          out[row + x] = sum
        }
      })
    },

    blurColumns(from, out, weights, size) {
      const { width, height } = size
      const radius = (weights.length - 1) / 2
      rows(size, (y) => {
        for (let x = 0; x < width; x++) {
          let sum = 0
          for (let tap = -radius; tap <= radius; tap++) {
            sum += weights[tap + radius] * from[clamp(y + tap, height) * width + x]
          }
          out[y * width + x] = sum
        }
      })
    },

    sobel(from, out, size) {
      const { width, height } = size
      rows(size, (y) => {
        const above = clamp(y - 1, height) * width
        const here = y * width
        const under = clamp(y + 1, height) * width
        for (let x = 0; x < width; x++) {
          const left = clamp(x - 1, width)
          const right = clamp(x + 1, width)
          const northWest = from[above + left]
          const northEast = from[above + right]
          const southWest = from[under + left]
          const southEast = from[under + right]
          const across = northEast + 2 * from[here + right] + southEast - northWest - 2 * from[here + left] - southWest
          const down = southWest + 2 * from[under + x] + southEast - northWest - 2 * from[above + x] - northEast
          out[here + x] = Math.sqrt(across * across + down * down)
        }
      })
    },

    composite({ red, green, blue, washedRed, washedGreen, washedBlue, luma, tones, edges, look, out }, size) {
      const [detail, saturation, lightest, heaviest, strength] = look
      const mix = (colour, washed, grey, factor) =>
        toByte((grey + saturation * (washed + detail * (colour - washed) - grey)) * factor)
      rows(size, (y) => {
        for (let at = y * size.width; at < (y + 1) * size.width; at++) {
          const grey = 0.299 * washedRed[at] + 0.587 * washedGreen[at] + 0.114 * washedBlue[at]
          const gain = Math.min(Math.max((tones[at] + 0.05) / (luma[at] / 255 + 0.05), 0.6), 1.8)
          const step = saturate((edges[at] - lightest) / (heaviest - lightest))
          const factor = gain * (1 - strength * step * step * (3 - 2 * step))
          out[4 * at] = mix(red[at], washedRed[at], grey, factor)
          out[4 * at + 1] = mix(green[at], washedGreen[at], grey, factor)
          out[4 * at + 2] = mix(blue[at], washedBlue[at], grey, factor)
          out[4 * at + 3] = 255
        }
      })
    },

    mount(photo, after, sheet, gap) {
      const { pixels, base, stepX, stepY, width } = photo
      rows(photo, (y) => {
        const row = y * (2 * width + gap)
        for (let x = 0; x < width; x++) {
          const from = base + x * stepX + y * stepY
          for (let channel = 0; channel < 3; channel++) {
            sheet[4 * (row + x) + channel] = pixels[from + channel]
            sheet[4 * (row + width + gap + x) + channel] = after[4 * (y * width + x) + channel]
          }
          sheet[4 * (row + x) + 3] = 255
          sheet[4 * (row + width + gap + x) + 3] = 255
        }
        sheet.fill(255, 4 * (row + width), 4 * (row + width + gap))
      })
    },
  }
}
