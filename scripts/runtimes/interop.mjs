// Libraries that look closely at a typed array before they take it, over the installed package: sharp and onnxruntime-node.
import assert from 'node:assert/strict'
import * as ort from 'onnxruntime-node'
import sharp from 'sharp'
import { Allocator } from 'unimalloc'

const memory = new Allocator({ backend: 'host' })

/** Protocol buffers, as much as a model of one node takes. */
const varint = (value) => (value < 128 ? [value] : [(value & 127) | 128, ...varint(value >>> 7)])
const number = (field, value) => [...varint(field * 8), ...varint(value)]
const message = (field, ...parts) => {
  const bytes = parts.flat()
  return [...varint(field * 8 + 2), ...varint(bytes.length), ...bytes]
}
const string = (field, text) => message(field, [...Buffer.from(text)])

/** The ONNX model `y = x * x` for `length` floats. */
function squares(length) {
  const floats = message(1, number(1, 1), message(2, message(1, number(1, length))))
  const value = (field, name) => message(field, string(1, name), message(2, floats))
  const node = message(1, string(1, 'x'), string(1, 'x'), string(2, 'y'), string(4, 'Mul'))
  const graph = message(7, node, string(2, 'squares'), value(11, 'x'), value(12, 'y'))
  return Uint8Array.from([...number(1, 8), ...graph, ...message(8, number(2, 13))])
}

const tests = {
  async 'sharp reads pixels from an array'() {
    const [width, height] = [64, 48]
    for (const allocate of ['alloc', 'allocUnsafe']) {
      const pixels = memory[allocate](Uint8Array, 3 * width * height)
      for (let index = 0; index < pixels.length; index++) pixels[index] = index % 251
      const image = sharp(pixels, { raw: { width, height, channels: 3 } })
      const negated = await image.negate().raw().toBuffer()
      assert.equal(negated.length, pixels.length)
      assert.ok(negated.every((value, index) => value === 255 - pixels[index]))
      const png = await sharp(pixels, { raw: { width, height, channels: 3 } })
        .png()
        .toBuffer()
      assert.deepEqual((await sharp(memory.from(png)).metadata()).width, width)
      pixels.free()
    }
  },
  async 'onnxruntime reads its input from an array and writes its output into one'() {
    const length = 1000
    const session = await ort.InferenceSession.create(squares(length))
    for (const allocate of ['alloc', 'allocUnsafe']) {
      const [input, output] = [memory[allocate](Float32Array, length), memory[allocate](Float32Array, length)]
      for (let index = 0; index < length; index++) input[index] = index / 8
      const x = new ort.Tensor('float32', input, [length])
      assert.equal(x.data, input)
      const plain = await session.run({ x })
      assert.ok(plain.y.data.every((value, index) => value === Math.fround(input[index] * input[index])))
      await session.run({ x }, { y: new ort.Tensor('float32', output, [length]) })
      assert.equal(output[999], Math.fround(input[999] * input[999]))
      input.free()
      output.free()
    }
    await session.release()
  },
}

let failed = 0
for (const [name, test] of Object.entries(tests)) {
  try {
    await test()
    console.log(`✔ ${name}`)
  } catch (error) {
    failed += 1
    console.log(`✘ ${name}\n${error.stack}`)
  }
}
console.log(`${Object.keys(tests).length - failed} passed, ${failed} failed`)
process.exitCode = failed > 0 ? 1 : 0
