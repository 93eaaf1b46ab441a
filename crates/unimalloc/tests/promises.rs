//! One small test per promise, named after it. `docs/reliability.md` has the list.

mod common;

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::Mutex;
use std::thread;

use common::faulty::faulty_backend;
use common::{alloc, alone, free};
use unimalloc::*;

type B = HostBackend;

fn plain<B: ThreadSlots>() -> *mut std::ffi::c_void {
    B::get_allocator_ptr_raw_for_encryption::<false>()
}

fn encoded<B: ThreadSlots>() -> *mut std::ffi::c_void {
    B::get_allocator_ptr_raw_for_encryption::<true>()
}

/// Small, mid, large, huge, and aligned beyond a granule.
const KINDS: [(usize, usize); 7] =
    [(1, 1), (100, 16), (9000, 8), (100_000, 256), (700_000, 16), (20 << 20, 16), (3000, 1 << 20)];

macro_rules! invalid_frees {
    ($name:ident, $policy:ty) => {
        mod $name {
            use super::*;

            #[test]
            fn a_double_free_is_a_typed_error() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc::<$policy, B>(size, align);
                    free::<$policy, B>(block).unwrap();
                    assert_eq!(free::<$policy, B>(block), Err(FreeError::DoubleFree), "{size}");
                    assert_eq!(free::<StandardPolicy, B>(block), Err(FreeError::DoubleFree), "{size}");
                    let elsewhere = block as usize;
                    let result =
                        thread::spawn(move || free::<$policy, B>(elsewhere as *mut u8)).join().unwrap();
                    assert_eq!(result, Err(FreeError::DoubleFree), "{size}, in another thread");
                }
            }

            #[test]
            fn a_double_free_after_a_remote_free_is_a_typed_error() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc::<$policy, B>(size, align) as usize;
                    thread::spawn(move || free::<$policy, B>(block as *mut u8).unwrap()).join().unwrap();
                    assert_eq!(free::<$policy, B>(block as *mut u8), Err(FreeError::DoubleFree), "{size}");
                }
            }

            #[test]
            fn an_interior_free_is_a_typed_error_and_leaves_the_block_alone() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc::<$policy, B>(size, align);
                    let usable = usable_size::<B>(block);
                    for offset in [1, usable / 2, usable - 1].into_iter().filter(|offset| *offset > 0) {
                        let inside = block.wrapping_add(offset);
                        assert_eq!(free::<$policy, B>(inside), Err(FreeError::Interior), "{size} + {offset}");
                    }
                    assert_eq!(usable_size::<B>(block), usable);
                    free::<$policy, B>(block).unwrap();
                }
            }

            #[test]
            fn a_foreign_pointer_is_a_typed_error() {
                let _alone = alone();
                let mut here = [0u8; 64];
                let boxed = Box::into_raw(Box::new(0u64));
                for address in [here.as_mut_ptr(), boxed.cast(), 64 as *mut u8, usize::MAX as *mut u8] {
                    assert_eq!(free::<$policy, B>(address), Err(FreeError::NotOurs));
                }
                // SAFETY: from `Box::into_raw` above.
                drop(unsafe { Box::from_raw(boxed) });
            }

            #[test]
            fn a_free_by_a_hand_made_allocator_is_checked_alike() {
                let _alone = alone();
                let mut other = ThreadAllocator::<B>::new();
                let block = alloc::<$policy, B>(500, 16);
                // SAFETY: freed once; the others must be refused.
                unsafe {
                    assert_eq!(other.free::<$policy>(block.add(8)), Err(FreeError::Interior));
                    assert_eq!(other.free::<$policy>(block), Ok(()));
                    assert_eq!(other.free::<$policy>(block), Err(FreeError::DoubleFree));
                }
            }

            #[test]
            fn a_block_outlives_its_thread_and_is_freed_once_elsewhere() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = thread::spawn(move || {
                        let block = alloc::<$policy, B>(size, align);
                        // SAFETY: a live block of `size` bytes.
                        unsafe { block.write_bytes(0x5A, size) };
                        block as usize
                    })
                    .join()
                    .unwrap();
                    // SAFETY: still live, and ours.
                    let bytes = unsafe { std::slice::from_raw_parts(block as *const u8, size) };
                    assert!(bytes.iter().all(|byte| *byte == 0x5A));
                    free::<$policy, B>(block as *mut u8).unwrap();
                    assert_eq!(free::<$policy, B>(block as *mut u8), Err(FreeError::DoubleFree));
                }
            }

            #[test]
            fn realloc_keeps_contents_and_alignment() {
                let _alone = alone();
                for align in [1, 64, 4096, 128 << 10] {
                    let mut block = alloc::<$policy, B>(100, align);
                    let mut filled = 100;
                    // SAFETY: always the live block, within its size.
                    unsafe {
                        block.write_bytes(0x77, 100);
                        for size in [300, 5000, 200_000, 3 << 20, 9 << 20, 70_000, 101, 12] {
                            block = thread_realloc::<$policy, B>(block, size, align);
                            assert!(!block.is_null(), "{:?}", last_error());
                            assert_eq!(block as usize % align, 0, "{size}");
                            let kept = std::slice::from_raw_parts(block, filled.min(size));
                            assert!(kept.iter().all(|byte| *byte == 0x77), "{size}");
                            filled = filled.min(size);
                        }
                    }
                    free::<$policy, B>(block).unwrap();
                }
            }
        }
    };
}

