import { invalid, show } from './errors.js'
import type { UnimallocError } from './errors.js'

function named(key: PropertyKey): { word: string; access: string } {
  // Node 20 describes it in another way.
  if (typeof key === 'symbol') return { word: '[Symbol.dispose]', access: '[Symbol.dispose]' }
  return { word: String(key), access: `.${String(key)}` }
}

const NONE_ITSELF = 'a Proxy, a prototype and a copy are none'

/** The error of a method that was torn off its object, or called on another one. */
export function foreignReceiver(key: PropertyKey, noun: string, receiver: unknown): UnimallocError {
  const { word, access } = named(key)
  const said = receiver == null ? `called without its ${noun}` : `called on ${show(receiver)}, which is no ${noun}`
  const why = typeof receiver === 'object' && receiver !== null ? ` (${NONE_ITSELF})` : ''
  return invalid(`${word}: ${said}${why}; write ${noun}${access}(…), or bind it: ${noun}${access}.bind(${noun})`)
}

/** The same for a getter. */
export function foreignRead(key: PropertyKey, noun: string, receiver: unknown): UnimallocError {
  return invalid(
    `${named(key).word}: read from ${show(receiver)}, which is no ${noun} (${NONE_ITSELF}); read it from the ${noun} itself`,
  )
}

const AsyncFunction: unknown = (async () => {}).constructor

/**
 * Has all methods and getters of a class check what they are called on, so that a foreign receiver gets one of our errors and not the engine's
 * words about private fields. Each then has one call more: methods where that counts check for themselves, and are named in `but`.
 */
export function checkReceivers(
  of: { prototype: object },
  noun: string,
  isOne: (value: object) => boolean,
  but: readonly PropertyKey[] = [],
): void {
  const { prototype } = of
  const fits = (value: unknown): boolean => typeof value === 'object' && value !== null && isOne(value)
  for (const key of Reflect.ownKeys(prototype)) {
    const member = Object.getOwnPropertyDescriptor(prototype, key) as PropertyDescriptor
    if (key === 'constructor' || but.includes(key)) continue
    const get = member.get as ((this: unknown) => unknown) | undefined
    if (get !== undefined) {
      member.get = likeIt(get, function (this: unknown): unknown {
        if (!fits(this)) throw foreignRead(key, noun, this)
        return get.call(this)
      })
    }
    const method = member.value as ((this: unknown, ...args: unknown[]) => unknown) | undefined
    if (typeof method === 'function') {
      const isAsync = method.constructor === AsyncFunction
      member.value = likeIt(method, function (this: unknown, ...args: unknown[]): unknown {
        if (fits(this)) return method.apply(this, args)
        const error = foreignReceiver(key, noun, this)
        if (isAsync) return Promise.reject(error)
        throw error
      })
    }
    Object.defineProperty(prototype, key, member)
  }
}

/** Gives a function the name and the length of the one that it stands before. */
function likeIt<F extends (...args: never[]) => unknown>(
  { name, length }: { name: string; length: number },
  made: F,
): F {
  Object.defineProperty(made, 'name', { value: name, configurable: true })
  return Object.defineProperty(made, 'length', { value: length, configurable: true })
}
