/** For what the program logs: the name that a class is exported by, which a bundler may change. */
export function name(of: { prototype: object }, as: string): void {
  Object.defineProperty(of, 'name', { value: as, configurable: true })
}

type Inspect = (value: object, options: object) => string

/** Has `console.log` show an object in words; the prototype, and what was made from it, as any other object. */
export function showAs<T extends object>(
  of: { prototype: T },
  isOne: (value: object) => boolean,
  words: (object: T) => string,
): void {
  const value = function (this: T, _depth: number, options: object, inspect: Inspect): string {
    return isOne(this) ? words(this) : inspect(this, { ...options, customInspect: false })
  }
  Object.defineProperty(of.prototype, Symbol.for('nodejs.util.inspect.custom'), {
    value,
    configurable: true,
    writable: true,
  })
}
