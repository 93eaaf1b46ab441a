// The figures that pages show, by name. Each is computed from a results file; a row that is not there is an error, never a gap.
import { ratio, share, table, time } from './format.mjs'
import { gpu, gpuBudgets, js, jsNodes, jsPeer, JS_NODE, rust, rustInstructions, rustPeak } from './results.mjs'

const rustSizes = ['64 B', '256 B', '1 KiB', '4 KiB', '64 KiB']
const largeSizes = ['64 KiB', '256 KiB', '1 MiB', '4 MiB', '16 MiB', '64 MiB']

/**
 * A row of the README's tables: what, our time, and the peers' by name; the fastest in bold. Nobody can be faster than a `floor`, which takes
 * no part.
 */
function compared(what, ours, peers, unit) {
  const fastest = Math.min(ours, ...peers.filter(({ floor }) => !floor).map(({ value }) => value))
  const show = ({ value, floor }) =>
    !floor && value <= fastest * 1.02 ? `**${time(value, unit)}**` : time(value, unit)
  return [what, show({ value: ours }), peers.map((peer) => `${peer.name} ${show(peer)}`).join(', ')]
}

const rustRow = (workload, what) => {
  const ours = rust(workload, 'unimalloc').nanoseconds
  const peers = ['mimalloc', 'jemalloc', 'system'].map((name) => ({
    name: name === 'system' ? 'glibc' : name,
    value: rust(workload, name).nanoseconds,
  }))
  return compared(what, ours, peers, 'ns')
}

const jsRow = (workload, what, peers) =>
  compared(
    what,
    js(workload)[0].nanoseconds.median,
    peers.map((name) => ({
      name: name.startsWith('bare') ? `a ${name}` : `\`${name}\``,
      value: jsPeer(workload, name).nanoseconds.median,
      floor: name.startsWith('bare'),
    })),
    'ns',
  )

const gpuRow = (workload, row, column, what, peers, unit) =>
  compared(
    what,
    gpu(workload, row, column),
    peers.map(([name, peerRow, peerColumn, floor = false]) => ({
      name,
      value: gpu(workload, peerRow ?? row, peerColumn),
      floor,
    })),
    unit,
  )

function readme() {
  return table(
    ['allocate and free', 'unimalloc', 'others'],
    [
      ['*in Rust, host memory*', '', ''],
      rustRow('pair 64 B', '64 B'),
      rustRow('pair 1 KiB', '1 KiB'),
      rustRow('pair 64 KiB', '64 KiB'),
      rustRow('random', 'one of 10,000 live blocks, 256 B to 16 KiB'),
      [`*in Node ${JS_NODE}, host memory*`, '', ''],
      jsRow('allocUnsafe 1 KiB', '`allocUnsafe`, 1 KiB', ['Buffer.allocUnsafe', 'new Float32Array']),
      jsRow('allocUnsafe 64 KiB', '`allocUnsafe`, 64 KiB', ['Buffer.allocUnsafe', 'new Float32Array']),
      jsRow('alloc 4 KiB', '`alloc` (zeros), 4 KiB', ['new Float32Array', 'bare external buffer']),
      jsRow('alloc 1024 KiB', '`alloc` (zeros), 1 MiB', ['new Float32Array', 'bare external buffer']),
      ['*on an NVIDIA H200, unified memory*', '', ''],
      gpuRow(
        'pair',
        '4 KiB',
        'unimalloc',
        '4 KiB',
        [
          ['CUDA 13 managed pool', null, 'CUDA 13 managed pool'],
          ['cuMemAllocManaged', null, 'cuMemAllocManaged'],
        ],
        'ns',
      ),
      gpuRow(
        'launch',
        '1 MiB',
        'on the stream',
        '1 MiB around a kernel launch',
        [
          ['a launch on a kept block', null, 'kept block', true],
          ['CUDA 13 managed pool', null, 'CUDA 13 managed pool'],
          ['cuMemAllocManaged', null, 'cuMemAllocManaged'],
        ],
        'µs',
      ),
      gpuRow(
        'round-trip',
        "'auto'",
        'allocated each time',
        '4 KiB: CPU writes, kernel, CPU reads',
        [
          ['cuMemAllocManaged', 'cuMemAllocManaged', 'allocated each time'],
          ['the kernel and its wait alone', 'a kernel and its wait alone', 'block kept', true],
        ],
        'µs',
      ),
      gpuRow(
        'device',
        "'device', host wrote it all",
        'µs',
        '64 MiB that the CPU wrote before, filled by a kernel',
        [
          ['plain migration', 'plain migration, host wrote it all', 'µs'],
          ['CUDA 13 managed pool', 'CUDA 13 managed pool, host wrote', 'µs'],
        ],
        'µs',
      ),
    ],
  )
}

const range = (ratios) => {
  const [low, high] = [Math.min(...ratios), Math.max(...ratios)]
  return ratio(low) === ratio(high) ? ratio(low) : `${ratio(low)} to ${ratio(high)}`
}

/** Whether the worst of some ratios meets a budget. */
const verdict = (ratios, must, aim) => {
  const worst = Math.max(...ratios)
  return worst <= aim ? 'aim' : worst <= must ? 'must' : '**not met**'
}

const budgetRow = (what, ratios, must, aim) => [
  what,
  range(ratios),
  `≤ ${must}`,
  `≤ ${aim}`,
  verdict(ratios, must, aim),
]

