// Reads from an ELF file which versions of its libraries' symbols it asks for: what decides on how old a system it loads.
import { readFileSync } from 'node:fs'

const SHT_STRTAB = 3
const SHT_GNU_VERNEED = 0x6ffffffe
const MACHINES = { 62: 'x64', 183: 'arm64' }

/**
 * The architecture of a 64-bit little-endian ELF file, and every (library, version) it needs, such as `['libc.so.6', 'GLIBC_2.14']`.
 * @param {string} path
 * @returns {{ arch: string, needs: [library: string, version: string][] }}
 */
export function readElf(path) {
  const file = readFileSync(path)
  if (file.length < 64 || file.readUInt32BE(0) !== 0x7f454c46) throw new Error(`${path} is no ELF file`)
  if (file[4] !== 2 || file[5] !== 1) throw new Error(`${path} is not 64-bit little-endian`)
  const arch = MACHINES[file.readUInt16LE(18)] ?? `machine ${file.readUInt16LE(18)}`
  const table = Number(file.readBigUInt64LE(40))
  const entrySize = file.readUInt16LE(58)
  const sections = Array.from({ length: file.readUInt16LE(60) }, (_, index) => {
    const at = table + index * entrySize
    return {
      type: file.readUInt32LE(at + 4),
      offset: Number(file.readBigUInt64LE(at + 24)),
      link: file.readUInt32LE(at + 40),
      info: file.readUInt32LE(at + 44),
    }
  })
  const needs = []
  for (const section of sections.filter(({ type }) => type === SHT_GNU_VERNEED)) {
    const strings = sections[section.link]
    if (strings?.type !== SHT_STRTAB) throw new Error(`${path}: its version section has no string table`)
    const text = (offset) => file.toString('latin1', strings.offset + offset, file.indexOf(0, strings.offset + offset))
    // Elf64_Verneed: version, count, file, aux, next. Elf64_Vernaux: hash, flags, other, name, next.
    for (let need = section.offset, left = section.info; left > 0; left--) {
      const library = text(file.readUInt32LE(need + 4))
      let auxiliary = need + file.readUInt32LE(need + 8)
      for (let count = file.readUInt16LE(need + 2); count > 0; count--) {
        needs.push([library, text(file.readUInt32LE(auxiliary + 8))])
        auxiliary += file.readUInt32LE(auxiliary + 12)
      }
      need += file.readUInt32LE(need + 12)
    }
  }
  return { arch, needs }
}

/** `'2.9' < '2.17'`. */
export function compareVersions(a, b) {
  const [left, right] = [a, b].map((version) => version.split('.').map(Number))
  for (let index = 0; index < Math.max(left.length, right.length); index++) {
    const difference = (left[index] ?? 0) - (right[index] ?? 0)
    if (difference !== 0) return difference
  }
  return 0
}

/** The oldest glibc that has every symbol version the file asks for, or null where it asks for none. */
export function neededGlibc(path) {
  const versions = readElf(path).needs.flatMap(([, version]) =>
    version.startsWith('GLIBC_') ? [version.slice('GLIBC_'.length)] : [],
  )
  return versions.toSorted(compareVersions).at(-1) ?? null
}
