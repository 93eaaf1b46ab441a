//! Ten million random operations over eight threads: contents intact, nothing lost, everything returned.

mod common;

use std::sync::Mutex;
use std::thread;

use common::{alloc, free, Random};
use unimalloc::{stats, trim, usable_size, HasSegmentPool, HostBackend, StandardPolicy};

type B = HostBackend;

const THREADS: u64 = 8;

/// Ten million in all, or what the variable says: sanitizers are slow.
fn operations() -> u64 {
    let configured = std::env::var("UNIMALLOC_STRESS_OPERATIONS").ok().and_then(|text| text.parse().ok());
    configured.unwrap_or(10_000_000) / THREADS
}

/// A live block: address, size, and the byte it is filled with at its first and last 16 bytes.
#[derive(Clone, Copy)]
struct Block(usize, usize, u8);

impl Block {
    fn new(size: usize, fill: u8) -> Self {
        let block = Self(alloc::<StandardPolicy, B>(size, 16) as usize, size, fill);
        assert!(usable_size::<B>(block.0 as *const u8) >= size);
        for part in block.parts() {
            part.fill(fill);
        }
        block
    }

    fn parts(self) -> [&'static mut [u8]; 2] {
        let edge = self.1.min(16);
        // SAFETY: the block is live, and this test is its only user.
        [self.0, self.0 + self.1 - edge]
            .map(|at| unsafe { std::slice::from_raw_parts_mut(at as *mut u8, edge) })
    }

    fn free(self) {
        for part in self.parts() {
            assert!(part.iter().all(|byte| *byte == self.2), "contents changed at {:x}", self.0);
        }
        free::<StandardPolicy, B>(self.0 as *mut u8).unwrap();
    }
}

#[test]
fn ten_million_operations_over_eight_threads() {
    static HANDED_OVER: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let worker = |seed| {
            scope.spawn(move || {
                let mut random = Random(seed + 1);
                let mut blocks: Vec<Block> = Vec::new();
                for _ in 0..operations() {
                    match random.below(100) {
                        0..=49 if blocks.len() < 2000 => {
                            let most = if random.below(1000) == 0 { 1 << 21 } else { 1 << 13 };
                            blocks.push(Block::new(random.size(most), random.next() as u8));
                        }
                        50 => {
                            let mut others = HANDED_OVER.lock().unwrap();
                            let count = blocks.len().min(20);
                            others.extend(blocks.drain(..count));
                        }
                        51 => {
                            let mut others = HANDED_OVER.lock().unwrap();
                            let keep = others.len().saturating_sub(20);
                            blocks.extend(others.drain(keep..));
                        }
                        _ if !blocks.is_empty() => blocks.swap_remove(random.below(blocks.len())).free(),
                        _ => {}
                    }
                }
                blocks.into_iter().for_each(Block::free);
            })
        };
        let workers: Vec<_> = (0..THREADS).map(worker).collect();
        // A scope waits for closures; this waits for the threads' ends, where their heaps are given up.
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    HANDED_OVER.lock().unwrap().drain(..).for_each(Block::free);

    let numbers = stats::<B>();
    assert_eq!(numbers.corruptions, 0);
    trim::<B>(0);
    let numbers = stats::<B>();
    assert_eq!(numbers.reserved_bytes, 0, "{numbers:?}");
    assert_eq!(numbers.backend_allocations, numbers.backend_frees);
    for pool in [B::global_segment_pool(), B::global_orphan_pool()] {
        assert_eq!((pool.len(), pool.bytes()), (0, 0));
    }
    assert_eq!((B::global_huge_pool().len(), B::global_huge_pool().bytes()), (0, 0));
}
