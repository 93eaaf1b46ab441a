//! Frees that wait for the GPU, against the stand-in driver. Each test is a process of its own.
#![cfg(target_os = "linux")]

mod common;

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use common::stand_in::{Gpu, SIZE};
use common::{alloc, free};
use fake_cuda::Build;
use unimalloc::cuda::{Hint, PrefetchTo, Stream};
use unimalloc::{
    alloc_on_stream, alloc_with, free_notify, last_error, pending_stats, record_use, stats, take_up_pending,
    trim, AllocError, AllocOptions, CudaUnifiedBackend, FreeError, Freed, HostBackend, MemoryBackend, Notify,
    Place, Placement, SecurePolicy, StandardPolicy,
};

type B = CudaUnifiedBackend;

const DEVICE: AllocOptions =
    AllocOptions { place: Place { device: 0, placement: Placement::Device }, zeroed: false, group: 0 };

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

fn capture(stream: &Stream, begin: bool) {
    capture_mode(stream, begin.then_some(RELAXED));
}

/// Begins the capture of a stream's work into a graph in a mode, or ends it, as foreign code would.
fn capture_mode(stream: &Stream, mode: Option<u32>) {
    type BeginEntry = unsafe extern "C" fn(*mut c_void, u32) -> u32;
    type RetainEntry = unsafe extern "C" fn(*mut *mut c_void, i32) -> u32;
    type PushEntry = unsafe extern "C" fn(*mut c_void) -> u32;
    type EndEntry = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32;
    // SAFETY: the library is loaded; entries have these types; handles are live.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let entry = |name: &std::ffi::CStr| libc::dlsym(library, name.as_ptr());
        let stream = stream.handle() as *mut c_void;
        let mut context = std::ptr::null_mut();
        std::mem::transmute::<*mut c_void, RetainEntry>(entry(c"cuDevicePrimaryCtxRetain"))(&mut context, 0);
        std::mem::transmute::<*mut c_void, PushEntry>(entry(c"cuCtxPushCurrent_v2"))(context);
        let code = if let Some(mode) = mode {
            std::mem::transmute::<*mut c_void, BeginEntry>(entry(c"cuStreamBeginCapture_v2"))(stream, mode)
        } else {
            let mut graph = std::ptr::null_mut();
            std::mem::transmute::<*mut c_void, EndEntry>(entry(c"cuStreamEndCapture"))(stream, &mut graph)
        };
        assert_eq!(code, 0);
    }
}

fn block() -> *mut u8 {
    alloc::<StandardPolicy, B>(SIZE, 256)
}

fn free_block(block: *mut u8) {
    free::<StandardPolicy, B>(block).unwrap();
}

/// Addresses of `count` blocks, all live at once, freed again afterwards.
fn addresses(count: usize) -> HashSet<usize> {
    let blocks: Vec<_> = (0..count).map(|_| block()).collect();
    blocks.iter().for_each(|block| free_block(*block));
    blocks.into_iter().map(|block| block as usize).collect()
}

/// Allocates and frees until what has passed is taken up: the allocation that needs memory records an event, and a later
/// one sees it done.
fn take_up() {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pending_stats().blocks > 0 {
        assert!(Instant::now() < deadline, "never taken up: {:?}", pending_stats());
        addresses(3000);
        thread::sleep(Duration::from_millis(1));
    }
}

macro_rules! in_child {
    ($name:ident, [$($variable:literal = $value:literal),*], |$gpu:ident| $body:block) => {
        #[test]
        fn $name() {
            Build::new().in_child(stringify!($name), &[$(($variable, $value)),*], || {
                let $gpu = Gpu::new();
                $body
            });
        }
    };
}

in_child!(a_block_freed_during_a_kernel_is_not_reused_before_it_ends, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let used = block();
    gpu.spin(&stream, 300);
    gpu.write(&stream, used, 7);
    let freed_at = Instant::now();
    free_block(used);
    assert!(freed_at.elapsed() < Duration::from_millis(100), "the free waited for the kernel");
    assert_eq!(pending_stats().blocks, 1);
    assert!(!addresses(2000).contains(&(used as usize)));
    assert!(!stream.query().unwrap(), "the kernel ended too early for this test");
    stream.synchronize().unwrap();
    take_up();
    assert!(addresses(4000).contains(&(used as usize)), "never reused");
});

in_child!(a_block_without_launches_is_reused_at_once, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    gpu.spin(&stream, 200);
    let used = block();
    free_block(used);
    assert_eq!(block(), used);
});