invalid_frees!(standard, StandardPolicy);
invalid_frees!(secure, SecurePolicy);
invalid_frees!(hardened, HardenedPolicy);

// ---- nulls ----

faulty_backend!(Refusing, 2 << 20);

#[test]
fn a_null_of_the_backend_keeps_its_reason_and_one_without_a_reason_gets_one() {
    let _alone = alone();
    let faults = Refusing::faults();
    faults.limit.store(0, SeqCst);
    let null = || thread_alloc::<StandardPolicy, Refusing>(100, 16);
    set_last_error(AllocError::Reentrant);
    assert!(null().is_null());
    assert_eq!(last_error(), Some(AllocError::OutOfMemory));
    faults.silent.store(true, SeqCst);
    set_last_error(AllocError::Reentrant);
    assert!(null().is_null());
    assert_eq!(last_error(), Some(AllocError::OutOfMemory), "not an older reason");
    faults.heal();
    set_last_error(AllocError::NoDevice);
    free::<StandardPolicy, Refusing>(alloc::<StandardPolicy, Refusing>(100, 16)).unwrap();
    assert_eq!(last_error(), Some(AllocError::NoDevice), "a success leaves the reason in place");
}

#[test]
fn bad_sizes_and_alignments_are_null_with_the_reason_under_every_policy() {
    let _alone = alone();
    fn check<P: AllocPolicy>() {
        for (size, align, reason) in [
            (1, 0, AllocError::InvalidAlignment),
            (1, 24, AllocError::InvalidAlignment),
            (1, 4 << 20, AllocError::InvalidAlignment),
            (usize::MAX, 1, AllocError::InvalidSize),
            (isize::MAX as usize, 1, AllocError::InvalidSize),
            (isize::MAX as usize - (2 << 20) + 1, 16, AllocError::InvalidSize),
        ] {
            assert!(thread_alloc::<P, B>(size, align).is_null());
            assert_eq!(last_error(), Some(reason), "{size} {align}");
            let block = alloc::<P, B>(10, 1);
            // SAFETY: the block stays live, since the request is refused.
            assert!(unsafe { thread_realloc::<P, B>(block, size, align) }.is_null());
            assert_eq!(last_error(), Some(reason), "{size} {align}");
            free::<P, B>(block).unwrap();
        }
    }
    check::<StandardPolicy>();
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}

faulty_backend!(TwoMiB, 2 << 20);

#[test]
fn an_alignment_that_no_small_segment_can_hold_does_not_ask_for_segments_for_ever() {
    let _alone = alone();
    for size in [70_000, 200_000, 500_000] {
        let block = alloc::<StandardPolicy, TwoMiB>(size, 2 << 20);
        assert!(TwoMiB::faults().held().0 <= 3, "{:?}", TwoMiB::faults().held());
        free::<StandardPolicy, TwoMiB>(block).unwrap();
    }
}

// ---- threads ----

#[test]
fn a_thread_that_only_frees_makes_no_heap() {
    let _alone = alone();
    let blocks: Vec<usize> = KINDS
        .into_iter()
        .flat_map(|(size, align)| {
            [
                alloc::<StandardPolicy, B>(size, align) as usize,
                alloc::<SecurePolicy, B>(size, align) as usize,
                alloc::<HardenedPolicy, B>(size, align) as usize,
            ]
        })
        .collect();
    thread::spawn(move || {
        for block in blocks {
            free::<StandardPolicy, B>(block as *mut u8).unwrap();
            assert_eq!(free::<StandardPolicy, B>(block as *mut u8), Err(FreeError::DoubleFree));
        }
        assert_eq!((plain::<B>(), encoded::<B>()), (ptr::null_mut(), ptr::null_mut()));
    })
    .join()
    .unwrap();
}

#[test]
fn a_thread_with_a_reused_id_is_another_owner() {
    let _alone = alone();
    let mut ids = HashSet::new();
    let mut reused = false;
    let mut kept: Vec<usize> = Vec::new();
    for round in 0..200 {
        let previous = kept.last().copied();
        let (id, block) = thread::spawn(move || {
            // A free of a block of a thread that had this id must not be taken for one of our own.
            if let Some(block) = previous.filter(|_| round % 2 == 1) {
                free::<StandardPolicy, B>(block as *mut u8).unwrap();
                assert_eq!(free::<StandardPolicy, B>(block as *mut u8), Err(FreeError::DoubleFree));
            }
            let first = alloc::<StandardPolicy, B>(48, 16);
            let second = alloc::<StandardPolicy, B>(48, 16);
            assert_ne!(first, second);
            free::<StandardPolicy, B>(first).unwrap();
            (common::pages::thread_id(), second as usize)
        })
        .join()
        .unwrap();
        reused |= !ids.insert(id);
        if round % 2 == 1 {
            kept.pop();
        }
        kept.push(block);
    }
    assert!(reused, "the system gave every thread an id of its own: nothing was shown");
    assert_eq!(kept.iter().collect::<HashSet<_>>().len(), kept.len());
    kept.into_iter().for_each(|block| free::<StandardPolicy, B>(block as *mut u8).unwrap());
}

