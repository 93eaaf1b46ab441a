/**
 * Node 20 gives `Symbol.dispose` to its main realm alone: in one of `vm`, as Jest makes for each test file, a class would get a
 * method called "undefined". There it is a registered symbol, the same in all realms.
 */
if ((Symbol as { dispose?: symbol }).dispose === undefined) {
  Object.defineProperty(Symbol, 'dispose', { value: Symbol.for('nodejs.dispose') })
}
