// The Gray-Scott model of two chemicals that react and spread, in JavaScript and as a kernel: U feeds V, V dies off.
export interface Dish {
  width: number
  height: number
}

const FEED = 0.0545
const KILL = 0.062
const SPREAD_U = 0.16
const SPREAD_V = 0.08

export const KERNEL = `
extern "C" __global__ void gray_scott(const float* u, const float* v, float* u_next, float* v_next, int width, int height) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  int left = y * width + (x + width - 1) % width, right = y * width + (x + 1) % width;
  int above = (y + height - 1) % height * width + x, below = (y + 1) % height * width + x, at = y * width + x;
  float reaction = u[at] * v[at] * v[at];
  u_next[at] = u[at] + ${SPREAD_U}f * (u[left] + u[right] + u[above] + u[below] - 4.0f * u[at]) - reaction + ${FEED}f * (1.0f - u[at]);
  v_next[at] = v[at] + ${SPREAD_V}f * (v[left] + v[right] + v[above] + v[below] - 4.0f * v[at]) + reaction - ${FEED + KILL}f * v[at];
}`

type Numbers = Float32Array | Float64Array

/** Fills the dish with U and puts drops of V into it, the same ones every time. */
export function seed({ width, height }: Dish, u: Numbers, v: Numbers): void {
  u.fill(1)
  v.fill(0)
  let state = 2026
  const random = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32
  for (let drop = 0; drop < Math.ceil((width * height) / 3000); drop++) {
    const [middleX, middleY, radius] = [random() * width, random() * height, 2 + random() * 4]
    for (let y = -radius; y <= radius; y++) {
      for (let x = -radius; x <= radius; x++) {
        if (x * x + y * y > radius * radius) continue
        const [column, row] = [Math.floor(middleX + x + width) % width, Math.floor(middleY + y + height) % height]
        u[row * width + column] = 0.5
        v[row * width + column] = 0.25
      }
    }
  }
}

/** One step in time, on the CPU. */
export function step({ width, height }: Dish, u: Numbers, v: Numbers, uNext: Numbers, vNext: Numbers): void {
  for (let y = 0; y < height; y++) {
    const row = y * width
    const above = (y === 0 ? height - 1 : y - 1) * width
    const below = (y === height - 1 ? 0 : y + 1) * width
    for (let x = 0; x < width; x++) {
      const at = row + x
      const left = x === 0 ? row + width - 1 : at - 1
      const right = x === width - 1 ? row : at + 1
      const here = u[at] as number
      const there = v[at] as number
      const reaction = here * there * there
      const aroundU = (u[left] as number) + (u[right] as number) + (u[above + x] as number) + (u[below + x] as number)
      const aroundV = (v[left] as number) + (v[right] as number) + (v[above + x] as number) + (v[below + x] as number)
      uNext[at] = here + SPREAD_U * (aroundU - 4 * here) - reaction + FEED * (1 - here)
      vNext[at] = there + SPREAD_V * (aroundV - 4 * there) + reaction - (FEED + KILL) * there
    }
  }
}

/** The largest difference from the same steps computed anew, in ordinary arrays and double precision. */
export function worstDifference(dish: Dish, steps: number, v: ArrayLike<number>): number {
  const fresh = () => new Float64Array(dish.width * dish.height)
  let [u, w, uNext, wNext] = [fresh(), fresh(), fresh(), fresh()]
  seed(dish, u, w)
  for (let index = 0; index < steps; index++) {
    step(dish, u, w, uNext, wNext)
    ;[u, w, uNext, wNext] = [uNext, wNext, u, w]
  }
  let worst = 0
  // A value that is no number must not pass as no difference.
  for (let index = 0; index < w.length; index++) {
    const difference = Math.abs((w[index] as number) - (v[index] as number))
    if (!(difference <= worst)) worst = difference
  }
  return worst
}

const PALETTE = [
  [9, 20, 43],
  [14, 65, 92],
  [40, 132, 130],
  [238, 214, 160],
  [229, 107, 80],
] as const

/** Colours for how much V there is. */
export function paint(v: ArrayLike<number>, pixels: Uint8Array): void {
  for (let index = 0; index < v.length; index++) {
    const place = Math.min(0.9999, Math.max(0, (v[index] as number) / 0.36)) * (PALETTE.length - 1)
    const stop = Math.floor(place)
    const [from, to] = [PALETTE[stop], PALETTE[stop + 1]] as [readonly number[], readonly number[]]
    for (let channel = 0; channel < 3; channel++) {
      const [start, end] = [from[channel], to[channel]] as [number, number]
      pixels[3 * index + channel] = start + (end - start) * (place - stop)
    }
  }
}
