//! Allocating and freeing alone: by size, by where the pages are, by threads, and at random.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use unimalloc::cuda::{KernelArg, Stream};
use unimalloc::Placement;
use unimalloc_bench::peer::{Mimalloc, Peer};
use unimalloc_bench::random::Random;

use crate::measure::{median, nanoseconds};
use crate::peers::{alloc, alloc_in, free, give_all_back, limit, reserved, ALONE, BESIDE_OTHERS, KIB, MIB};
use crate::results::Workload;
use crate::Bench;

const ROUND: Duration = Duration::from_millis(3);
const SLOW_ROUND: Duration = Duration::from_millis(20);

pub fn name(size: usize) -> String {
    match size {
        size if size >= MIB => format!("{} MiB", size / MIB),
        size if size >= KIB => format!("{} KiB", size / KIB),
        size => format!("{size} B"),
    }
}

/// One block at a time, untouched.
pub fn by_size(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = [
        "unimalloc",
        "unimalloc 'device'",
        "CUDA 13 managed pool",
        "cuMemAllocAsync",
        "cuMemAllocManaged",
        "mimalloc, host memory",
    ];
    let mut table = Workload::new("pair", "Allocate and free one block", "ns", &columns);
    let (driver, stream) = (&bench.gpu.driver, bench.gpu.stream.handle());
    let pool = driver.managed_pool(ALONE).map_err(|error| table.note(error)).ok();
    let mut worst = (0.0_f64, 0.0_f64);
    for size in [256, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB] {
        let ours = nanoseconds(ROUND, || free(alloc(size)));
        let device = nanoseconds(ROUND, || free(alloc_in(size, Placement::Device)));
        let pooled = pool.as_ref().map(|pool| {
            nanoseconds(ROUND, || driver.free_async(black_box(pool.alloc(size, stream)), stream))
        });
        driver.synchronize(stream);
        let plain =
            nanoseconds(ROUND, || driver.free_async(black_box(driver.device_async(size, stream)), stream));
        driver.synchronize(stream);
        let managed = nanoseconds(SLOW_ROUND, || driver.free(black_box(driver.managed(size))));
        // SAFETY: the block is freed at once, by the same peer.
        let mimalloc =
            nanoseconds(ROUND, || unsafe { Mimalloc::free(black_box(Mimalloc::alloc(size)), size) });
        worst = (worst.0.max(ours / pooled.unwrap_or(f64::NAN)), worst.1.max(ours / managed));
        if size == 4 * KIB {
            let results = &mut bench.results;
            results.at_most(
                "pair of 4 KiB against the managed pool",
                ours / pooled.unwrap_or(f64::NAN),
                0.01,
                0.005,
            );
            results.at_most(
                "pair of 4 KiB against cuMemAllocManaged + cuMemFree",
                ours / managed,
                0.0004,
                0.0002,
            );
        }
        table
            .row(name(size), &[Some(ours), Some(device), pooled, Some(plain), Some(managed), Some(mimalloc)]);
    }
    table.note(format!(
        "largest ratio over all sizes: {:.5} of the managed pool, {:.6} of the driver",
        worst.0, worst.1
    ));
    Ok(vec![table])
}

/// The same where the blocks' pages are on one side or the other.
pub fn resident(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["untouched", "on the CPU", "on the GPU", "GPU / CPU"];
    let mut table =
        Workload::new("resident", "Allocate and free blocks by where their pages are", "ns", &columns);
    for (size, count) in [(KIB, 2048), (4 * KIB, 1024), (64 * KIB, 256), (MIB, 32), (4 * MIB, 16)] {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        let work = |blocks: &mut Vec<*mut u8>| {
            blocks.extend((0..count).map(|_| alloc(size)));
            blocks.drain(..).for_each(free);
        };
        give_all_back();
        for round in 0..16 {
            for (side, times) in times.iter_mut().enumerate() {
                if side == 0 && round > 0 {
                    continue; // fresh memory is there once
                }
                // The working set is the blocks that the timed rounds take: the last freed come first.
                let mut blocks: Vec<_> = (0..count).map(|_| alloc(size)).collect();
                for block in &blocks {
                    match side {
                        // SAFETY: live blocks of `size` bytes.
                        1 => unsafe { block.write_bytes(1, size) },
                        // A plain number, not a pointer: the blocks are not marked, so that they are free at once below.
                        2 => bench.kernels.fill(&bench.gpu.stream, KernelArg::U64(*block as u64), size),
                        _ => {}
                    }
                }
                bench.gpu.stream.synchronize().map_err(|error| error.to_string())?;
                blocks.drain(..).for_each(free);
                let repeats = (40_000 / count).max(1);
                work(&mut blocks);
                let start = Instant::now();
                (0..repeats).for_each(|_| work(&mut blocks));
                times.push(start.elapsed().as_secs_f64() * 1e9 / (repeats * count) as f64);
            }
        }
        let [fresh, cpu, gpu] = times.map(|mut times| median(&mut times));
        table
            .row(format!("{count} of {}", name(size)), &[Some(fresh), Some(cpu), Some(gpu), Some(gpu / cpu)]);
        bench.results.at_most(
            format!("pair of {}: GPU-resident against CPU-resident", name(size)),
            gpu / cpu,
            1.05,
            1.0,
        );
    }
    table.note(
        "GPU / CPU is a ratio. Blocks below 64 KiB prefer the host: a kernel's touch does not move them.",
    );
    Ok(vec![table])
}

