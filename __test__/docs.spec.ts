// Every block of JavaScript in README.md and docs/guide/ is run as it stands, and must print what its comments say.
//
// A block that makes streams or kernels runs over the stand-in driver, or on a GPU where there is one; the others run on the host.
// One that asks which backend it got runs on both. A comment after console.log starts with what is printed.
import { spawn } from 'node:child_process'
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import anyTest from 'ava'
import type { ExecutionContext } from 'ava'
import * as unimalloc from 'unimalloc'

import type { Outcome } from './helpers/child.js'
import { fakeCudaDirectory } from './helpers/fake-cuda.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const guide = join(root, 'docs', 'guide')

interface Block {
  page: string
  line: number
  language: string
  code: string
}

const pages = [
  'README.md',
  ...(existsSync(guide) ? readdirSync(guide).map((name) => join('docs', 'guide', name)) : []),
].filter((page) => page.endsWith('.md') && existsSync(join(root, page)))
const blocks = pages.flatMap(blocksOf)

/** The fenced blocks of a page. */
function blocksOf(page: string): Block[] {
  const found: Block[] = []
  let open: Block | null = null
  readFileSync(join(root, page), 'utf8')
    .split('\n')
    .forEach((text, index) => {
      const fence = /^```(\S*)/.exec(text)
      if (open !== null && fence !== null) {
        found.push(open)
        open = null
      } else if (fence !== null) {
        open = { page, line: index + 1, language: fence[1] as string, code: '' }
      } else if (open !== null) {
        open.code += `${text}\n`
      }
    })
  return found
}

/** `using` becomes what Node 20 understands; nothing else changes. */
async function translate(code: string): Promise<string> {
  const { transform } = await import('esbuild')
  return (await transform(code, { loader: 'ts', target: 'node20.19', format: 'esm' })).code
}

// A project that has the package installed.
const folder = mkdtempSync(join(tmpdir(), 'unimalloc-docs-'))
mkdirSync(join(folder, 'node_modules'))
symlinkSync(root, join(folder, 'node_modules', 'unimalloc'), 'junction')
anyTest.after.always(() => rmSync(folder, { recursive: true }))

function run(name: string, code: string, environment: Record<string, string>): Promise<Outcome> {
  const file = join(folder, name)
  writeFileSync(file, code)
  return runNode([file], environment)
}

function runNode(args: string[], environment: Record<string, string>): Promise<Outcome> {
  return new Promise((done, reject) => {
    const env: NodeJS.ProcessEnv = { ...process.env, ...environment }
    delete env['NODE_OPTIONS']
    const child = spawn(process.execPath, args, { cwd: root, env })
    let [stdout, stderr] = ['', '']
    child.stdout.setEncoding('utf8').on('data', (text: string) => (stdout += text))
    child.stderr.setEncoding('utf8').on('data', (text: string) => (stderr += text))
    child.once('error', reject)
    child.once('close', (exit, signal) => done({ code: exit, signal, stdout, stderr }))
  })
}

/** What the comments behind a block's calls of console.log say, in order. */
function promises(code: string): string[] {
  return [...code.matchAll(/^\s*console\.log\(.*\) \/\/ (.*)$/gm)].map(([, text]) => text as string)
}

async function check(t: ExecutionContext, block: Block, environment: Record<string, string>): Promise<void> {
  const { language, code, page, line } = block
  const commonjs = language === 'cjs'
  const name = `${page.replaceAll(/[^\w.]/g, '-')}-${line}.${commonjs ? 'cjs' : 'mjs'}`
  const { code: exit, signal, stdout, stderr } = await run(name, commonjs ? code : await translate(code), environment)
  t.is(signal, null, stderr)
  t.is(exit, 0, stderr)
  t.is(stderr, '')
  const printed = stdout.split('\n').slice(0, -1)
  let at = 0
  for (const promise of promises(code)) {
    while (at < printed.length && !keeps(promise, printed[at] as string)) at++
    t.true(at < printed.length, `nothing printed is what the comment says: ${promise}\nprinted was:\n${stdout}`)
    at++
  }
}

/** Whether a comment starts with what was printed, and says no more than an explanation after a colon. */
function keeps(comment: string, printed: string): boolean {
  return comment === printed || comment.startsWith(`${printed}:`)
}

const usesGpu = /\bcuda\s*\.(?:compile|compileAsync|defaultStream|devices|synchronize|Stream)\b/
const asksFirst = /\bif \((?:allocator\.backend === |isCudaAvailable\(\))/
const fake = fakeCudaDirectory()
const hasCompiler = isInstalled('esbuild')

function isInstalled(name: string): boolean {
  try {
    createRequire(import.meta.url).resolve(name)
    return true
  } catch {
    return false
  }
}

for (const block of blocks.filter(({ language }) => ['js', 'ts', 'cjs'].includes(language))) {
  const name = `${block.page}:${block.line}`
  const test = hasCompiler || block.language === 'cjs' ? anyTest : anyTest.skip
  const needsGpu = usesGpu.test(block.code) && !asksFirst.test(block.code)
  if (!needsGpu) test(`${name} on the host`, (t) => check(t, block, { UNIMALLOC_BACKEND: 'host' }))
  if (usesGpu.test(block.code)) {
    const testGpu = unimalloc.isCudaAvailable() ? test : anyTest.skip
    testGpu(`${name} on a GPU`, (t) => check(t, block, {}))
    const testFake = fake === null ? anyTest.skip : test
    testFake(`${name} over the stand-in driver`, (t) => check(t, block, { LD_LIBRARY_PATH: fake as string }))
  }
}

for (const backend of ['host', 'auto']) {
  const first = blocks.find(({ page, language }) => page === 'README.md' && language === 'js')
  const testFirst = first === undefined ? anyTest.skip : anyTest
  testFirst(
    `the first program of the README runs as it stands, on every Node and on the backend '${backend}'`,
    async (t) => {
      const { code, stdout, stderr } = await run(`first-${backend}.mjs`, (first as Block).code, {
        UNIMALLOC_BACKEND: backend,
      })
      t.is(code, 0, stderr)
      t.is(stdout, '2.000\n')
    },
  )
}

// An installation for a GPU machine has no pages.
const testPages = blocks.length > 0 ? anyTest : anyTest.skip

testPages('every block is of a kind that is checked, here or by a doctest', (t) => {
  // Shell, C++ and what a program prints are for reading; Rust is a doctest of the crate.
  const known = new Set(['js', 'ts', 'cjs', 'rust', 'sh', 'cpp', 'text'])
  for (const { page, line, language } of blocks) t.true(known.has(language), `${page}:${line}: ${language}`)
  t.true(blocks.filter(({ language }) => language === 'js').length > 20)
})

testPages('every guide is in the list of the README', (t) => {
  const readme = readFileSync(join(root, 'README.md'), 'utf8')
  for (const name of readdirSync(guide)) t.true(readme.includes(`](docs/guide/${name})`), name)
})

testPages('Rust needs nothing beside the crate: a doctest would also see what the crate itself depends on', (t) => {
  const rust = blocks.filter(({ language }) => language === 'rust')
  t.true(rust.length > 5)
  for (const { page, line, code } of rust) {
    for (const [, name] of code.matchAll(/^\s*use (\w+)/gm))
      t.regex(name as string, /^(std|unimalloc)$/, `${page}:${line}`)
  }
})

testPages('links between pages lead somewhere', (t) => {
  for (const page of pages) {
    const text = readFileSync(join(root, page), 'utf8')
    for (const [, target] of text.matchAll(/\]\((?!https?:|#)([^)\s]+)\)/g)) {
      const [file, anchor] = (target as string).split('#') as [string, string?]
      const path = resolve(root, dirname(page), file)
      t.true(existsSync(path), `${page}: ${target}`)
      if (anchor === undefined || !existsSync(path)) continue
      const anchors = [...readFileSync(path, 'utf8').matchAll(/^#+ (.*)$/gm)].map(([, title]) =>
        (title as string)
          .toLowerCase()
          .replace(/[^\w\s-]/g, '')
          .replace(/\s/g, '-'),
      )
      t.true(anchors.includes(anchor), `${page}: ${target}, of ${anchors.join(', ')}`)
    }
  }
})

const testSources = existsSync(join(root, 'ts')) ? anyTest : anyTest.skip

testSources('the site has no warning: every page has a title, and every link leads somewhere', async (t) => {
  const typedoc = join(root, 'node_modules', 'typedoc', 'bin', 'typedoc')
  const args = ['--options', join('docs', 'site', 'typedoc.mjs'), '--out', join(folder, 'site'), '--logLevel', 'Warn']
  const { code, stdout, stderr } = await runNode([typedoc, ...args], {})
  t.is(code, 0, stdout + stderr)
  t.true(existsSync(join(folder, 'site', 'documents', 'Placement.html')))
})

testPages('the reference lists everything exported, and every member of an allocator and of `cuda`', (t) => {
  const reference = readFileSync(join(guide, 'reference.md'), 'utf8')
  const { allocator, Allocator, cuda } = unimalloc
  const members = Object.getOwnPropertyNames(Allocator.prototype).filter((name) => name !== 'constructor')
  const names = [...Object.keys(unimalloc), ...members, ...Object.keys(cuda).map((name) => `cuda.${name}`)]
  t.true(names.length > 30 && members.every((name) => name in allocator))
  const said = new Set([...reference.matchAll(/`([\w.]+)(?:\(.*?\))?`/g)].map(([, name]) => name as string))
  for (const name of names) t.true(said.has(name), name)
})

testSources('the reference lists every error code, and every environment variable that the sources read', (t) => {
  const reference = readFileSync(join(guide, 'reference.md'), 'utf8')
  const union = /type UnimallocErrorCode =([^\n]*\n(?: +\|.*\n)*)/.exec(
    readFileSync(join(root, 'ts', 'errors.ts'), 'utf8'),
  )
  const codes = [...(union?.[1] ?? '').matchAll(/'(\w+)'/g)].map(([, code]) => code as string)
  t.true(codes.length >= 17)
  for (const code of codes) t.true(reference.includes(`| \`${code}\` |`), code)

  const folders = ['ts', join('crates', 'unimalloc', 'src'), join('crates', 'unimalloc-node', 'src')]
  const read = new Set(
    folders.flatMap((folder) =>
      readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' })
        .filter((file) => /\.(?:ts|rs)$/.test(file))
        .flatMap((file) => readFileSync(join(root, folder, file), 'utf8').match(/\bUNIMALLOC_[A-Z_]+\b/g) ?? []),
    ),
  )
  t.true(read.size >= 4)
  for (const variable of read) t.true(reference.includes(`| \`${variable}\` |`), variable)
})
