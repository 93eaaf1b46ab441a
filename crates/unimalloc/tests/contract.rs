//! The public contract, as an outside program uses it: every signature, for both backends, on a machine without a GPU.
//!
//! Libraries named like the driver are looked for in the ordinary way, so nothing here says that there is none: where
//! there is one, the parts that expect its absence are skipped by name.

#[path = "common/pages.rs"]
#[allow(dead_code, missing_docs, unused_imports)]
mod pages;

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;

use pages::is_readable;
use unimalloc::*;

/// Compiles only where every item has exactly the signature of the contract.
#[allow(clippy::type_complexity)]
fn signatures<B>()
where
    B: MemoryBackend + HasSegmentPool + LocalAllocatorSelector<B> + ThreadSlots,
    StandardPolicy: PolicySlotSelection<B>,
    SecurePolicy: PolicySlotSelection<B>,
    HardenedPolicy: PolicySlotSelection<B>,
{
    let _: [bool; 4] =
        [B::SUPPORTS_PAGE_RESET, B::SUPPORTS_MAKE_GUARD, B::SUPPORTS_DECOMMIT, B::ENABLE_CPU_CACHE];
    let _: unsafe fn(usize) -> *mut u8 = <B as MemoryBackend>::allocate;
    let _: [unsafe fn(*mut u8, usize) -> bool; 4] =
        [B::deallocate, B::page_reset, B::make_guard, B::decommit];

    let _: fn() -> &'static BackendPools = <B as HasSegmentPool>::pools;
    let _: [fn() -> &'static GlobalSegmentPool; 2] = [B::global_segment_pool, B::global_orphan_pool];
    let _: fn() -> &'static GlobalHugePool = B::global_huge_pool;
    let _: [fn(&GlobalSegmentPool) -> usize; 2] = [GlobalSegmentPool::len, GlobalSegmentPool::bytes];
    let _: [fn(&GlobalHugePool) -> usize; 2] = [GlobalHugePool::len, GlobalHugePool::bytes];

    type F<B, R> = fn(&mut ThreadAllocator<B>) -> R;
    let _: fn(F<B, u8>) -> Option<u8> = <B as LocalAllocatorSelector<B>>::with_allocator::<u8>;
    let _: unsafe fn(F<B, u8>) -> Option<u8> =
        <B as LocalAllocatorSelector<B>>::with_allocator_unguarded::<u8>;
    let _: fn(F<B, u8>) -> Option<u8> = B::with_allocator_for_policy::<SecurePolicy, u8>;
    let _: unsafe fn(F<B, u8>) -> Option<u8> = B::with_allocator_unguarded_for_policy::<HardenedPolicy, u8>;
    let _: [fn() -> *mut c_void; 6] = [
        <B as LocalAllocatorSelector<B>>::get_allocator_ptr,
        <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw,
        B::get_allocator_ptr_for_policy::<StandardPolicy>,
        B::get_allocator_ptr_raw_for_policy::<HardenedPolicy>,
        B::get_allocator_ptr_raw_for_encryption::<true>,
        B::get_allocator_ptr_raw_for_encryption::<false>,
    ];
    let _: fn(*mut c_void) = B::register_current_allocator_ptr;

    fn by_policy<B: HasSegmentPool, P: PolicySlotSelection<B>>() {
        let _: fn(F<B, ()>) -> Option<()> = P::with_allocator::<()>;
        let _: unsafe fn(F<B, ()>) -> Option<()> = P::with_allocator_unguarded::<()>;
        let _: [fn() -> *mut c_void; 2] = [P::get_allocator_ptr, P::get_allocator_ptr_raw];
    }
    by_policy::<B, StandardPolicy>();
    by_policy::<B, SecurePolicy>();
    by_policy::<B, HardenedPolicy>();
    let _: [bool; 3] = [
        StandardPolicy::ENABLE_FREE_LIST_ENCRYPTION,
        SecurePolicy::ENABLE_FREE_LIST_ENCRYPTION,
        HardenedPolicy::ENABLE_FREE_LIST_ENCRYPTION,
    ];

    let _: [fn() -> ThreadAllocator<B>; 2] = [ThreadAllocator::<B>::new, ThreadAllocator::<B>::new_encrypted];
    let _: fn(&mut ThreadAllocator<B>, usize, usize) -> *mut u8 =
        ThreadAllocator::<B>::alloc::<StandardPolicy>;
    let _: unsafe fn(&mut ThreadAllocator<B>, *mut u8) -> Result<(), FreeError> =
        ThreadAllocator::<B>::free::<StandardPolicy>;
    let _: fn(&ThreadAllocator<B>) -> *mut c_void = ThreadAllocator::<B>::as_ptr;

    let _: fn(usize, usize) -> *mut u8 = thread_alloc::<StandardPolicy, B>;
    let _: unsafe fn(*mut u8) -> Result<(), FreeError> = thread_free::<StandardPolicy, B>;
    let _: unsafe fn(*mut u8, usize, usize) -> *mut u8 = thread_realloc::<StandardPolicy, B>;
    let _: fn(*const u8) -> usize = usable_size::<B>;
    let _: fn() -> Option<AllocError> = last_error;
    let _: fn() -> bool = is_cuda_available;
}

/// A bundle can be made in a constant, with three parts.
#[test]
fn pools_are_made_in_a_constant_and_have_three_parts() {
    static POOLS: BackendPools = BackendPools::new();
    let _: (&GlobalSegmentPool, &GlobalSegmentPool, &GlobalHugePool) =
        (&POOLS.segment, &POOLS.orphan, &POOLS.huge);
    assert_eq!((POOLS.segment.len(), POOLS.orphan.bytes(), POOLS.huge.len()), (0, 0, 0));
}

#[test]
fn every_signature_is_as_written() {
    signatures::<HostBackend>();
    signatures::<CudaUnifiedBackend>();
    fn error<E: std::error::Error + Copy + PartialEq + Send + Sync + 'static>(_: E) {}
    error(FreeError::NotOurs);
    error(AllocError::NoDriver);
    let free = [
        FreeError::NotOurs,
        FreeError::Interior,
        FreeError::DoubleFree,
        FreeError::Corrupted,
        FreeError::Forked,
    ];
    let alloc = [
        AllocError::InvalidSize,
        AllocError::InvalidAlignment,
        AllocError::ModeMismatch,
        AllocError::NoDriver,
        AllocError::NoDevice,
        AllocError::Unsupported,
        AllocError::Driver(999),
        AllocError::ContextLost,
        AllocError::RegistryFull,
        AllocError::Budget,
        AllocError::OutOfMemory,
        AllocError::NotRegistered,
        AllocError::Forked,
        AllocError::Reentrant,
    ];
    // Each message says what to do: it has a part after a colon.
    for message in free.map(|e| e.to_string()).iter().chain(&alloc.map(|e| e.to_string())) {
        assert!(message.split_once(": ").is_some_and(|(_, next)| next.len() > 10), "{message}");
    }
}

/// What each row of the semantics table promises, for one backend.
macro_rules! semantics {
    ($name:ident, $backend:ty, $can_allocate:expr) => {
        mod $name {
            use super::*;

            type B = $backend;

            /// Whether blocks can be had: without a GPU only from the host backend.
            fn has_memory() -> bool {
                $can_allocate
            }

            #[test]
            fn allocate_takes_positive_multiples_of_4096() {
                for size in [0, 1, 4095, 4097, usize::MAX] {
                    // SAFETY: a bad size answers null.
                    assert!(unsafe { B::allocate(size) }.is_null());
                    assert_eq!(last_error(), Some(AllocError::InvalidSize), "{size}");
                }
            }

            #[test]
            fn deallocate_refuses_what_was_not_allocated() {
                for address in [0usize, 4096, 0x1000_0000] {
                    // SAFETY: no region is there.
                    assert!(!unsafe { B::deallocate(address as *mut u8, 4096) });
                    assert_eq!(last_error(), Some(AllocError::NotRegistered));
                }
                if has_memory() {
                    // SAFETY: the region is released once, after calls that must be refused.
                    unsafe {
                        let region = B::allocate(8192);
                        assert!(!B::deallocate(region, 4096));
                        assert!(!B::deallocate(region.add(4096), 4096));
                        assert!(B::deallocate(region, 8192));
                        assert!(!B::deallocate(region, 8192));
                    }
                }
            }

            #[test]
            fn no_cpu_cache() {
                const { assert!(!B::ENABLE_CPU_CACHE) };
            }

            #[test]
            fn projections_point_into_the_bundle() {
                assert!(ptr::eq(B::global_segment_pool(), &B::pools().segment));
                assert!(ptr::eq(B::global_orphan_pool(), &B::pools().orphan));
                assert!(ptr::eq(B::global_huge_pool(), &B::pools().huge));
                assert!(ptr::eq(B::pools(), B::pools()));
            }

            #[test]
            fn with_allocator_runs_once_and_refuses_reentry() {
                let runs = Cell::new(0);
                let answer = <B as LocalAllocatorSelector<B>>::with_allocator(|_| {
                    runs.set(runs.get() + 1);
                    let inner = <B as LocalAllocatorSelector<B>>::with_allocator(|_| runs.set(100));
                    assert_eq!((inner, last_error()), (None, Some(AllocError::Reentrant)));
                    let refused = |_: &mut ThreadAllocator<B>| runs.set(100);
                    // SAFETY: it is refused, so the closure does not run.
                    let inner = unsafe { B::with_allocator_unguarded(refused) };
                    assert_eq!(inner, None);
                    assert_eq!(B::with_allocator_for_policy::<HardenedPolicy, ()>(|_| runs.set(100)), None);
                    42
                });
                assert_eq!((answer, runs.get()), (Some(42), 1));
            }

            #[test]
            fn a_panic_inside_releases_the_guard_and_passes_through() {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    <B as LocalAllocatorSelector<B>>::with_allocator(|_| std::panic::panic_any(7u8))
                }));
                assert_eq!(caught.unwrap_err().downcast_ref::<u8>(), Some(&7));
                assert_eq!(<B as LocalAllocatorSelector<B>>::with_allocator(|_| 1), Some(1));
            }

            #[test]
            fn unguarded_is_correct_as_the_first_call_on_a_thread() {
                std::thread::spawn(|| {
                    // SAFETY: the closure uses only its argument.
                    let made = unsafe {
                        <B as LocalAllocatorSelector<B>>::with_allocator_unguarded(|allocator| {
                            allocator.as_ptr()
                        })
                    };
                    assert_eq!(made, Some(<B as LocalAllocatorSelector<B>>::get_allocator_ptr()));
                })
                .join()
                .unwrap();
            }

            #[test]
            fn raw_getters_never_make_a_slot_and_the_others_keep_it() {
                std::thread::spawn(|| {
                    let raw = || {
                        [
                            <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw(),
                            B::get_allocator_ptr_raw_for_policy::<HardenedPolicy>(),
                            B::get_allocator_ptr_raw_for_encryption::<false>(),
                            B::get_allocator_ptr_raw_for_encryption::<true>(),
                            <SecurePolicy as PolicySlotSelection<B>>::get_allocator_ptr_raw(),
                        ]
                    };
                    assert_eq!(raw(), [ptr::null_mut(); 5]);
                    let plain = <B as LocalAllocatorSelector<B>>::get_allocator_ptr();
                    assert!(!plain.is_null());
                    assert_eq!(raw(), [plain, ptr::null_mut(), plain, ptr::null_mut(), plain]);
                    let encoded = B::get_allocator_ptr_for_policy::<HardenedPolicy>();
                    assert_eq!(raw(), [plain, encoded, plain, encoded, plain]);
                    assert_eq!(<B as LocalAllocatorSelector<B>>::get_allocator_ptr(), plain);
                })
                .join()
                .unwrap();
            }

            #[test]
            fn policies_select_their_slots() {
                let standard = <StandardPolicy as PolicySlotSelection<B>>::get_allocator_ptr();
                let secure = <SecurePolicy as PolicySlotSelection<B>>::get_allocator_ptr();
                let hardened = <HardenedPolicy as PolicySlotSelection<B>>::get_allocator_ptr();
                assert_eq!(standard, secure);
                assert_ne!(standard, hardened);
                assert_eq!(standard, B::get_allocator_ptr_for_policy::<SecurePolicy>());
                let inside = <HardenedPolicy as PolicySlotSelection<B>>::with_allocator(|allocator| {
                    allocator.as_ptr()
                });
                assert_eq!(inside, Some(hardened));
                // SAFETY: the closure uses only its argument.
                let inside = unsafe {
                    <StandardPolicy as PolicySlotSelection<B>>::with_allocator_unguarded(|allocator| {
                        allocator.as_ptr()
                    })
                };
                assert_eq!(inside, Some(standard));
            }

            #[test]
            fn a_registered_allocator_is_the_slot_of_its_own_mode() {
                let own = B::get_allocator_ptr_for_policy::<StandardPolicy>();
                let own_encoded = B::get_allocator_ptr_for_policy::<HardenedPolicy>();
                let plain = ThreadAllocator::<B>::new();
                let encoded = ThreadAllocator::<B>::new_encrypted();
                B::register_current_allocator_ptr(plain.as_ptr());
                assert_eq!(B::get_allocator_ptr_for_policy::<SecurePolicy>(), plain.as_ptr());
                assert_eq!(B::get_allocator_ptr_for_policy::<HardenedPolicy>(), own_encoded);
                B::register_current_allocator_ptr(encoded.as_ptr());
                assert_eq!(B::get_allocator_ptr_for_policy::<HardenedPolicy>(), encoded.as_ptr());
                drop(plain);
                assert_eq!(B::get_allocator_ptr_for_policy::<SecurePolicy>(), own);
                B::register_current_allocator_ptr(ptr::null_mut());
                assert_eq!(B::get_allocator_ptr_raw_for_encryption::<true>(), own_encoded);
            }

            #[test]
            fn a_foreign_mode_answers_mode_mismatch() {
                let mut plain = ThreadAllocator::<B>::new();
                assert!(plain.alloc::<HardenedPolicy>(64, 16).is_null());
                assert_eq!(last_error(), Some(AllocError::ModeMismatch));
                let mut encoded = ThreadAllocator::<B>::new_encrypted();
                for block in [encoded.alloc::<StandardPolicy>(64, 16), encoded.alloc::<SecurePolicy>(64, 16)]
                {
                    assert!(block.is_null());
                    assert_eq!(last_error(), Some(AllocError::ModeMismatch));
                }
            }

            #[test]
            fn null_frees_and_foreign_pointers_do_not() {
                let mut here = 0u8;
                let mut allocator = ThreadAllocator::<B>::new();
                // SAFETY: null is no block, and the other address must be refused.
                unsafe {
                    assert_eq!(thread_free::<StandardPolicy, B>(ptr::null_mut()), Ok(()));
                    assert_eq!(allocator.free::<StandardPolicy>(ptr::null_mut()), Ok(()));
                    assert_eq!(thread_free::<HardenedPolicy, B>(&mut here), Err(FreeError::NotOurs));
                    assert_eq!(allocator.free::<SecurePolicy>(&mut here), Err(FreeError::NotOurs));
                    assert!(thread_realloc::<StandardPolicy, B>(&mut here, 10, 1).is_null());
                }
                assert_eq!(last_error(), Some(AllocError::NotRegistered));
                assert_eq!(usable_size::<B>(&here), 0);
                assert_eq!(usable_size::<B>(ptr::null()), 0);
            }
        }
    };
}

