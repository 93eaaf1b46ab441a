// `npm run figures [-- --check]`: fills the figures in README.md and docs/*.md from docs/results/*.json, so that none is typed.
//
// A page says `<!--= NAME -->…<!--/-->`; what is between the marks is written by the function of that name in figures/values.mjs.
// With --check nothing is written, and a page that is out of date is an error.
import { readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'
import { values } from './figures/values.mjs'
import { root, runScript, SetupError } from './setup.mjs'

const MARK = /<!--= (?<name>\S+) -->(?<old>.*?)<!--\/-->/gs

const pages = () => [
  'README.md',
  ...readdirSync(join(root, 'docs'))
    .filter((name) => name.endsWith('.md'))
    .map((name) => join('docs', name)),
]

/** The text with all its figures as the results have them. */
function filled(page, text, used) {
  return text.replace(MARK, (_, name, old, at) => {
    const value = values[name]
    const where = `${page}:${text.slice(0, at).split('\n').length}`
    if (value === undefined)
      throw new SetupError(`${where}: no figure is called ${name}; scripts/figures/values.mjs has them all.`)
    // A line that starts with a comment is HTML to the end, and shows its Markdown as it stands.
    if (!old.startsWith('\n') && (at === 0 || text[at - 1] === '\n')) {
      throw new SetupError(
        `${where}: a figure cannot start a line; put a word before it, or its mark on a line of its own.`,
      )
    }
    used.add(name)
    return `<!--= ${name} -->${value()}<!--/-->`
  })
}

/** Brings the figures up to date, or, with `check`, answers the pages that are not. */
export function figures(check = false) {
  const stale = []
  const used = new Set()
  for (const page of pages()) {
    const text = readFileSync(join(root, page), 'utf8')
    const fresh = filled(page, text, used)
    if (fresh === text) continue
    stale.push(page)
    if (!check) writeFileSync(join(root, page), fresh)
  }
  const unused = Object.keys(values).filter((name) => !used.has(name))
  if (unused.length > 0)
    throw new SetupError(`scripts/figures/values.mjs: no page has ${unused.join(', ')}; take them out.`)
  return stale
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  await runScript(() => {
    const check = process.argv.includes('--check')
    const stale = figures(check)
    if (stale.length === 0) return 0
    if (!check) {
      console.log(`Brought up to date: ${stale.join(', ')}.`)
      return 0
    }
    console.error(`figures are out of date in ${stale.join(', ')}: run \`npm run figures\`.`)
    return 1
  })
}
