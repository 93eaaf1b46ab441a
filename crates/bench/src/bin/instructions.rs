//! Runs one hot path a given number of times and nothing else: `instructions SCENARIO TIMES`.
//!
//! Under callgrind, the difference between two runs is what the path costs, whatever starting up costs.
//! `check-instructions.mjs` does so for every scenario and compares with `instructions.json`.

use std::hint::black_box;
use std::process::ExitCode;

use unimalloc::{
    thread_alloc, thread_free, thread_realloc, usable_size, AllocPolicy, CudaUnifiedBackend, FreeError,
    HardenedPolicy, HostBackend, SecurePolicy, StandardPolicy, ThreadSlots,
};

/// Not inlined: what a caller in another crate that is not rebuilt for it pays.
#[inline(never)]
fn alloc_in<P: AllocPolicy, B: ThreadSlots>(size: usize) -> *mut u8 {
    thread_alloc::<P, B>(size, 16)
}

#[inline(never)]
fn free_in<P: AllocPolicy, B: ThreadSlots>(block: *mut u8) -> Result<(), FreeError> {
    // SAFETY: the scenarios free each block once.
    unsafe { thread_free::<P, B>(block) }
}

fn alloc<P: AllocPolicy>(size: usize) -> *mut u8 {
    alloc_in::<P, HostBackend>(size)
}

fn freed_in<P: AllocPolicy, B: ThreadSlots>(block: *mut u8) {
    assert!(!block.is_null() && free_in::<P, B>(block) == Ok(()));
}

fn freed<P: AllocPolicy>(block: *mut u8) {
    freed_in::<P, HostBackend>(block);
}

fn pair_in<P: AllocPolicy, B: ThreadSlots>(size: usize, times: usize) {
    for _ in 0..times {
        freed_in::<P, B>(black_box(alloc_in::<P, B>(black_box(size))));
    }
}

fn pair<P: AllocPolicy>(size: usize, times: usize) {
    pair_in::<P, HostBackend>(size, times);
}

fn batch(size: usize, count: usize, times: usize) {
    let mut blocks = vec![std::ptr::null_mut(); count];
    for _ in 0..times {
        blocks.fill_with(|| alloc::<StandardPolicy>(size));
        blocks.iter().for_each(|block| freed::<StandardPolicy>(*block));
    }
}

fn remote(size: usize, times: usize) {
    const BATCH: usize = 1_000;
    for _ in 0..times {
        let blocks: Vec<usize> = (0..BATCH).map(|_| alloc::<StandardPolicy>(size) as usize).collect();
        let freeing = std::thread::spawn(move || {
            blocks.into_iter().for_each(|block| freed::<StandardPolicy>(block as *mut u8));
        });
        freeing.join().expect("the freeing thread panicked");
    }
}

fn resize(times: usize) {
    for _ in 0..times {
        let block = alloc::<StandardPolicy>(64);
        // SAFETY: the block is live; the old address is not used again.
        let block = unsafe { thread_realloc::<StandardPolicy, HostBackend>(block, black_box(4096), 16) };
        freed::<StandardPolicy>(block);
    }
}

fn sizes(times: usize) {
    let block = alloc::<StandardPolicy>(100);
    for _ in 0..times {
        assert_eq!(usable_size::<HostBackend>(black_box(block)), 112);
    }
    freed::<StandardPolicy>(block);
}

fn thread_start_and_exit(times: usize) {
    for _ in 0..times {
        std::thread::spawn(|| pair::<StandardPolicy>(64, 1)).join().expect("the thread panicked");
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [scenario, times] = arguments.as_slice() else {
        eprintln!("usage: instructions SCENARIO TIMES");
        return ExitCode::FAILURE;
    };
    let Ok(times) = times.parse() else {
        eprintln!("TIMES is a number");
        return ExitCode::FAILURE;
    };
    match scenario.as_str() {
        "pair of 64 B" => pair::<StandardPolicy>(64, times),
        "pair of 16 KiB" => pair::<StandardPolicy>(16 << 10, times),
        // Takes a `libcuda.so.1`, and any will do: a hit calls no driver.
        "pair of 4 KiB of the CUDA backend" => pair_in::<StandardPolicy, CudaUnifiedBackend>(4 << 10, times),
        "pair of 1 MiB" => pair::<StandardPolicy>(1 << 20, times),
        "pair of 16 MiB" => pair::<StandardPolicy>(16 << 20, times),
        "Secure pair of 64 B" => pair::<SecurePolicy>(64, times),
        "Hardened pair of 64 B" => pair::<HardenedPolicy>(64, times),
        "1000 of 64 B, then their frees" => batch(64, 1_000, times),
        "1000 of 4 KiB, then their frees" => batch(4 << 10, 1_000, times),
        "1000 of 64 B, freed by another thread" => remote(64, times),
        "realloc from 64 B to 4 KiB" => resize(times),
        "usable size" => sizes(times),
        "thread with one pair" => thread_start_and_exit(times),
        _ => {
            eprintln!("unknown scenario {scenario}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
