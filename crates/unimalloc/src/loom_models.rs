//! Models of what threads do to each other, run on the real code under every interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p unimalloc --release --lib loom
//! ```

use std::ptr::NonNull;

use loom::sync::Arc;
use loom::thread;

use crate::backend::{BackendOps, MemoryBackend};
use crate::error::FreeError;
use crate::meta::address_map::AddressMap;
use crate::meta::geometry::{class_of, GRANULE, MAX_ALIGN};
use crate::meta::inbox::Inbox;
use crate::meta::slot;
use crate::meta::span::samples::{self, told, INDEX};
use crate::meta::span::{Remote, Span, ACTIVE, TOLD};
use crate::placement::Place;
use crate::policy::Policy;
use crate::pool::{BackendPools, Home, PoolKey, SpanRequest};
use crate::sync::{AtomicU16, Ordering::Relaxed};

/// Two blocks to a granule.
const BLOCK: usize = GRANULE / 2;

/// A span of so many blocks, all handed out, kept by heap 1. Two are one row.
fn full_span_of(blocks: usize) -> (&'static Span, &'static Inbox) {
    samples::full_span(blocks, Policy::Standard)
}

fn full_span() -> (&'static Span, &'static Inbox) {
    full_span_of(2)
}

fn drain(span: &'static Span) -> usize {
    let mut freed = 0;
    span.drain(|index| {
        span.push(index);
        freed += 1;
    });
    freed
}

fn freer(span: &'static Span, index: usize) -> thread::JoinHandle<()> {
    thread::spawn(move || assert!(span.free_remote(index, slot::LIVE).is_ok()))
}

/// What a keeper that drains, parks and comes back when it is told has taken up in the end, with `freers` at work meanwhile.
fn taken_around_parking<const N: usize>(
    span: &'static Span,
    inbox: &Inbox,
    freers: [thread::JoinHandle<()>; N],
) -> usize {
    let mut taken = drain(span);
    let parked = span.park();
    if !parked {
        taken += drain(span);
    }
    freers.into_iter().for_each(|freer| freer.join().unwrap());
    // Whoever parked it hears of what is left; whoever did not looks again.
    if !parked || told(inbox) == [INDEX] {
        taken += drain(span);
    }
    taken
}

#[test]
fn loom_racing_frees_of_one_block_have_one_winner() {
    loom::model(|| {
        let (span, _) = full_span();
        let racer = || thread::spawn(move || span.free_remote(0, slot::LIVE).is_ok());
        let (one, two) = (racer(), racer());
        let winners = usize::from(one.join().unwrap()) + usize::from(two.join().unwrap());
        assert_eq!(winners, 1);
        assert_eq!(drain(span), 1);
        assert!(matches!(span.free_remote(0, slot::LIVE), Err(FreeError::DoubleFree)));
    });
}

#[test]
fn loom_a_drain_takes_each_remote_free_once() {
    loom::model(|| {
        let (span, _) = full_span();
        let freer = thread::spawn(move || {
            assert!(span.free_remote(0, slot::LIVE).is_ok());
            assert!(span.free_remote(1, slot::LIVE).is_ok());
        });
        let mut taken = drain(span);
        freer.join().unwrap();
        taken += drain(span);
        assert_eq!(taken, 2);
        assert!(span.is_empty() && !span.has_remote());
    });
}

/// The one that finds its row marked writes nothing but its word.
#[test]
fn loom_a_drain_takes_a_free_that_found_its_row_marked_or_leaves_the_row_marked() {
    loom::model(|| {
        let (span, _) = full_span();
        assert!(span.free_remote(0, slot::LIVE).is_ok());
        let freer = freer(span, 1);
        let mut taken = drain(span);
        freer.join().unwrap();
        taken += drain(span);
        assert_eq!(taken, 2);
        assert!(span.is_empty() && !span.has_remote());
    });
}