semantics!(host, HostBackend, true);
semantics!(cuda, CudaUnifiedBackend, is_cuda_available());

#[test]
fn capabilities_are_the_hosts_alone() {
    const {
        assert!(HostBackend::SUPPORTS_PAGE_RESET && HostBackend::SUPPORTS_MAKE_GUARD);
        assert!(HostBackend::SUPPORTS_DECOMMIT);
        assert!(!CudaUnifiedBackend::SUPPORTS_PAGE_RESET && !CudaUnifiedBackend::SUPPORTS_MAKE_GUARD);
        assert!(!CudaUnifiedBackend::SUPPORTS_DECOMMIT);
    }
    // SAFETY: nothing is touched.
    unsafe {
        assert!(!CudaUnifiedBackend::page_reset(0x1000 as *mut u8, 4096));
        assert!(!CudaUnifiedBackend::make_guard(0x1000 as *mut u8, 4096));
        assert!(!CudaUnifiedBackend::decommit(0x1000 as *mut u8, 4096));
    }
    assert_eq!(last_error(), Some(AllocError::Unsupported));
}

#[test]
fn backends_share_nothing() {
    assert!(!ptr::eq(HostBackend::pools(), CudaUnifiedBackend::pools()));
    assert_ne!(
        <HostBackend as LocalAllocatorSelector<HostBackend>>::get_allocator_ptr(),
        <CudaUnifiedBackend as LocalAllocatorSelector<CudaUnifiedBackend>>::get_allocator_ptr()
    );
    let block = thread_alloc::<StandardPolicy, HostBackend>(100, 16);
    // SAFETY: the block is freed once, by its own backend; the other must refuse it.
    unsafe {
        assert_eq!(thread_free::<StandardPolicy, CudaUnifiedBackend>(block), Err(FreeError::NotOurs));
        assert_eq!(usable_size::<CudaUnifiedBackend>(block), 0);
        assert_eq!(thread_free::<StandardPolicy, HostBackend>(block), Ok(()));
    }
    let of_host = ThreadAllocator::<HostBackend>::new();
    CudaUnifiedBackend::register_current_allocator_ptr(of_host.as_ptr());
    assert_eq!(last_error(), Some(AllocError::NotRegistered));
}