#[test]
fn allocation_works_inside_another_destructor_of_a_thread_before_and_after_our_own() {
    let _alone = alone();
    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    struct Late;
    impl Drop for Late {
        fn drop(&mut self) {
            for (size, align) in KINDS {
                let gone = alloc::<StandardPolicy, B>(size, align);
                free::<StandardPolicy, B>(gone).unwrap();
                assert_eq!(free::<StandardPolicy, B>(gone), Err(FreeError::DoubleFree));
                SEEN.lock().unwrap().push(alloc::<HardenedPolicy, B>(size, align) as usize);
                SEEN.lock().unwrap().push(alloc::<SecurePolicy, B>(size, align) as usize);
            }
            // Torn down or not: these never crash, and answer null or a live slot.
            let _ = (<B as LocalAllocatorSelector<B>>::get_allocator_ptr(), plain::<B>(), encoded::<B>());
            let _ = <B as LocalAllocatorSelector<B>>::with_allocator(|allocator| allocator.as_ptr());
        }
    }
    thread_local! {
        static BEFORE: Late = const { Late };
        static AFTER: Late = const { Late };
    }
    let ended = thread::spawn(|| {
        BEFORE.with(|_| ());
        let block = alloc::<StandardPolicy, B>(64, 16);
        AFTER.with(|_| ());
        free::<StandardPolicy, B>(block).unwrap();
    })
    .join();
    assert!(ended.is_ok(), "a destructor panicked");
    let seen = std::mem::take(&mut *SEEN.lock().unwrap());
    assert_eq!(seen.len(), 2 * 2 * KINDS.len());
    for block in seen {
        free::<StandardPolicy, B>(block as *mut u8).unwrap();
    }
}

#[test]
fn a_thread_allocator_kept_in_a_thread_local_may_outlive_the_slots() {
    let _alone = alone();
    thread_local! {
        static KEPT: RefCell<Option<ThreadAllocator<B>>> = const { RefCell::new(None) };
    }
    let block = thread::spawn(|| {
        KEPT.with(|_| ()); // its destructor is registered first
        let mut allocator = ThreadAllocator::<B>::new();
        B::register_current_allocator_ptr(allocator.as_ptr());
        let block = allocator.alloc::<StandardPolicy>(100, 16) as usize;
        KEPT.with(|kept| *kept.borrow_mut() = Some(allocator));
        block
    })
    .join()
    .unwrap();
    free::<StandardPolicy, B>(block as *mut u8).unwrap();
}

// ---- slots ----

#[test]
fn registration_refuses_everything_but_a_live_allocator_of_this_thread_and_backend() {
    let _alone = alone();
    thread::spawn(|| {
        let own = <B as LocalAllocatorSelector<B>>::get_allocator_ptr();
        let refuse = |pointer: *mut std::ffi::c_void, reason| {
            set_last_error(AllocError::NoDevice);
            B::register_current_allocator_ptr(pointer);
            assert_eq!(last_error(), Some(reason));
            assert_eq!(<B as LocalAllocatorSelector<B>>::get_allocator_ptr(), own);
        };
        refuse(8 as *mut _, AllocError::NotRegistered); // nothing is read through it
        refuse(usize::MAX as *mut _, AllocError::NotRegistered);
        let gone = {
            let allocator = ThreadAllocator::<B>::new();
            allocator.as_ptr()
        };
        refuse(gone, AllocError::NotRegistered);
        refuse(ThreadAllocator::<CudaUnifiedBackend>::new().as_ptr(), AllocError::NotRegistered);
        let (send, receive) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = thread::spawn(move || {
            let allocator = ThreadAllocator::<B>::new();
            send.send(allocator.as_ptr() as usize).unwrap();
            let _ = stopped.recv();
        });
        refuse(receive.recv().unwrap() as *mut _, AllocError::NotRegistered);
        drop(stop);
        other.join().unwrap();
        let mine = ThreadAllocator::<B>::new();
        <B as LocalAllocatorSelector<B>>::with_allocator(|_| {
            refuse(mine.as_ptr(), AllocError::Reentrant);
            refuse(ptr::null_mut(), AllocError::Reentrant);
        });
    })
    .join()
    .unwrap();
}

#[test]
fn blocks_of_the_old_and_the_new_allocator_are_freed_from_any_thread() {
    let _alone = alone();
    thread::spawn(|| {
        let old = alloc::<StandardPolicy, B>(100, 16);
        let allocator = ThreadAllocator::<B>::new();
        B::register_current_allocator_ptr(allocator.as_ptr());
        let new: Vec<usize> = (0..3).map(|_| alloc::<StandardPolicy, B>(100, 16) as usize).collect();
        free::<StandardPolicy, B>(old).unwrap();
        free::<StandardPolicy, B>(new[0] as *mut u8).unwrap();
        let remote = new[1];
        thread::spawn(move || free::<StandardPolicy, B>(remote as *mut u8).unwrap()).join().unwrap();
        drop(allocator);
        free::<StandardPolicy, B>(new[2] as *mut u8).unwrap();
        for block in new {
            assert_eq!(free::<StandardPolicy, B>(block as *mut u8), Err(FreeError::DoubleFree));
        }
    })
    .join()
    .unwrap();
}

