import { readFile } from 'node:fs/promises'

const dist = new URL('../../dist/', import.meta.url).href

/** @type {import('node:module').LoadHook} */
export async function load(url, context, nextLoad) {
  if (!url.startsWith(dist)) return nextLoad(url, context)
  // Without a source Node reads a CommonJS file by its own loader.
  if (url.endsWith('.cjs')) return { format: 'commonjs', source: null, shortCircuit: true }
  return { format: 'module', source: await readFile(new URL(url), 'utf8'), shortCircuit: true }
}
