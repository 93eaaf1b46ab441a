//! What a thread's caches hand out next, and that they lose and mix nothing. Each test has a thread of its own, and so caches
//! that were empty, and no other runs beside it, because some free an address twice.

mod common;

use common::prot_none::ProtNone;
use common::{alloc, alone, free};
use unimalloc::*;

type B = HostBackend;
type P = StandardPolicy;

fn in_thread(test: fn()) {
    let _alone = alone();
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn the_block_freed_last_comes_back_first() {
    in_thread(|| {
        for size in [16, 64, 1000, 4096, 65_536, 300_000] {
            let block = alloc::<P, B>(size, 16);
            free::<P, B>(block).unwrap();
            for _ in 0..5 {
                // A block of another class is freed in between, and does not stand in the way.
                let other = alloc::<P, B>(2 * size, 16);
                free::<P, B>(other).unwrap();
                let again = alloc::<P, B>(size, 16);
                assert_eq!(again, block, "{size}");
                assert_ne!(again, other);
                free::<P, B>(again).unwrap();
            }
        }
    });
}

#[test]
fn a_double_free_of_the_block_freed_last_is_found() {
    in_thread(|| {
        let (first, second) = (alloc::<P, B>(64, 16), alloc::<P, B>(128, 16));
        for block in [first, second] {
            free::<P, B>(block).unwrap();
            assert_eq!(free::<P, B>(block), Err(FreeError::DoubleFree));
        }
        for block in [first, second] {
            assert_eq!(free::<P, B>(block), Err(FreeError::DoubleFree));
        }
    });
}

#[test]
fn blocks_of_several_classes_freed_by_turns_fill_their_caches() {
    in_thread(|| {
        // More of each than a cache holds, freed in an order in which each free meets one of another class before it.
        let sizes = [16, 32, 4096, 65_536];
        let mut blocks = Vec::new();
        for _ in 0..5000 {
            blocks.extend(sizes.map(|size| alloc::<P, B>(size, 16)));
        }
        let mut distinct: Vec<_> = blocks.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), blocks.len());
        for block in &blocks {
            free::<P, B>(*block).unwrap();
        }
        for block in &blocks {
            assert_eq!(free::<P, B>(*block), Err(FreeError::DoubleFree));
        }
        for _ in 0..5000 {
            for size in sizes {
                assert!(usable_size::<B>(alloc::<P, B>(size, 16)) < 2 * size);
            }
        }
    });
}

#[test]
fn the_block_freed_last_is_given_back_with_the_rest() {
    in_thread(|| {
        let block = alloc::<P, ProtNone>(64, 16); // no other test here uses this backend
        free::<P, ProtNone>(block).unwrap();
        assert_ne!(stats::<ProtNone>().reserved_bytes, 0);
        trim::<ProtNone>(0);
        assert_eq!(stats::<ProtNone>().reserved_bytes, 0);
        assert_eq!(free::<P, ProtNone>(block), Err(FreeError::NotOurs), "its memory is gone");
    });
}

#[test]
fn more_kinds_of_blocks_than_an_index_of_sixteen_bits_has_bins_for_do_not_mix() {
    in_thread(|| {
        let placements = [Placement::Auto, Placement::Host, Placement::Device, Placement::ReadMostly];
        let mut blocks = Vec::new();
        for placement in placements {
            for group in 0..=u8::MAX {
                let place = Place { device: 0, placement };
                let options = AllocOptions { place, group, ..AllocOptions::default() };
                let block = alloc_with::<P, B>(64, 16, &options);
                assert!(!block.is_null(), "{:?}", last_error());
                blocks.push((options, block));
            }
        }
        for (_, block) in &blocks {
            free::<P, B>(*block).unwrap();
        }
        for size in (16..=16_384).step_by(16) {
            let block = alloc::<P, B>(size, 16);
            assert!(usable_size::<B>(block) >= size, "{size}");
            assert!(blocks[1..].iter().all(|(_, other)| *other != block), "a block of another kind");
        }
        for (options, block) in blocks[1..].iter().rev() {
            assert_eq!(alloc_with::<P, B>(64, 16, options), *block, "{options:?}");
        }
    });
}