#[test]
fn handles_may_be_swapped_and_dropped_inside_a_closure() {
    let _alone = alone();
    thread::spawn(|| {
        let own = <B as LocalAllocatorSelector<B>>::get_allocator_ptr();
        let mut mine = ThreadAllocator::<B>::new();
        let of_mine = mine.as_ptr();
        let block = <B as LocalAllocatorSelector<B>>::with_allocator(|allocator| {
            std::mem::swap(allocator, &mut mine);
            assert_eq!((allocator.as_ptr(), mine.as_ptr()), (of_mine, own));
            allocator.alloc::<StandardPolicy>(64, 16)
        })
        .unwrap();
        // The slot has not moved; the handle has: it went with the closure, and the heap with the last handle.
        assert_eq!(<B as LocalAllocatorSelector<B>>::get_allocator_ptr(), own);
        free::<StandardPolicy, B>(block).unwrap();
        B::register_current_allocator_ptr(of_mine);
        assert_eq!(last_error(), Some(AllocError::NotRegistered));
        let registered = ThreadAllocator::<B>::new();
        let pointer = registered.as_ptr();
        B::register_current_allocator_ptr(pointer);
        let registered = Cell::new(Some(registered));
        <B as LocalAllocatorSelector<B>>::with_allocator(|allocator| {
            drop(registered.take());
            assert_eq!(allocator.as_ptr(), pointer, "the closure's handle keeps it alive");
            let block = allocator.alloc::<StandardPolicy>(64, 16);
            // SAFETY: freed once.
            unsafe { allocator.free::<StandardPolicy>(block) }.unwrap();
        });
        assert_eq!(<B as LocalAllocatorSelector<B>>::get_allocator_ptr(), own);
    })
    .join()
    .unwrap();
}

#[test]
fn free_functions_work_inside_a_closure_without_the_borrowed_allocator() {
    let _alone = alone();
    fn check<P: AllocPolicy>() {
        <P as PolicySlotSelection<B>>::with_allocator(|allocator| {
            let mine = allocator.alloc::<P>(200, 16);
            let shared = alloc::<P, B>(200, 16);
            assert_ne!(mine, shared);
            free::<P, B>(mine).unwrap(); // queued for the allocator
            assert_eq!(free::<P, B>(mine), Err(FreeError::DoubleFree));
            free::<P, B>(shared).unwrap();
            for _ in 0..1000 {
                let again = allocator.alloc::<P>(200, 16);
                assert_ne!(again, shared, "it belongs to a shared heap");
                // SAFETY: freed once.
                unsafe { allocator.free::<P>(again) }.unwrap();
            }
        })
        .unwrap();
    }
    check::<StandardPolicy>();
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}

faulty_backend!(Reentering, 2 << 20);

#[test]
fn a_backend_may_call_the_allocator() {
    let _alone = alone();
    static INNER: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    Reentering::faults().hook.lock().unwrap().replace(|| {
        let block = thread_alloc::<StandardPolicy, Reentering>(300, 16);
        let kept = thread_alloc::<HardenedPolicy, Reentering>(300, 16);
        assert!(!block.is_null() && !kept.is_null());
        free::<StandardPolicy, Reentering>(block).unwrap();
        INNER.lock().unwrap().push(kept as usize);
        let mut handle = ThreadAllocator::<Reentering>::new();
        assert!(!handle.alloc::<SecurePolicy>(50, 16).is_null());
        let _ = <Reentering as LocalAllocatorSelector<Reentering>>::with_allocator(|allocator| {
            assert!(allocator.alloc::<StandardPolicy>(64, 16).is_null());
            assert_eq!(last_error(), Some(AllocError::Reentrant));
        });
    });
    let blocks: Vec<*mut u8> =
        KINDS.iter().map(|(size, align)| alloc::<StandardPolicy, Reentering>(*size, *align)).collect();
    Reentering::faults().heal();
    assert!(!INNER.lock().unwrap().is_empty());
    audit::<Reentering>().unwrap();
    for block in blocks.into_iter().chain(INNER.lock().unwrap().drain(..).map(|block| block as *mut u8)) {
        free::<StandardPolicy, Reentering>(block).unwrap();
    }
}

struct Disposing;

thread_local! {
    /// Dropped in the middle of the next call that writes to a block.
    static DROPPED_BY_FILL: std::cell::RefCell<Option<ThreadAllocator<Disposing>>> = const { std::cell::RefCell::new(None) };
}

