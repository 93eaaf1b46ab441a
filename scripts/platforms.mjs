// The platforms that have a package of their own, and what each is called by Rust, by npm and by Node.
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { root } from './setup.mjs'

/** Rust's name for each platform; the key is npm's, and the folder under `npm/`. */
export const targets = {
  'linux-x64-gnu': 'x86_64-unknown-linux-gnu',
  'linux-arm64-gnu': 'aarch64-unknown-linux-gnu',
  'linux-x64-musl': 'x86_64-unknown-linux-musl',
  'linux-arm64-musl': 'aarch64-unknown-linux-musl',
  'win32-x64-msvc': 'x86_64-pc-windows-msvc',
  'darwin-arm64': 'aarch64-apple-darwin',
  'darwin-x64': 'x86_64-apple-darwin',
}

/** What a binary may ask of the system's C library at most, where that is measured. */
export const glibcFloor = '2.17'

/** The name of the platform that runs this, or null where there is no package for it. */
export function hostPlatform() {
  const { platform, arch } = process
  if (platform === 'win32') return arch === 'x64' ? 'win32-x64-msvc' : null
  if (platform === 'darwin') return `darwin-${arch}` in targets ? `darwin-${arch}` : null
  if (platform !== 'linux') return null
  // Node's report names the glibc it runs on; on musl the field is not there.
  process.report.excludeNetwork = true
  const glibc = process.report.getReport().header.glibcVersionRuntime
  const name = `linux-${arch}-${glibc ? 'gnu' : 'musl'}`
  return name in targets ? name : null
}

export const folderOf = (name) => join(root, 'npm', name)
export const binaryOf = (name) => `unimalloc.${name}.node`

export function readManifest(folder = root) {
  return JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
}

/** What cargo calls the binding's library on that platform. */
export function libraryOf(name) {
  if (name.startsWith('win32')) return 'unimalloc_node.dll'
  return name.startsWith('darwin') ? 'libunimalloc_node.dylib' : 'libunimalloc_node.so'
}
