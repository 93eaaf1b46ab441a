// Reading a photograph into unified memory, and writing the sheet as PNG.
import { createWriteStream, readFileSync } from 'node:fs'
import { mkdir } from 'node:fs/promises'
import { dirname } from 'node:path'
import { pipeline } from 'node:stream/promises'
import jpeg from '@julusian/jpeg-turbo'
import { imageSize } from 'image-size'
import { PNG } from 'pngjs'

/** Something about the input that its owner can change; shown as one line. */
export class InputError extends Error {}

const next = 'Give the path of a JPEG or PNG photograph.'

function readBytes(path) {
  try {
    return readFileSync(path)
  } catch (error) {
    const reasons = {
      ENOENT: 'there is no such file',
      EISDIR: 'it is a directory',
      EACCES: 'it may not be read by this user',
    }
    throw new InputError(`${path}: ${reasons[error.code] ?? error.message}. ${next}`)
  }
}

function measure(path, file) {
  try {
    const found = imageSize(file)
    if (found.type === 'jpg' || found.type === 'png') return found
  } catch {
    // Said below.
  }
  throw new InputError(`${path} is not a JPEG or PNG picture, or its header is damaged. ${next}`)
}

/** How to walk width x height stored pixels so that the picture stands upright, for each EXIF orientation. */
export function upright(width, height, orientation = 1) {
  const row = 4 * width
  const lastX = 4 * (width - 1)
  const lastY = row * (height - 1)
  const walks = {
    1: [0, 4, row],
    2: [lastX, -4, row],
    3: [lastX + lastY, -4, -row],
    4: [lastY, 4, -row],
    5: [0, row, 4],
    6: [lastY, -row, 4],
    7: [lastX + lastY, -row, -4],
    8: [lastX, row, -4],
  }
  const [base, stepX, stepY] = walks[orientation] ?? walks[1]
  return orientation >= 5 && orientation <= 8
    ? { width: height, height: width, base, stepX, stepY }
    : { width, height, base, stepX, stepY }
}

/**
 * Decodes a picture. libjpeg-turbo writes its output straight into the unified array; pngjs can only write into memory of its own,
 * which is copied in once, and counted.
 * @param {string} path
 * @param {import('unimalloc').Allocator} allocator
 * @returns {import('./pipeline.js').Photo & { pixels: import('unimalloc').UnifiedArray<Uint8Array>, copiedBytes: number, decoder: string }}
 */
export function readPhoto(path, allocator) {
  const file = readBytes(path)
  const { width, height, type, orientation } = measure(path, file)
  const pixels = allocator.allocUnsafe(Uint8Array, 4 * width * height)
  const walk = upright(width, height, orientation)
  try {
    if (type === 'jpg') {
      const target = Buffer.from(pixels.buffer, pixels.byteOffset, pixels.byteLength)
      const decoded = jpeg.decompressSync(file, target, { format: jpeg.FORMAT_RGBA })
      if (decoded.width !== width || decoded.height !== height) throw new Error('its headers contradict each other')
      return { ...walk, pixels, copiedBytes: 0, decoder: 'libjpeg-turbo, straight into unified memory' }
    }
    const decoded = PNG.sync.read(file)
    pixels.set(decoded.data)
    return { ...walk, pixels, copiedBytes: decoded.data.length, decoder: 'pngjs, then one copy into unified memory' }
  } catch {
    pixels.free()
    throw new InputError(`${path} cannot be decoded: it is truncated, damaged or of an unusual colour format. ${next}`)
  }
}

/** Writes RGBA pixels; the encoder reads them where they lie. */
export async function writePng(path, pixels, width, height) {
  const png = new PNG({ width, height, inputHasAlpha: true })
  png.data = Buffer.from(pixels.buffer, pixels.byteOffset, pixels.byteLength)
  try {
    await mkdir(dirname(path), { recursive: true })
    await pipeline(png.pack(), createWriteStream(path))
  } catch (error) {
    throw new InputError(`${path} cannot be written: ${error.message}. Choose another folder with --out DIR.`)
  }
}
