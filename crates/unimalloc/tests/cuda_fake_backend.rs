//! The CUDA backend against the stand-in driver, through the real loading path. Each test is a process of its own.
#![cfg(target_os = "linux")]

use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use fake_cuda::{Build, Calls, Loaded, OLD_VERSION};
use unimalloc::{
    cuda, is_cuda_available, last_error, AllocError, CudaUnifiedBackend, MemoryBackend, Place, Placement,
};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

fn allocate(size: usize) -> *mut u8 {
    // SAFETY: any size may be asked for.
    unsafe { CudaUnifiedBackend::allocate(size) }
}

fn allocate_at(size: usize, placement: Placement) -> *mut u8 {
    // SAFETY: any size may be asked for.
    unsafe { CudaUnifiedBackend::allocate_at(size, Place { device: 0, placement }) }
}

fn live(size: usize) -> *mut u8 {
    let base = allocate(size);
    assert!(!base.is_null(), "{:?}", last_error());
    base
}

fn deallocate(base: *mut u8, size: usize) -> bool {
    // SAFETY: no test uses a region after this, and garbage is refused: what is tested.
    unsafe { CudaUnifiedBackend::deallocate(base, size) }
}

fn refused(size: usize, reason: AllocError) {
    assert!(allocate(size).is_null());
    assert_eq!(last_error(), Some(reason));
}

fn fake() -> Loaded {
    // Loads it, if nothing has yet.
    assert!(is_cuda_available());
    Loaded::find().expect("the stand-in is loaded")
}

/// Runs the body in a process that finds `build`, with variables set.
macro_rules! in_child {
    ($name:ident, $build:expr, [$($variable:literal = $value:literal),*], $body:block) => {
        #[test]
        fn $name() {
            $build.in_child(stringify!($name), &[$(($variable, $value)),*], || $body);
        }
    };
}

in_child!(a_library_without_an_entry_point_is_no_driver, Build::new().without("cuMemAllocManaged"), [], {
    assert!(!is_cuda_available());
    refused(PAGE, AllocError::NoDriver);
    let reason = cuda::unavailable_reason().unwrap();
    assert!(reason.contains("cuMemAllocManaged") && reason.contains("install"), "{reason}");
    assert_eq!(cuda::devices().unwrap_err().kind(), cuda::CudaErrorKind::Unavailable);
});

in_child!(a_driver_that_does_not_start_is_absent, Build::new(), ["FAKE_CUDA_INIT_ERROR" = "803"], {
    assert!(!is_cuda_available());
    refused(PAGE, AllocError::NoDriver);
    let reason = cuda::unavailable_reason().unwrap();
    assert!(reason.contains("803") && reason.contains("nvidia-smi"), "{reason}");
});

in_child!(a_driver_before_12_is_absent, Build::new().driver(11_080), [], {
    refused(PAGE, AllocError::NoDriver);
    let reason = cuda::unavailable_reason().unwrap();
    assert!(reason.contains("11.8") && reason.contains("525"), "{reason}");
});

in_child!(no_device, Build::new(), ["FAKE_CUDA_DEVICES" = "0"], {
    refused(PAGE, AllocError::NoDevice);
    assert!(cuda::unavailable_reason().unwrap().contains("CUDA_VISIBLE_DEVICES"));
});

in_child!(no_managed_memory, Build::new(), ["FAKE_CUDA_MANAGED" = "0"], {
    assert!(!is_cuda_available());
    refused(PAGE, AllocError::Unsupported);
    assert!(cuda::unavailable_reason().unwrap().contains("managed memory"));
});

in_child!(asking_makes_no_context, Build::new(), [], {
    assert!(is_cuda_available());
    assert_eq!(cuda::unavailable_reason(), None);
    refused(1, AllocError::InvalidSize);
    assert_eq!(fake().counter("cuDevicePrimaryCtxRetain"), 0);
    assert_eq!(fake().counter("context_creations"), 0);
});