// SAFETY: regions are the host backend's.
unsafe impl MemoryBackend for Disposing {
    unsafe fn allocate(size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { HostBackend::allocate(size) }
    }
    unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
        // SAFETY: as the caller promises.
        unsafe { HostBackend::deallocate(ptr, size) }
    }
    unsafe fn fill(ptr: *mut u8, byte: u8, len: usize) -> bool {
        drop(DROPPED_BY_FILL.take());
        // SAFETY: as the caller promises.
        unsafe { ptr.write_bytes(byte, len) };
        true
    }
}

backend_pools!(Disposing);

#[test]
fn a_backend_may_drop_the_last_handle_of_the_allocator_that_calls_it() {
    fn register(allocator: &ThreadAllocator<Disposing>) {
        <Disposing as LocalAllocatorSelector<Disposing>>::register_current_allocator_ptr(allocator.as_ptr());
    }
    let _alone = alone();
    for _ in 0..100 {
        let allocator = ThreadAllocator::new();
        register(&allocator);
        let block = alloc::<SecurePolicy, Disposing>(100, 16);
        DROPPED_BY_FILL.set(Some(allocator));
        free::<SecurePolicy, Disposing>(block).unwrap(); // poisons it
        assert!(DROPPED_BY_FILL.take().is_none());
        let allocator = ThreadAllocator::new();
        register(&allocator);
        DROPPED_BY_FILL.set(Some(allocator));
        let block = alloc::<SecurePolicy, Disposing>(100, 16); // zeroes it
        assert!(DROPPED_BY_FILL.take().is_none());
        free::<SecurePolicy, Disposing>(block).unwrap();
        // The thread's own heap is its allocator again: all of theirs was given back.
        let audit = audit::<Disposing>().unwrap();
        assert_eq!((audit.live_blocks, audit.orphans), (0, 0));
    }
}

// ---- policies ----

#[test]
fn secure_and_hardened_blocks_start_as_zeros_and_end_as_poison() {
    let _alone = alone();
    fn check<P: AllocPolicy>() {
        for (size, align) in KINDS {
            for _ in 0..3 {
                let block = alloc::<P, B>(size, align);
                let usable = usable_size::<B>(block);
                // SAFETY: a live block; after the free its pages stay mapped, in a cache or the pool of this thread.
                unsafe {
                    let bytes = std::slice::from_raw_parts_mut(block, usable);
                    assert!(bytes.iter().all(|byte| *byte == 0), "{size}");
                    bytes.fill(0x11);
                    free::<P, B>(block).unwrap();
                    if size < 1 << 20 {
                        assert!((0..usable).all(|at| block.add(at).read_volatile() == POISON), "{size}");
                    }
                }
            }
        }
    }
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}

#[test]
fn what_a_secure_block_grows_by_reads_as_zero() {
    let _alone = alone();
    fn check<P: AllocPolicy>() {
        let mut block = alloc::<P, B>(1000, 16);
        // SAFETY: always the live block, within its size.
        unsafe {
            block.write_bytes(0xFF, 1000);
            for (cut, grown) in [(600, 1000), (100, 5000), (4000, 200_000), (150_000, 150_001)] {
                block = thread_realloc::<P, B>(block, cut, 16);
                block = thread_realloc::<P, B>(block, grown, 16);
                let bytes = std::slice::from_raw_parts_mut(block, grown);
                assert!(bytes[cut..].iter().all(|byte| *byte == 0), "{cut} to {grown}");
                bytes.fill(0xFF);
            }
        }
        free::<P, B>(block).unwrap();
    }
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}

faulty_backend!(Fresh, 4 << 20);

#[test]
fn fresh_spans_are_in_order_under_standard_and_shuffled_under_the_others() {
    let _alone = alone();
    fn sorted<P: AllocPolicy>() -> bool {
        let blocks: Vec<_> = (0..60).map(|_| alloc::<P, Fresh>(1024, 16)).collect();
        let sorted = blocks.is_sorted();
        blocks.into_iter().for_each(|block| free::<P, Fresh>(block).unwrap());
        sorted
    }
    // By chance one in 60! would be.
    assert!(sorted::<StandardPolicy>());
    assert!(!sorted::<SecurePolicy>());
    assert!(!sorted::<HardenedPolicy>());
}

#[test]
fn a_hardened_block_rests_until_a_mebibyte_more_was_freed() {
    let _alone = alone();
    thread::spawn(|| {
        let first = alloc::<HardenedPolicy, B>(1000, 16); // blocks of 1,024 bytes
        free::<HardenedPolicy, B>(first).unwrap();
        let mut freed = 0;
        loop {
            let block = alloc::<HardenedPolicy, B>(1000, 16);
            if block == first {
                break free::<HardenedPolicy, B>(block).unwrap();
            }
            free::<HardenedPolicy, B>(block).unwrap();
            freed += 1;
            assert!(freed < 1100, "never comes back");
        }
        assert!(freed >= 1023, "came back after {freed} frees");
    })
    .join()
    .unwrap();
}

