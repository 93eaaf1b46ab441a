//! Frees by threads that did not allocate the block: they come back to whoever has use for them, once.

mod common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{mpsc, Barrier};
use std::thread;

use common::faulty::faulty_backend;
use common::{alloc, free};
use unimalloc::*;

faulty_backend!(Ended, 2 << 20);
faulty_backend!(Ending, 2 << 20);
faulty_backend!(Again, 2 << 20);
faulty_backend!(Races, 2 << 20);

/// Many, some and few blocks to a span.
const SIZES: [usize; 3] = [64, 1000, 60_000];

/// Enough blocks for two spans and a half.
fn count(size: usize) -> usize {
    5 * (if size > 8 << 10 { 512 << 10 } else { 64 << 10 } / (size + 16)) / 2
}

fn nothing_is_left<B: ThreadSlots>(held: impl Fn() -> (usize, usize)) {
    let audit = audit::<B>().unwrap();
    assert_eq!((audit.spans, audit.orphans, audit.remote_blocks), (0, 0, 0), "{audit:?}");
    trim::<B>(0);
    assert_eq!(held(), (0, 0));
}

/// Allocates in a thread that ends, before two others free every second block each, or while they do.
fn two_others_free<P: AllocPolicy, B: ThreadSlots>(ended: bool) {
    for size in SIZES {
        for _ in 0..20 {
            let freer = || {
                let (send, receive) = mpsc::channel::<usize>();
                let free_all =
                    move || receive.iter().for_each(|block| free::<P, B>(block as *mut u8).unwrap());
                (send, thread::spawn(free_all))
            };
            let (senders, freers): (Vec<_>, Vec<_>) = [freer(), freer()].into_iter().unzip();
            let ending = thread::spawn(move || {
                let mut kept = Vec::new();
                for at in 0..count(size) {
                    let block = alloc::<P, B>(size, 16) as usize;
                    if ended {
                        kept.push(block);
                    } else {
                        senders[at % 2].send(block).unwrap();
                    }
                }
                (kept, senders)
            });
            // A join, and no scope, which would not wait for the very end of the thread, where its heap is given up.
            let (kept, senders) = ending.join().unwrap();
            for (at, block) in kept.into_iter().enumerate() {
                senders[at % 2].send(block).unwrap();
            }
            drop(senders);
            freers.into_iter().for_each(|freer| freer.join().unwrap());
            let orphans = audit::<B>().unwrap().orphans;
            assert_eq!(orphans, 0, "blocks of {size}: who frees the last one returns the span");
        }
    }
}

#[test]
fn the_spans_of_a_thread_that_ended_are_returned_by_the_last_of_two_others() {
    two_others_free::<StandardPolicy, Ended>(true);
    two_others_free::<SecurePolicy, Ended>(true);
    two_others_free::<HardenedPolicy, Ended>(true);
    nothing_is_left::<Ended>(|| Ended::faults().held());
}

#[test]
fn the_spans_of_a_thread_that_ends_meanwhile_are_returned_too() {
    two_others_free::<StandardPolicy, Ending>(false);
    two_others_free::<SecurePolicy, Ending>(false);
    two_others_free::<HardenedPolicy, Ending>(false);
    nothing_is_left::<Ending>(|| Ending::faults().held());
}

#[test]
fn a_second_free_is_refused_whoever_was_first_and_whatever_the_keeper_did_in_between() {
    fn elsewhere<P: AllocPolicy>(block: usize) -> Result<(), FreeError> {
        thread::spawn(move || free::<P, Again>(block as *mut u8)).join().unwrap()
    }
    fn check<P: AllocPolicy>() {
        for size in SIZES {
            let blocks: Vec<_> = (0..count(size)).map(|_| alloc::<P, Again>(size, 16) as usize).collect();
            let all_refuse = |block: usize| {
                assert_eq!(free::<P, Again>(block as *mut u8), Err(FreeError::DoubleFree));
                assert_eq!(elsewhere::<P>(block), Err(FreeError::DoubleFree));
            };
            // By another, then by its keeper: neighbours, and blocks of other rows and spans.
            let by_others = [0, 1, blocks.len() / 3, blocks.len() - 1].map(|at| blocks[at]);
            for block in by_others {
                elsewhere::<P>(block).unwrap();
                all_refuse(block);
            }
            // By its keeper, then by another.
            let own = blocks[2];
            free::<P, Again>(own as *mut u8).unwrap();
            all_refuse(own);
            // When its keeper has taken them up, too. The spans have other live blocks, so they stay.
            trim::<Again>(usize::MAX);
            by_others.into_iter().chain([own]).for_each(all_refuse);
            let gone: HashSet<_> = by_others.into_iter().chain([own]).collect();
            let audit = audit::<Again>().unwrap();
            assert_eq!((audit.live_blocks, audit.remote_blocks), (blocks.len() - gone.len(), 0));
            let left = blocks.into_iter().filter(|block| !gone.contains(block));
            left.for_each(|block| free::<P, Again>(block as *mut u8).unwrap());
        }
        trim::<Again>(0);
    }
    check::<StandardPolicy>();
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
    assert_eq!(Again::faults().held(), (0, 0));
}

/// What the program does is wrong; the allocator is none the worse for it.
#[test]
fn a_block_that_its_own_thread_and_another_free_at_the_same_time_is_handed_out_once() {
    const ROUNDS: usize = 20_000;
    let (next, both) = (AtomicUsize::new(0), Barrier::new(2));
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut freed = 0;
            for _ in 0..ROUNDS {
                both.wait();
                freed += usize::from(free::<StandardPolicy, Races>(next.load(SeqCst) as *mut u8).is_ok());
                both.wait();
            }
            freed
        });
        let mut freed = 0;
        for _ in 0..ROUNDS {
            let block = alloc::<StandardPolicy, Races>(64, 16);
            next.store(block as usize, SeqCst);
            both.wait();
            freed += usize::from(free::<StandardPolicy, Races>(block).is_ok());
            both.wait();
            // Twice in the cache, it would come out twice.
            let [one, two] = [(); 2].map(|()| alloc::<StandardPolicy, Races>(64, 16));
            assert_ne!(one, two);
            [one, two].into_iter().for_each(|block| free::<StandardPolicy, Races>(block).unwrap());
        }
        freed += other.join().unwrap();
        assert!((ROUNDS..=2 * ROUNDS).contains(&freed), "{freed}");
    });
    assert_eq!(audit::<Races>().unwrap().live_blocks, 0);
    trim::<Races>(0);
    assert_eq!(Races::faults().held(), (0, 0));
    assert_eq!(stats::<Races>().corruptions, 0);
}
