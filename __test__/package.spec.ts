// What people install: the tarballs, in an empty project outside this checkout, with npm and nothing else.
import { spawnSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

import anyTest from 'ava'
import type { ExecutionContext } from 'ava'

const root = fileURLToPath(new URL('..', import.meta.url))
const read = (...path: string[]) => JSON.parse(readFileSync(join(root, ...path), 'utf8'))
const inCheckout = existsSync(join(root, 'scripts', 'pack.mjs'))
// One after the other: they share the tarballs, and installing is heavy.
const test = inCheckout ? anyTest.serial : anyTest.serial.skip

const workshop = mkdtempSync(join(tmpdir(), 'unimalloc-package-'))
const tarballs = join(workshop, 'tarballs')
anyTest.after.always(() => rmSync(workshop, { recursive: true, force: true }))

/** What the user has in the environment: nothing of the test runner, and npm as it came. */
function environment(): NodeJS.ProcessEnv {
  const own = Object.entries(process.env).filter(([name]) => !/^(npm_|NODE_|AVA_|UNIMALLOC_|INIT_CWD$)/i.test(name))
  return { ...Object.fromEntries(own), UNIMALLOC_BACKEND: 'host' }
}

function run(t: ExecutionContext, cwd: string, program: string, ...args: string[]): string {
  const { status, stdout, stderr, error } = spawnSync(program, args, {
    cwd,
    env: environment(),
    encoding: 'utf8',
    shell: process.platform === 'win32' && /^npm$|\.cmd$/.test(program),
  })
  t.is(status, 0, `${program} ${args.join(' ')}\n${error?.message ?? ''}${stdout}${stderr}`)
  return stdout
}

const npmInstall = ['install', '--offline', '--no-audit', '--no-fund', '--loglevel=error']

/** An empty project with the given tarballs installed. */
function project(t: ExecutionContext, name: string, files: string[], ...options: string[]): string {
  const folder = join(workshop, name)
  mkdirSync(folder)
  writeFileSync(join(folder, 'package.json'), '{ "private": true }\n')
  run(t, folder, 'npm', ...npmInstall, ...options, ...files.map((file) => join(tarballs, file)))
  return folder
}

const packed = () => readdirSync(tarballs).sort()
const mainTarball = () => packed().find((name) => /^unimalloc-\d/.test(name)) as string

test('pack:local writes two tarballs: the package, without any binary, and the binary of this platform', (t) => {
  t.timeout(120_000)
  run(t, root, process.execPath, join('scripts', 'pack.mjs'), tarballs, '--built')
  t.is(packed().length, 2, packed().join())
  const listed = (name: string) => run(t, tarballs, 'tar', '-tzf', name).trim().split(/\r?\n/)
  const main = listed(mainTarball())
  for (const name of ['package.json', 'README.md', 'CHANGELOG.md', 'LICENSE-MIT', 'LICENSE-APACHE', 'native.cjs']) {
    t.true(main.includes(`package/${name}`), name)
  }
  t.deepEqual(
    main.filter(
      (name) => !/^package\/(dist\/|[^/]+$)/.test(name) || /\.(node|ts|tsx)$/.test(name.replace(/\.d\.[cm]ts$/, '')),
    ),
    [],
    'neither sources nor binaries',
  )
  const platform = listed(packed().find((name) => name !== mainTarball()) as string)
  t.is(platform.filter((name) => name.endsWith('.node')).length, 1, platform.join())
  t.true(platform.includes('package/LICENSE-MIT'))
})

test('installed, it works: import and require share one state, and the program runs', (t) => {
  t.timeout(120_000)
  const folder = project(t, 'consumer', packed())
  writeFileSync(
    join(folder, 'main.mjs'),
    `import { createRequire } from 'node:module'
    import { alloc, allocator, UnimallocError } from 'unimalloc'
    const required = createRequire(import.meta.url)('unimalloc')
    const array = alloc(Float32Array, 8)
    array[7] = 1.5
    const live = required.allocator.stats().currentCount
    let code
    required.allocator.free(array)
    try { array.free() } catch (error) { code = error instanceof required.UnimallocError && error instanceof UnimallocError && error.code }
    console.log(JSON.stringify([array.length, live, allocator === required.allocator, required.alloc === alloc, code]))`,
  )
  t.deepEqual(JSON.parse(run(t, folder, process.execPath, 'main.mjs')), [0, 1, true, true, 'DOUBLE_FREE'])
  writeFileSync(
    join(folder, 'main.cjs'),
    `const { alloc } = require('unimalloc')
    import('unimalloc').then((imported) => console.log(alloc(Float32Array, 8).length, imported.alloc === alloc))`,
  )
  t.is(run(t, folder, process.execPath, 'main.cjs'), '8 true\n')
  const manifest = JSON.parse(readFileSync(join(folder, 'node_modules', 'unimalloc', 'package.json'), 'utf8'))
  const program = join(folder, 'node_modules', 'unimalloc', manifest.bin.unimalloc)
  t.is(run(t, folder, process.execPath, program, '--version').trim(), read('package.json').version)
  t.deepEqual(Object.keys(manifest.dependencies ?? {}), [])
  t.is(manifest.scripts, undefined, 'nothing runs at install')
})

test('its types compile with lib es2022 and esnext.disposable, and nothing else installed', (t) => {
  t.timeout(120_000)
  const folder = join(workshop, 'consumer')
  writeFileSync(
    join(folder, 'typed.mts'),
    `import { alloc, Allocator, type UnifiedArray } from 'unimalloc'
    using own = new Allocator({ backend: 'host' })
    using floats: UnifiedArray<Float32Array> = own.alloc(Float32Array, 8)
    export const first: number = floats[0]!
    // @ts-expect-error a length is a number
    alloc(Float32Array, '8')`,
  )
  writeFileSync(
    join(folder, 'typed.cts'),
    `import unimalloc = require('unimalloc')\nunimalloc.alloc(Float32Array, 8).free()`,
  )
  const compilerOptions = {
    target: 'es2022',
    lib: ['es2022', 'esnext.disposable'],
    types: [],
    module: 'nodenext',
    moduleResolution: 'nodenext',
    strict: true,
    skipLibCheck: false,
    noEmit: true,
  }
  writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify({ compilerOptions, files: ['typed.mts', 'typed.cts'] }))
  run(t, folder, process.execPath, join(root, 'node_modules', 'typescript', 'bin', 'tsc'), '-p', folder)
})

