/** What the program's exit code says; `docs/guide/cli.md` has the same table. */
export const EXIT = { ok: 0, failed: 1, usage: 2, noGpu: 3 } as const
export type ExitCode = (typeof EXIT)[keyof typeof EXIT]

/** A command line that makes no sense. The message is for the user, and names the help. */
export class UsageError extends Error {}

/** What was asked for cannot be done here. The message is for the user, and says what to change. */
export class Failure extends Error {}