in_child!(regions_are_the_drivers_and_go_back_once, Build::new(), [], {
    let before = CudaUnifiedBackend::counters();
    let base = live(2 * MIB);
    // SAFETY: the region is live and ours.
    unsafe { base.write_bytes(7, 2 * MIB) };
    assert_eq!(fake().counter("live_managed"), 1);
    for (ptr, size) in [
        (std::ptr::null_mut(), PAGE),
        (base.wrapping_add(PAGE), 2 * MIB - PAGE),
        (base, MIB),
        (base, 0),
        (std::ptr::without_provenance_mut(0xdead_b000), PAGE),
    ] {
        assert!(!deallocate(ptr, size));
        assert_eq!(last_error(), Some(AllocError::NotRegistered));
    }
    assert_eq!(fake().counter("cuMemFree_v2"), 0, "garbage does not reach the driver");
    assert!(deallocate(base, 2 * MIB));
    assert!(!deallocate(base, 2 * MIB), "released before");
    assert_eq!(fake().counter("live_managed"), 0);
    assert_eq!(fake().counter("cuMemFree"), 0, "version 1 refuses managed pointers");
    let after = CudaUnifiedBackend::counters();
    assert_eq!((after.allocations, after.frees), (before.allocations + 1, before.frees + 1));
    assert_eq!(after.live_bytes, 0);
});

in_child!(bad_sizes, Build::new(), [], {
    for size in [0, 1, 4095, 4097, usize::MAX, 1 << 63] {
        refused(size, AllocError::InvalidSize);
    }
    assert_eq!(fake().counter("cuMemAllocManaged"), 0);
});

in_child!(hooks_that_managed_memory_has_not_touch_nothing, Build::new(), [], {
    const {
        assert!(!CudaUnifiedBackend::SUPPORTS_PAGE_RESET && !CudaUnifiedBackend::SUPPORTS_MAKE_GUARD);
        assert!(!CudaUnifiedBackend::SUPPORTS_DECOMMIT && !CudaUnifiedBackend::ENABLE_CPU_CACHE);
    }
    let base = live(PAGE);
    // SAFETY: the region is live and ours.
    unsafe { base.write_bytes(9, PAGE) };
    let calls = fake().calls();
    for hook in [CudaUnifiedBackend::page_reset, CudaUnifiedBackend::make_guard, CudaUnifiedBackend::decommit]
    {
        // SAFETY: the region is live and ours.
        assert!(!unsafe { hook(base, PAGE) });
        assert_eq!(last_error(), Some(AllocError::Unsupported));
    }
    assert_eq!(fake().calls(), calls);
    // SAFETY: as above.
    assert!(unsafe { std::slice::from_raw_parts(base, PAGE) }.iter().all(|&byte| byte == 9));
});

in_child!(a_hundred_threads_share_one_context, Build::new(), [], {
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let base = live(PAGE);
                    // SAFETY: the region is live and ours.
                    unsafe { base.write(1) };
                    assert!(deallocate(base, PAGE));
                }
            });
        }
    });
    let fake = fake();
    assert_eq!((fake.counter("live_managed"), fake.counter("context_creations")), (0, 1));
    assert_eq!(
        fake.counter("cuDevicePrimaryCtxRetain"),
        fake.counter("cuDevicePrimaryCtxRelease_v2") + 1,
        "one retain stays"
    );
    assert_eq!(fake.counter("cuCtxPushCurrent_v2"), fake.counter("cuCtxPopCurrent_v2"));
});

/// The driver's own entry points, for a test that acts as other code in the process.
fn entry<F: Copy>(name: &str) -> F {
    // SAFETY: the stand-in is loaded already, and each caller names the type of the function that it asks for.
    unsafe { *Box::leak(Box::new(libloading::Library::new("libcuda.so.1").unwrap())).get(name).unwrap() }
}

fn current_context() -> *mut c_void {
    let get: unsafe extern "C" fn(*mut *mut c_void) -> u32 = entry("cuCtxGetCurrent");
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver is started and writes one handle.
    assert_eq!(unsafe { get(&mut context) }, 0);
    context
}

/// Makes a device's primary context this thread's current one, as other code would.
fn make_current(device: c_int) -> *mut c_void {
    let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> u32 = entry("cuDevicePrimaryCtxRetain");
    let set: unsafe extern "C" fn(*mut c_void) -> u32 = entry("cuCtxSetCurrent");
    let mut context = std::ptr::null_mut();
    // SAFETY: the device exists; the driver writes one handle, which is then made current.
    unsafe {
        assert_eq!(retain(&mut context, device), 0);
        assert_eq!(set(context), 0);
    }
    context
}

