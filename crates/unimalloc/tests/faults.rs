//! A backend that fails: nothing is lost, nothing is counted twice, nothing panics, and what was refused works later.

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use common::faulty::faulty_backend;
use common::{free, Random};
use unimalloc::*;

/// Sizes of every kind of block.
const KINDS: [(usize, usize); 6] =
    [(100, 16), (9000, 8), (100_000, 256), (700_000, 16), (20 << 20, 16), (200_000, 2 << 20)];

/// Allocates of each kind under each policy, grows some, frees all; a null must have a reason.
fn work<B: ThreadSlots>() {
    fn under<P: AllocPolicy, B: ThreadSlots>() {
        let mut blocks = Vec::new();
        for (size, align) in KINDS {
            set_last_error(AllocError::Reentrant);
            let block = thread_alloc::<P, B>(size, align);
            if block.is_null() {
                assert_eq!(last_error(), Some(AllocError::OutOfMemory));
                continue;
            }
            // SAFETY: the block is live and ours; a failed realloc leaves it.
            let grown = unsafe { thread_realloc::<P, B>(block, size * 2, 16) };
            blocks.push(if grown.is_null() { block } else { grown });
        }
        for block in blocks {
            assert_eq!(free::<P, B>(block), Ok(()));
        }
    }
    under::<StandardPolicy, B>();
    under::<SecurePolicy, B>();
    under::<HardenedPolicy, B>();
}

/// The books add up and agree with the backend's own.
fn audit_against<B: ThreadSlots>(held: (usize, usize)) {
    let audit = audit::<B>().unwrap_or_else(|what| panic!("{what}"));
    assert_eq!(audit.live_blocks, 0, "{audit:?}");
    assert_eq!(stats::<B>().reserved_bytes, held.1);
}

#[test]
fn null_on_the_nth_call_loses_nothing() {
    faulty_backend!(Nth, 2 << 20);
    let faults = Nth::faults();
    for silent in [false, true] {
        for nth in 0..16 {
            for more in [0, 2] {
                faults.silent.store(silent, SeqCst);
                faults.refuse_at.store(nth, SeqCst);
                faults.refuse_more.store(more, SeqCst);
                work::<Nth>();
                audit_against::<Nth>(faults.held());
                faults.heal();
                work::<Nth>();
                trim::<Nth>(0);
                audit_against::<Nth>(faults.held());
                assert_eq!(faults.held(), (0, 0), "refused call {nth} and {more} more");
            }
        }
    }
    assert!(faults.refused.load(SeqCst) > 60, "the faults were there");
    assert_eq!(faults.bad_frees.load(SeqCst), 0);
}

#[test]
fn misaligned_regions_are_used_from_an_aligned_address_on_and_returned_as_they_came() {
    faulty_backend!(Crooked, 2 << 20);
    let faults = Crooked::faults();
    for misalign in [4096, 64 << 10, 1 << 20, (2 << 20) - 4096] {
        faults.misalign.store(misalign, SeqCst);
        for (size, align) in KINDS {
            let block = common::alloc::<SecurePolicy, Crooked>(size, align);
            free::<SecurePolicy, Crooked>(block).unwrap();
        }
        work::<Crooked>();
        audit_against::<Crooked>(faults.held());
        faults.heal();
        trim::<Crooked>(0);
        assert_eq!((faults.held(), faults.bad_frees.load(SeqCst)), ((0, 0), 0), "{misalign}");
    }
}

#[test]
fn a_region_that_is_not_taken_back_stays_ours_and_is_tried_again() {
    faulty_backend!(Sticky, 2 << 20);
    let faults = Sticky::faults();
    work::<Sticky>();
    let (regions, bytes) = faults.held();
    assert!(regions > 3);
    faults.refuse_frees.store(usize::MAX, SeqCst);
    assert_eq!(trim::<Sticky>(0), 0);
    audit_against::<Sticky>((regions, bytes));
    faults.refuse_frees.store(1, SeqCst);
    let released = trim::<Sticky>(0);
    assert!(released > 0 && released < bytes, "one refusal does not keep the others: {released} of {bytes}");
    audit_against::<Sticky>(faults.held());
    assert_eq!(trim::<Sticky>(0), bytes - released);
    assert_eq!(faults.held(), (0, 0));
}

#[test]
fn a_misaligned_region_that_is_not_taken_back_is_not_forgotten() {
    faulty_backend!(Stray, 2 << 20);
    let faults = Stray::faults();
    faults.misalign.store(4096, SeqCst);
    faults.refuse_frees.store(usize::MAX, SeqCst);
    work::<Stray>();
    audit_against::<Stray>(faults.held());
    faults.heal();
    trim::<Stray>(0);
    audit_against::<Stray>((0, 0));
    assert_eq!(faults.held(), (0, 0));
}

