//! Ceilings: of bytes, and of regions. They are one per process, so these tests run one at a time.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{alloc, free};
use unimalloc::*;

type B = HostBackend;

const MIB: usize = 1 << 20;

/// No limit, nothing cached.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    HostBackend::set_limit(Some(u64::MAX));
    HostBackend::set_registry_capacity(65_536);
    trim::<B>(0);
    guard
}

fn live_regions() -> u64 {
    let counters = HostBackend::counters();
    counters.allocations - counters.frees
}

#[test]
fn a_spent_budget_is_null_with_the_reason_and_nothing_changes() {
    let _alone = alone();
    HostBackend::set_limit(Some(64 << 20));
    let before = HostBackend::counters();
    // SAFETY: any size may be asked for.
    assert!(unsafe { HostBackend::allocate(65 * MIB) }.is_null());
    assert_eq!(last_error(), Some(AllocError::Budget));
    assert!(thread_alloc::<StandardPolicy, B>(65 * MIB, 16).is_null());
    assert_eq!(last_error(), Some(AllocError::Budget));
    let after = HostBackend::counters();
    assert_eq!((after.live_bytes, after.allocations), (before.live_bytes, before.allocations));
    assert!(after.failures >= before.failures + 2);
    HostBackend::set_limit(Some(u64::MAX));
    free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(65 * MIB, 16)).unwrap();
}

#[test]
fn a_refusal_gives_cached_memory_back_first_and_only_as_much_as_is_needed() {
    let _alone = alone();
    let blocks = [10, 20, 30, 40].map(|size| alloc::<StandardPolicy, B>(size * MIB, 16));
    blocks.into_iter().for_each(|block| free::<StandardPolicy, B>(block).unwrap());
    HostBackend::set_limit(Some(110 << 20));
    let block = alloc::<StandardPolicy, B>(48 * MIB, 16); // 100 are cached: the 40 go
    assert_eq!((B::pools().huge.len(), B::pools().huge.bytes()), (2, 30 * MIB), "the largest first");
    free::<StandardPolicy, B>(block).unwrap();
}

#[test]
fn near_the_ceiling_small_blocks_are_still_served() {
    let _alone = alone();
    let held = HostBackend::counters().live_bytes;
    HostBackend::set_limit(Some(held + (5 << 20)));
    let mut blocks = Vec::new();
    loop {
        let block = thread_alloc::<StandardPolicy, B>(100_000, 16);
        if block.is_null() {
            break;
        }
        blocks.push(block);
    }
    assert_eq!(last_error(), Some(AllocError::Budget));
    // Two of the smallest segments.
    assert!(blocks.len() >= 2 * (2 * MIB / 106_496), "{} blocks within 5 MiB", blocks.len());
    blocks.into_iter().for_each(|block| free::<StandardPolicy, B>(block).unwrap());
}

#[test]
fn at_a_full_budget_what_a_thread_caches_serves_every_other_kind_of_request() {
    type Kind = (&'static str, usize, fn(usize) -> *mut u8);
    const KINDS: [Kind; 8] = [
        ("small", 100, |size| thread_alloc::<StandardPolicy, B>(size, 16)),
        ("of a page", 5000, |size| thread_alloc::<StandardPolicy, B>(size, 16)),
        ("of a large class", 600_000, |size| thread_alloc::<StandardPolicy, B>(size, 16)),
        ("huge", 7 * MIB, |size| thread_alloc::<StandardPolicy, B>(size, 16)),
        ("aligned", 100_000, |size| thread_alloc::<StandardPolicy, B>(size, 1 << 20)),
        ("of another group", 100, |size| {
            let options = AllocOptions { group: 7, ..AllocOptions::default() };
            alloc_with::<StandardPolicy, B>(size, 16, &options)
        }),
        ("hardened", 100, |size| thread_alloc::<HardenedPolicy, B>(size, 16)),
        ("huge and hardened", 7 * MIB, |size| thread_alloc::<HardenedPolicy, B>(size, 16)),
    ];
    let _alone = alone();
    let held = HostBackend::counters().live_bytes;
    for (first, first_size, get) in KINDS {
        for (second, second_size, get_other) in KINDS {
            // A heap of its own, with nothing cached.
            let served = std::thread::spawn(move || {
                HostBackend::set_limit(Some(held + (8 << 20)));
                let block = get(first_size);
                assert!(!block.is_null(), "{first}: {:?}", last_error());
                free::<StandardPolicy, B>(block).unwrap();
                let other = get_other(second_size);
                let served = !other.is_null();
                if served {
                    free::<StandardPolicy, B>(other).unwrap();
                }
                served
            });
            assert!(served.join().unwrap(), "{second} after a {first} block was freed");
            trim::<B>(0);
        }
    }
    let mut allocator = ThreadAllocator::<B>::new();
    for size in [100, 600_000, 7 * MIB, 5000] {
        let block = allocator.alloc::<StandardPolicy>(size, 16);
        assert!(!block.is_null(), "{size} of a hand-made allocator: {:?}", last_error());
        // SAFETY: allocated above.
        unsafe { allocator.free::<StandardPolicy>(block) }.unwrap();
    }
}

#[test]
fn a_full_registry_releases_the_fresh_region_and_answers_null() {
    let _alone = alone();
    let before = live_regions();
    // SAFETY: regions are released once, unused.
    unsafe {
        HostBackend::set_registry_capacity(before as usize + 2);
        let held = [HostBackend::allocate(4096), HostBackend::allocate(4096)];
        assert!(held.iter().all(|region| !region.is_null()));
        let before_refusals = writable();
        for _ in 0..10 {
            assert!(HostBackend::allocate(8 * MIB).is_null());
            assert_eq!(last_error(), Some(AllocError::RegistryFull));
        }
        // Ten that stayed would be seen; the test harness's other threads map a stack each.
        let after = writable();
        assert!(after < before_refusals + 40 * MIB, "{after} bytes, {before_refusals} before");
        assert_eq!(live_regions(), before + 2);
        assert!(HostBackend::deallocate(held[0], 4096));
        let again = HostBackend::allocate(4096);
        assert!(!again.is_null(), "a release makes room");
        for region in [held[1], again] {
            assert!(HostBackend::deallocate(region, 4096));
        }
    }
}

#[test]
fn a_full_registry_makes_the_allocator_release_what_it_caches() {
    let _alone = alone();
    let cached = alloc::<StandardPolicy, B>(30 * MIB, 16);
    free::<StandardPolicy, B>(cached).unwrap();
    HostBackend::set_registry_capacity(live_regions() as usize);
    let block = alloc::<StandardPolicy, B>(60 * MIB, 16);
    assert!(thread_alloc::<StandardPolicy, B>(90 * MIB, 16).is_null());
    assert_eq!(last_error(), Some(AllocError::RegistryFull));
    free::<StandardPolicy, B>(block).unwrap();
}

/// Bytes of this process's address space that can be written to; 0 where that cannot be asked.
fn writable() -> usize {
    let bytes = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|address| usize::from_str_radix(address, 16).ok());
        rest.starts_with("rw").then_some(end? - start?)
    };
    std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().filter_map(bytes).sum())
}