test('without the package of the platform: NATIVE_MISSING names it, says why, and what to do', (t) => {
  t.timeout(120_000)
  const folder = project(t, 'alone', [mainTarball()], '--omit=optional')
  const program = `
    const { alloc, UnimallocError } = require('unimalloc')
    try { alloc(Float32Array, 8) } catch (error) {
      console.log(error instanceof UnimallocError, error.code, error.message)
      console.log('cause' in error)
    }`
  const said = run(t, folder, process.execPath, '--input-type=commonjs', '-e', program)
  t.regex(said, /^true NATIVE_MISSING /)
  t.regex(said, new RegExp(`"@unimalloc/native-${process.platform}-${process.arch}[-"]`))
  t.regex(said, /npm\/cli\/issues\/4828.*npm install.*From tarballs, install both/)
  t.regex(said, /\nfalse\n$/, 'no page of the files that the loader looked for')
})

test('a binary that is there and does not load is another story, and is told', (t) => {
  t.timeout(120_000)
  const folder = join(workshop, 'broken')
  cpSync(join(workshop, 'consumer'), folder, { recursive: true })
  const scope = join(folder, 'node_modules', '@unimalloc')
  const [name] = readdirSync(scope) as [string]
  const [binary] = readdirSync(join(scope, name)).filter((file) => file.endsWith('.node')) as [string]
  writeFileSync(join(scope, name, binary), 'no binary at all')
  const program = `
    try { require('unimalloc').alloc(Float32Array, 8) } catch (error) {
      console.log(error.code, error.message)
      console.log(error.cause instanceof Error, error.cause.cause)
    }`
  const said = run(t, folder, process.execPath, '--input-type=commonjs', '-e', program)
  t.regex(said, /\ntrue undefined\n$/)
  t.regex(said, /^NATIVE_MISSING .*does not load: /)
  t.notRegex(said, /omit=optional/)
})

test('in node_modules the README leads somewhere, and the changelog has this version', (t) => {
  const folder = join(workshop, 'consumer', 'node_modules', 'unimalloc')
  const { version, homepage, bugs } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
  t.regex(homepage, /^https:/)
  t.regex(bugs.url, /^https:/)
  const links = [...readFileSync(join(folder, 'README.md'), 'utf8').matchAll(/\]\(([^)\s]+)\)/g)].map(
    ([, link]) => link as string,
  )
  t.true(links.length > 20)
  for (const link of links) t.regex(link, /^(https:|#)/)
  // What they name is in this checkout, which becomes that tag.
  const ours = links.filter((link) => link.includes(`/v${version}/`))
  t.true(ours.length > 15)
  for (const link of ours) t.true(existsSync(join(root, link.split(`/v${version}/`)[1]?.split('#')[0] as string)), link)
  t.true(readFileSync(join(folder, 'CHANGELOG.md'), 'utf8').includes(`\n## [${version}] - `))
})