in_child!(a_threads_own_context_stays_as_it_was, Build::new(), ["FAKE_CUDA_DEVICES" = "2"], {
    let base = live(PAGE);
    assert!(current_context().is_null(), "none before, none after");
    let other = make_current(1);
    assert!(deallocate(base, PAGE));
    let base = live(PAGE);
    // SAFETY: the region is live and ours.
    assert!(unsafe { CudaUnifiedBackend::fill(base, 1, PAGE) });
    fake().fail("cuMemAllocManaged", Calls::Nth(1), 999);
    refused(PAGE, AllocError::Driver(999));
    assert_eq!(current_context(), other);
});

in_child!(regions_belong_to_the_device_of_their_place, Build::new(), ["FAKE_CUDA_DEVICES" = "2"], {
    let at = |device| {
        // SAFETY: any place may be asked for.
        unsafe { CudaUnifiedBackend::allocate_at(PAGE, Place { device, placement: Placement::Auto }) }
    };
    let base = at(1);
    assert!(!base.is_null());
    assert_eq!(fake().counter("context_creations"), 1, "only that device's");
    assert!(at(2).is_null());
    assert_eq!(last_error(), Some(AllocError::NoDevice));
    assert!(deallocate(base, PAGE));
});

in_child!(a_full_registry_releases_the_fresh_region, Build::new(), ["UNIMALLOC_REGISTRY_CAPACITY" = "2"], {
    let (first, second) = (live(PAGE), live(PAGE));
    refused(PAGE, AllocError::RegistryFull);
    assert_eq!(fake().counter("live_managed"), 2);
    assert_eq!(CudaUnifiedBackend::counters().live_bytes, 2 * PAGE as u64);
    assert!(deallocate(first, PAGE));
    let third = live(PAGE);
    CudaUnifiedBackend::set_registry_capacity(3);
    let fourth = live(PAGE);
    for base in [second, third, fourth] {
        assert!(deallocate(base, PAGE));
    }
});

in_child!(a_bad_capacity_is_said, Build::new(), ["UNIMALLOC_REGISTRY_CAPACITY" = "lots"], {
    refused(PAGE, AllocError::InvalidConfiguration);
    assert_eq!(fake().counter("live_managed"), 0);
});

in_child!(
    driver_errors_are_reasons,
    Build::new(),
    ["FAKE_CUDA_FAIL" = "cuMemAllocManaged@1=2,cuMemAllocManaged@2=999"],
    {
        refused(PAGE, AllocError::OutOfMemory);
        refused(PAGE, AllocError::Driver(999));
        let base = live(PAGE);
        let counters = CudaUnifiedBackend::counters();
        assert_eq!((counters.allocations, counters.failures, counters.live_bytes), (1, 2, PAGE as u64));
        assert!(deallocate(base, PAGE));
    }
);

in_child!(
    a_code_that_nobody_knows_is_passed_on,
    Build::new(),
    ["FAKE_CUDA_FAIL" = "cuMemAllocManaged@1=54321"],
    {
        refused(PAGE, AllocError::Driver(54_321));
    }
);

in_child!(a_failed_release_can_be_tried_again, Build::new(), ["FAKE_CUDA_FAIL" = "cuMemFree_v2@1=1"], {
    let base = live(PAGE);
    assert!(!deallocate(base, PAGE));
    assert_eq!(last_error(), Some(AllocError::Driver(1)));
    assert_eq!(CudaUnifiedBackend::counters().live_bytes, PAGE as u64);
    assert!(deallocate(base, PAGE));
    assert_eq!(fake().counter("live_managed"), 0);
    assert_eq!(CudaUnifiedBackend::counters().live_bytes, 0);
});

in_child!(a_deinitialised_driver_has_released_everything, Build::new(), [], {
    let base = live(PAGE);
    fake().control("deinitialized", 1);
    assert!(deallocate(base, PAGE), "{:?}", last_error());
    assert!(!deallocate(base, PAGE));
    refused(PAGE, AllocError::Driver(4));
});

