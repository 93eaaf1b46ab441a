import { UnimallocError } from './errors.js'

/** The platforms that have a package with a binary, as their packages are called. */
const PLATFORMS = [
  'linux-x64-gnu',
  'linux-arm64-gnu',
  'linux-x64-musl',
  'linux-arm64-musl',
  'win32-x64-msvc',
  'darwin-arm64',
  'darwin-x64',
]

/** Whether this Linux has musl for its C library. Node names its glibc in its report; Bun and Deno may not, and need glibc. */
function isMusl(): boolean {
  Object.assign(process.report, { excludeNetwork: true })
  const report = process.report.getReport() as unknown as
    { header?: { glibcVersionRuntime?: string }; sharedObjects?: string[] } | undefined
  if (report?.header?.glibcVersionRuntime !== undefined) return false
  return report?.sharedObjects?.some((path) => path.includes('ld-musl-') || path.includes('libc.musl-')) ?? false
}

function platform(): string {
  const name = `${process.platform}-${process.arch}`
  if (process.platform === 'linux') return `${name}-${isMusl() ? 'musl' : 'gnu'}`
  return process.platform === 'win32' ? `${name}-msvc` : name
}

/** What the loader met besides files that are not there: a binary that is there and does not load. */
function loadFailure(error: unknown): Error | null {
  for (let current = error; current instanceof Error; current = current.cause) {
    if (!/^Cannot find (module|package|native binding)/.test(current.message)) return current
  }
  return null
}

/** The error for a binding that is something else. */
export function notTheBinding(): UnimallocError {
  return new UnimallocError(
    'NATIVE_MISSING',
    'what was loaded as the native part of unimalloc is something else, most often because a bundler has put a path in its place: leave unimalloc out of ' +
      'the bundle (esbuild --external:unimalloc or --packages=external; webpack externals; serverExternalPackages in Next), or have ' +
      '.node files copied (esbuild --loader:.node=copy)',
  )
}

/** The error for a binding that did not load, which says why and what to do. */
export function nativeMissing(cause: unknown): UnimallocError {
  const name = platform()
  const packageName = `@unimalloc/native-${name}`
  const failure = loadFailure(cause)
  let message: string
  if (!PLATFORMS.includes(name)) {
    message =
      `unimalloc has no native part for ${name}: there are packages for ${PLATFORMS.join(', ')}. ` +
      'Where Rust has a compiler for this platform, a checkout can be built with "npm run build".'
  } else if (failure !== null && /loading addons is disabled/.test(failure.message)) {
    message =
      'this process may not load native addons, and unimalloc is one: start Node without --no-addons, and with --permission add ' +
      '--allow-addons, for worker threads --allow-worker, and --allow-fs-read for the folder of node_modules.'
  } else if (failure !== null) {
    // The loader chains what it met to the files that it looked for before, a page of them; they say nothing.
    delete failure.cause
    message =
      `the native part of unimalloc ("${packageName}") is here but does not load: ${failure.message.split('\n', 1)[0]}. ` +
      'If it came from another machine, remove node_modules and install again on this one; if this system is older than what the ' +
      'package supports (glibc 2.17 on Linux), build a checkout with "npm run build".'
  } else {
    message =
      `the optional package "${packageName}" with the native part of unimalloc is not installed. npm leaves it out with ` +
      '--omit=optional, and when node_modules or package-lock.json were made on another platform ' +
      '(https://github.com/npm/cli/issues/4828): remove both and run "npm install" again, on the platform that runs the program. ' +
      'From tarballs, install both: the package and that of the platform. In a checkout, run "npm run build".'
  }
  return new UnimallocError('NATIVE_MISSING', message, failure === null ? {} : { cause: failure })
}
