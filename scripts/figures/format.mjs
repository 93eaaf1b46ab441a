// How figures look on a page.

const group = (text) => text.replace(/\B(?=(\d{3})+$)/g, ',')

/** Three significant digits, whole numbers from 100 up. */
export function share(value) {
  if (value >= 100) return group(String(Math.round(value)))
  return value.toPrecision(value >= 1 ? 3 : 2)
}

const units = ['ns', 'µs', 'ms', 's']

/** A time with the unit that suits it. */
export function time(value, unit) {
  let at = units.indexOf(unit)
  while (value >= 10_000 && at < units.length - 1) {
    value /= 1000
    at++
  }
  return `${share(value)} ${units[at]}`
}

export const ratio = (value) => (value >= 10 ? value.toFixed(0) : value.toFixed(value < 0.1 ? 3 : 2))

/** A table as a block of its own: the first column to the left, the others to the right unless they are words. */
export function table(head, rows) {
  const rule = head.map((name, column) => (column === 0 || name === 'others' || name === 'meets' ? '---' : '---:'))
  const lines = [head, rule, ...rows].map((cells) => `| ${cells.join(' | ')} |`)
  return `\n\n${lines.join('\n')}\n\n`
}