/// Keeps the calling thread on one of the processors it may use, counted round and round; where that cannot be asked for, it
/// stays where the system puts it.
#[cfg(target_os = "linux")]
fn stay_on(number: usize) {
    // SAFETY: a zeroed set is an empty one; the calls read and write sets of the size given.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed) != 0 {
            return;
        }
        let processors = (0..libc::CPU_SETSIZE as usize).filter(|at| libc::CPU_ISSET(*at, &allowed));
        let processors: Vec<_> = processors.collect();
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processors[number % processors.len()], &mut one);
        let _ = libc::sched_setaffinity(0, size_of_val(&one), &one);
    }
}

#[cfg(not(target_os = "linux"))]
fn stay_on(_: usize) {}

/// Runs `work` on so many threads at once for a while, the first of them on processor `first`; calls per microsecond of all
/// together.
fn throughput<F: Fn(usize) -> u64 + Sync>(threads: usize, first: usize, work: F) -> f64 {
    let barrier = Barrier::new(threads);
    let rates: f64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|index| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    stay_on(first + index);
                    work(index); // warm
                    barrier.wait();
                    let start = Instant::now();
                    let mut calls = 0;
                    while start.elapsed() < Duration::from_millis(60) {
                        calls += work(index);
                    }
                    calls as f64 / start.elapsed().as_secs_f64() / 1e6
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(f64::NAN)).sum()
    });
    rates
}

/// Several threads at once.
pub fn threads(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["unimalloc", "CUDA 13 managed pool", "cuMemAllocManaged", "spin loop"];
    let mut table =
        Workload::new("threads", "Pairs of 4 KiB by all threads together", "pairs per µs", &columns);
    let driver = &bench.gpu.driver;
    let pool = driver.managed_pool(256 * MIB).map_err(|error| table.note(error)).ok();
    let streams: Vec<_> =
        (0..16).map(|_| Stream::new(0)).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    let spin = |_| {
        let mut random = Random(1);
        for _ in 0..2000 {
            black_box(random.bits());
        }
        1
    };
    let pairs = |_| {
        for _ in 0..2000 {
            free(alloc(4 * KIB));
        }
        2000
    };
    let mut alone = None;
    for count in [1, 2, 4, 8, 16] {
        let (mut ours, mut spins, mut quotients) = (Vec::new(), Vec::new(), Vec::new());
        // One processor is not as fast as the next, nor as it was a second ago: both run on the same ones, one after the other.
        for round in 0..9 {
            ours.push(throughput(count, 2 * round, pairs));
            spins.push(throughput(count, 2 * round, spin));
            quotients.push(ours[round] / spins[round]);
        }
        let (ours, spins, quotient) = (median(&mut ours), median(&mut spins), median(&mut quotients));
        let alone = *alone.get_or_insert(quotient);
        let pooled = pool.as_ref().map(|pool| {
            throughput(count, 0, |index| {
                driver.enter();
                let stream = streams[index].handle();
                for _ in 0..100 {
                    driver.free_async(black_box(pool.alloc(4 * KIB, stream)), stream);
                }
                driver.synchronize(stream);
                100
            })
        });
        let managed = throughput(count, 0, |_| {
            driver.enter();
            for _ in 0..20 {
                driver.free(black_box(driver.managed(4 * KIB)));
            }
            20
        });
        table.row(format!("{count} threads"), &[Some(ours), pooled, Some(managed), Some(spins)]);
        if count == 16 {
            bench.results.at_least(
                "16 threads: throughput of the pair, by a spin loop's scaling",
                quotient / alone,
                0.9,
                0.98,
            );
        }
    }
    table.note(
        "spin loop: rounds of arithmetic alone, on the same processors; what the machine itself gives more threads",
    );
    Ok(vec![table])
}

/// Replaces random ones of 1,000 live blocks; nanoseconds of a free and an allocation.
fn replace<T: Copy>(pairs: usize, mut alloc: impl FnMut(usize) -> T, mut free: impl FnMut(T)) -> f64 {
    const LIVE: usize = 1000;
    let mut random = Random(42);
    let mut size = move || random.within(KIB, MIB);
    let mut at = Random(7);
    let mut live: Vec<T> = (0..LIVE).map(|_| alloc(size())).collect();
    let mut times: Vec<_> = (0..5)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..pairs {
                let slot = &mut live[at.below(LIVE)];
                free(*slot);
                *slot = alloc(size());
            }
            start.elapsed().as_secs_f64() * 1e9 / pairs as f64
        })
        .collect();
    live.into_iter().for_each(free);
    median(&mut times)
}

/// RMM's workload: random sizes from 1 KiB to 1 MiB, 1,000 blocks live, about 512 MiB.
pub fn random_sizes(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["unimalloc", "CUDA 13 managed pool", "cuMemAllocAsync", "cuMemAllocManaged"];
    let mut table =
        Workload::new("random", "Replace one of 1,000 live blocks of 1 KiB to 1 MiB", "ns", &columns);
    let (driver, stream) = (&bench.gpu.driver, bench.gpu.stream.handle());
    give_all_back();
    limit(ALONE);
    let ours = replace(20_000, alloc, free);
    let held = reserved();
    give_all_back();
    limit(BESIDE_OTHERS);
    let pool = driver.managed_pool(ALONE).map_err(|error| table.note(error)).ok();
    let pooled = pool.as_ref().map(|pool| {
        let time = replace(2000, |size| pool.alloc(size, stream), |block| driver.free_async(block, stream));
        driver.synchronize(stream);
        table.note(format!("the managed pool held {} MiB at most", pool.reserved_high() >> 20));
        time
    });
    drop(pool);
    let plain =
        replace(2000, |size| driver.device_async(size, stream), |block| driver.free_async(block, stream));
    driver.synchronize(stream);
    let managed = replace(200, |size| driver.managed(size), |block| driver.free(block));
    table.note(format!("unimalloc held {} MiB for about 512 MiB live", held >> 20));
    table.row("1,000 live", &[Some(ours), pooled, Some(plain), Some(managed)]);
    Ok(vec![table])
}
