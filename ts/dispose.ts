/**
 * Node 20 gives `Symbol.dispose` to its main realm alone: in one of `vm`, as Jest and Vitest make for each test file, a class would get a
 * method called "undefined". There it is a registered symbol, the same in all realms.
 */
if ((Symbol as { dispose?: symbol }).dispose === undefined) {
  Object.defineProperty(Symbol, 'dispose', { value: Symbol.for('nodejs.dispose') })
}

/** The key under which `using` finds what to call. */
export const dispose: typeof Symbol.dispose = Symbol.dispose

/** Lets objects of a prototype be disposed by code of esbuild's too: in a realm without `Symbol.dispose` it asks for another registered symbol. */
export function disposableEverywhere(prototype: Disposable): void {
  const registered = Symbol.for('Symbol.dispose')
  if (registered === (dispose as symbol)) return
  const own = prototype[dispose]
  // What a subclass has instead; on anything else, the method that says what is wrong.
  const value = function (this: Disposable | undefined): void {
    ;(this?.[dispose] ?? own).call(this as Disposable)
  }
  Object.defineProperty(prototype, registered, { value, configurable: true, writable: true })
}
