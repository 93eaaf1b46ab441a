import { spawnSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync, copyFileSync, existsSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import test from 'ava'
import { PNG } from 'pngjs'
import { upright } from './photo.js'

const here = (name: string) => fileURLToPath(new URL(name, import.meta.url))
const folder = mkdtempSync(join(tmpdir(), 'unimalloc-demo-'))
test.after.always(() => rmSync(folder, { recursive: true, force: true }))

function demo(...args: string[]) {
  return spawnSync(process.execPath, [here('main.js'), ...args], { cwd: folder, encoding: 'utf8' })
}

test('the photograph becomes a sheet with both pictures, and nothing stays allocated', (t) => {
  const { status, stdout, stderr } = demo('--backend', 'host', '--out', join(folder, 'sheet'))
  t.is(status, 0, stderr)
  t.regex(stdout, /backend +host \(asked for by name\)/)
  t.regex(stdout, /by the program +0 bytes/)
  t.regex(stdout, /still allocated +0 arrays/)
  t.regex(stdout, /pass 2: 0$/m)
  t.regex(stdout, /as computed independently: 240000 pixels \(100 %\)/)
  const sheet = PNG.sync.read(readFileSync(join(folder, 'sheet', 'before-after.png')))
  t.deepEqual([sheet.width, sheet.height], [1212, 400])
  const column = (x: number) => Array.from({ length: 400 }, (_, y) => sheet.data[4 * (1212 * y + x)])
  t.true(
    column(605).every((value) => value === 255),
    'the gap is white',
  )
  t.notDeepEqual(column(300), column(300 + 612), 'the second picture is not the first')
})

test('a PNG is read too, and its copy is counted', (t) => {
  const png = new PNG({ width: 40, height: 30 })
  for (let at = 0; at < png.data.length; at++) png.data[at] = at % 4 === 3 ? 255 : (at * 7) % 251
  const path = join(folder, 'small.png')
  writeFileSync(path, PNG.sync.write(png))
  const { status, stdout, stderr } = demo(path, '--backend', 'host')
  t.is(status, 0, stderr)
  t.regex(stdout, /while decoding +4\.7 KiB/)
  t.true(existsSync(join(folder, 'demo-output', 'before-after.png')))
})

const bad: [string, () => string[], RegExp][] = [
  ['a missing file', () => [join(folder, 'nowhere.jpg')], /there is no such file\. Give the path/],
  ['a folder', () => [folder], /it is a directory\. Give the path/],
  [
    'a file that is no picture',
    () => {
      writeFileSync(join(folder, 'words.jpg'), 'not a photograph')
      return [join(folder, 'words.jpg')]
    },
    /is not a JPEG or PNG picture/,
  ],
  [
    'a truncated photograph',
    () => {
      copyFileSync(here('coffee.jpg'), join(folder, 'half.jpg'))
      truncateSync(join(folder, 'half.jpg'), 60_000)
      return [join(folder, 'half.jpg')]
    },
    /cannot be decoded/,
  ],
  ['an unknown option', () => ['--frobnicate'], /Unknown option '--frobnicate'.*--help/],
  ['an unknown backend', () => ['--backend', 'tpu'], /auto, host or cuda-unified/],
  [
    'a folder that cannot be made',
    () => {
      writeFileSync(join(folder, 'file'), '')
      return ['--backend', 'host', '--out', join(folder, 'file', 'below')]
    },
    /cannot be written.*--out DIR/,
  ],
]
for (const [what, args, message] of bad) {
  test(`${what} gives one line with the next step and exit code 1`, (t) => {
    const { status, stderr } = demo(...args())
    t.is(status, 1)
    t.regex(stderr, message)
    t.is(stderr.trim().split('\n').length, 1, stderr)
  })
}

test('every EXIF orientation reads the stored pixels upright', (t) => {
  // A 3 x 2 picture whose pixel (x, y) holds 10 y + x, stored in each of the eight ways a camera may be held.
  const upper = [0, 1, 2, 10, 11, 12]
  const stored: Record<number, [number, number, number[]]> = {
    1: [3, 2, [0, 1, 2, 10, 11, 12]],
    2: [3, 2, [2, 1, 0, 12, 11, 10]],
    3: [3, 2, [12, 11, 10, 2, 1, 0]],
    4: [3, 2, [10, 11, 12, 0, 1, 2]],
    5: [2, 3, [0, 10, 1, 11, 2, 12]],
    6: [2, 3, [2, 12, 1, 11, 0, 10]],
    7: [2, 3, [12, 2, 11, 1, 10, 0]],
    8: [2, 3, [10, 0, 11, 1, 12, 2]],
  }
  for (const [orientation, [width, height, values]] of Object.entries(stored)) {
    const walk = upright(width, height, Number(orientation))
    t.deepEqual([walk.width, walk.height], [3, 2], `orientation ${orientation}`)
    const read = upper.map((_, at) => {
      const x = at % 3
      const y = Math.floor(at / 3)
      return values[(walk.base + x * walk.stepX + y * walk.stepY) / 4]
    })
    t.deepEqual(read, upper, `orientation ${orientation}`)
  }
})