#[test]
fn without_a_driver_every_allocation_is_null_with_the_reason() {
    if is_cuda_available() {
        println!("skipped: there is a CUDA device here");
        return;
    }
    let reasons = [AllocError::NoDriver, AllocError::NoDevice, AllocError::Unsupported];
    // SAFETY: any size may be asked for.
    assert!(unsafe { CudaUnifiedBackend::allocate(4096) }.is_null());
    let reason = last_error().unwrap();
    assert!(reasons.contains(&reason), "{reason:?}");
    type Call = fn() -> *mut u8;
    let calls: [Call; 6] = [
        || thread_alloc::<StandardPolicy, CudaUnifiedBackend>(64, 16),
        || thread_alloc::<SecurePolicy, CudaUnifiedBackend>(1 << 20, 256),
        || thread_alloc::<HardenedPolicy, CudaUnifiedBackend>(64 << 20, 16),
        // SAFETY: null allocates.
        || unsafe { thread_realloc::<StandardPolicy, CudaUnifiedBackend>(ptr::null_mut(), 10, 1) },
        || ThreadAllocator::<CudaUnifiedBackend>::new().alloc::<StandardPolicy>(10, 1),
        || {
            CudaUnifiedBackend::with_allocator_for_policy::<HardenedPolicy, _>(|allocator| {
                allocator.alloc::<HardenedPolicy>(10, 1)
            })
            .unwrap()
        },
    ];
    for (at, call) in calls.into_iter().enumerate() {
        set_last_error(AllocError::Reentrant);
        assert!(call().is_null(), "call {at}");
        assert_eq!(last_error(), Some(reason), "call {at}");
    }
    assert_eq!(CudaUnifiedBackend::pools().segment.len(), 0);
    assert_eq!(stats::<CudaUnifiedBackend>().reserved_bytes, 0);
}

