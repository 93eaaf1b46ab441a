// Vectors for short texts, honest and simple: every word points in a direction of its own, drawn at random but always the same,
// rare words weigh more than common ones, and a text is the sum of its words, scaled to length 1. The dot product of two texts
// then says how many telling words they share. A language model gives better vectors; what follows them is the same.

/** Numbers in a vector. */
export const width = 256

/** How many of a vector's numbers a word touches. */
const spread = 12

/** @param {string} text */
export function words(text) {
  return (text.toLowerCase().match(/[a-z]+/g) ?? []).filter((word) => word.length > 2).map(stem)
}

/** Just enough for plurals and the like: "barking" and "barks" are "bark". */
function stem(word) {
  return word.length > 4 ? word.replace(/(?:ies|ing|ed|es|s)$/, '') : word.replace(/s$/, '')
}

/** Weights of words, by how few of the texts have them. @param {string[]} texts */
export function weigh(texts) {
  /** @type {Map<string, number>} */
  const seen = new Map()
  for (const text of texts) for (const word of new Set(words(text))) seen.set(word, (seen.get(word) ?? 0) + 1)
  return (/** @type {string} */ word) => Math.log((1 + texts.length) / (1 + (seen.get(word) ?? 0)))
}

/** Writes a text's vector into an array that is there already: a row of a unified array, for instance. */
export function embed(text, weight, into) {
  into.fill(0)
  for (const word of new Set(words(text))) {
    const amount = weight(word)
    let state = hash(word)
    for (let i = 0; i < spread; i++) {
      state = Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9
      into[(state >>> 8) % width] += state & 1 ? amount : -amount
    }
  }
  let square = 0
  for (const value of into) square += value * value
  if (square > 0) for (let i = 0; i < width; i++) into[i] /= Math.sqrt(square)
}

/** FNV-1a. */
function hash(word) {
  let state = 0x811c9dc5
  for (let i = 0; i < word.length; i++) state = Math.imul(state ^ word.charCodeAt(i), 0x01000193)
  return state
}
