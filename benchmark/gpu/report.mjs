// Tables and pictures from the results of `gpu` (crates/bench) and `cupy_pool.py`.
//
//   node benchmark/gpu/report.mjs GPU.json... CUPY.json DIRECTORY
//
// Writes gpu-h200.json (all together), gpu-h200.md and gpu-<workload>.svg to the directory. Of several runs each value is the median.
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { format, resolveConfig } from 'prettier'

const gpuFiles = process.argv.slice(2)
const [cupyFile, directory] = gpuFiles.splice(-2)
if (gpuFiles.length === 0) {
  console.error('usage: node benchmark/gpu/report.mjs GPU.json... CUPY.json DIRECTORY')
  process.exit(2)
}
const runs = gpuFiles.map((file) => JSON.parse(readFileSync(file, 'utf8')))
const results = merge(runs)
const cupy = JSON.parse(readFileSync(cupyFile, 'utf8'))

/** The median of what the runs say; `null` where one of them says nothing. */
function median(values) {
  if (values.some((value) => value === null)) return null
  const sorted = values.toSorted((a, b) => a - b)
  const middle = sorted.length >> 1
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2
}

/** Runs of one program on one machine as one: they have the same rows in the same order. */
function merge(runs) {
  const merged = structuredClone(runs[0])
  merged.workloads.forEach((workload, at) => {
    // A note with a figure is of the run that made it.
    const said = (note, line) => runs.every((run) => run.workloads[at].notes[line] === note)
    workload.notes = workload.notes.map((note, line) => (said(note, line) ? note : `${note} (the first run)`))
    workload.rows.forEach((row, line) => {
      row.values = row.values.map((_, column) => median(runs.map((run) => run.workloads[at].rows[line].values[column])))
    })
  })
  merged.budgets.forEach((figure, at) => {
    figure.runs = runs.map((run) => run.budgets[at].value)
    figure.value = median(figure.runs)
  })
  return merged
}

const byteNames = ['B', 'KiB', 'MiB']
function sizeName(bytes) {
  const power = Math.min(2, Math.floor(Math.log2(bytes) / 10))
  return `${bytes / 1024 ** power} ${byteNames[power]}`
}

/** CuPy ran in a process of its own, from Python; its numbers become columns of the same tables. */
function addCupy() {
  const add = (name, column, valueOf) => {
    const workload = results.workloads.find((candidate) => candidate.name === name)
    if (!workload || workload.columns.includes(column)) return
    workload.columns.push(column)
    for (const row of workload.rows) row.values.push(valueOf(row.case) ?? null)
  }
  const bySize = (table) => new Map(Object.entries(table).map(([bytes, value]) => [sizeName(Number(bytes)), value]))
  const pairs = bySize(cupy.pair_ns)
  add('pair', 'CuPy managed pool', (name) => pairs.get(name))
  add('threads', 'CuPy managed pool', (name) => cupy.threads[name.split(' ')[0]])
  add('random', 'CuPy managed pool', () => cupy.random.ns)
  const launches = bySize(cupy.launch_us)
  add('launch', 'CuPy, kept array', (name) => launches.get(name)?.kept)
  add('launch', 'CuPy managed pool', (name) => launches.get(name)?.temporary)
  results.workloads
    .find(({ name }) => name === 'random')
    ?.notes.push(`CuPy's pool held ${Math.round(cupy.random.held_bytes / 2 ** 20)} MiB`)
  results.cupy = cupy.cupy
}

function number(value) {
  if (value === null) return '–'
  if (value >= 100) return Math.round(value).toLocaleString('en')
  return value >= 10 ? value.toFixed(1) : value.toFixed(value >= 1 ? 2 : 3)
}

function table({ columns, rows }) {
  const lines = [`| | ${columns.join(' | ')} |`, `| --- | ${columns.map(() => '---:').join(' | ')} |`]
  for (const row of rows) lines.push(`| ${row.case} | ${row.values.map(number).join(' | ')} |`)
  return lines.join('\n')
}

const colours = ['#1b6ca8', '#e07a1f', '#3c8d40', '#b33a3a', '#7d5ba6', '#6b6b6b', '#c2a000']
const escape = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;')

