import { styleText } from 'node:util'

export type Style = Parameters<typeof styleText>[0]

/** Styles text where the output is a terminal that has colours and nobody asked for none (NO_COLOR, TERM=dumb). */
export function styled(style: Style, text: string, stream: NodeJS.WriteStream = process.stdout): string {
  const colours = stream.isTTY === true && typeof stream.hasColors === 'function' && stream.hasColors()
  return colours ? styleText(style, text, { validateStream: false }) : text
}

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB']

/** A number of bytes for people: `1.5 GiB`. */
export function bytes(value: number): string {
  if (!Number.isFinite(value)) return 'unlimited'
  const unit = value < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(value) / 10))
  const amount = value / 1024 ** unit
  return `${unit === 0 || Number.isInteger(amount) ? amount : amount.toFixed(1)} ${UNITS[unit]}`
}

/** A time for people, from seconds: `12 ns`, `3.4 µs`. */
export function seconds(value: number): string {
  for (const [unit, size] of [
    ['s', 1],
    ['ms', 1e-3],
    ['µs', 1e-6],
  ] as const) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`
  }
  return `${Math.round(value * 1e9)} ns`
}

/** `CUDA 13.0` from what the driver reports. */
export function cudaVersion(version: number): string {
  return `${Math.floor(version / 1000)}.${Math.floor((version % 1000) / 10)}`
}

/** How many characters of prose fit on a line of the terminal; more than that is hard to read. */
export function lineWidth(): number {
  return Math.min(process.stdout.columns ?? 110, 110)
}

/** Names on the left, values beside them, wrapped to the terminal. */
export function facts(rows: readonly (readonly [name: string, value: string])[]): string {
  const name = Math.max(...rows.map(([text]) => text.length))
  const width = Math.max(40, lineWidth() - name - 4)
  return rows
    .map(([left, right]) => `  ${left.padEnd(name)}  ${wrap(right, width).join(`\n${' '.repeat(name + 4)}`)}`)
    .join('\n')
}

/** Breaks text at spaces into lines of at most `width` characters, where words allow. */
export function wrap(text: string, width: number): string[] {
  const lines: string[] = []
  for (const paragraph of text.split('\n')) {
    let line = ''
    for (const word of paragraph.split(' ')) {
      if (line && line.length + 1 + word.length > width) {
        lines.push(line)
        line = word
      } else line = line ? `${line} ${word}` : word
    }
    lines.push(line)
  }
  return lines
}

/** A table whose first column is text and whose others are figures. */
export function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const widths = head.map((title, column) => Math.max(title.length, ...rows.map((row) => row[column]?.length ?? 0)))
  const line = (cells: readonly string[]) =>
    `  ${cells.map((cell, column) => (column === 0 ? cell.padEnd(widths[0] ?? 0) : cell.padStart(widths[column] ?? 0))).join('   ')}`
  return [styled('dim', line(head)), ...rows.map(line)].join('\n')
}