in_child!(a_lost_context_is_said_and_the_process_lives, Build::new(), [], {
    let base = live(PAGE);
    fake().control("lose_context", 719);
    assert!(!deallocate(base, PAGE));
    assert_eq!(last_error(), Some(AllocError::ContextLost));
    refused(PAGE, AllocError::ContextLost);
    // SAFETY: the region is live and ours.
    assert!(!unsafe { CudaUnifiedBackend::fill(base, 0, PAGE) });
    assert_eq!(last_error(), Some(AllocError::ContextLost));
    assert_eq!(CudaUnifiedBackend::counters().live_bytes, PAGE as u64);
});

in_child!(the_device_cannot_be_overfilled, Build::new(), ["FAKE_CUDA_FREE_BYTES" = "64MiB"], {
    let base = live(48 * MIB);
    refused(32 * MIB, AllocError::Budget);
    assert_eq!(fake().counter("cuMemAllocManaged"), 1, "refused before the driver was asked");
    let second = live(16 * MIB);
    refused(PAGE, AllocError::Budget);
    assert!(deallocate(base, 48 * MIB));
    let third = live(32 * MIB);
    // What is free is looked at again.
    fake().control("free_bytes", 512 << 20);
    let fourth = live(256 * MIB);
    // A limit by name replaces what is free.
    CudaUnifiedBackend::set_limit(Some(u64::MAX));
    let fifth = live(1024 * MIB);
    CudaUnifiedBackend::set_limit(Some(1));
    refused(PAGE, AllocError::Budget);
    for (base, size) in [(second, 16), (third, 32), (fourth, 256), (fifth, 1024)] {
        assert!(deallocate(base, size * MIB));
    }
});

in_child!(
    a_limit_in_per_cent_is_of_the_device,
    Build::new(),
    ["FAKE_CUDA_TOTAL_BYTES" = "100MiB", "UNIMALLOC_MAX_BYTES" = "50%"],
    {
        let base = live(50 * MIB);
        refused(PAGE, AllocError::Budget);
        assert_eq!(CudaUnifiedBackend::counters().limit_bytes, 50 << 20);
        assert!(deallocate(base, 50 * MIB));
    }
);

in_child!(a_bad_limit_is_said, Build::new(), ["UNIMALLOC_MAX_BYTES" = "-5%"], {
    refused(PAGE, AllocError::InvalidConfiguration);
    CudaUnifiedBackend::set_limit(Some(PAGE as u64));
    assert!(deallocate(live(PAGE), PAGE), "an option replaces the variable");
});

in_child!(segments_fit_the_ceiling, Build::new(), ["UNIMALLOC_MAX_BYTES" = "100MiB"], {
    assert_eq!(CudaUnifiedBackend::segment_bytes(), 8 * MIB);
    CudaUnifiedBackend::set_limit(Some(u64::MAX));
    assert_eq!(CudaUnifiedBackend::segment_bytes(), 32 * MIB);
});

in_child!(segments_are_small_without_concurrent_access, Build::new(), ["FAKE_CUDA_CONCURRENT" = "0"], {
    assert_eq!(CudaUnifiedBackend::segment_bytes(), 2 * MIB);
});

in_child!(a_forked_child_gets_errors, Build::new(), [], {
    let base = live(PAGE);
    let calls = fake().calls();
    // SAFETY: the child calls only code that takes no lock there, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = Some(AllocError::Forked);
        // SAFETY: as a caller would; the child's answers go into its exit code.
        let held = unsafe {
            [
                !is_cuda_available(),
                allocate(PAGE).is_null() && last_error() == forked,
                !deallocate(base, PAGE) && last_error() == forked,
                !CudaUnifiedBackend::fill(base, 0, PAGE) && last_error() == forked,
                cuda::Stream::new(0).is_err_and(|error| error.kind() == cuda::CudaErrorKind::Forked),
                fake().calls() == calls,
            ]
        };
        let failed = held.iter().position(|held| !held);
        // SAFETY: ends this process without running its exit handlers.
        unsafe { libc::_exit(failed.map_or(0, |index| index as i32 + 1)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), 0, "number of the check that failed in the child");
    assert!(deallocate(base, PAGE), "the parent goes on");
});