#[test]
fn loom_a_drain_of_one_row_leaves_the_mark_of_another() {
    loom::model(|| {
        let (span, _) = full_span_of(3);
        assert!(span.free_remote(2, slot::LIVE).is_ok());
        let freer = freer(span, 0);
        let mut taken = drain(span);
        freer.join().unwrap();
        taken += drain(span);
        assert_eq!((taken, span.used.load(Relaxed)), (2, 1));
    });
}

#[test]
fn loom_racing_drains_and_frees_in_two_rows_lose_nothing() {
    model(|| {
        let (span, _) = full_span_of(3);
        let freers = [freer(span, 0), freer(span, 1), freer(span, 2)];
        let mut taken = drain(span);
        freers.into_iter().for_each(|freer| freer.join().unwrap());
        taken += drain(span);
        assert_eq!(taken, 3);
    });
}

/// The keeper looks at the word and stores to it. The store is an exchange here: for loom, which does not know that a
/// compare-and-swap leaves no room between what it found and what it wrote, a plain one may come to lie there.
#[test]
fn loom_a_block_that_its_keeper_and_another_free_at_once_is_freed_once() {
    model(|| {
        let (span, _) = full_span();
        let freer = thread::spawn(move || span.free_remote(0, slot::LIVE).is_ok());
        let word = &span.slots()[0];
        let mut free = 0;
        if word.load(Relaxed) == slot::LIVE {
            word.swap(slot::CACHED, Relaxed);
            free += 1;
        }
        free += drain(span);
        let freed = freer.join().unwrap();
        free += drain(span);
        assert_eq!(free, 1, "in the keeper's hands once, whether the other heard of it or not: {freed}");
        assert!(span.park(), "the bit that no word stands behind went with the look");
    });
}

#[test]
fn loom_a_remote_free_is_seen_by_the_parking_keeper_or_tells_it() {
    loom::model(|| {
        let (span, inbox) = full_span();
        let freer = freer(span, 0);
        let parked = span.park();
        let early = if parked { 0 } else { drain(span) };
        freer.join().unwrap();
        if parked {
            assert_eq!(told(inbox), [INDEX]);
            assert_eq!(span.state(), TOLD);
            span.unpark();
            assert_eq!(drain(span), 1);
        } else {
            assert_eq!(early, 1);
        }
        assert_eq!(span.state(), ACTIVE);
    });
}

#[test]
fn loom_a_keeper_that_drains_and_parks_misses_neither_of_two_frees() {
    model(|| {
        let (span, inbox) = full_span();
        assert_eq!(taken_around_parking(span, inbox, [freer(span, 0), freer(span, 1)]), 2);
    });
}

#[test]
fn loom_a_free_that_found_its_row_marked_is_seen_by_the_parking_keeper_or_tells_it() {
    loom::model(|| {
        let (span, inbox) = full_span();
        assert!(span.free_remote(0, slot::LIVE).is_ok());
        assert_eq!(taken_around_parking(span, inbox, [freer(span, 1)]), 2);
    });
}

#[test]
fn loom_a_full_span_tells_its_keeper_once() {
    loom::model(|| {
        let (span, inbox) = full_span();
        assert!(span.park());
        let (one, two) = (freer(span, 0), freer(span, 1));
        // The keeper reads its inbox meanwhile, as it would before a refill.
        let mut messages = told(inbox);
        if !messages.is_empty() {
            assert_eq!(span.state(), TOLD);
            span.unpark();
            drain(span);
        }
        one.join().unwrap();
        two.join().unwrap();
        messages.extend(told(inbox));
        assert_eq!(messages, [INDEX], "told once, whoever came first");
        drain(span);
        assert!(span.is_empty());
    });
}

#[test]
fn loom_messages_to_a_growing_inbox_are_not_lost() {
    loom::model(|| {
        let inbox: Arc<Inbox> = Arc::new(Inbox::new());
        inbox.reserve(1);
        let (first, second) = (inbox.clone(), inbox.clone());
        let one = thread::spawn(move || first.tell(1));
        let two = thread::spawn(move || second.tell(2));
        inbox.reserve(100);
        let mut all = told(&inbox);
        one.join().unwrap();
        two.join().unwrap();
        all.extend(told(&inbox));
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
        assert!(!inbox.has_messages());
    });
}

