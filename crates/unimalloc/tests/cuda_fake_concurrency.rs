//! Devices where the CPU may touch no managed memory while a kernel runs: the stand-in driver takes the memory away from the
//! CPU meanwhile, so that a touch is a segmentation fault. Each test is a process of its own.
#![cfg(target_os = "linux")]

mod common;

use std::time::{Duration, Instant};

use common::{alloc, free};
use fake_cuda::{Build, Loaded};
use unimalloc::cuda::{CompileOptions, KernelArg, LaunchConfig, Module, Stream};
use unimalloc::{
    alloc_with, decay, is_cuda_available, pending_stats, thread_realloc, AllocOptions, CudaUnifiedBackend,
    DecayThread, HardenedPolicy, Place, Placement, SecurePolicy, StandardPolicy,
};

type B = CudaUnifiedBackend;

const KERNELS: &str = "
.version 8.0
.target sm_52
.address_size 64
.visible .entry write_u8(.param .u64 p, .param .u32 n, .param .u8 v) { ret; }
.visible .entry spin(.param .u32 ms) { ret; }
";

const SIZE: usize = 4096;

struct Gpu {
    module: Module,
    stream: Stream,
}

impl Gpu {
    fn new() -> Self {
        assert!(is_cuda_available() && Loaded::find().is_some());
        let module = Module::compile(KERNELS, &CompileOptions::default()).unwrap();
        Self { module, stream: Stream::new(0).unwrap() }
    }

    fn launch(&self, name: &str, args: &[KernelArg], concurrent: bool) {
        let kernel = self.module.kernel(name).unwrap();
        assert!(!kernel.is_concurrent());
        let config = LaunchConfig::for_threads(SIZE as u64, 256).unwrap();
        // SAFETY: the stand-in's kernels take these arguments, and the tests say when the CPU touches memory.
        unsafe {
            if concurrent {
                kernel.launch_concurrent(&config, &self.stream, args)
            } else {
                kernel.launch(&config, &self.stream, args)
            }
        }
        .unwrap();
    }
}

macro_rules! in_child {
    ($name:ident, |$gpu:ident| $body:block) => {
        #[test]
        fn $name() {
            Build::new().in_child(stringify!($name), &[("FAKE_CUDA_CONCURRENT", "0")], || {
                let $gpu = Gpu::new();
                $body
            });
        }
    };
}

fn bytes(block: *mut u8, len: usize) -> &'static [u8] {
    // SAFETY: a live block of so many bytes.
    unsafe { std::slice::from_raw_parts(block, len) }
}

in_child!(a_launch_waits_so_that_the_cpu_may_read_at_once, |gpu| {
    let block = alloc::<StandardPolicy, B>(SIZE, 256);
    let started = Instant::now();
    gpu.launch("spin", &[KernelArg::U32(50)], false);
    assert!(started.elapsed() >= Duration::from_millis(45), "the launch did not wait");
    gpu.launch(
        "write_u8",
        &[KernelArg::Pointer(block as u64), KernelArg::U32(SIZE as u32), KernelArg::U8(7)],
        false,
    );
    assert!(bytes(block, SIZE).iter().all(|byte| *byte == 7));
    free::<StandardPolicy, B>(block).unwrap();
});

