//! Several devices, on real ones. Run with `--ignored`; where there are fewer than two, each test says so.
#![cfg(target_os = "linux")]

#[path = "cuda_gpu_support/mod.rs"]
mod support;

use support::*;
use unimalloc::cuda::{
    self, CompileOptions, CudaErrorKind, KernelArg, LaunchConfig, Module, PrefetchTo, Stream,
};
use unimalloc::{
    alloc_on_stream, alloc_with, last_error, pending_stats, stats, trim, AllocError, AllocOptions, Arena,
    CudaUnifiedBackend, Place, Placement, StandardPolicy,
};

/// Kernels that the stand-in driver has as well, so that these tests also run over two of its devices.
const SOURCE: &str = r#"
extern "C" __global__ void fill_f32(float* p, unsigned n, float value) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = value;
}
extern "C" __global__ void vector_add(const float* a, const float* b, float* c, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void spin(unsigned ms) {
    long long end = clock64() + ms * 1980000LL;
    while (clock64() < end) {}
}
"#;

/// One of two devices.
struct One {
    index: u16,
    module: Module,
    stream: Stream,
}

impl One {
    fn new(index: u16) -> Self {
        let module = Module::compile(SOURCE, &CompileOptions::for_device(index).name("devices.cu")).unwrap();
        Self { index, module, stream: Stream::new(index).unwrap() }
    }

    fn options(&self, placement: Placement) -> AllocOptions {
        AllocOptions { place: Place { device: self.index, placement }, ..AllocOptions::default() }
    }

    fn alloc(&self, size: usize, placement: Placement) -> *mut u8 {
        let block = alloc_with::<StandardPolicy, B>(size, 256, &self.options(placement));
        assert!(!block.is_null(), "{size} bytes on device {}: {:?}", self.index, last_error());
        block
    }

    fn run(&self, kernel: &str, threads: usize, args: &[KernelArg]) {
        let config = LaunchConfig::for_threads(threads as u64, 256).unwrap();
        let kernel = self.module.kernel(kernel).unwrap();
        // SAFETY: each test passes what the kernel takes, and frees blocks through the allocator only.
        unsafe { kernel.launch(&config, &self.stream, args) }.unwrap();
    }

    fn set(&self, block: *mut u8, bytes: usize, value: f32) {
        let floats = bytes / 4;
        self.run("fill_f32", floats, &[at(block), KernelArg::U32(floats as u32), KernelArg::F32(value)]);
    }

    /// Writes the block after `ms`.
    fn late_set(&self, block: *mut u8, bytes: usize, value: f32, ms: u32) {
        self.run("spin", 1, &[KernelArg::U32(ms)]);
        self.set(block, bytes, value);
    }
}

fn all_are(block: *mut u8, bytes: usize, value: f32) -> bool {
    read(block, bytes).iter().all(|word| f32::from_bits(*word) == value)
}

/// Both devices, if there are two; and the lock and the ceiling that the tests have in common.
fn two(test: &str) -> Option<(Alone, One, One)> {
    let count = cuda::devices().unwrap().len();
    if count < 2 {
        println!("skipped: {test} needs two devices, and there is {count}");
        return None;
    }
    Some((Alone::new(), One::new(0), One::new(1)))
}

#[test]
#[ignore = "needs two GPUs"]
fn each_device_has_blocks_of_its_own_in_every_placement() {
    let Some((_alone, a, b)) = two("each_device_has_blocks_of_its_own_in_every_placement") else { return };
    let devices = cuda::devices().unwrap();
    assert!(devices.iter().enumerate().all(|(at, device)| usize::from(device.index) == at));
    for placement in [Placement::Auto, Placement::Host, Placement::Device, Placement::ReadMostly] {
        for size in [4 * KIB, MIB, 20 * MIB] {
            let blocks = [a.alloc(size, placement), b.alloc(size, placement)];
            for (one, block) in [&a, &b].into_iter().zip(blocks) {
                one.set(block, size, 10.0 + f32::from(one.index));
            }
            for (one, block) in [&a, &b].into_iter().zip(blocks) {
                one.stream.synchronize().unwrap();
                let value = 10.0 + f32::from(one.index);
                assert!(all_are(block, size, value), "{placement:?} {size}");
            }
            // Blocks of two devices never share a segment.
            if size < 2 * MIB {
                assert!(
                    (blocks[0] as usize).abs_diff(blocks[1] as usize) >= 2 * MIB - size,
                    "{placement:?} {size}"
                );
            }
            blocks.into_iter().for_each(free);
        }
    }
    take_up();
}

#[test]
#[ignore = "needs two GPUs"]
fn device_blocks_are_on_their_own_device_and_the_other_one_reads_them() {
    let Some((_alone, a, b)) = two("device_blocks_are_on_their_own_device_and_the_other_one_reads_them")
    else {
        return;
    };
    trim::<B>(0); // fresh memory, which nobody has touched
    let size = 8 * MIB;
    let (from, to) = (a.alloc(size, Placement::Device), b.alloc(size, Placement::Device));
    assert_eq!((present(from, size).0, present(to, size).0), (0, 0), "backed on the host");
    a.set(from, size, 3.5);
    // The other device's stream comes after the first one's work by an event.
    b.stream.wait(&a.stream.record().unwrap()).unwrap();
    let count = KernelArg::U32((size / 4) as u32);
    b.run("vector_add", size / 4, &[at(from), at(from), at(to), count]);
    // Both blocks wait for both devices: freed and taken again they belong to nobody's kernel.
    free(from);
    b.stream.synchronize().unwrap();
    assert!(all_are(to, size, 7.0));
    // SAFETY: a live block of so many bytes.
    unsafe { b.stream.prefetch(to, size, PrefetchTo::Device) }.unwrap();
    free(to);
    take_up();
}

#[test]
#[ignore = "needs two GPUs"]
fn a_block_that_both_devices_use_waits_for_both() {
    let Some((_alone, a, b)) = two("a_block_that_both_devices_use_waits_for_both") else { return };
    for (slow, fast) in [(&a, &b), (&b, &a)] {
        let block = a.alloc(4 * KIB, Placement::Auto);
        write(block, 4 * KIB, 0);
        fast.set(block, 4 * KIB, 1.0);
        fast.stream.synchronize().unwrap();
        slow.late_set(block, 4 * KIB, 2.0, 60);
        free(block);
        let others: Vec<_> = (0..600).map(|_| a.alloc(4 * KIB, Placement::Auto)).collect();
        assert!(!others.contains(&block), "handed out under the kernel of device {}", slow.index);
        assert!(!slow.stream.query().unwrap(), "the kernel ended before the test");
        slow.stream.synchronize().unwrap();
        others.into_iter().for_each(free);
        take_up();
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn a_stream_has_back_only_blocks_of_its_own_device() {
    let Some((_alone, a, b)) = two("a_stream_has_back_only_blocks_of_its_own_device") else { return };
    let on = |one: &One| {
        let options = one.options(Placement::Device);
        alloc_on_stream::<StandardPolicy, B>(MIB, 256, &options, &one.stream)
    };
    let used = on(&a);
    a.late_set(used, KIB, 1.0, 20);
    free(used);
    let other = on(&b);
    assert_ne!(other, used);
    assert_eq!(on(&a), used, "the stream that used it may have it back at once");
    [used, other].into_iter().for_each(free);
    a.stream.synchronize().unwrap();
    take_up();
    assert_eq!(pending_stats().blocks, 0);
}

#[test]
#[ignore = "needs two GPUs"]
fn a_kernel_and_a_stream_of_two_devices_are_refused_with_the_next_step() {
    let Some((_alone, a, b)) = two("a_kernel_and_a_stream_of_two_devices_are_refused_with_the_next_step")
    else {
        return;
    };
    let block = a.alloc(4 * KIB, Placement::Auto);
    let config = LaunchConfig::for_threads(1024, 256).unwrap();
    let kernel = a.module.kernel("fill_f32").unwrap();
    // SAFETY: the arguments are what the kernel takes.
    let refused =
        unsafe { kernel.launch(&config, &b.stream, &[at(block), KernelArg::U32(1024), KernelArg::F32(1.0)]) };
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
    assert!(error.to_string().contains("compile it for that device"), "{error}");
    free(block);
    let none =
        AllocOptions { place: Place { device: 99, placement: Placement::Auto }, ..AllocOptions::default() };
    assert!(alloc_with::<StandardPolicy, B>(4 * KIB, 256, &none).is_null());
    assert_eq!(last_error(), Some(AllocError::NoDevice));
}

#[test]
#[ignore = "needs two GPUs"]
fn one_budget_holds_for_both_devices_together() {
    let Some((_alone, a, b)) = two("one_budget_holds_for_both_devices_together") else { return };
    trim::<B>(0);
    CudaUnifiedBackend::set_limit(Some((128 * MIB) as u64));
    let (first, second) = (a.alloc(64 * MIB, Placement::Auto), b.alloc(40 * MIB, Placement::Auto));
    for one in [&a, &b] {
        let refused = alloc_with::<StandardPolicy, B>(64 * MIB, 256, &one.options(Placement::Auto));
        assert!(refused.is_null(), "device {}", one.index);
        assert_eq!(last_error(), Some(AllocError::Budget));
    }
    assert!(stats::<B>().reserved_bytes <= 128 * MIB);
    free(first);
    // What one device's pool caches is given back for the other.
    let third = b.alloc(64 * MIB, Placement::Auto);
    [second, third].into_iter().for_each(free);
    CudaUnifiedBackend::set_limit(Some(LIMIT));
    trim::<B>(0);
}

#[test]
#[ignore = "needs two GPUs"]
fn an_arena_serves_its_device() {
    let Some((_alone, _, b)) = two("an_arena_serves_its_device") else { return };
    let arena = Arena::<B>::new().device(1).placement(Placement::Device);
    let block = arena.alloc(MIB, 256);
    assert!(!block.is_null(), "{:?}", last_error());
    b.set(block, MIB, 3.0);
    b.stream.synchronize().unwrap();
    assert!(all_are(block, MIB, 3.0));
    // SAFETY: the block is live and of the arena.
    unsafe { arena.free(block) }.unwrap();
    take_up();
}
