// `npm run build`: the release addon at the root and the JavaScript in dist/. Each is made again only when its sources changed.
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { pathToFileURL } from 'node:url'
import {
  cacheDir,
  checkCompiler,
  checkNode,
  checkRust,
  digestOf,
  installPackages,
  isStamped,
  root,
  run,
  runScript,
  stamp,
  unstamp,
} from './setup.mjs'

const dist = join(root, 'dist')

export function addonFiles() {
  return readdirSync(root).filter((name) => name.endsWith('.node'))
}

function buildNative(rustVersion) {
  const digest = digestOf(
    ['Cargo.toml', 'Cargo.lock', 'package.json', 'crates/unimalloc', 'crates/unimalloc-node', 'scripts/build.mjs'],
    rustVersion,
    process.platform,
    process.arch,
    process.env.RUSTFLAGS ?? '',
  )
  const present = addonFiles().length > 0 && existsSync(join(root, 'native.cjs'))
  if (present && isStamped('native', digest)) return
  console.log('Building the native addon (release) …')
  unstamp('native')
  for (const name of addonFiles()) rmSync(join(root, name))
  const cli = join(root, 'node_modules', '@napi-rs', 'cli', 'dist', 'cli.js')
  const where = ['--manifest-path', join('crates', 'unimalloc-node', 'Cargo.toml'), '-p', 'unimalloc-node', '-o', '.']
  const names = ['--js', 'native.cjs', '--dts', 'native.d.cts']
  const lock = existsSync(join(root, 'Cargo.lock')) ? ['--', '--locked'] : []
  run(process.execPath, [cli, 'build', '--platform', '--release', ...where, ...names, ...lock])
  stamp('native', digest)
}

/** One CommonJS bundle, an ES module that re-exports its names, and declarations beside both. */
async function buildDist() {
  const sources = ['index.ts', 'ts', 'native.d.cts', 'tsconfig.json', 'tsconfig.build.json', 'package.json']
  const digest = digestOf([...sources, 'scripts/build.mjs'], 'dist')
  if (existsSync(join(dist, 'index.cjs')) && isStamped('dist', digest)) return
  console.log('Building dist/ …')
  unstamp('dist')
  rmSync(dist, { recursive: true, force: true })
  const esbuild = await import('esbuild')
  const common = {
    absWorkingDir: root,
    entryPoints: ['index.ts'],
    bundle: true,
    platform: 'node',
    target: 'node20.19',
    external: ['#native'],
    logLevel: 'warning',
  }
  await esbuild.build({ ...common, format: 'cjs', outfile: 'dist/index.cjs', sourcemap: 'linked' })

  // The ES format is built only for the list of names it reports.
  const { metafile } = await esbuild.build({
    ...common,
    format: 'esm',
    outfile: 'names.mjs',
    write: false,
    metafile: true,
  })
  const names = metafile.outputs['names.mjs'].exports.toSorted()
  writeFileSync(join(dist, 'index.mjs'), `export { ${names.join(', ')} } from './index.cjs'\n`)
  writeFileSync(join(dist, 'index.d.mts'), `export * from './index.cjs'\n`)
  // The program is a user of the package like any other: it finds it by name, and shares its one state.
  await esbuild.build({
    ...common,
    entryPoints: ['ts/cli/main.ts'],
    external: ['unimalloc'],
    format: 'esm',
    outfile: 'dist/cli.mjs',
  })
  buildTypes()
  stamp('dist', digest)
}

function buildTypes() {
  const types = join(cacheDir, 'types')
  rmSync(types, { recursive: true, force: true })
  run(process.execPath, [join(root, 'node_modules', 'typescript', 'bin', 'tsc'), '-p', 'tsconfig.build.json'])
  // tsc names the declarations of an ES module package; these describe a CommonJS file and say so by their extension.
  for (const entry of readdirSync(types, { recursive: true })) {
    if (!entry.endsWith('.d.ts')) continue
    const target = join(dist, entry.replace(/\.d\.ts$/, '.d.cts'))
    const text = readFileSync(join(types, entry), 'utf8')
    mkdirSync(dirname(target), { recursive: true })
    writeFileSync(target, text.replace(/((?:from|import\(?)\s*['"]\.[^'"]*)\.js(['"])/g, '$1.cjs$2'))
  }
}

/** Everything that `npm test`, `npm run demo` and the rest need built. */
export async function build() {
  checkNode()
  const rustVersion = checkRust()
  checkCompiler()
  installPackages()
  buildNative(rustVersion)
  await buildDist()
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  await runScript(async () => {
    await build()
    console.log(`Built ${[...addonFiles(), 'native.cjs', 'dist/'].join(', ')}.`)
  })
}