#[test]
fn a_hardened_block_rests_also_when_it_is_freed_after_its_thread_ended() {
    let _alone = alone();
    faulty_backend!(Resting, 2 << 20);
    let (kept, freed) = thread::spawn(|| {
        (
            alloc::<HardenedPolicy, Resting>(1000, 16) as usize,
            alloc::<HardenedPolicy, Resting>(1000, 16) as usize,
        )
    })
    .join()
    .unwrap();
    free::<HardenedPolicy, Resting>(freed as *mut u8).unwrap();
    trim::<Resting>(0); // looks at orphans
    for round in 0..500 {
        let block = alloc::<HardenedPolicy, Resting>(1000, 16); // adopts the span
        assert_ne!(block as usize, freed, "round {round}");
        free::<HardenedPolicy, Resting>(block).unwrap();
    }
    free::<HardenedPolicy, Resting>(kept as *mut u8).unwrap();
}

#[test]
fn an_overwritten_redzone_is_corrupted_and_the_process_goes_on() {
    let _alone = alone();
    faulty_backend!(Overrun, 2 << 20);
    for (size, align) in KINDS {
        let block = alloc::<HardenedPolicy, Overrun>(size, align);
        let usable = usable_size::<Overrun>(block);
        let before = stats::<Overrun>().corruptions;
        // SAFETY: the redzone is part of the block; writing to it is the fault that is looked for.
        unsafe {
            let past = block.add(usable);
            let was = past.read();
            past.write(!was);
            assert_eq!(free::<StandardPolicy, Overrun>(block), Err(FreeError::Corrupted), "{size}");
            assert_eq!(stats::<Overrun>().corruptions, before + 1);
            assert_eq!(usable_size::<Overrun>(block), usable, "nothing has happened");
            past.write(was);
        }
        free::<HardenedPolicy, Overrun>(block).unwrap();
    }
}

#[test]
fn each_byte_behind_what_was_asked_for_is_watched() {
    let _alone = alone();
    faulty_backend!(Watched, 2 << 20);
    fn free_finds(block: *mut u8, size: usize) {
        for past in [0, 1, 7, 15] {
            // SAFETY: the redzone is part of the block; writing to it is the fault that is looked for.
            unsafe {
                let past = block.add(size + past);
                let was = past.read();
                past.write(!was);
                assert_eq!(free::<HardenedPolicy, Watched>(block), Err(FreeError::Corrupted), "{size}");
                let elsewhere = block as usize;
                let elsewhere = thread::spawn(move || free::<HardenedPolicy, Watched>(elsewhere as *mut u8));
                assert_eq!(elsewhere.join().unwrap(), Err(FreeError::Corrupted), "{size}");
                past.write(was);
            }
        }
    }
    let odd = [1, 15, 16, 17, 100, 113, 1000, 4001, 70_000, 1_000_000, 5_000_001, 20_000_000];
    for (size, align) in odd.into_iter().flat_map(|size| [(size, 1), (size, 256), (size, 64 << 10)]) {
        let block = alloc::<HardenedPolicy, Watched>(size, align);
        assert_eq!(usable_size::<Watched>(block), size);
        // SAFETY: the block is live and as long as that; the last byte that may be written is no fault.
        unsafe { block.write_bytes(0xFD, size) };
        free_finds(block, size);
        free::<HardenedPolicy, Watched>(block).unwrap();
    }
    // The redzone moves with the end of a block that is resized in place.
    let block = alloc::<HardenedPolicy, Watched>(3000, 16);
    for size in [2999, 2500, 3001, 2100, 3000] {
        // SAFETY: the block is ours.
        unsafe {
            let same = thread_realloc::<HardenedPolicy, Watched>(block, size, 16);
            assert_eq!(same, block, "in place");
            assert_eq!(usable_size::<Watched>(block), size);
            let tail = std::slice::from_raw_parts(block, size);
            assert!(tail.iter().all(|byte| *byte == 0), "what is new reads as zero");
        }
        free_finds(block, size);
        // SAFETY: as above.
        unsafe { block.add(2099).write(0) };
    }
    free::<HardenedPolicy, Watched>(block).unwrap();
    // Or with the block, where too much would be left behind it.
    let block = alloc::<HardenedPolicy, Watched>(500_000, 16);
    // SAFETY: the block is ours.
    let block = unsafe { thread_realloc::<HardenedPolicy, Watched>(block, 270_000, 16) };
    assert_eq!(usable_size::<Watched>(block), 270_000);
    free_finds(block, 270_000);
    free::<HardenedPolicy, Watched>(block).unwrap();
    audit::<Watched>().unwrap();
}

#[test]
fn a_block_keeps_its_own_policy_whoever_frees_it() {
    let _alone = alone();
    fn freed_by<P: AllocPolicy>() {
        let standard = alloc::<StandardPolicy, B>(500, 16);
        let secure = alloc::<SecurePolicy, B>(500, 16);
        let hardened = alloc::<HardenedPolicy, B>(500, 16);
        for (block, poisoned) in [(standard, false), (secure, true), (hardened, true)] {
            // SAFETY: a live block; after the free its page stays mapped, since the span has more blocks than this one.
            unsafe {
                block.write_bytes(0x33, 500);
                free::<P, B>(block).unwrap();
                assert_eq!(block.read_volatile() == POISON, poisoned);
                assert_eq!(free::<P, B>(block), Err(FreeError::DoubleFree));
            }
        }
        let again: Vec<_> = (0..100).map(|_| alloc::<HardenedPolicy, B>(500 - 16, 16)).collect();
        assert!(!again.contains(&hardened), "quarantined, whoever freed it");
        again.into_iter().for_each(|block| free::<P, B>(block).unwrap());
    }
    freed_by::<StandardPolicy>();
    freed_by::<SecurePolicy>();
    freed_by::<HardenedPolicy>();
}

