//! Kernels, and allocation around their launches.

use std::time::{Duration, Instant};

use unimalloc::cuda::{CompileOptions, Kernel, KernelArg, LaunchConfig, Module, Stream};
use unimalloc::Placement;

use crate::measure::{in_turns, median, microseconds};
use crate::pairs::name;
use crate::peers::{alloc, alloc_on, free, give_all_back, KIB, MIB};
use crate::results::Workload;
use crate::Bench;

const SOURCE: &str = r#"
extern "C" __global__ void fill(float* p, unsigned long long n, float v) {
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v;
}
extern "C" __global__ void add(float* p, unsigned long long n, float v) {
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += v;
}
extern "C" __global__ void spin(int* p, long long cycles) {
    long long end = clock64() + cycles;
    while (clock64() < end) {}
    *p = 1;
}
"#;

pub struct Kernels {
    fill: Kernel,
    add: Kernel,
    spin: Kernel,
}

const THREADS: u32 = 256;

impl Kernels {
    pub fn new() -> Result<Self, String> {
        let module = Module::compile(SOURCE, &CompileOptions::for_device(0).name("gpu.cu"))
            .map_err(|error| error.to_string())?;
        let kernel = |name| module.kernel(name).map_err(|error| error.to_string());
        Ok(Self { fill: kernel("fill")?, add: kernel("add")?, spin: kernel("spin")? })
    }

    fn over(kernel: &Kernel, stream: &Stream, block: KernelArg<'_>, bytes: usize, value: f32) {
        let floats = (bytes / 4) as u64;
        let config = LaunchConfig::for_threads(floats, THREADS).expect("a block is not empty");
        // SAFETY: the kernel stays inside the block, which is freed through its allocator only.
        unsafe { kernel.launch(&config, stream, &[block, KernelArg::U64(floats), KernelArg::F32(value)]) }
            .expect("a launch");
    }

    /// Writes floats over all bytes.
    pub fn fill(&self, stream: &Stream, block: KernelArg<'_>, bytes: usize) {
        Self::over(&self.fill, stream, block, bytes, 1.0);
    }

    /// Reads and writes floats over all bytes.
    pub fn add(&self, stream: &Stream, block: KernelArg<'_>, bytes: usize) {
        Self::over(&self.add, stream, block, bytes, 1.0);
    }

    /// Keeps the stream busy, then writes 1 to the block.
    pub fn spin(&self, stream: &Stream, block: KernelArg<'_>, cycles: i64) {
        let config = LaunchConfig { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0 };
        // SAFETY: as above.
        unsafe { self.spin.launch(&config, stream, &[block, KernelArg::I64(cycles)]) }.expect("a launch");
    }
}

pub fn pointer(block: *mut u8) -> KernelArg<'static> {
    KernelArg::Pointer(block as u64)
}