in_child!(this_crate_touches_nothing_by_the_cpu_while_a_kernel_runs, |gpu| {
    let kept = alloc::<StandardPolicy, B>(SIZE, 256);
    // SAFETY: a live block; no kernel runs yet.
    unsafe { kept.write_bytes(5, SIZE) };
    let secure = alloc::<SecurePolicy, B>(SIZE, 256);
    let hardened = alloc::<HardenedPolicy, B>(SIZE, 256);
    let started = Instant::now();
    gpu.launch("spin", &[KernelArg::U32(300)], true);
    assert!(started.elapsed() < Duration::from_millis(200), "it waited");
    // Zeroing, poison, redzones and the copy of a realloc: each would fault here if the CPU did it.
    let zeroed = AllocOptions { zeroed: true, ..AllocOptions::default() };
    let fresh = alloc_with::<StandardPolicy, B>(100, 16, &zeroed);
    let large = alloc_with::<StandardPolicy, B>(3 << 20, 256, &zeroed);
    assert!(!fresh.is_null() && !large.is_null());
    let other = alloc::<HardenedPolicy, B>(64, 16);
    free::<SecurePolicy, B>(secure).unwrap();
    free::<HardenedPolicy, B>(hardened).unwrap();
    free::<HardenedPolicy, B>(other).unwrap();
    // SAFETY: the block is live and the caller's.
    let grown = unsafe { thread_realloc::<StandardPolicy, B>(kept, 5 * SIZE, 256) };
    assert!(!grown.is_null());
    // Pinned memory may be touched at any time.
    let host =
        AllocOptions { place: Place { device: 0, placement: Placement::Host }, ..AllocOptions::default() };
    let mailbox = alloc_with::<StandardPolicy, B>(64, 16, &host);
    // SAFETY: a live block.
    unsafe { mailbox.write_bytes(1, 64) };
    assert!(!gpu.stream.query().unwrap(), "the kernel ended before the test");
    gpu.stream.synchronize().unwrap();
    assert!(bytes(grown, SIZE).iter().all(|byte| *byte == 5));
    assert!(bytes(fresh, 100).iter().chain(bytes(large, 3 << 20)).all(|byte| *byte == 0));
    for block in [grown, fresh, large, mailbox] {
        free::<StandardPolicy, B>(block).unwrap();
    }
});

in_child!(
    pinned_memory_is_filled_and_copied_by_the_cpu_so_that_no_other_thread_loses_managed_memory,
    |_gpu| {
        let place = Place { device: 0, placement: Placement::Host };
        let host = AllocOptions { place, ..AllocOptions::default() };
        let work =
            || ["cuMemsetD8Async", "cuMemcpyAsync"].map(|entry| Loaded::find().unwrap().counter(entry));
        let before = work();
        for zeroed in [false, true] {
            let block = alloc_with::<SecurePolicy, B>(1 << 20, 256, &AllocOptions { zeroed, ..host });
            assert!(bytes(block, 1 << 20).iter().all(|byte| *byte == 0));
            // SAFETY: a live block of so many bytes; then it is not used any more.
            let grown = unsafe {
                block.write_bytes(7, 1 << 20);
                thread_realloc::<SecurePolicy, B>(block, 3 << 20, 256)
            };
            assert!(bytes(grown, 1 << 20).iter().all(|byte| *byte == 7));
            assert!(bytes(grown, 3 << 20)[1 << 20..].iter().all(|byte| *byte == 0));
            free::<SecurePolicy, B>(grown).unwrap();
        }
        assert_eq!(work(), before);
    }
);

#[test]
fn a_decay_thread_takes_no_memory_from_the_cpu() {
    let slowly = [("FAKE_CUDA_CONCURRENT", "0"), ("FAKE_CUDA_LAG_US", "20000")];
    Build::new().in_child("a_decay_thread_takes_no_memory_from_the_cpu", &slowly, || {
        let gpu = Gpu::new();
        let managed = AllocOptions {
            place: Place { device: 0, placement: Placement::ReadMostly },
            ..AllocOptions::default()
        };
        let kept = alloc_with::<SecurePolicy, B>(SIZE, 256, &managed);
        // As much as closes a batch: it waits for nothing but to be taken up, which has the device poison it.
        let gone = alloc_with::<SecurePolicy, B>(3 << 20, 256, &managed);
        assert!(!kept.is_null() && !gone.is_null());
        gpu.launch(
            "write_u8",
            &[KernelArg::Pointer(gone as u64), KernelArg::U32(SIZE as u32), KernelArg::U8(7)],
            false,
        );
        free::<SecurePolicy, B>(gone).unwrap();
        let fills = || Loaded::find().unwrap().counter("cuMemsetD8Async");
        let (before, started) = (fills(), Instant::now());
        let fading = DecayThread::start::<B>(Duration::from_millis(5)).unwrap();
        while started.elapsed() < Duration::from_millis(300) {
            // SAFETY: a live block that nobody else uses.
            unsafe { kept.write_volatile(kept.read_volatile().wrapping_add(1)) };
        }
        drop(fading);
        assert_eq!((fills() - before, pending_stats().blocks), (0, 1));
        decay::<B>();
        assert_eq!((fills() - before, pending_stats().blocks), (1, 0));
        free::<SecurePolicy, B>(kept).unwrap();
    });
}
