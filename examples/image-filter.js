// Sharpens a photograph. libjpeg-turbo decodes straight into unified memory and a filter writes beside it: no copy in between.
//   node examples/image-filter.js [PHOTO.jpg] [OUT.png]
import { readFileSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import jpeg from '@julusian/jpeg-turbo'
import { imageSize } from 'image-size'
import { PNG } from 'pngjs'
import { allocator, cuda } from 'unimalloc'

const photo = process.argv[2] ?? fileURLToPath(new URL('demo/coffee.jpg', import.meta.url))
const output = process.argv[3] ?? 'sharpened.png'
const amount = 1.5

const file = readFileSync(photo)
const { width, height } = imageSize(file)

// Everything that is allocated through a scope goes when the scope ends, also when something in between throws.
const scope = allocator.scope()
try {
  const image = scope.allocUnsafe(Uint8Array, width * height * 4)
  // The decoder wants a Buffer: this one is a view of the same memory.
  jpeg.decompressSync(file, Buffer.from(image.buffer, image.byteOffset, image.byteLength), { format: jpeg.FORMAT_RGBA })
  const sharp = scope.allocUnsafe(Uint8Array, image.length)

  if (allocator.backend === 'cuda-unified') await sharpenOnGpu(image, sharp)
  else sharpenOnCpu(image, sharp)

  const png = new PNG({ width, height })
  png.data = Buffer.from(sharp.buffer, sharp.byteOffset, sharp.byteLength)
  writeFileSync(output, PNG.sync.write(png))

  // The other computation of a few pixels, to be sure.
  const wrong = probes().filter((at) => Math.abs(sharp[at] - sharpened(image, at)) > 1)
  console.log(`${allocator.backend}: sharpened ${width} x ${height} to ${output}, ${wrong.length} of the probes wrong`)
  if (wrong.length > 0) process.exitCode = 1
} finally {
  scope[Symbol.dispose]()
}

/** One thread a pixel. The same arithmetic as `sharpened`. */
async function sharpenOnGpu(image, sharp) {
  const module = cuda.compile(
    `
    extern "C" __global__ void sharpen(const unsigned char *from, unsigned char *to, float amount, int width, int height) {
      const int x = blockIdx.x * blockDim.x + threadIdx.x;
      const int y = blockIdx.y * blockDim.y + threadIdx.y;
      if (x >= width || y >= height) return;
      for (int channel = 0; channel < 4; channel++) {
        const int at = (y * width + x) * 4 + channel;
        float blurred = 0.0f;
        for (int dy = -1; dy <= 1; dy++)
          for (int dx = -1; dx <= 1; dx++) {
            const int nx = min(max(x + dx, 0), width - 1);
            const int ny = min(max(y + dy, 0), height - 1);
            blurred += from[(ny * width + nx) * 4 + channel];
          }
        blurred /= 9.0f;
        const float value = from[at] + amount * (from[at] - blurred);
        to[at] = channel == 3 ? 255 : (unsigned char)(fminf(fmaxf(value, 0.0f), 255.0f) + 0.5f);
      }
    }`,
    { name: 'sharpen.cu' },
  )
  const sizes = [{ i32: width }, { i32: height }]
  module.kernel('sharpen').launch({ threads: [width, height], args: [image, sharp, { f32: amount }, ...sizes] })
  // Brings the pages back while the program does something else; a hint, which changes no result.
  cuda.defaultStream.prefetch(sharp, 'host')
  await cuda.defaultStream.synchronize()
}

function sharpenOnCpu(image, sharp) {
  for (let at = 0; at < image.length; at++) sharp[at] = sharpened(image, at)
}

/** A byte of the result: the pixel, and what sets it apart from its neighbourhood once more. */
function sharpened(image, at) {
  const channel = at % 4
  if (channel === 3) return 255
  const pixel = (at - channel) / 4
  const [x, y] = [pixel % width, Math.floor(pixel / width)]
  let blurred = 0
  for (let ny = y - 1; ny <= y + 1; ny++) {
    const row = Math.min(Math.max(ny, 0), height - 1) * width
    for (let nx = x - 1; nx <= x + 1; nx++) {
      blurred += image[(row + Math.min(Math.max(nx, 0), width - 1)) * 4 + channel]
    }
  }
  const value = image[at] + amount * (image[at] - blurred / 9)
  return Math.floor(Math.min(Math.max(value, 0), 255) + 0.5)
}

/** Bytes all over the picture, the corners among them. */
function probes() {
  const last = width * height * 4 - 1
  return [0, last, ...Array.from({ length: 1000 }, (_, index) => Math.floor((last * index) / 1000))]
}
