//! Workloads of several threads. Threads start within the time that is measured, as in the programs they are named for.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;

use super::{allocate, release, touch, Block, Sample};
use crate::clock::Start;
use crate::peer::Peer;
use crate::random::Random;

/// Runs `f` on a thread of its own that the peer knows of.
fn spawn<'scope, P: Peer, R: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    f: impl FnOnce() -> R + Send + 'scope,
) -> thread::ScopedJoinHandle<'scope, R> {
    scope.spawn(|| {
        P::enter_thread();
        let result = f();
        P::leave_thread();
        result
    })
}

pub(super) fn larson<P: Peer>(threads: usize, generations: u64) -> Sample {
    const BLOCKS: usize = 1_000;
    const ROUNDS: usize = 10_000;
    let mut owned: Vec<Vec<Block>> = (0..threads)
        .map(|seed| {
            let mut random = Random(seed as u64);
            (0..BLOCKS).map(|_| allocate::<P>(random.within(10, 1_000))).collect()
        })
        .collect();
    let start = Start::now();
    for generation in 0..generations {
        owned = thread::scope(|scope| {
            let handles: Vec<_> = owned
                .into_iter()
                .enumerate()
                .map(|(at, mut blocks)| {
                    spawn::<P, _>(scope, move || {
                        let mut random = Random(generation << 8 | at as u64);
                        for _ in 0..ROUNDS {
                            let block = &mut blocks[random.below(BLOCKS)];
                            release::<P>(*block);
                            *block = allocate::<P>(random.within(10, 1_000));
                            touch(*block);
                        }
                        blocks
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().expect("a worker panicked")).collect()
        });
    }
    let time = start.elapsed();
    owned.into_iter().flatten().for_each(release::<P>);
    Sample { time, operations: generations * (threads * ROUNDS) as u64 }
}

pub(super) fn xmalloc<P: Peer>(threads: usize, batches: u64) -> Sample {
    const BATCH: usize = 120;
    let start = Start::now();
    thread::scope(|scope| {
        for pair in 0..threads / 2 {
            let (send, receive) = sync_channel::<Vec<Block>>(8);
            spawn::<P, _>(scope, move || {
                let mut random = Random(pair as u64);
                for _ in 0..batches {
                    let blocks = (0..BATCH).map(|_| allocate::<P>(random.within(8, 512))).collect();
                    if send.send(blocks).is_err() {
                        return;
                    }
                }
            });
            spawn::<P, _>(scope, move || receive.into_iter().flatten().for_each(release::<P>));
        }
    });
    Sample { time: start.elapsed(), operations: batches * (BATCH * threads / 2) as u64 }
}

/// Where the threads of `mstress` swap blocks: an address and size in one word each.
struct Exchange(Vec<AtomicUsize>);

impl Exchange {
    fn swap(&self, at: usize, block: Option<Block>) -> Option<Block> {
        // Sizes below 2^20 KiB in the high bits, addresses below 2^47: user space.
        let word = block.map_or(0, |(address, size)| address | size.div_ceil(1 << 12) << 47);
        let word = self.0[at].swap(word, Ordering::AcqRel);
        (word != 0).then_some((word & ((1 << 47) - 1), (word >> 47) << 12))
    }
}

pub(super) fn mstress<P: Peer>(threads: usize, rounds: u64) -> Sample {
    const KEPT: usize = 500;
    const STEPS: usize = 1_000;
    let exchange = Exchange((0..1_000).map(|_| AtomicUsize::new(0)).collect());
    let start = Start::now();
    for round in 0..rounds {
        thread::scope(|scope| {
            for at in 0..threads {
                let exchange = &exchange;
                spawn::<P, _>(scope, move || {
                    let mut random = Random(round << 8 | at as u64);
                    let mut kept: Vec<Block> = Vec::with_capacity(KEPT);
                    for step in 0..STEPS {
                        // Blocks that are swapped have whole pages as sizes, so that peers that want the size back get
                        // the right one.
                        let most = if step % 100 == 0 { 512 << 10 } else { 16 << 10 };
                        let block = allocate::<P>(random.log_within(8, most).next_multiple_of(8));
                        touch(block);
                        if kept.len() < KEPT {
                            kept.push(block);
                        } else {
                            let place = random.below(KEPT);
                            release::<P>(std::mem::replace(&mut kept[place], block));
                        }
                        if step % 4 == 0 {
                            let given = allocate::<P>(random.within(1, 4) << 12);
                            if let Some(block) = exchange.swap(random.below(exchange.0.len()), Some(given)) {
                                release::<P>(block);
                            }
                        }
                    }
                    kept.into_iter().for_each(release::<P>);
                });
            }
        });
    }
    for at in 0..exchange.0.len() {
        exchange.swap(at, None).into_iter().for_each(release::<P>);
    }
    Sample { time: start.elapsed(), operations: rounds * (threads * STEPS * 5 / 4) as u64 }
}

pub(super) fn cache_scratch<P: Peer>(threads: usize, times: u64) -> Sample {
    const WRITES: usize = 1_000;
    let given: Vec<Block> = (0..threads).map(|_| allocate::<P>(8)).collect();
    let start = Start::now();
    thread::scope(|scope| {
        for block in given {
            spawn::<P, _>(scope, move || {
                release::<P>(block);
                for _ in 0..times {
                    let block = allocate::<P>(8);
                    let word = block.0 as *mut u64;
                    for value in 0..WRITES as u64 {
                        // SAFETY: the block is live, 8 bytes long and aligned.
                        unsafe { word.write_volatile(black_box(value)) };
                    }
                    release::<P>(block);
                }
            });
        }
    });
    Sample { time: start.elapsed(), operations: times * threads as u64 }
}

pub(super) fn glibc_thread<P: Peer>(threads: usize, times: u64) -> Sample {
    const LIVE: usize = 1_024;
    let start = Start::now();
    thread::scope(|scope| {
        for at in 0..threads {
            spawn::<P, _>(scope, move || {
                let mut random = Random(at as u64);
                let mut blocks: Vec<Block> =
                    (0..LIVE).map(|_| allocate::<P>(random.log_within(4, 32 << 10))).collect();
                for _ in 0..times {
                    let block = &mut blocks[random.below(LIVE)];
                    release::<P>(*block);
                    *block = allocate::<P>(random.log_within(4, 32 << 10));
                }
                blocks.into_iter().for_each(release::<P>);
            });
        }
    });
    Sample { time: start.elapsed(), operations: times * threads as u64 }
}

pub(super) fn handoff<P: Peer>(size: usize, batches: u64) -> Sample {
    const BATCH: usize = 500;
    let start = Start::now();
    thread::scope(|scope| {
        let (send, receive) = sync_channel::<Vec<Block>>(4);
        let (send_back, receive_back) = sync_channel::<Vec<Block>>(8);
        spawn::<P, _>(scope, move || {
            for _ in 0..batches {
                let mut blocks: Vec<Block> =
                    receive_back.try_recv().unwrap_or_else(|_| Vec::with_capacity(BATCH));
                blocks.extend((0..BATCH).map(|_| allocate::<P>(size)));
                if send.send(blocks).is_err() {
                    return;
                }
            }
        });
        spawn::<P, _>(scope, move || {
            for mut blocks in receive {
                blocks.drain(..).for_each(release::<P>);
                let _ = send_back.try_send(blocks); // a full channel: the vector is dropped
            }
        });
    });
    Sample { time: start.elapsed(), operations: batches * BATCH as u64 }
}
