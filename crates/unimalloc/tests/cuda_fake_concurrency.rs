//! Devices where the CPU may touch no managed memory while a kernel runs: the stand-in driver takes the memory away from the
//! CPU meanwhile, so that a touch is a segmentation fault. Each test is a process of its own.
#![cfg(target_os = "linux")]

mod common;

use std::time::{Duration, Instant};

use common::{alloc, free};
use fake_cuda::{Build, Loaded};
use unimalloc::cuda::{CompileOptions, KernelArg, LaunchConfig, Module, Stream};
use unimalloc::{
    alloc_with, is_cuda_available, thread_realloc, AllocOptions, CudaUnifiedBackend, HardenedPolicy, Place,
    Placement, SecurePolicy, StandardPolicy,
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
