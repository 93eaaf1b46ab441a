//! Random sequences of operations against a simple model, with every block recounted after every step. A failure shrinks
//! to a short sequence; `PROPTEST_CASES` runs more of them.

mod common;

use common::faulty::faulty_backend;
use common::model::{decode, Op, World};
use proptest::prelude::*;
use unimalloc::Policy;

faulty_backend!(Small, 2 << 20);
faulty_backend!(Medium, 4 << 20);
faulty_backend!(Large, 32 << 20);

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![3 => Just(Policy::Standard), 1 => Just(Policy::Secure), 2 => Just(Policy::Hardened)]
}

/// Mostly small, with a few at the edges between kinds of blocks.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 0usize..300,
        6 => 300usize..20_000,
        3 => 20_000usize..600_000,
        1 => 600_000usize..12_000_000,
        1 => (0u32..24, -17isize..17).prop_map(|(shift, off)| (1usize << shift).saturating_add_signed(off)),
    ]
}

fn align() -> impl Strategy<Value = u32> {
    prop_oneof![10 => 0u32..9, 2 => 9u32..17, 1 => 17u32..22]
}

fn op() -> impl Strategy<Value = Op> {
    let (who, block) = (0usize..3, 0usize..1000);
    prop_oneof![
        12 => (who.clone(), policy(), size(), align(), any::<bool>(), 0u8..3)
            .prop_map(|(who, policy, size, align, zeroed, group)| Op::Alloc { who, policy, size, align, zeroed, group }),
        10 => (who.clone(), block.clone(), policy()).prop_map(|(who, block, policy)| Op::Free { who, block, policy }),
        3 => (who.clone(), block.clone(), size(), align())
            .prop_map(|(who, block, size, align)| Op::Realloc { who, block, size, align }),
        2 => (who.clone(), block.clone()).prop_map(|(who, freed)| Op::DoubleFree { who, freed }),
        1 => (who.clone(), block.clone(), 0usize..1_000_000)
            .prop_map(|(who, block, offset)| Op::InteriorFree { who, block, offset }),
        1 => who.clone().prop_map(|who| Op::End { who }),
        1 => (who.clone(), prop_oneof![Just(0usize), 0usize..(64 << 20)])
            .prop_map(|(who, keep)| Op::Trim { who, keep }),
        1 => who.prop_map(|who| Op::Decay { who }),
        1 => prop_oneof![Just(usize::MAX), 0usize..(64 << 20)].prop_map(|bytes| Op::Retain { bytes }),
        1 => (0usize..3, 0usize..4).prop_map(|(after, count)| Op::Refuse { after, count }),
        1 => (0usize..5).prop_map(|count| Op::RefuseFrees { count }),
        1 => prop_oneof![Just(0usize), Just(4096), Just(64 << 10)].prop_map(|bytes| Op::Misalign { bytes }),
    ]
}

fn config(cases: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

macro_rules! agrees {
    ($name:ident, $backend:ty, $threads:expr, $cases:expr) => {
        #[test]
        fn $name() {
            proptest!(config($cases), |(ops in prop::collection::vec(op(), 1..150))| {
                let mut world = World::<$backend>::new(<$backend>::faults(), 3, $threads);
                for op in &ops {
                    world.step(op);
                }
                world.finish();
            });
        }
    };
}

agrees!(hand_made_allocators_with_small_segments_agree_with_the_model, Small, false, 150);
agrees!(hand_made_allocators_agree_with_the_model, Medium, false, 150);
agrees!(threads_agree_with_the_model, Large, true, 80);

faulty_backend!(Replayed, 2 << 20);

#[test]
fn what_the_fuzzer_found_worth_keeping_agrees_with_the_model() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/operations");
    let Ok(files) = std::fs::read_dir(corpus) else {
        println!("skipped: the crate is here without its corpus");
        return;
    };
    let mut replayed = 0;
    for file in files {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let mut world = World::<Replayed>::new(Replayed::faults(), 3, false);
        decode(&bytes).iter().take(200).for_each(|op| world.step(op));
        world.finish();
        replayed += 1;
    }
    assert!(replayed > 50, "{replayed} files");
}
