// Several devices, on real ones. With fewer than two each test is skipped by its name. The kernels are such that the stand-in driver has them too.
import anyTest from 'ava'
import type { UnifiedArray } from 'unimalloc'
import { Allocator, cuda, UnimallocError } from 'unimalloc'

const devices = cuda.devices()
const test = devices.length >= 2 ? anyTest.serial : anyTest.skip
/** Of the devices at hand: whether the CPU, and each other device, may touch memory that a kernel uses. */
const concurrent = devices.every(({ concurrentManagedAccess }) => concurrentManagedAccess)

const SOURCE = `
extern "C" __global__ void fill_f32(float* p, unsigned n, float value) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] = value;
}
extern "C" __global__ void vector_add(const float* a, const float* b, float* c, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void spin(unsigned ms) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ms * 1000000ull);
}`

type Floats = UnifiedArray<Float32Array>

/** One of two devices: an allocator, a stream and kernels. */
class One {
  readonly own: Allocator
  readonly stream: cuda.Stream
  readonly #module: cuda.Module

  constructor(readonly device: number) {
    this.own = new Allocator({ backend: 'cuda-unified', device })
    this.stream = new cuda.Stream({ device })
    this.#module = cuda.compile(SOURCE, { device, name: 'devices.cu' })
  }

  launch(kernel: string, threads: number, ...args: cuda.KernelArgument[]): void {
    this.#module.kernel(kernel).launch({ threads, args, stream: this.stream })
  }

  fill(array: Floats, value: number): void {
    this.launch('fill_f32', array.length, array, { u32: array.length }, { f32: value })
  }

  add(a: Floats, b: Floats, sum: Floats): void {
    this.launch('vector_add', sum.length, a, b, sum, { u32: sum.length })
  }

  spin(ms: number): void {
    this.launch('spin', 1, { u32: ms })
  }
}

const both = (): [One, One] => [new One(0), new One(1)]
const isAll = (array: Floats, value: number): boolean => array.every((element) => element === value)

test('arrays of each device in every placement', async (t) => {
  const ones = both()
  for (const placement of ['auto', 'host', 'device', 'read-mostly'] as const) {
    for (const length of [1000, 100_000, 5_000_000]) {
      const arrays = ones.map(({ own }) => own.alloc(Float32Array, length, { placement }))
      ones.forEach((one, index) => one.fill(arrays[index] as Floats, index + 1))
      await cuda.synchronize()
      arrays.forEach((array, index) => t.true(isAll(array, index + 1), `${placement} ${length} on device ${index}`))
      for (const array of arrays) array.free()
    }
  }
  for (const { own } of ones) own.trim()
})

test('each device uses arrays of the other where both may; where not, it is an error', async (t) => {
  const [a, b] = both()
  for (const [mine, other] of [
    [a, b],
    [b, a],
  ] as const) {
    const x = mine.own.alloc(Float32Array, 1_000_000)
    const [y, sum] = [other.own.alloc(Float32Array, 1_000_000), other.own.alloc(Float32Array, 1_000_000)]
    mine.fill(x, 1.5)
    mine.stream.synchronizeBlocking()
    other.fill(y, 2)
    if (concurrent) {
      other.add(x, y, sum)
      await other.stream.synchronize()
      t.true(isAll(sum, 3.5))
      t.true(isAll(x, 1.5))
    } else {
      t.throws(() => other.add(x, y, sum), { instanceOf: UnimallocError, code: 'INVALID_ARGUMENT' })
    }
    other.stream.copy(sum, x)
    await other.stream.synchronize()
    t.true(isAll(sum, 1.5))
    for (const array of [x, y, sum]) array.free()
  }
})

test('an array that both devices use is handed out again when both have passed', async (t) => {
  const [a, b] = both()
  const placement = 'host' // reached by both, with concurrent access or without
  for (const slow of [a, b]) {
    const array = a.own.alloc(Float32Array, 1000, { placement })
    const { pointer } = array
    a.fill(array, 1)
    b.spin(1)
    b.fill(array, 2)
    slow.spin(100)
    slow.fill(array, 3)
    const end = slow.stream.record()
    array.free()
    const others = Array.from({ length: 300 }, () => a.own.alloc(Float32Array, 1000, { placement }))
    if (concurrent) t.false(end.done, 'the kernel ended before the test')
    if (!end.done) t.false(others.some((other) => other.pointer === pointer))
    await end.wait()
    t.true(others.every((other) => isAll(other, 0)))
    for (const other of others) other.free()
    a.own.trim()
    t.is(a.own.stats().pendingBytes, 0)
  }
})

test('work of one device comes after an event of the other', async (t) => {
  const [a, b] = both()
  const array = a.own.alloc(Float32Array, 1000, { placement: 'host' })
  const sum = b.own.alloc(Float32Array, 1000, { placement: 'host' })
  a.spin(30)
  a.fill(array, 4)
  const filled = a.stream.record()
  b.stream.wait(filled)
  b.add(array, array, sum)
  await b.stream.synchronize()
  t.true(isAll(sum, 8))
  t.true(filled.done)
  t.throws(() => b.stream.record().millisecondsSince(filled), { code: 'INVALID_ARGUMENT', message: /two devices/ })
})

test('realloc waits for work of the other device', (t) => {
  const [a, b] = both()
  const array = a.own.alloc(Float32Array, 1000, { placement: 'host' })
  b.spin(50)
  b.fill(array, 7)
  const longer = a.own.realloc(array, 2000)
  t.true(isAll(longer.subarray(0, 1000) as Floats, 7))
  t.true(isAll(longer.subarray(1000) as Floats, 0))
})

test('a stream and a kernel of two devices are refused', (t) => {
  const [a, b] = both()
  const array = a.own.alloc(Float32Array, 1000)
  const kernel = cuda.compile(SOURCE, { device: 0 }).kernel('fill_f32')
  const args = [array, { u32: 1000 }, { f32: 1 }]
  t.throws(() => kernel.launch({ threads: 1000, args, stream: b.stream }), {
    code: 'INVALID_ARGUMENT',
    message: /compile it for that device/,
  })
})

test('a percentage is of the allocator’s own device', (t) => {
  for (const [device, { totalBytes }] of devices.slice(0, 2).entries()) {
    const { limitBytes } = new Allocator({ device, maxBytes: '1%' }).stats()
    t.true(limitBytes <= Math.floor(totalBytes / 100), `device ${device}`)
  }
})
