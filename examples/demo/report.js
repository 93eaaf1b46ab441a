// What the demo prints.

export function formatBytes(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  const unit = bytes < 1024 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10))
  return unit === 0 ? `${bytes} B` : `${(bytes / 1024 ** unit).toFixed(1)} ${units[unit]}`
}

const milliseconds = (value) => (value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(3))

function heading(title) {
  console.log(`\n${title}`)
}

function rows(entries) {
  const wide = Math.max(...entries.map(([name]) => name.length))
  for (const [name, value] of entries) console.log(`  ${name.padEnd(wide)}  ${value}`)
}

/**
 * @param {object} run
 * @param {string} run.clock what the times are: of the GPU, or of the CPU
 * @param {Record<string, number>[]} run.passes time of each stage, per pass
 * @param {[string, string][]} run.facts
 * @param {[string, string][]} run.memory
 * @param {[string, string][]} run.results
 */
export function printReport({ clock, passes, facts, memory, results }) {
  heading('unimalloc demo: ink and wash')
  rows(facts)
  heading(`Time per stage, ms (${clock})`)
  const names = Object.keys(passes[0])
  const columns = passes.map((_, index) => (index === 0 ? 'cold' : 'warm'))
  console.log(`  ${'stage'.padEnd(10)}${columns.map((name) => name.padStart(10)).join('')}`)
  for (const name of names) {
    console.log(`  ${name.padEnd(10)}${passes.map((pass) => milliseconds(pass[name]).padStart(10)).join('')}`)
  }
  const totals = passes.map((pass) => milliseconds(Object.values(pass).reduce((sum, value) => sum + value, 0)))
  console.log(`  ${'all'.padEnd(10)}${totals.map((total) => total.padStart(10)).join('')}`)
  heading('Memory')
  rows(memory)
  heading('Result')
  rows(results)
}