#[test]
fn loom_an_address_map_shows_a_span_whole_or_not_at_all() {
    loom::model(|| {
        let map: Arc<AddressMap<Span>> = Arc::new(AddressMap::new());
        let publisher = {
            let map = map.clone();
            thread::spawn(move || {
                let (span, _) = full_span();
                map.set(MAX_ALIGN, 1, Some(span));
            })
        };
        if let Some(span) = map.get(MAX_ALIGN + 5) {
            assert_eq!((span.base(), span.block(), span.capacity()), (MAX_ALIGN, BLOCK, 2));
            assert_eq!(span.slot_at(MAX_ALIGN + BLOCK).unwrap().1.load(Relaxed), slot::LIVE);
        }
        publisher.join().unwrap();
        assert!(map.get(MAX_ALIGN).is_some());
    });
}

#[test]
fn loom_threads_that_make_the_same_leaf_keep_both_entries() {
    loom::model(|| {
        let map: Arc<AddressMap<u32>> = Arc::new(AddressMap::new());
        let set = |address, value: &'static u32| {
            let map = map.clone();
            thread::spawn(move || map.set(address, 1, Some(value)))
        };
        let (one, two) = (set(GRANULE, &1), set(2 * GRANULE, &2));
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!((map.get(GRANULE), map.get(2 * GRANULE)), (Some(&1), Some(&2)));
    });
}

/// Addresses that nobody touches: the models look at bookkeeping alone.
struct Nowhere;

// SAFETY: the models never use a byte of a block; each makes one region, in a map of its own.
unsafe impl MemoryBackend for Nowhere {
    unsafe fn allocate(_: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(MAX_ALIGN)
    }
    unsafe fn deallocate(_: *mut u8, _: usize) -> bool {
        true
    }
    fn segment_bytes() -> usize {
        MAX_ALIGN
    }
}

const REQUEST: SpanRequest = SpanRequest { key: 0, class: class_of(BLOCK) as u16, lane: 0, group: 0 };

/// Pools with one segment, and a span in it with `used` blocks handed out, kept by the caller.
fn pools(used: usize) -> (Home, &'static Span) {
    pools_of(REQUEST, used)
}

fn pools_of(request: SpanRequest, used: usize) -> (Home, &'static Span) {
    let pools: &'static BackendPools = Box::leak(Box::new(BackendPools::new()));
    let home = Home { ops: const { &BackendOps::of::<Nowhere>() }, pools };
    assert_eq!(home.key(PoolKey { place: Place::DEFAULT, encoded: false }), 0);
    let span = home.take_span(request).unwrap();
    for _ in 0..used {
        let index = span.pop().unwrap().unwrap();
        span.set_state(index, slot::LIVE);
    }
    (home, span)
}

