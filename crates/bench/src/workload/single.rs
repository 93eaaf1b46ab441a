//! Workloads of one thread.

use std::hint::black_box;

use super::{allocate, release, touch, touch_pages, Block, Sample};
use crate::clock::Start;
use crate::peer::Peer;
use crate::random::Random;

pub(super) fn pair<P: Peer>(size: usize, times: u64) -> Sample {
    let start = Start::now();
    for _ in 0..times {
        let block = P::alloc(black_box(size));
        // SAFETY: the block was just allocated.
        unsafe { P::free(black_box(block), size) };
    }
    Sample { time: start.elapsed(), operations: times }
}

pub(super) fn batch<P: Peer>(size: usize, reverse: bool, times: u64) -> Sample {
    let count = (1_000_usize).min((16 << 20) / size);
    let mut blocks = vec![0_usize; count];
    let start = Start::now();
    for _ in 0..times {
        for block in &mut blocks {
            *block = P::alloc(black_box(size)) as usize;
        }
        let free = |block: &usize| {
            // SAFETY: the block was allocated above.
            unsafe { P::free(*block as *mut u8, size) }
        };
        if reverse {
            blocks.iter().rev().for_each(free);
        } else {
            blocks.iter().for_each(free);
        }
    }
    Sample { time: start.elapsed(), operations: times * count as u64 }
}

pub(super) fn random<P: Peer>(touched: bool, times: u64) -> Sample {
    const LIVE: usize = 10_000;
    let mut random = Random(7);
    let mut blocks: Vec<Block> = (0..LIVE).map(|_| allocate::<P>(random.within(256, 16 << 10))).collect();
    if touched {
        blocks.iter().copied().for_each(touch);
    }
    // Drawn beforehand, so that the loop measures the allocator and not the generator.
    let drawn: Vec<(u16, u16)> =
        (0..times).map(|_| (random.below(LIVE) as u16, random.within(256, 16 << 10) as u16)).collect();
    let start = Start::now();
    for &(at, size) in &drawn {
        let block = &mut blocks[usize::from(at)];
        release::<P>(*block);
        *block = (P::alloc(usize::from(size)) as usize, usize::from(size));
        if touched {
            touch(*block);
        }
    }
    let time = start.elapsed();
    blocks.into_iter().for_each(release::<P>);
    Sample { time, operations: times }
}

pub(super) fn malloc_large<P: Peer>(times: u64) -> Sample {
    const MIB: usize = 1 << 20;
    let mut random = Random(11);
    let mut blocks: [Option<Block>; 20] = [None; 20];
    let start = Start::now();
    for _ in 0..times {
        let place = &mut blocks[random.below(20)];
        if let Some(block) = place.take() {
            release::<P>(block);
        }
        let block = allocate::<P>(random.within(5 * MIB, 25 * MIB));
        touch_pages(block);
        *place = Some(block);
    }
    let time = start.elapsed();
    blocks.into_iter().flatten().for_each(release::<P>);
    Sample { time, operations: times }
}

pub(super) fn glibc_simple<P: Peer>(times: u64) -> Sample {
    const COUNT: usize = 1_600;
    let mut blocks = [0_usize; COUNT];
    let mut operations = 0;
    let start = Start::now();
    for size in [8_usize, 16, 32, 64, 128, 256, 512, 1024] {
        for turn in 0..times {
            for block in &mut blocks {
                *block = P::alloc(black_box(size)) as usize;
            }
            for at in 0..COUNT {
                let at = match turn % 3 {
                    0 => at,
                    1 => COUNT - 1 - at,
                    _ => (at * 7) % COUNT, // 7 and 1,600 have no common divisor: every block once
                };
                // SAFETY: the block was allocated above.
                unsafe { P::free(blocks[at] as *mut u8, size) };
            }
            operations += COUNT as u64;
        }
    }
    Sample { time: start.elapsed(), operations }
}

pub(super) fn realloc<P: Peer>(times: u64) -> Sample {
    let mut operations = 0;
    let start = Start::now();
    for _ in 0..times {
        let mut size = 16;
        let mut block = P::alloc(size);
        while size < 256 << 10 {
            let larger = size + size / 2;
            // SAFETY: the block is live and `size` bytes long.
            block = unsafe { P::realloc(block, size, larger) };
            size = larger;
            touch((block as usize, size));
            operations += 1;
        }
        // SAFETY: as above.
        unsafe { P::free(block, size) };
    }
    Sample { time: start.elapsed(), operations }
}