/** Bars on a logarithmic axis: what is compared differs by powers of ten. */
function picture({ title, unit, columns, rows }) {
  const [left, right, width, bar, gap] = [250, 90, 900, 13, 12]
  const shown = columns
    .map((name, index) => ({ name, index }))
    .filter(({ index, name }) => name !== 'GPU / CPU' && rows.some(({ values }) => values[index] !== null))
  const values = rows.flatMap((row) => shown.map(({ index }) => row.values[index])).filter((value) => value > 0)
  const [least, most] = [Math.min(...values), Math.max(...values)]
  const low = 10 ** Math.floor(Math.log10(least) - 0.3)
  const span = Math.max(1, Math.log10(most / low))
  const x = (value) => left + (Math.log10(value / low) / span) * (width - left - right)
  const legendRows = Math.ceil(shown.length / 3)
  let y = 58 + legendRows * 18
  const top = y
  const parts = []
  for (const row of rows) {
    const height = shown.length * bar
    parts.push(`<text x="${left - 10}" y="${y + height / 2 + 4}" text-anchor="end">${escape(row.case)}</text>`)
    shown.forEach(({ index }, order) => {
      const value = row.values[index]
      if (value === null) return
      const end = Math.max(x(value), left + 1)
      const at = y + order * bar
      parts.push(
        `<rect x="${left}" y="${at}" width="${(end - left).toFixed(1)}" height="${bar - 2}" fill="${colours[order % colours.length]}"/>`,
        `<text x="${(end + 4).toFixed(1)}" y="${at + bar - 3}" class="value">${number(value)}</text>`,
      )
    })
    y += height + gap
  }
  const grid = []
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= most; power++) {
    const at = x(10 ** power).toFixed(1)
    grid.push(
      `<line x1="${at}" x2="${at}" y1="${top - 6}" y2="${y - gap + 4}" stroke="#ddd"/>`,
      `<text x="${at}" y="${y + 8}" text-anchor="middle" class="value">${(10 ** power).toLocaleString('en')}</text>`,
    )
  }
  const legend = shown.map(({ name }, order) => {
    const [column, line] = [order % 3, Math.floor(order / 3)]
    const at = [20 + column * 290, 46 + line * 18]
    return `<rect x="${at[0]}" y="${at[1]}" width="11" height="11" fill="${colours[order % colours.length]}"/><text x="${at[0] + 17}" y="${at[1] + 10}">${escape(name)}</text>`
  })
  const { gpu, driver, origin } = results
  const height = y + 40
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif" font-size="12" fill="#222">
<style>.value { font-size: 10px; fill: #555 }</style>
<rect width="100%" height="100%" fill="#fff"/>
<text x="20" y="28" font-size="16" font-weight="600">${escape(title)} (${escape(unit)}, logarithmic)</text>
${legend.join('\n')}
${grid.join('\n')}
${parts.join('\n')}
<text x="20" y="${height - 10}" class="value">${escape(`${gpu}, driver ${driver}, ${origin.processor}, commit ${origin.commit}, ${origin.day}`)}</text>
</svg>
`
}

function verdict({ value, must, aim, at_least: atLeast }) {
  const meets = (bound) => (atLeast ? value >= bound : value <= bound)
  if (meets(aim)) return 'aim'
  return meets(must) ? 'must' : '**missed**'
}

function budgets() {
  const digits = (value) => (value < 0.01 ? value.toPrecision(2) : value < 2 ? value.toFixed(3) : value.toFixed(1))
  const bound = (figure, value) => `${figure.at_least ? '≥' : '≤'} ${digits(value)}`
  const lines = ['| what | measured | runs | must | aim | meets |', '| --- | ---: | ---: | ---: | ---: | --- |']
  for (const figure of results.budgets) {
    lines.push(
      `| ${figure.what} | ${digits(figure.value)} | ${digits(Math.min(...figure.runs))} to ${digits(Math.max(...figure.runs))} | ${bound(figure, figure.must)} | ${bound(figure, figure.aim)} | ${verdict(figure)} |`,
    )
  }
  return lines.join('\n')
}

addCupy()
const { gpu, driver, cuda, origin } = results
const sections = results.workloads.map((workload) => {
  writeFileSync(join(directory, `gpu-${workload.name}.svg`), picture(workload))
  const notes = workload.notes.map((note) => `- ${note}`).join('\n')
  return `## ${workload.title}\n\nIn ${workload.unit}.\n\n${table(workload)}\n\n${notes ? `${notes}\n\n` : ''}![${workload.title}](gpu-${workload.name}.svg)\n`
})
writeFileSync(
  join(directory, 'gpu-h200.md'),
  `# On an NVIDIA H200

Generated by \`benchmark/gpu/report.mjs\` from [gpu-h200.json](gpu-h200.json).

| | |
| --- | --- |
| GPU | ${gpu}, driver ${driver}, CUDA ${cuda} |
| host | ${origin.processor}, ${origin.processors} processors, ${origin.system} |
| commit | ${origin.commit}, ${origin.day} |
| command | \`${origin.command}\`; CuPy ${cupy.cupy}: \`python3 benchmark/gpu/cupy_pool.py\` |

Medians of ${runs.length} runs on one machine, a process each (CuPy: one, from Python). Managed memory in use stayed below 1 GiB. The CPU is a virtual machine's: take CPU times as
ratios. [The guide](../gpu.md) says what follows from them.

## What has a budget

${budgets()}

${sections.join('\n')}`,
)
const json = join(directory, 'gpu-h200.json')
writeFileSync(json, await format(JSON.stringify(results), { ...(await resolveConfig(json)), parser: 'json' }))