#[test]
fn a_slow_backend_delays_its_caller_alone() {
    faulty_backend!(Slow, 2 << 20);
    let warm = common::alloc::<StandardPolicy, Slow>(1000, 16);
    Slow::faults().slow_micros.store(2_000_000, SeqCst);
    let slow = thread::spawn(|| common::alloc::<StandardPolicy, Slow>(50 << 20, 16) as usize);
    // No lock is held across the call: everything that needs no new region goes on.
    let started = std::time::Instant::now();
    for _ in 0..100 {
        let blocks: Vec<_> = (0..50).map(|_| common::alloc::<StandardPolicy, Slow>(1000, 16)).collect();
        blocks.into_iter().for_each(|block| free::<StandardPolicy, Slow>(block).unwrap());
        stats::<Slow>();
    }
    assert!(started.elapsed().as_millis() < 1500, "{:?}", started.elapsed());
    free::<StandardPolicy, Slow>(slow.join().unwrap() as *mut u8).unwrap();
    free::<StandardPolicy, Slow>(warm).unwrap();
    Slow::faults().heal();
}

#[test]
fn threads_that_meet_failures_at_random_lose_nothing() {
    faulty_backend!(Storm, 2 << 20);
    let faults = Storm::faults();
    faults.limit.store(60 << 20, SeqCst);
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut blocks: Vec<(*mut u8, usize)> = Vec::new();
                    for _ in 0..20_000 {
                        if random.below(2) == 0 && blocks.len() < 300 {
                            let size = random.size(1 << 20).max(size_of::<usize>());
                            let block = match random.below(3) {
                                0 => thread_alloc::<StandardPolicy, Storm>(size, 16),
                                1 => thread_alloc::<SecurePolicy, Storm>(size.min(4096), 16),
                                _ => thread_alloc::<HardenedPolicy, Storm>(size.min(4096), 16),
                            };
                            if !block.is_null() {
                                // SAFETY: a live block that has room for an address.
                                unsafe { block.cast::<usize>().write_unaligned(block as usize) };
                                blocks.push((block, size));
                            }
                        } else if let Some(at) = random.next().checked_rem(blocks.len() as u64) {
                            let (block, _) = blocks.swap_remove(at as usize);
                            // SAFETY: as above.
                            assert_eq!(unsafe { block.cast::<usize>().read_unaligned() }, block as usize);
                            free::<StandardPolicy, Storm>(block).unwrap();
                        }
                        if random.below(500) == 0 {
                            trim::<Storm>(random.below(30 << 20));
                        }
                    }
                    blocks.into_iter().for_each(|(block, _)| free::<StandardPolicy, Storm>(block).unwrap());
                })
            })
            .collect();
        scope.spawn(|| {
            let mut random = Random(99);
            while !stop.load(SeqCst) {
                faults.refuse_at.store(random.below(3) as isize, SeqCst);
                faults.refuse_more.store(random.below(3) as isize, SeqCst);
                faults.refuse_frees.store(random.below(2), SeqCst);
                faults.misalign.store([0, 4096, 64 << 10][random.below(3)], SeqCst);
                thread::sleep(std::time::Duration::from_micros(300));
            }
        });
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, SeqCst); // before a worker's panic goes on here, or its scope would wait for ever
        ended.into_iter().for_each(|worker| worker.unwrap());
    });
    audit_against::<Storm>(faults.held());
    faults.heal();
    trim::<Storm>(0);
    assert_eq!((faults.held(), faults.bad_frees.load(SeqCst)), ((0, 0), 0));
    assert!(faults.refused.load(SeqCst) > 0);
}

/// A backend that wants segments of a size no bookkeeping is made for.
mod odd_segments {
    use unimalloc::{backend_pools, last_error, AllocError, HostBackend, MemoryBackend, StandardPolicy};

    use crate::common::{alloc, free};

    struct Odd<const BYTES: usize>;

    // SAFETY: all calls are passed on to a backend that keeps the promises.
    unsafe impl<const BYTES: usize> MemoryBackend for Odd<BYTES> {
        unsafe fn allocate(size: usize) -> *mut u8 {
            // SAFETY: the same contract.
            unsafe { HostBackend::allocate(size) }
        }
        unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
            // SAFETY: the same contract.
            unsafe { HostBackend::deallocate(ptr, size) }
        }
        fn segment_bytes() -> usize {
            BYTES
        }
    }
    backend_pools!(Odd<0>);
    backend_pools!(Odd<5_000_000>);
    backend_pools!(Odd<{ 1 << 40 }>);

    #[test]
    fn hooks_that_a_backend_leaves_out_touch_nothing_and_say_why() {
        let mut page = [7_u8; 4096];
        for hook in [Odd::<0>::page_reset, Odd::<0>::make_guard, Odd::<0>::decommit] {
            // SAFETY: nothing may happen to the range: what is tested.
            assert!(!unsafe { hook(page.as_mut_ptr(), page.len()) });
            assert_eq!(last_error(), Some(AllocError::Unsupported));
        }
        assert_eq!(page, [7; 4096]);
    }

    #[test]
    fn a_strange_segment_size_is_brought_into_bounds() {
        for size in [16, 5000, 300_000, 3 << 20, 20 << 20] {
            free::<StandardPolicy, Odd<0>>(alloc::<StandardPolicy, Odd<0>>(size, 16)).unwrap();
            free::<StandardPolicy, Odd<5_000_000>>(alloc::<StandardPolicy, Odd<5_000_000>>(size, 16))
                .unwrap();
            free::<StandardPolicy, Odd<{ 1 << 40 }>>(alloc::<StandardPolicy, Odd<{ 1 << 40 }>>(size, 16))
                .unwrap();
        }
    }
}
