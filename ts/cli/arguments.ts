import { parseArgs } from 'node:util'

import { UsageError } from './exit.js'

const BACKENDS = ['auto', 'host', 'cuda-unified'] as const
export type BackendChoice = (typeof BACKENDS)[number]

export type Command =
  | { name: 'help'; of: string | undefined }
  | { name: 'version' }
  | { name: 'doctor'; json: boolean; requireGpu: boolean }
  | { name: 'demo'; backend: BackendChoice; out: string }
  | { name: 'bench'; backend: BackendChoice; json: boolean }

const HELP = { help: { type: 'boolean', short: 'h', default: false } } as const
const BACKEND = { backend: { type: 'string', short: 'b', default: 'auto' } } as const
const JSON_OUTPUT = { json: { type: 'boolean', default: false } } as const

export const HELPS: Record<string, string> = {
  '': `malloc for CUDA unified memory

Usage: unimalloc <command> [options]

Commands:
  doctor   what this machine has, and what will work on it
  demo     grow a pattern in unified memory and write it as a picture
  bench    what an allocation costs here, next to what Node has

Options:
  -h, --help      help, also for a command: unimalloc doctor --help
  -v, --version   the version of this package

Exit codes:
  0  it worked    1  something that should work does not
  2  the command line makes no sense    3  a GPU was asked for and none is usable`,
  doctor: `Usage: unimalloc doctor [--json] [--require-gpu]

Looks at the runtime, the native part, the driver and the devices, tries each thing that the package does, and says in words
what will work here and what will not. Trying makes a CUDA context on the first device.

Options:
      --json          the same as one JSON object
      --require-gpu   exit with 3 where no GPU is usable; without this, a machine without a GPU is in order
  -h, --help          this text`,
  demo: `Usage: unimalloc demo [--backend auto|host|cuda-unified] [--out FILE.png]

Lets two chemicals react and spread (the Gray-Scott model): the CPU seeds the dish, the GPU computes it in the same arrays, the
CPU reads, checks and paints it. Without a GPU the same program computes in JavaScript, on a smaller dish.

Options:
  -b, --backend   where the arrays live; 'auto', the default, takes the GPU where there is one
  -o, --out       the picture, default unimalloc-demo.png
  -h, --help      this text`,
  bench: `Usage: unimalloc bench [--backend auto|host|cuda-unified] [--json]

Times pairs of allocation and free by size, and on a GPU a small round trip through a kernel. Takes a few seconds. The figures
are of this machine, now: compare columns, not runs.

Options:
  -b, --backend   what to measure; 'auto', the default, takes the GPU where there is one
      --json      the same as one JSON object
  -h, --help      this text`,
}

/** Reads the command line, without the names of the runtime and the program. */
export function readArguments(args: readonly string[]): Command {
  const [name, ...rest] = args
  switch (name) {
    case undefined:
    case '-h':
    case '--help':
      return { name: 'help', of: '' }
    case '-v':
    case '--version':
      return { name: 'version' }
    case 'help':
      if (rest[0] !== undefined && !(rest[0] in HELPS)) throw unknownCommand(rest[0])
      return { name: 'help', of: rest[0] ?? '' }
    case 'doctor': {
      const options = { ...HELP, ...JSON_OUTPUT, 'require-gpu': { type: 'boolean', default: false } } as const
      const { help, json, 'require-gpu': requireGpu } = parse(name, rest, options)
      return help ? { name: 'help', of: name } : { name, json, requireGpu }
    }
    case 'demo': {
      const options = {
        ...HELP,
        ...BACKEND,
        out: { type: 'string', short: 'o', default: 'unimalloc-demo.png' },
      } as const
      const { help, backend, out } = parse(name, rest, options)
      if (help) return { name: 'help', of: name }
      if (!out.toLowerCase().endsWith('.png')) {
        throw new UsageError(`--out is '${out}'; the picture is a PNG, so give it a name that ends in .png`)
      }
      return { name, backend: backendOf(name, backend), out }
    }
    case 'bench': {
      const { help, backend, json } = parse(name, rest, { ...HELP, ...BACKEND, ...JSON_OUTPUT })
      return help ? { name: 'help', of: name } : { name, backend: backendOf(name, backend), json }
    }
    default:
      throw name.startsWith('-')
        ? new UsageError(`unknown option '${name}'; see unimalloc --help`)
        : unknownCommand(name)
  }
}

type Options = NonNullable<NonNullable<Parameters<typeof parseArgs>[0]>['options']>

function parse<const O extends Options>(name: string, args: string[], options: O) {
  try {
    return parseArgs({ args, options, strict: true, allowPositionals: false }).values
  } catch (error) {
    // Node explains at length how to pass a positional argument; this program takes none.
    const [sentence] = (error as Error).message.split(/\. |\n/)
    throw new UsageError(`${sentence?.replace(/\.$/, '')}; see unimalloc ${name} --help`, { cause: error })
  }
}

function backendOf(name: string, value: string): BackendChoice {
  const backend = BACKENDS.find((word) => word === value)
  if (backend) return backend
  throw new UsageError(`--backend is '${value}'; use one of ${BACKENDS.join(', ')}; see unimalloc ${name} --help`)
}

function unknownCommand(name: string): UsageError {
  const commands = Object.keys(HELPS).filter(Boolean).join(', ')
  return new UsageError(`unknown command '${name}'; there are ${commands}; see unimalloc --help`)
}
