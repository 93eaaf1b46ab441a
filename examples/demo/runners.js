// Where the chain runs: on the CPU, in JavaScript, or on the GPU. A runner has the filters and the clock of its side.
import { performance } from 'node:perf_hooks'
import { cuda } from 'unimalloc'
import { cudaFilters } from './filters-cuda.js'
import { hostFilters } from './filters-host.js'
import { progress } from './progress.js'

/**
 * @typedef {object} Runner
 * @property {string} device
 * @property {string} clock
 * @property {import('./pipeline.js').Filters} filters
 * @property {<T>(name: string, run: () => T) => T} stage runs a stage and keeps its time
 * @property {() => Promise<Record<string, number>>} finish waits for all stages; their times in ms
 * @property {(array: ArrayBufferView, side: 'device' | 'host') => void} prefetch
 * @property {() => number} launches
 * @property {() => void} dispose
 */

/** @returns {Runner} */
export function hostRunner() {
  let bar = progress('')
  /** @type {Record<string, number>} */
  let times = {}
  return {
    device: 'CPU, filters in JavaScript',
    clock: 'CPU clock',
    filters: hostFilters((fraction) => bar.update(fraction)),
    stage(name, run) {
      bar = progress(name)
      const started = performance.now()
      try {
        return run()
      } finally {
        times[name] = performance.now() - started
        bar.stop()
      }
    },
    async finish() {
      const finished = times
      times = {}
      return finished
    },
    prefetch() {},
    launches: () => 0,
    dispose() {},
  }
}

/** @returns {Runner} */
export function cudaRunner() {
  const compiled = cudaFilters()
  const [device] = cuda.devices()
  const driver = `${Math.floor(device.driverVersion / 1000)}.${Math.floor((device.driverVersion % 1000) / 10)}`
  /** @type {{ name: string, start: cuda.Event, end: cuda.Event }[]} */
  let marks = []
  const drop = () => {
    for (const { start, end } of marks) {
      start[Symbol.dispose]()
      end[Symbol.dispose]()
    }
    marks = []
  }
  return {
    device: `${device.name} (compute capability ${device.computeCapability.join('.')}, driver for CUDA ${driver})`,
    clock: 'GPU clock',
    filters: compiled.filters,
    stage(name, run) {
      const start = cuda.defaultStream.record()
      const result = run()
      marks.push({ name, start, end: cuda.defaultStream.record() })
      return result
    },
    async finish() {
      await cuda.synchronize()
      const times = Object.fromEntries(marks.map(({ name, start, end }) => [name, end.millisecondsSince(start)]))
      drop()
      return times
    },
    prefetch: (array, side) => cuda.defaultStream.prefetch(array, side),
    launches: compiled.launches,
    dispose() {
      drop()
      compiled[Symbol.dispose]()
    },
  }
}
