import test from 'ava'
import { setTimeout as delay } from 'node:timers/promises'
import { Allocator } from 'unimalloc'

import { runProgram } from './helpers/child.js'
import { throwsCode } from './helpers/errors.js'

test.serial('a loop that drops arrays and yields never meets a low ceiling', async (t) => {
  const own = new Allocator({ backend: 'host', maxBytes: '10MiB' })
  for (let round = 0; round < 150; round++) {
    own.alloc(Uint8Array, 1 << 20)
    await delay(1)
  }
  t.is(own.stats().totalCount, 150)
  t.is(own.stats().outOfMemory, 0)
})

test.serial('a loop that does not yield gets the error, and what it says helps', async (t) => {
  const own = new Allocator({ backend: 'host', maxBytes: '10MiB' })
  const drop = (): void => {
    for (;;) own.alloc(Uint8Array, 1 << 20)
  }
  throwsCode(t, drop, 'OUT_OF_MEMORY', /yields to the event loop/)
  let tries = 0
  for (; tries < 50; tries++) {
    await delay(5)
    try {
      own.alloc(Uint8Array, 1 << 20)
      break
    } catch {}
  }
  t.true(tries < 50)
})

test.serial('arrays that are in use are kept, however close the ceiling', async (t) => {
  const own = new Allocator({ backend: 'host', maxBytes: '10MiB' })
  const kept = Array.from({ length: 9 }, (_, index) => own.alloc(Uint8Array, 1 << 20).fill(index))
  for (let round = 0; round < 20; round++) {
    own.alloc(Uint8Array, 1 << 18).free()
    await delay(1)
  }
  t.true(kept.every((array, index) => array[0] === index && array[array.length - 1] === index))
  t.is(own.stats().outOfMemory, 0)
})

test.serial('the ceiling of the process is watched as well', async (t) => {
  const { stdout, stderr } = await runProgram(
    `
    const { alloc, allocator } = require('unimalloc')
    ;(async () => {
      for (let round = 0; round < 100; round++) {
        alloc(Float32Array, 1e6)[0] = 1
        await new Promise((go) => setTimeout(go, 1))
      }
      console.log(allocator.stats().totalCount, allocator.stats().outOfMemory)
    })()`,
    { UNIMALLOC_BACKEND: 'host', UNIMALLOC_MAX_BYTES: '48MiB' },
  )
  t.is(stdout, '100 0\n', stderr)
})
