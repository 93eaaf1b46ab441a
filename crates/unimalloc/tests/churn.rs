//! Ten thousand threads that come and go leave nothing behind.

mod common;

use std::thread;

use common::{alloc, free};
use unimalloc::*;

type B = HostBackend;

/// Bytes of this process's pages in memory.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|statm| statm.split_whitespace().nth(1)?.parse::<usize>().ok())
        .unwrap_or(0);
    pages * 4096
}

#[test]
fn ten_thousand_short_lived_threads_without_growth() {
    let mut handed_over = Vec::new();
    let mut after_warm_up = (0, 0);
    for round in 0..10_000 {
        let freed_here = std::mem::take(&mut handed_over);
        handed_over = thread::spawn(move || {
            for block in freed_here {
                free::<StandardPolicy, B>(block as *mut u8).unwrap();
            }
            let mut blocks = Vec::new();
            for size in [10, 100, 1000, 10_000, 100_000] {
                blocks.push(alloc::<StandardPolicy, B>(size, 16) as usize);
                blocks.push(alloc::<HardenedPolicy, B>(size, 16) as usize);
                free::<SecurePolicy, B>(alloc::<SecurePolicy, B>(size, 16)).unwrap();
            }
            blocks
        })
        .join()
        .unwrap();
        if round == 1000 {
            after_warm_up = (stats::<B>().reserved_bytes, resident());
        }
    }
    let (reserved, before) = after_warm_up;
    assert_eq!(stats::<B>().reserved_bytes, reserved);
    let now = resident();
    assert!(now < before + (8 << 20), "{before} bytes resident after 1,000 threads, {now} after 10,000");
    let audit = audit::<B>().unwrap();
    assert_eq!(audit.live_blocks, handed_over.len());
    handed_over.into_iter().for_each(|block| free::<StandardPolicy, B>(block as *mut u8).unwrap());
    trim::<B>(0);
    assert_eq!(stats::<B>().reserved_bytes, 0);
}