/// What a temporary costs: a block allocated, used by one kernel and freed, against a block that is kept.
pub fn alloc_launch_free(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    const LAUNCHES: usize = 1000;
    // Without its stream's name a temporary is another block each time until a batch has passed: the GPU's and the
    // processor's caches then see as many blocks as here, allocator or not.
    const IN_TURN: usize = 64;
    let columns = [
        "kept block",
        "64 kept blocks in turn",
        "unimalloc",
        "on the stream",
        "CUDA 13 managed pool",
        "cuMemAllocManaged",
    ];
    let mut table =
        Workload::new("launch", "Allocate, launch a kernel on it, free", "µs per launch", &columns);
    let Bench { gpu, kernels, results } = bench;
    let stream = &gpu.stream;
    let driver = &gpu.driver;
    let pool = driver.managed_pool(256 * MIB).map_err(|error| table.note(error)).ok();
    for (size, touched) in [(4 * KIB, 4 * KIB), (256 * KIB, 4 * KIB), (MIB, 4 * KIB)] {
        let end = || stream.synchronize().expect("a wait");
        let kept = alloc(size);
        let mut on_kept = || {
            (0..LAUNCHES).for_each(|_| kernels.fill(stream, pointer(kept), touched));
            end();
        };
        let several: Vec<_> = (0..IN_TURN).map(|_| alloc(size)).collect();
        let mut in_turn = || {
            let blocks = several.iter().cycle().take(LAUNCHES);
            blocks.for_each(|block| kernels.fill(stream, pointer(*block), touched));
            end();
        };
        let mut fresh = || {
            for _ in 0..LAUNCHES {
                let block = alloc(size);
                kernels.fill(stream, pointer(block), touched);
                free(block);
            }
            end();
        };
        let mut ordered = || {
            for _ in 0..LAUNCHES {
                let block = alloc_on(size, Placement::Device, stream);
                kernels.fill(stream, pointer(block), touched);
                free(block);
            }
            end();
        };
        let mut pooled = || {
            let Some(pool) = &pool else { return };
            for _ in 0..LAUNCHES {
                let block = pool.alloc(size, stream.handle());
                kernels.fill(stream, KernelArg::U64(block), touched);
                driver.free_async(block, stream.handle());
            }
            end();
        };
        let (mut ratios, mut ordered_ratios) = (Vec::new(), Vec::new());
        let mut times = vec![Vec::new(); 5];
        for round in 0..18 {
            let turn = in_turns(1, &mut [&mut on_kept, &mut in_turn, &mut fresh, &mut ordered, &mut pooled]);
            if round < 3 {
                continue; // first touches
            }
            ratios.push(turn[2] / turn[0]);
            ordered_ratios.push(turn[3] / turn[0]);
            times.iter_mut().zip(&turn).for_each(|(times, time)| times.push(time / LAUNCHES as f64));
        }
        let mut values: Vec<_> = times.iter_mut().map(|times| Some(median(times))).collect();
        if pool.is_none() {
            values[4] = None;
        }
        let few = 50;
        let driven = microseconds(
            5,
            || (),
            |()| {
                for _ in 0..few {
                    let block = driver.managed(size);
                    kernels.fill(stream, KernelArg::U64(block), touched);
                    driver.free(block);
                }
                end();
            },
        );
        values.push(Some(driven / f64::from(few)));
        table.row(name(size), &values);
        let what = format!("alloc + launch + free of {} against a launch on a kept block", name(size));
        results.at_most(&what, median(&mut ratios), 1.1, 1.02);
        results.at_most(what + ", on the stream", median(&mut ordered_ratios), 1.1, 1.02);
        free(kept);
        several.into_iter().for_each(free);
    }
    table.note("the kernel writes 4 KiB; 1,000 launches and one wait");
    drop(pool);
    Ok(vec![table])
}

/// What a free costs while a kernel of 10 ms runs, and that the block is let alone until its kernel ends.
pub fn free_while_busy(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    const CYCLES: i64 = 18_000_000;
    let columns = ["unimalloc, used", "unimalloc, unused", "cuMemFree, unused", "kernel"];
    let mut table = Workload::new("busy", "Free a block while a kernel of 10 ms runs", "µs", &columns);
    let Bench { gpu, kernels, results } = bench;
    let mut times = vec![Vec::new(); 4];
    let mut reused = 0;
    for _ in 0..7 {
        give_all_back();
        let (used, unused) = (alloc(4 * KIB), alloc(4 * KIB));
        let theirs = gpu.driver.managed(64 * KIB);
        // SAFETY: a live block; the kernel writes it at its end.
        unsafe { used.cast::<u32>().write(7) };
        let start = Instant::now();
        kernels.spin(&gpu.stream, pointer(used), CYCLES);
        let clock = |time: &mut Vec<f64>, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            time.push(start.elapsed().as_secs_f64() * 1e6);
        };
        clock(&mut times[0], &mut || free(used));
        clock(&mut times[1], &mut || free(unused));
        // Whoever got the block now would see the kernel write to it.
        let others: Vec<_> = (0..500).map(|_| alloc(4 * KIB)).collect();
        reused += usize::from(others.contains(&used) && !gpu.stream.query().unwrap_or(true));
        assert!(!gpu.stream.query().unwrap_or(true), "the kernel ended before the free was measured");
        clock(&mut times[2], &mut || gpu.driver.free(theirs));
        gpu.stream.synchronize().map_err(|error| error.to_string())?;
        times[3].push(start.elapsed().as_secs_f64() * 1e6);
        others.into_iter().for_each(free);
    }
    let values: Vec<_> = times.iter_mut().map(|times| median(times)).collect();
    assert_eq!(reused, 0, "a block was handed out under a running kernel");
    results.at_most("free of a block that a 10 ms kernel uses, µs", values[0], 10.0, 2.0);
    table.row("4 KiB", &values.into_iter().map(Some).collect::<Vec<_>>());
    table.note("cuMemFree waits for the device; kernel: from launch to the end of the wait");
    std::thread::sleep(Duration::from_millis(1));
    Ok(vec![table])
}
