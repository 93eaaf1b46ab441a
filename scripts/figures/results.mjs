// What docs/results/*.json and the instruction counts say, by the names that they use.
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { root, SetupError } from '../setup.mjs'

const files = new Map()

function load(path) {
  if (!files.has(path)) files.set(path, JSON.parse(readFileSync(join(root, path), 'utf8')))
  return files.get(path)
}

/** What a results file has, or an error that says what it has not. */
function need(value, path, ...names) {
  if (value === undefined || value === null) {
    throw new SetupError(`${path} has no ${names.join(', ')}: name what it has in scripts/figures/values.mjs.`)
  }
  return value
}

const RUST = 'docs/results/rust-allocators.json'
const RESIDENT = 'docs/results/rust-resident.json'
const JS = 'docs/results/js-allocators.json'
const GPU = 'docs/results/gpu-h200.json'
const INSTRUCTIONS = 'crates/bench/instructions.json'

/** One allocator's figures in one workload: `nanoseconds`, and the `ratio` to mimalloc. */
export function rust(workload, peer) {
  const { peers, rows } = load(RUST)
  const row = rows.find((each) => each.workload === workload)
  return need(row?.cells[peers.indexOf(peer)], RUST, workload, peer)
}

/** Our peak resident set over mimalloc's, one for each workload. */
export function rustPeak() {
  const { peers, rows } = load(RESIDENT)
  const [ours, theirs] = ['unimalloc', 'mimalloc'].map((name) => peers.indexOf(name))
  return rows.map(({ peak_bytes: peak }) => need(peak[ours], RESIDENT, 'unimalloc') / peak[theirs])
}

export function rustInstructions(scenario) {
  const path = load(INSTRUCTIONS).paths.find((each) => each.scenario === scenario)
  return need(path?.instructions, INSTRUCTIONS, scenario)
}

/** The version of Node that the README shows. */
export const JS_NODE = '24'

export const jsNodes = () => load(JS).nodes.map(({ version }) => version)

/** All peers of a workload, ours first, in the Node whose version starts so. */
export function js(workload, node = `v${JS_NODE}.`) {
  const rows = load(JS).nodes.find(({ version }) => version.startsWith(node))?.rows
  return need(rows?.find(({ name }) => name === workload)?.peers, JS, `Node ${node}`, workload)
}

/** One peer's figures: `nanoseconds`, and our `ratio` to it. */
export function jsPeer(workload, peer, node) {
  return need(
    js(workload, node).find(({ name }) => name === peer),
    JS,
    workload,
    peer,
  )
}

export function gpu(workload, row, column) {
  const found = load(GPU).workloads.find(({ name }) => name === workload)
  const values = found?.rows.find((each) => each.case === row)?.values
  return need(values?.[found.columns.indexOf(column)], GPU, workload, row, column)
}

export const gpuBudgets = () => need(load(GPU).budgets, GPU, 'budgets')