#[test]
fn orphans_are_adopted_by_their_own_mode_and_policy_alone() {
    let _alone = alone();
    faulty_backend!(Orphans, 2 << 20);
    fn span(block: usize) -> usize {
        block & !0xFFFF
    }
    fn leave<P: AllocPolicy>() -> usize {
        thread::spawn(|| alloc::<P, Orphans>(1000, 16) as usize).join().unwrap()
    }
    let left = [leave::<StandardPolicy>(), leave::<SecurePolicy>(), leave::<HardenedPolicy>()];
    assert_eq!(audit::<Orphans>().unwrap().orphans, 3);
    assert_eq!(
        Orphans::global_orphan_pool().len(),
        2,
        "plain and encoded blocks are in segments of their own"
    );
    let taken = [
        alloc::<StandardPolicy, Orphans>(1000, 16),
        alloc::<SecurePolicy, Orphans>(1000, 16),
        alloc::<HardenedPolicy, Orphans>(1000, 16),
    ]
    .map(|block| block as usize);
    assert_eq!(taken.map(span), left.map(span), "each adopted the orphan of its own policy");
    assert_eq!(audit::<Orphans>().unwrap().orphans, 0);
    left.into_iter()
        .chain(taken)
        .for_each(|block| free::<StandardPolicy, Orphans>(block as *mut u8).unwrap());
    trim::<Orphans>(0);
    assert_eq!(Orphans::faults().held(), (0, 0));
}

// ---- pools ----

#[test]
fn a_cached_huge_block_serves_requests_of_at_least_seven_eighths_of_it_best_fit_first() {
    let _alone = alone();
    faulty_backend!(Huge, 2 << 20);
    const MIB: usize = 1 << 20;
    let blocks = [64, 72, 80].map(|size| alloc::<StandardPolicy, Huge>(size * MIB, 16));
    blocks.into_iter().for_each(|block| free::<StandardPolicy, Huge>(block).unwrap());
    assert_eq!((Huge::pools().huge.len(), Huge::pools().huge.bytes()), (3, 216 * MIB));
    assert_eq!(alloc::<StandardPolicy, Huge>(70 * MIB, 16), blocks[1], "72 fits 70 best");
    assert_eq!(alloc::<StandardPolicy, Huge>(70 * MIB, 16), blocks[2], "80 is within an eighth");
    let fresh = alloc::<StandardPolicy, Huge>(54 * MIB, 16);
    assert_ne!(fresh, blocks[0], "64 would waste more than an eighth");
    assert_eq!(Huge::pools().huge.len(), 1);
    for block in [blocks[1], blocks[2], fresh] {
        free::<StandardPolicy, Huge>(block).unwrap();
    }
    assert_eq!(trim::<Huge>(120 * MIB), (80 + 72) * MIB, "the largest first, and no more than needed");
    assert_eq!(trim::<Huge>(0), (64 + 54) * MIB);
    assert_eq!(Huge::faults().held(), (0, 0));
}

#[test]
fn free_memory_above_the_retention_limit_goes_back() {
    let _alone = alone();
    faulty_backend!(Retained, 2 << 20);
    const MIB: usize = 1 << 20;
    set_retention::<Retained>(50 * MIB);
    let blocks = [20, 22, 24].map(|size| alloc::<StandardPolicy, Retained>(size * MIB, 16));
    assert_eq!(Retained::faults().held().1, 66 * MIB, "memory in use is not limited");
    blocks.into_iter().for_each(|block| free::<StandardPolicy, Retained>(block).unwrap());
    assert_eq!(Retained::pools().huge.bytes(), 42 * MIB, "the largest went back");
    assert_eq!(set_retention::<Retained>(0), 42 * MIB);
    assert_eq!(Retained::faults().held(), (0, 0));
    set_retention::<Retained>(usize::MAX);
}

#[test]
fn idle_memory_decays_by_half_a_call_and_memory_in_use_does_not() {
    let _alone = alone();
    faulty_backend!(Decaying, 2 << 20);
    const MIB: usize = 1 << 20;
    let blocks = [10, 20, 30, 40].map(|size| alloc::<StandardPolicy, Decaying>(size * MIB, 16));
    blocks.into_iter().for_each(|block| free::<StandardPolicy, Decaying>(block).unwrap());
    assert_eq!(decay::<Decaying>(), 0, "nothing has been idle since an earlier call");
    let used = alloc::<StandardPolicy, Decaying>(10 * MIB, 16);
    free::<StandardPolicy, Decaying>(used).unwrap();
    assert_eq!(decay::<Decaying>(), (40 + 30) * MIB, "half of the 90 MiB that were idle, in whole regions");
    assert_eq!(decay::<Decaying>(), 20 * MIB);
    assert_eq!(decay::<Decaying>(), 10 * MIB);
    assert_eq!(decay::<Decaying>(), 0);
    assert_eq!(Decaying::faults().held(), (0, 0));
}

