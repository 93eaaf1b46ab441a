#!/usr/bin/env node
import { UnimallocError } from 'unimalloc'

import { HELPS, readArguments } from './arguments.js'
import type { Command } from './arguments.js'
import { bench } from './bench.js'
import { demo } from './demo.js'
import { doctor } from './doctor.js'
import { EXIT, Failure, UsageError } from './exit.js'
import type { ExitCode } from './exit.js'
import { styled } from './text.js'
import { packageVersion } from './version.js'

async function run(command: Command): Promise<ExitCode> {
  switch (command.name) {
    case 'help':
      console.log(HELPS[command.of ?? ''])
      return EXIT.ok
    case 'version':
      console.log(packageVersion())
      return EXIT.ok
    case 'doctor':
      return doctor(command)
    case 'demo':
      return demo(command)
    case 'bench':
      return bench(command)
  }
}

function report(message: string): void {
  console.error(`${styled('red', 'unimalloc:', process.stderr)} ${message}`)
}

async function main(): Promise<ExitCode> {
  process.stdout.on('error', (error: NodeJS.ErrnoException) => {
    // A reader that has seen enough (`| head`) closes the pipe; that is no failure.
    if (error.code === 'EPIPE') process.exit(EXIT.ok)
    report(`the output cannot be written: ${error.message}`)
    process.exit(EXIT.failed)
  })
  // There is nowhere to say that messages cannot be written; the exit code tells.
  process.stderr.on('error', () => {})
  try {
    return await run(readArguments(process.argv.slice(2)))
  } catch (error) {
    if (error instanceof UsageError) {
      report(error.message)
      return EXIT.usage
    }
    if (error instanceof UnimallocError) {
      report(`${error.message} (${error.code})`)
      return error.code === 'CUDA_UNAVAILABLE' ? EXIT.noGpu : EXIT.failed
    }
    // What the system refuses is the user's to mend, and needs no stack; anything else is ours.
    if (error instanceof Failure || (error instanceof Error && 'syscall' in error)) {
      report(error.message)
      return EXIT.failed
    }
    throw error
  }
}

process.exitCode = await main()