#[test]
fn host_capabilities_are_done_and_observable() {
    const SIZE: usize = 1 << 20;
    // SAFETY: the region is ours; nothing of it is touched while it may not be.
    unsafe {
        let region = HostBackend::allocate(SIZE);
        region.write_bytes(0xAB, SIZE);
        assert!(HostBackend::page_reset(region.add(4096), 8192));
        assert_eq!((*region, *region.add(4096), *region.add(12287), *region.add(12288)), (0xAB, 0, 0, 0xAB));
        assert!(HostBackend::make_guard(region, 4096));
        assert!(!is_readable(region), "a guard faults");
        assert!(is_readable(region.add(4096)));
        assert!(HostBackend::decommit(region.add(SIZE / 2), SIZE / 2));
        assert!(!is_readable(region.add(SIZE / 2)));
        for (at, size) in [(0, 0), (1, 4096), (0, 100), (0, SIZE + 4096), (SIZE, 4096)] {
            assert!(!HostBackend::page_reset(region.add(at), size), "{at} {size}");
            assert!(!HostBackend::make_guard(region.add(at), size), "{at} {size}");
            assert!(!HostBackend::decommit(region.add(at), size), "{at} {size}");
            assert_eq!(last_error(), Some(AllocError::InvalidRange));
        }
        assert!(HostBackend::deallocate(region, SIZE), "still releasable");
    }
}
