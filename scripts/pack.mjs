// `npm run pack:local -- DIR`: the tarballs that `npm install` takes, for this machine: the main package and its platform's.
//   --built          take the addon that `npm run build` made, also when only systems as new as this one can load it
//   --platforms A,B  pack these platforms, whose binaries lie in npm/ (`all`: every one): for a release
import { copyFileSync, cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { basename, join, resolve } from 'node:path'
import { parseArgs } from 'node:util'
import { addonFiles, build } from './build.mjs'
import { buildPlatform, checkBinary } from './platform.mjs'
import { binaryOf, folderOf, hostPlatform, readManifest, targets } from './platforms.mjs'
import { npm, root, runScript, SetupError } from './setup.mjs'

const licences = ['LICENSE-MIT', 'LICENSE-APACHE']

/** The manifest that users get: without what is of use in a checkout only, and with the platform packages that go with it. */
function publishedManifest(platforms) {
  const { scripts: _scripts, devDependencies: _devDependencies, ava: _ava, napi: _napi, ...manifest } = readManifest()
  const { version } = manifest
  const optionalDependencies = platforms.map((name) => [readManifest(folderOf(name)).name, version])
  return { ...manifest, optionalDependencies: Object.fromEntries(optionalDependencies) }
}

/** The README as it lies in node_modules: the pages that it links to are not beside it there, but in the repository. */
function publishedReadme(version) {
  const repository = 'unimalloc/unimalloc'
  return readFileSync(join(root, 'README.md'), 'utf8').replace(
    /(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)/g,
    (_, image, text, path) =>
      image
        ? `![${text}](https://raw.githubusercontent.com/${repository}/v${version}/${path})`
        : `[${text}](https://github.com/${repository}/blob/v${version}/${path})`,
  )
}

function pack(folder, manifest, directory) {
  writeFileSync(join(folder, 'package.json'), `${JSON.stringify(manifest, null, 2)}\n`)
  npm(['pack', folder, '--pack-destination', directory, '--silent'])
  return `${manifest.name.replace(/^@/, '').replace('/', '-')}-${manifest.version}.tgz`
}

function packMain(stage, platforms, directory) {
  const manifest = publishedManifest(platforms)
  for (const name of manifest.files) cpSync(join(root, name), join(stage, name), { recursive: true })
  writeFileSync(join(stage, 'README.md'), publishedReadme(manifest.version))
  return pack(stage, manifest, directory)
}

function packPlatform(stage, name, binary, directory) {
  const manifest = readManifest(folderOf(name))
  if (manifest.version !== readManifest().version) {
    throw new SetupError(
      `npm/${name}/package.json has version ${manifest.version}, package.json ${readManifest().version}.`,
    )
  }
  for (const licence of licences) copyFileSync(join(root, licence), join(stage, licence))
  copyFileSync(join(folderOf(name), 'README.md'), join(stage, 'README.md'))
  copyFileSync(binary, join(stage, binaryOf(name)))
  return pack(stage, manifest, directory)
}

function binaryFor(name, { built, host }) {
  if (built) return join(root, addonFiles()[0])
  if (name === host) return buildPlatform(name)
  const binary = join(folderOf(name), binaryOf(name))
  if (!existsSync(binary)) {
    throw new SetupError(
      `npm/${name}/${basename(binary)} is not there: make it with \`npm run build:platform -- ${name}\`.`,
    )
  }
  checkBinary(name, binary)
  return binary
}

function readArguments() {
  try {
    const { values, positionals } = parseArgs({
      allowPositionals: true,
      options: { built: { type: 'boolean', default: false }, platforms: { type: 'string' } },
    })
    if (positionals.length === 1) return { ...values, directory: resolve(process.env.INIT_CWD ?? '.', positionals[0]) }
  } catch (error) {
    throw new SetupError(error.message)
  }
  throw new SetupError('Say where the tarballs go: npm run pack:local -- DIR')
}

function chosenPlatforms({ built, platforms: list }, host) {
  if (list === undefined || built) {
    if (host === null) throw new SetupError(`There is no package for ${process.platform}-${process.arch}.`)
    return [host]
  }
  const platforms = list === 'all' ? Object.keys(targets) : list.split(',')
  for (const name of platforms) {
    if (!(name in targets))
      throw new SetupError(`There is no platform ${name}; there are ${Object.keys(targets).join(', ')}.`)
  }
  return platforms
}

await runScript(async () => {
  const options = readArguments()
  const { directory, built, platforms: list } = options
  const host = hostPlatform()
  const platforms = chosenPlatforms(options, host)
  await build()
  mkdirSync(directory, { recursive: true })
  const stage = mkdtempSync(join(tmpdir(), 'unimalloc-pack-'))
  const folder = (name) => {
    mkdirSync(join(stage, name))
    return join(stage, name)
  }
  try {
    const tarballs = platforms.map((name) =>
      // For a release every binary was made, and tested, elsewhere.
      packPlatform(folder(name), name, binaryFor(name, { built, host: list === undefined ? host : null }), directory),
    )
    tarballs.unshift(packMain(folder('main'), platforms, directory))
    console.log(`Packed ${tarballs.join(' and ')} into ${directory}. To install them, in a project's folder:`)
    console.log(`  npm install ${tarballs.map((name) => join(directory, name)).join(' ')}`)
    console.log(
      'pnpm add takes the same. Yarn looks for the platform’s package in the registry alone; package.json tells it otherwise:',
    )
    const resolutions = platforms.map((name, index) => [
      readManifest(folderOf(name)).name,
      `file:${join(directory, tarballs[index + 1])}`,
    ])
    console.log(`  "resolutions": ${JSON.stringify(Object.fromEntries(resolutions))}`)
  } finally {
    rmSync(stage, { recursive: true, force: true })
  }
})