function rustBudgets() {
  const against = (sizes) => sizes.map((size) => rust(`pair ${size}`, 'unimalloc').ratio)
  return table(
    ['Rust', 'measured', 'must', 'aim', 'meets'],
    [
      budgetRow('pair, 64 B to 64 KiB, against mimalloc', against(rustSizes), 1.3, 1),
      budgetRow('pair, 64 KiB to 64 MiB, against mimalloc', against(largeSizes), 1, 0.1),
      budgetRow('random replacement, against mimalloc', [rust('random', 'unimalloc').ratio], 0.7, 0.3),
      budgetRow('Hardened against Secure, pair, 64 B to 64 KiB', rustSizes.map(hardened), 2, 1.5),
      budgetRow(
        'freed by another thread (handoff), against mimalloc',
        ['64 B', '1 KiB'].map((size) => rust(`handoff ${size}`, 'unimalloc').ratio),
        1.5,
        1,
      ),
      budgetRow('peak resident set, against mimalloc', rustPeak(), 1.2, 1),
    ],
  )
}

const hardened = (size) =>
  rust(`pair ${size}`, 'unimalloc-hardened').nanoseconds / rust(`pair ${size}`, 'unimalloc-secure').nanoseconds

function jsBudgets() {
  const worst = (workload, peer) => jsNodes().map((node) => jsPeer(workload, peer, node).ratio.median)
  return table(
    ['JavaScript, Node 20 to 26', 'measured', 'must', 'aim', 'meets'],
    [
      budgetRow(
        '`allocUnsafe` + `free` of 1 KiB, against `Buffer.allocUnsafe`',
        worst('allocUnsafe 1 KiB', 'Buffer.allocUnsafe'),
        0.6,
        0.2,
      ),
      budgetRow(
        '`alloc` + `free` of 4 KiB, against a bare external buffer',
        worst('alloc 4 KiB', 'bare external buffer'),
        1.5,
        1.1,
      ),
    ],
  )
}

const us = (workload, row, column) => () => time(gpu(workload, row, column), 'µs')

function gpuSmall() {
  const columns = ['prefer the host', 'no advice', "'device'"]
  const rows = [
    'first write by the CPU',
    'CPU alone',
    'kernel alone',
    'CPU writes, kernel reads',
    'CPU, ten kernels',
    '64 kernels, one wait',
  ]
  return table(
    ['', ...columns],
    rows.map((row) => [row, ...columns.map((column) => share(gpu('small', row, column)))]),
  )
}

function gpuResident() {
  const rows = ['2048 of 1 KiB', '1024 of 4 KiB', '256 of 64 KiB', '32 of 1 MiB', '16 of 4 MiB']
  return table(
    ['blocks', 'on the CPU, ns', 'on the GPU, ns'],
    rows.map((row) => [row, share(gpu('resident', row, 'on the CPU')), share(gpu('resident', row, 'on the GPU'))]),
  )
}

export const values = {
  'readme.table': readme,
  'rust.budgets': rustBudgets,
  'js.budgets': jsBudgets,
  'rust.pair.instructions': () => String(rustInstructions('pair of 64 B')),
  'rust.pair.64': () => ratio(rust('pair 64 B', 'unimalloc').ratio),
  'rust.pair.256': () => ratio(rust('pair 256 B', 'unimalloc').ratio),
  'rust.hardened': () => range(rustSizes.map(hardened)),
  'rust.pair.16m': () => ratio(rust('pair 16 MiB', 'unimalloc').ratio),
  'gpu.small': gpuSmall,
  'gpu.resident': gpuResident,
  'gpu.round-trip.auto': us('round-trip', "'auto'", 'allocated each time'),
  'gpu.round-trip.kernel': us('round-trip', 'a kernel and its wait alone', 'block kept'),
  'gpu.round-trip.plain': us('round-trip', 'no advice', 'allocated each time'),
  'gpu.round-trip.device': us('round-trip', "'device'", 'allocated each time'),
  'gpu.round-trip.device-kept': us('round-trip', "'device'", 'block kept'),
  'gpu.launch.stream': us('launch', '1 MiB', 'on the stream'),
  'gpu.launch.kept': us('launch', '1 MiB', 'kept block'),
  'gpu.device.warm': us('device', "unimalloc 'device', warm", 'µs'),
  'gpu.device.fresh': us('device', 'cuMemAllocManaged, fresh', 'µs'),
  'gpu.device.migrated': us('device', 'plain migration, host wrote it all', 'µs'),
  'gpu.device.host-wrote': us('device', "'device', host wrote it all", 'µs'),
  'gpu.read-mostly.write': us('round-trip', "'read-mostly'", 'allocated each time'),
  'gpu.busy.driver': us('busy', '4 KiB', 'cuMemFree, unused'),
  'gpu.busy.free': us('busy', '4 KiB', 'unimalloc, used'),
  'gpu.pair.driver': () => time(gpu('pair', '4 KiB', 'cuMemAllocManaged'), 'ns'),
  'gpu.pair': () => time(gpu('pair', '4 KiB', 'unimalloc'), 'ns'),
  'gpu.threads': () =>
    (gpu('threads', '16 threads', 'unimalloc') / gpu('threads', '1 threads', 'unimalloc')).toFixed(1),
  'gpu.missed': () => {
    const missed = gpuBudgets().filter(({ value, must, at_least }) => (at_least ? value < must : value > must))
    return missed.length === 0 ? 'none' : missed.map(({ what }) => what).join('; ')
  },
}