test('bundled by esbuild, with the commands of the guide', (t) => {
  t.timeout(120_000)
  const folder = join(workshop, 'consumer')
  writeFileSync(
    join(folder, 'main.js'),
    `import { join } from 'node:path'
    import { alloc } from 'unimalloc'
    const array = alloc(Float32Array, 8)
    console.log(array.length, typeof join)
    array.free()`,
  )
  const esbuild = join(root, 'node_modules', '.bin', process.platform === 'win32' ? 'esbuild.cmd' : 'esbuild')
  const page = readFileSync(join(root, 'docs', 'guide', 'bundlers.md'), 'utf8')
  const commands = [...page.matchAll(/^npx esbuild (.*)$/gm)].map(([, args]) => (args as string).split(' '))
  t.true(commands.length >= 3)
  for (const args of commands) {
    rmSync(join(folder, 'out'), { recursive: true, force: true })
    run(t, folder, esbuild, ...args, '--log-level=error')
    const bundle = args.find((arg) => arg.startsWith('--outfile='))?.slice('--outfile='.length) as string
    t.is(run(t, folder, process.execPath, bundle), '8 function\n', args.join(' '))
  }
  // The last one needs no node_modules.
  const elsewhere = join(workshop, 'elsewhere')
  cpSync(join(folder, 'out'), elsewhere, { recursive: true })
  t.is(run(t, elsewhere, process.execPath, 'main.cjs'), '8 function\n')
})

test('every platform has its package, and all have one version', (t) => {
  const { version, napi, engines } = read('package.json')
  const names = readdirSync(join(root, 'npm')).filter((name) => !name.startsWith('.'))
  t.is(names.length, napi.targets.length)
  for (const name of names) {
    const manifest = read('npm', name, 'package.json')
    t.is(manifest.name, `${napi.packageName}-${name}`)
    t.is(manifest.version, version, name)
    t.is(manifest.main, `${napi.binaryName}.${name}.node`)
    t.true(manifest.files.includes(manifest.main))
    t.deepEqual(manifest.engines, engines)
    t.deepEqual([...manifest.os, ...manifest.cpu].join('-'), name.split('-').slice(0, 2).join('-'))
    // The loader that napi makes must look for exactly these.
    t.true(readFileSync(join(root, 'native.cjs'), 'utf8').includes(`require('${manifest.name}')`), name)
  }
  const cargo = readFileSync(join(root, 'Cargo.toml'), 'utf8')
  t.is(/^version = "(.*)"/m.exec(cargo)?.[1], version, 'Cargo.toml')
})

interface Elf {
  readElf(path: string): { arch: string; needs: [library: string, version: string][] }
  neededGlibc(path: string): string | null
  compareVersions(a: string, b: string): number
}

const onLinux = inCheckout && process.platform === 'linux' ? anyTest.serial : anyTest.serial.skip

onLinux('the version reader agrees with objdump', async (t) => {
  const { readElf, neededGlibc, compareVersions } = (await import(join(root, 'scripts', 'elf.mjs'))) as Elf
  t.true(compareVersions('2.9', '2.17') < 0)
  t.true(compareVersions('2.17', '2.2.5') > 0)
  t.is(compareVersions('2.17', '2.17'), 0)
  const [addon] = readdirSync(root).filter((name) => name.endsWith('.node')) as [string]
  const elf = readElf(join(root, addon))
  t.is(elf.arch, process.arch)
  t.throws(() => readElf(join(root, 'package.json')), { message: /no ELF file/ })
  const { status, stdout } = spawnSync('objdump', ['-T', join(root, addon)], { encoding: 'utf8' })
  if (status !== 0) {
    t.log('no objdump here to compare with')
    return
  }
  const seen = [...new Set(stdout.match(/GLIBC_[\d.]+/g))].sort()
  const named = elf.needs.map(([, version]) => version).filter((version) => version.startsWith('GLIBC_'))
  t.deepEqual([...new Set(named)].sort(), seen)
  t.true(seen.includes(`GLIBC_${neededGlibc(join(root, addon))}`))
})

// Made by `npm run build:platform`, which checks the same before it hands the binary out.
for (const name of ['linux-x64-gnu', 'linux-arm64-gnu']) {
  const binary = join(root, 'npm', name, `unimalloc.${name}.node`)
  const built = existsSync(binary) ? onLinux : anyTest.serial.skip
  built(`the published binary for ${name} loads from glibc 2.17 on`, async (t) => {
    const { readElf, neededGlibc, compareVersions } = (await import(join(root, 'scripts', 'elf.mjs'))) as Elf
    t.is(readElf(binary).arch, name.split('-')[1])
    t.true(compareVersions(neededGlibc(binary) as string, '2.17') <= 0, `${neededGlibc(binary)}`)
  })
}