fn free(home: Home, span: &'static Span, index: usize) {
    match span.free_remote(index, slot::LIVE) {
        Ok(Remote::Orphan) => home.visit_orphan(span),
        Ok(Remote::Done) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Every interleaving with up to three switches away from a thread that could go on.
fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 100_000;
    builder.check(f);
}

#[test]
fn loom_the_last_free_of_an_abandoned_span_returns_it() {
    model(|| {
        let (home, span) = pools(1);
        let freer = thread::spawn(move || free(home, span, 0));
        home.abandon(span);
        freer.join().unwrap();
        assert_eq!(home.pools.segment.len(), 1, "all of the segment is free again");
        assert_eq!(home.pools.orphan.len(), 0);
    });
}

#[test]
fn loom_two_frees_that_race_with_the_end_of_their_thread_return_the_span() {
    model(|| {
        let (home, span) = pools(2);
        let freer = |index| thread::spawn(move || free(home, span, index));
        let (one, two) = (freer(0), freer(1));
        home.abandon(span);
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!((home.pools.segment.len(), home.pools.orphan.len()), (1, 0));
    });
}

/// As above, of an encoded span, in which freed blocks stay where they are until it is empty.
#[test]
fn loom_two_frees_that_race_with_the_end_of_their_thread_return_an_encoded_span() {
    model(|| {
        let (home, span) = pools_of(SpanRequest { lane: Policy::Hardened as u8, ..REQUEST }, 2);
        assert!(span.is_coded());
        let freer = |index| thread::spawn(move || free(home, span, index));
        let (one, two) = (freer(0), freer(1));
        home.abandon(span);
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!((home.pools.segment.len(), home.pools.orphan.len()), (1, 0));
    });
}

#[test]
fn loom_the_adopter_of_an_encoded_span_finds_what_was_freed_before() {
    model(|| {
        let request = SpanRequest { lane: Policy::Hardened as u8, ..REQUEST };
        let (home, span) = pools_of(request, 2);
        let freer = thread::spawn(move || free(home, span, 0));
        home.abandon(span);
        let adopted = home.adopt(request);
        let early = adopted.map_or(0, drain);
        freer.join().unwrap();
        // Or the freer held it at that moment, and listed it again.
        let adopted = adopted.or_else(|| home.adopt(request)).unwrap();
        assert_eq!(early + drain(adopted), 1);
    });
}

#[test]
fn loom_the_numbers_of_the_pools_are_those_of_the_directory() {
    model(|| {
        let (home, span) = pools(0);
        let taker = thread::spawn(move || {
            assert!(home.take_span(REQUEST).is_some());
            assert_eq!(home.pools.segment.len(), 0, "what the segment gained and lost by now");
        });
        home.retire(span);
        taker.join().unwrap();
        assert_eq!(home.pools.segment.bytes(), 0);
    });
}

#[test]
fn loom_an_orphan_has_one_claimer() {
    model(|| {
        let (home, span) = pools(1);
        home.abandon(span);
        assert_eq!(home.pools.orphan.len(), 1);
        let adopter = || thread::spawn(move || home.adopt(REQUEST).is_some());
        let (one, two) = (adopter(), adopter());
        let claims = usize::from(one.join().unwrap()) + usize::from(two.join().unwrap());
        assert_eq!(claims, 1);
        assert_eq!(home.pools.orphan.len(), 0);
    });
}

#[test]
fn loom_an_adopter_and_a_freeing_thread_lose_no_block_between_them() {
    model(|| {
        let (home, span) = pools(2);
        home.abandon(span);
        let freer = thread::spawn(move || free(home, span, 0));
        let adopted = home.adopt(REQUEST);
        freer.join().unwrap();
        match adopted {
            Some(adopted) => {
                // The keeper finds the freed block, now or when it had looked before.
                drain(adopted);
                assert_eq!(adopted.used.load(Relaxed), 1);
                assert_eq!(home.pools.orphan.len(), 0);
            }
            None => {
                // The freeing thread held it for a moment; it is listed again, with the block on its free list.
                let adopted = home.adopt(REQUEST).unwrap();
                drain(adopted);
                assert_eq!(adopted.used.load(Relaxed), 1);
            }
        }
    });
}

#[test]
fn loom_a_free_into_a_parked_span_whose_thread_ends_is_not_forgotten() {
    model(|| {
        let (home, span) = pools(2);
        let inbox: &'static Inbox = Box::leak(Box::new(Inbox::new()));
        inbox.reserve(INDEX);
        span.adopt(1, Some(NonNull::dangling()), 0, inbox, INDEX);
        assert!(span.park());
        let freer = |index| thread::spawn(move || free(home, span, index));
        let (one, two) = (freer(0), freer(1));
        home.abandon(span);
        one.join().unwrap();
        two.join().unwrap();
        assert_eq!((home.pools.segment.len(), home.pools.orphan.len()), (1, 0));
    });
}