in_child!(a_pending_block_cannot_be_freed_twice, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let used = block();
    gpu.spin(&stream, 100);
    gpu.write(&stream, used, 7);
    free_block(used);
    assert_eq!(free::<StandardPolicy, B>(used), Err(FreeError::DoubleFree));
    assert_eq!(unimalloc::usable_size::<B>(used), 0);
    let other = used as usize;
    thread::spawn(move || {
        assert_eq!(free::<StandardPolicy, B>(other as *mut u8), Err(FreeError::DoubleFree))
    })
    .join()
    .unwrap();
});

in_child!(a_block_on_two_streams_waits_for_both, [], |gpu| {
    let streams = [Stream::new(0).unwrap(), Stream::new(0).unwrap()];
    let used = block();
    gpu.write(&streams[0], used, 1);
    gpu.spin(&streams[1], 300);
    gpu.write(&streams[1], used, 2);
    free_block(used);
    streams[0].synchronize().unwrap();
    assert!(!addresses(2000).contains(&(used as usize)));
    assert!(!streams[1].query().unwrap());
    streams[1].synchronize().unwrap();
    take_up();
    assert!(addresses(4000).contains(&(used as usize)));
});

in_child!(there_is_one_event_for_many_frees, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    addresses(3000);
    let before = gpu.fake.counter("cuEventRecord");
    for _ in 0..1000 {
        let used = block();
        gpu.write(&stream, used, 3);
        free_block(used);
    }
    let events = gpu.fake.counter("cuEventRecord") - before;
    assert!((1..=1000 / 8).contains(&events), "{events} events for 1,000 frees");
    stream.synchronize().unwrap();
    trim::<B>(0);
    assert_eq!(gpu.fake.counter("live_events"), 0);
});

in_child!(memory_does_not_grow_while_the_gpu_keeps_up, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let mut seen = HashSet::new();
    for round in 0..2000 {
        let used = block();
        gpu.write(&stream, used, 3);
        free_block(used);
        seen.insert(used as usize);
        if round % 10 == 0 {
            stream.synchronize().unwrap();
        }
    }
    assert!(seen.len() < 300, "{} blocks for one at a time", seen.len());
});

in_child!(foreign_work_is_waited_for_once_it_is_told_of, [], |gpu| {
    let own = Stream::new(0).unwrap();
    // SAFETY: `own` outlives the foreign handle.
    let foreign = unsafe { Stream::from_raw(own.handle()) }.unwrap();
    let used = block();
    gpu.spin(&own, 200);
    record_use::<B>(used.wrapping_add(100), &foreign).unwrap();
    free_block(used);
    assert_eq!(pending_stats().blocks, 1);
    drop(foreign); // waits: nothing can be asked of a foreign stream later
    assert!(own.query().unwrap());
    assert_eq!(pending_stats().blocks, 0);
    assert_eq!(record_use::<B>(used, &own), Err(FreeError::DoubleFree));
    assert_eq!(record_use::<B>(&raw const gpu as *const u8, &own), Err(FreeError::NotOurs));
});

in_child!(a_dropped_stream_is_still_waited_for, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let (early, late) = (block(), block());
    gpu.write(&stream, late, 1);
    gpu.spin(&stream, 200);
    gpu.write(&stream, early, 1);
    free_block(early);
    drop(stream);
    assert!(!addresses(2000).contains(&(early as usize)));
    assert_eq!(gpu.fake.counter("live_streams"), 1);
    trim::<B>(0); // waits
    assert_eq!(pending_stats().blocks, 0);
    free_block(late); // marked with a stream that is gone: it has passed
    assert_eq!(pending_stats().blocks, 0);
    assert_eq!(gpu.fake.counter("live_streams"), 0);
});

in_child!(what_a_dead_thread_left_pending_is_taken_up_by_others, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    gpu.spin(&stream, 100);
    let used = thread::scope(|scope| {
        scope
            .spawn(|| {
                let used = block();
                gpu.write(&stream, used, 1);
                free_block(used);
                used as usize
            })
            .join()
            .unwrap()
    });
    assert_eq!(pending_stats().blocks, 1);
    stream.synchronize().unwrap();
    take_up();
    assert!(addresses(4000).contains(&used));
});

in_child!(a_refusal_waits_for_pending_memory_before_it_is_final, ["UNIMALLOC_MAX_BYTES" = "64MiB"], |gpu| {
    let stream = Stream::new(0).unwrap();
    for _ in 0..4 {
        let used = alloc::<StandardPolicy, B>(40 << 20, 256);
        gpu.spin(&stream, 50);
        gpu.write(&stream, used, 1);
        free_block(used);
    }
    let live = alloc::<StandardPolicy, B>(40 << 20, 256);
    assert!(unimalloc::thread_alloc::<StandardPolicy, B>(40 << 20, 256).is_null());
    assert_eq!(last_error(), Some(AllocError::Budget));
    free_block(live);
});

