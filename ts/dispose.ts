/**
 * The key under which `using` finds what to call. Where an engine or a context has no `Symbol.dispose`, as `node:vm` contexts of Node 20, compilers
 * that translate `using` look for the registered symbol instead.
 */
export const dispose: typeof Symbol.dispose = (Symbol.dispose ?? Symbol.for('Symbol.dispose')) as typeof Symbol.dispose

/** Lets objects of a prototype be disposed by code from such a context too. */
export function disposableEverywhere(prototype: Disposable): void {
  const registered = Symbol.for('Symbol.dispose')
  if (registered === (dispose as symbol)) return
  const value = function (this: Disposable): void {
    this[dispose]()
  }
  Object.defineProperty(prototype, registered, { value, configurable: true, writable: true })
}