#[test]
fn a_decay_thread_works_until_it_is_dropped() {
    let _alone = alone();
    faulty_backend!(Ticking, 2 << 20);
    let block = alloc::<StandardPolicy, Ticking>(10 << 20, 16);
    free::<StandardPolicy, Ticking>(block).unwrap();
    let decaying = DecayThread::start::<Ticking>(std::time::Duration::from_millis(1)).unwrap();
    let started = std::time::Instant::now();
    while Ticking::faults().held().0 > 0 {
        assert!(started.elapsed().as_secs() < 60, "{:?}", stats::<Ticking>());
        thread::yield_now();
    }
    drop(decaying);
    let block = alloc::<StandardPolicy, Ticking>(10 << 20, 16);
    free::<StandardPolicy, Ticking>(block).unwrap();
    thread::sleep(std::time::Duration::from_millis(30));
    assert_eq!(Ticking::faults().held().0, 1, "nobody decays it any more");
}

// ---- arenas ----

#[test]
fn an_arena_serves_collections() {
    let _alone = alone();
    use unimalloc::allocator_api2::{boxed::Box, vec::Vec};

    fn check<P: AllocPolicy>() {
        let arena = Arena::<B, P>::new().placement(Placement::Host).group(3);
        let mut numbers = Vec::new_in(arena);
        for number in 0..100_000u64 {
            numbers.push(number);
        }
        assert!(numbers.iter().copied().eq(0..100_000));
        assert!(usable_size::<B>(numbers.as_ptr().cast()) >= 800_000, "it lies in a block of the backend");
        numbers.truncate(10);
        numbers.shrink_to_fit();
        assert!(numbers.iter().copied().eq(0..10));
        let empty: Vec<u64, _> = Vec::new_in(arena);
        assert_eq!(empty.capacity(), 0);
        let boxed = Box::new_in([7u8; 1000], arena);
        let boxed = thread::spawn(move || boxed).join().unwrap();
        assert_eq!(boxed[999], 7);
        #[repr(align(4096))]
        struct Aligned(u8);
        let aligned = Box::new_in(Aligned(1), arena);
        assert_eq!((&raw const *aligned as usize % 4096, aligned.0), (0, 1));
    }
    check::<StandardPolicy>();
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}

#[test]
fn a_zeroed_arena_zeroes_what_a_block_grows_by() {
    let _alone = alone();
    use std::alloc::Layout;
    use unimalloc::allocator_api2::alloc::Allocator;

    let arena = Arena::<B>::new().zeroed(true);
    let layout = |size| Layout::from_size_align(size, 16).unwrap();
    // SAFETY: always the live block, within its layout.
    unsafe {
        let dirty = alloc::<StandardPolicy, B>(100, 16);
        dirty.write_bytes(0xFF, usable_size::<B>(dirty));
        free::<StandardPolicy, B>(dirty).unwrap();
        let block = arena.allocate(layout(100)).unwrap();
        assert!(block.as_ref().iter().all(|byte| *byte == 0));
        let block = block.cast::<u8>();
        block.as_ptr().write_bytes(0xFF, usable_size::<B>(block.as_ptr()));
        let grown = arena.grow(block, layout(100), layout(111)).unwrap().cast::<u8>();
        let bytes = std::slice::from_raw_parts(grown.as_ptr(), 111);
        assert!(bytes[..100].iter().all(|byte| *byte == 0xFF) && bytes[100..].iter().all(|byte| *byte == 0));
        let grown = arena.grow_zeroed(grown, layout(111), layout(10_000)).unwrap().cast::<u8>();
        assert!((111..10_000).all(|at| grown.as_ptr().add(at).read() == 0));
        arena.deallocate(grown, layout(10_000));
        assert!(arena.allocate(Layout::from_size_align(10, 4 << 20).unwrap()).is_err());
        assert!(arena.alloc(10, 4 << 20).is_null());
        let block = arena.alloc(10, 8);
        let block = arena.realloc(block, 4000, 8);
        assert!((10..4000).all(|at| block.add(at).read() == 0));
        arena.free(block).unwrap();
    }
}

#[test]
fn a_freed_block_is_used_again_under_every_policy_whatever_its_size() {
    let _alone = alone();
    faulty_backend!(Reused, 2 << 20);
    fn check<P: AllocPolicy>() {
        for (size, align) in KINDS {
            let rounds = ((256 << 20) / size).min(300);
            for _ in 0..rounds {
                free::<P, Reused>(alloc::<P, Reused>(size, align)).unwrap();
            }
            let (_, held) = Reused::faults().held();
            assert!(held <= (8 << 20).max(2 * size), "{held} bytes held after {rounds} rounds of {size}");
            trim::<Reused>(0);
        }
    }
    check::<StandardPolicy>();
    check::<SecurePolicy>();
    check::<HardenedPolicy>();
}