in_child!(a_capturing_stream_gets_no_event, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let used: Vec<_> = (0..200).map(|_| block()).collect();
    capture(&stream, true);
    for block in &used {
        gpu.write(&stream, *block, 1);
    }
    let before = gpu.fake.counter("cuEventRecord");
    used.iter().for_each(|block| free_block(*block));
    addresses(3000);
    assert_eq!(gpu.fake.counter("cuEventRecord"), before);
    assert_eq!(pending_stats().blocks, 200);
    capture(&stream, false);
    trim::<B>(0);
    assert_eq!(pending_stats().blocks, 0);
});

in_child!(blocks_of_a_lost_context_are_accounted_and_the_process_lives, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let (used, host) = (block(), block());
    gpu.write(&stream, used, 1);
    gpu.launch("fault", &stream, &[]);
    free_block(used);
    while stream.query() == Ok(false) {
        thread::yield_now();
    }
    trim::<B>(0);
    let pending = pending_stats();
    assert_eq!((pending.blocks, pending.lost_blocks), (0, 1), "{pending:?}");
    assert!(pending.lost_bytes >= SIZE);
    let _ = free::<StandardPolicy, B>(host);
    assert!(unimalloc::thread_alloc::<StandardPolicy, B>(64 << 20, 256).is_null());
    assert_eq!(last_error(), Some(AllocError::ContextLost));
});

in_child!(the_same_stream_may_have_a_block_back_at_once, [], |gpu| {
    let (stream, other) = (Stream::new(0).unwrap(), Stream::new(0).unwrap());
    for size in [SIZE, 300_000, 64 << 20] {
        let on = |stream| alloc_on_stream::<StandardPolicy, B>(size, 256, &DEVICE, stream);
        let used = on(&stream);
        gpu.spin(&stream, 100);
        gpu.write(&stream, used, 1);
        free_block(used);
        let elsewhere = [on(&other), alloc_with::<StandardPolicy, B>(size, 256, &DEVICE)];
        assert!(!elsewhere.contains(&used), "{size}: handed to somebody who does not wait");
        let again = on(&stream);
        assert_eq!(again, used, "{size}");
        free_block(again);
        assert_eq!(free::<StandardPolicy, B>(again), Err(FreeError::DoubleFree));
        elsewhere.into_iter().for_each(free_block);
        stream.synchronize().unwrap();
    }
});

in_child!(who_freed_a_block_hears_of_it_also_where_it_is_reused_at_once, [], |gpu| {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    let stream = Stream::new(0).unwrap();
    let on_stream = || alloc_on_stream::<StandardPolicy, B>(SIZE, 256, &DEVICE, &stream);
    let used = on_stream();
    gpu.spin(&stream, 100);
    gpu.write(&stream, used, 1);
    let call = |tag, bytes| {
        assert!(bytes >= SIZE);
        TOLD.fetch_add(tag as usize, Relaxed);
    };
    // SAFETY: only the stream uses the block.
    let freed = unsafe { free_notify::<B>(used, Notify { call, tag: 5 }) };
    assert_eq!((freed, TOLD.load(Relaxed)), (Ok(Freed::Pending), 0));
    assert_eq!(on_stream(), used);
    assert_eq!(TOLD.load(Relaxed), 5, "whoever freed it waits for ever");
    free_block(used);
    stream.synchronize().unwrap();
    take_up();
    assert_eq!(TOLD.load(Relaxed), 5, "told once");
});

in_child!(another_thread_sees_no_end_of_work_on_a_per_thread_default_stream, [], |gpu| {
    // SAFETY: the driver's handle of the calling thread's default stream.
    let stream = unsafe { Stream::from_raw(2) }.unwrap();
    let used = block();
    gpu.spin(&stream, 300);
    gpu.write(&stream, used, 1);
    let address = used as usize;
    thread::scope(|scope| {
        // There the handle means another stream, which has nothing to do.
        scope.spawn(move || {
            free_block(address as *mut u8);
            while !take_up_pending(false) && pending_stats().blocks > 0 {
                thread::yield_now();
            }
        });
    });
    assert!(stream.query().unwrap(), "taken up while the kernel was running");
});

in_child!(secure_blocks_are_poisoned_only_after_the_gpu_is_done, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let used = alloc::<SecurePolicy, B>(SIZE, 256);
    gpu.spin(&stream, 150);
    gpu.write(&stream, used, 9);
    free::<SecurePolicy, B>(used).unwrap();
    // SAFETY: managed memory is readable at any time here, and stays mapped.
    let byte = || unsafe { used.read_volatile() };
    assert_eq!(byte(), 0, "poisoned while the kernel may still use it");
    stream.synchronize().unwrap();
    trim::<B>(usize::MAX);
    assert_eq!(byte(), 0xDE);
});

