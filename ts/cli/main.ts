#!/usr/bin/env node
import { UnimallocError } from 'unimalloc'

import { EXIT, HELPS, readArguments, UsageError } from './arguments.js'
import type { Command, ExitCode } from './arguments.js'
import { bench } from './bench.js'
import { demo } from './demo.js'
import { doctor } from './doctor.js'
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
  // A reader that has seen enough (`| head`) closes the pipe; that is no failure.
  process.stdout.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code !== 'EPIPE') throw error
    process.exit(EXIT.ok)
  })
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
    // A file that cannot be written is the user's to mend, and needs no stack; anything else is ours.
    if (error instanceof Error && 'syscall' in error) {
      report(error.message)
      return EXIT.failed
    }
    throw error
  }
}

process.exitCode = await main()
