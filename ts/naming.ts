/** For what the program logs: the name that a class is exported by, which a bundler may change. */
export function name(of: { prototype: object }, as: string): void {
  Object.defineProperty(of, 'name', { value: as, configurable: true })
}

/** Has `console.log` show an object in words. */
export function showAs<T extends object>(of: { prototype: T }, words: (object: T) => string): void {
  const value = function (this: T): string {
    return words(this)
  }
  Object.defineProperty(of.prototype, Symbol.for('nodejs.util.inspect.custom'), {
    value,
    configurable: true,
    writable: true,
  })
}