in_child!(a_capture_of_other_code_is_not_broken, Build::new(), [], {
    let first = live(PAGE);
    let stream = cuda::Stream::new(0).unwrap();
    let handle = stream.handle() as *mut c_void;
    make_current(0);
    let begin: unsafe extern "C" fn(*mut c_void, u32) -> u32 = entry("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32 = entry("cuStreamEndCapture");
    // SAFETY: the stream is alive; mode 0 is global, which forbids unsafe calls in every thread.
    assert_eq!(unsafe { begin(handle, 0) }, 0);
    assert!(stream.is_capturing().unwrap());
    let second = live(MIB);
    // SAFETY: the region is live and ours.
    assert!(unsafe { CudaUnifiedBackend::fill(second, 5, MIB) }, "{:?}", last_error());
    assert!(deallocate(first, PAGE), "{:?}", last_error());
    let mut graph = std::ptr::null_mut();
    // SAFETY: ends the capture begun above.
    assert_eq!(unsafe { end(handle, &mut graph) }, 0, "still a valid capture");
    // SAFETY: the region is live and ours.
    assert!(unsafe { std::slice::from_raw_parts(second, MIB) }.iter().all(|&byte| byte == 5));
    assert!(deallocate(second, MIB));
});

fn advice_counts() -> (u64, u64, u64, u64) {
    let count = |name: &str| fake().counter(name);
    (
        count("cuMemAdvise_v2"),
        count("cuMemPrefetchAsync_v2"),
        count("cuMemHostAlloc"),
        count("cuMemAllocManaged"),
    )
}

in_child!(placements_are_advised, Build::new(), [], {
    for (placement, counts) in [
        (Placement::Auto, (0, 0, 0, 1)),
        (Placement::Host, (2, 0, 0, 2)),
        (Placement::ReadMostly, (3, 0, 0, 3)),
        (Placement::Device, (4, 1, 0, 4)),
    ] {
        let base = allocate_at(2 * MIB, placement);
        assert!(!base.is_null());
        assert_eq!(advice_counts(), counts, "{placement:?}");
        assert!(deallocate(base, 2 * MIB));
    }
});

in_child!(an_older_driver_is_advised_by_its_own_entries, Build::new().driver(OLD_VERSION), [], {
    for placement in [Placement::Auto, Placement::Host, Placement::ReadMostly, Placement::Device] {
        let base = allocate_at(2 * MIB, placement);
        assert!(!base.is_null(), "{placement:?}: {:?}", last_error());
        assert!(deallocate(base, 2 * MIB));
    }
    assert_eq!((fake().counter("cuMemAdvise"), fake().counter("cuMemPrefetchAsync")), (4, 1));
});

in_child!(
    failed_advice_does_not_fail_the_allocation,
    Build::new(),
    ["FAKE_CUDA_FAIL" = "cuMemAdvise_v2@1+=801"],
    {
        let base = allocate_at(2 * MIB, Placement::Host);
        assert!(!base.is_null());
        assert!(deallocate(base, 2 * MIB));
    }
);

in_child!(a_prefetch_is_capped_by_what_is_free, Build::new(), ["FAKE_CUDA_FREE_BYTES" = "32MiB"], {
    CudaUnifiedBackend::set_limit(Some(u64::MAX));
    let base = allocate_at(64 * MIB, Placement::Device);
    assert!(!base.is_null());
    assert_eq!(fake().counter("cuMemPrefetchAsync_v2"), 0);
    assert!(deallocate(base, 64 * MIB));
});

in_child!(
    without_concurrent_access_host_placement_is_pinned,
    Build::new(),
    ["FAKE_CUDA_CONCURRENT" = "0"],
    {
        let host = allocate_at(MIB, Placement::Host);
        let device = allocate_at(MIB, Placement::Device);
        assert!(!host.is_null() && !device.is_null());
        assert_eq!(advice_counts(), (0, 0, 1, 1));
        // SAFETY: the region is live and ours.
        assert!(unsafe { CudaUnifiedBackend::fill(host, 3, MIB) });
        assert!(!deallocate(host, PAGE));
        assert!(deallocate(host, MIB) && deallocate(device, MIB));
        assert_eq!((fake().counter("live_pinned"), fake().counter("live_managed")), (0, 0));
    }
);

/// Fills and copies a part of two regions, checks the bytes, and answers how often the device was used.
fn transfers(placement: Placement, len: usize) -> (u64, u64) {
    let before = (fake().counter("cuMemsetD8Async"), fake().counter("cuMemcpyAsync"));
    let (one, two) = (allocate_at(2 * MIB, placement), allocate_at(2 * MIB, placement));
    assert!(!one.is_null() && !two.is_null(), "{:?}", last_error());
    // SAFETY: the regions are live and ours, apart, and longer than what is touched.
    unsafe {
        assert!(CudaUnifiedBackend::fill(two, 1, 2 * MIB));
        let whole_fills = fake().counter("cuMemsetD8Async") - before.0;
        assert!(CudaUnifiedBackend::fill(one.add(100), 0xAB, len), "{:?}", last_error());
        assert!(CudaUnifiedBackend::holds(one.add(100), 0xAB, len));
        let copies = fake().counter("cuMemcpyAsync");
        assert!(CudaUnifiedBackend::copy(two.add(5), one.add(100), len), "{:?}", last_error());
        let copies = fake().counter("cuMemcpyAsync") - copies;
        assert!(CudaUnifiedBackend::holds(two.add(5), 0xAB, len));
        assert!(!CudaUnifiedBackend::holds(two.add(5), 0xAB, len + 1));
        let bytes = std::slice::from_raw_parts(two, 2 * MIB);
        assert_eq!(bytes.iter().filter(|&&byte| byte == 0xAB).count(), len);
        assert!(bytes[5..5 + len].iter().all(|&byte| byte == 0xAB));
        let fills = fake().counter("cuMemsetD8Async") - before.0 - whole_fills;
        assert!(deallocate(one, 2 * MIB) && deallocate(two, 2 * MIB));
        (fills, copies)
    }
}

in_child!(bytes_are_touched_on_the_cheaper_side, Build::new(), [], {
    assert_eq!(transfers(Placement::Auto, 1000), (0, 0));
    assert_eq!(transfers(Placement::Auto, MIB), (1, 1));
    assert_eq!(transfers(Placement::Host, 100_000), (0, 0));
    assert_eq!(transfers(Placement::Host, MIB), (1, 1));
    assert_eq!(transfers(Placement::Device, 1000), (1, 1));
});

in_child!(without_concurrent_access_the_cpu_touches_nothing, Build::new(), ["FAKE_CUDA_CONCURRENT" = "0"], {
    assert_eq!(transfers(Placement::Auto, 10), (1, 1));
    assert_eq!(transfers(Placement::Host, 10), (0, 0), "pinned memory it may");
});

in_child!(a_failed_transfer_is_said, Build::new(), ["FAKE_CUDA_FAIL" = "cuMemsetD8Async@1=999"], {
    let base = live(MIB);
    // SAFETY: the region is live and ours; the last range is not, and is refused.
    unsafe {
        assert!(!CudaUnifiedBackend::fill(base, 1, MIB));
        assert_eq!(last_error(), Some(AllocError::Driver(999)));
        assert!(CudaUnifiedBackend::fill(base, 1, MIB));
        assert!(!CudaUnifiedBackend::fill(base.wrapping_add(MIB), 1, 1));
        assert_eq!(last_error(), Some(AllocError::InvalidRange));
    }
    assert!(deallocate(base, MIB));
});

/// What a static destructor or another library's exit handler may still do.
extern "C" fn at_exit() {
    let (stream, region) = LEFT_FOR_EXIT.lock().unwrap().take().unwrap();
    drop(stream);
    assert!(deallocate(region as *mut u8, PAGE));
    assert!(allocate(PAGE).is_null());
}

static LEFT_FOR_EXIT: Mutex<Option<(cuda::Stream, usize)>> = Mutex::new(None);

in_child!(no_driver_call_while_the_process_exits, Build::new(), ["FAKE_CUDA_ABORT_ON_EXIT_CALLS" = "1"], {
    // Registered before the driver is loaded, so that it runs after the driver's own handlers.
    // SAFETY: the handler is a function of this program.
    assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
    *LEFT_FOR_EXIT.lock().unwrap() = Some((cuda::Stream::new(0).unwrap(), live(PAGE) as usize));
});