in_child!(fills_copies_and_prefetches_mark_their_blocks, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    gpu.spin(&stream, 150);
    let (a, b, c) = (block(), block(), block());
    // SAFETY: the blocks are live and freed through the allocator only.
    unsafe {
        stream.fill(a, 1, SIZE).unwrap();
        stream.copy(b, a, SIZE).unwrap();
        stream.prefetch(c, SIZE, PrefetchTo::Device).unwrap();
    }
    [a, b, c].into_iter().for_each(free_block);
    assert_eq!(pending_stats().blocks, 3);
});

in_child!(a_warm_loop_makes_no_driver_call, [], |gpu| {
    addresses(3000);
    let before = gpu.fake.counter("calls");
    for _ in 0..1000 {
        addresses(10);
        let with_options = alloc_with::<StandardPolicy, B>(SIZE, 256, &AllocOptions::default());
        free_block(with_options);
    }
    assert_eq!(gpu.fake.counter("calls"), before);
    assert!(stats::<B>().backend_allocations > 0);
});

in_child!(taking_up_frees_breaks_no_capture_of_the_thread, [], |gpu| {
    let (busy, captured) = (Stream::new(0).unwrap(), Stream::new(0).unwrap());
    let used: Vec<_> = (0..100).map(|_| block()).collect();
    for block in &used {
        gpu.write(&busy, *block, 1);
    }
    capture_mode(&captured, Some(GLOBAL));
    used.iter().for_each(|block| free_block(*block));
    addresses(3000); // queries events and records them
    capture_mode(&captured, None);
    take_up();
});

in_child!(host_blocks_do_not_move_and_wait_for_the_streams_they_were_on, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    for size in [SIZE, 1 << 20, 20 << 20] {
        let used = alloc::<StandardPolicy, HostBackend>(size, 256);
        for to in [PrefetchTo::Device, PrefetchTo::Host] {
            // SAFETY: the block is live, and its contents are not needed.
            let hints = unsafe {
                [
                    stream.prefetch(used, size, to).unwrap(),
                    stream.discard_and_prefetch(used, size, to).unwrap(),
                ]
            };
            for hint in hints {
                assert!(
                    matches!(hint, Hint::NotApplicable(reason) if reason.contains("host backend")),
                    "{hint:?}"
                );
            }
        }
        free::<StandardPolicy, HostBackend>(used).unwrap();
        assert_eq!(pending_stats().blocks, 0, "a hint that did nothing marks nothing");
    }
    assert_eq!(gpu.fake.counter("cuMemPrefetchAsync_v2"), 0);

    let used = [SIZE, 20 << 20].map(|size| alloc::<StandardPolicy, HostBackend>(size, 256));
    gpu.spin(&stream, 200);
    for block in used {
        record_use::<HostBackend>(block, &stream).unwrap();
        free::<StandardPolicy, HostBackend>(block).unwrap();
    }
    assert_eq!(pending_stats().blocks, 2);
    let others: Vec<_> = (0..2000).map(|_| alloc::<StandardPolicy, HostBackend>(SIZE, 256)).collect();
    assert!(others.iter().all(|other| !used.contains(other)));
    for other in others {
        free::<StandardPolicy, HostBackend>(other).unwrap();
    }
    trim::<HostBackend>(0); // waits
    assert_eq!(pending_stats().blocks, 0);
});

in_child!(a_block_whose_pages_are_discarded_is_not_reused_before_they_are, [], |gpu| {
    let stream = Stream::new(0).unwrap();
    let used = alloc::<StandardPolicy, B>(1 << 20, 256);
    gpu.spin(&stream, 200);
    // SAFETY: the block is live, and its contents are not needed.
    unsafe { stream.discard_and_prefetch(used, 1 << 20, PrefetchTo::Device) }.unwrap();
    free_block(used);
    assert_eq!(pending_stats().blocks, 1);
    assert_ne!(alloc::<StandardPolicy, B>(1 << 20, 256), used);
});

fn hints() -> [bool; 4] {
    [Placement::Auto, Placement::Host, Placement::Device, Placement::ReadMostly].map(|placement| {
        let place = |device| Place { device, placement };
        let beyond = B::placement_hint(place(9));
        assert!(
            matches!(beyond, Hint::NotApplicable(reason) if reason.contains("no such device")),
            "{beyond:?}"
        );
        assert_eq!(
            HostBackend::placement_hint(place(0)) == Hint::Applied,
            placement == Placement::Auto,
            "host memory is in one place"
        );
        B::placement_hint(place(0)) == Hint::Applied
    })
}

in_child!(a_placement_says_whether_it_does_anything, [], |_gpu| {
    assert_eq!(hints(), [true; 4]);
});

in_child!(
    a_placement_says_whether_it_does_anything_without_concurrent_access,
    ["FAKE_CUDA_CONCURRENT" = "0"],
    |_gpu| {
        assert_eq!(hints(), [true, true, false, false]);
    }
);
