//! Workloads that touch what they allocate: where pages are decides what they cost.

use std::hint::black_box;
use std::time::Instant;

use unimalloc::cuda::{KernelArg, PrefetchTo};
use unimalloc::Placement;

use crate::kernels::pointer;
use crate::measure::{in_turns, median, microseconds};
use crate::peers::{alloc, alloc_in, alloc_on, free, give_all_back, KIB, MIB};
use crate::results::Workload;
use crate::Bench;

const PAGE: usize = 4 * KIB;
/// A block of this size has no advice under `'auto'`, and a page of its own.
const ADVICE_FREE: usize = 64 * KIB;

/// Writes 4 KiB, runs a kernel on it, and reads it back.
fn trip(bench: &Bench, block: *mut u8, arg: KernelArg<'_>) {
    // SAFETY: live blocks of at least a page, which no kernel uses now.
    unsafe { block.write_bytes(0, PAGE) };
    bench.kernels.add(&bench.gpu.stream, arg, PAGE);
    bench.gpu.stream.synchronize().expect("a wait");
    // SAFETY: as above.
    let floats = unsafe { std::slice::from_raw_parts(block.cast::<f32>(), PAGE / 4) };
    assert!(black_box(floats).iter().all(|value| *value == 1.0));
}

pub fn round_trip(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["block kept", "allocated each time"];
    let mut table = Workload::new("round-trip", "Write 4 KiB, run a kernel, read it back", "µs", &columns);
    let driver = &bench.gpu.driver;
    let mut measured = Vec::new();
    for (name, placement, size) in [
        ("'auto'", Placement::Auto, PAGE),
        ("'host'", Placement::Host, PAGE),
        ("'device'", Placement::Device, PAGE),
        ("no advice", Placement::Auto, ADVICE_FREE),
        ("'read-mostly'", Placement::ReadMostly, PAGE),
    ] {
        let kept = alloc_in(size, placement);
        let warm = 30;
        (0..warm).for_each(|_| trip(bench, kept, pointer(kept)));
        let on_kept = microseconds(300, || (), |()| trip(bench, kept, pointer(kept)));
        free(kept);
        let each = || {
            let block = alloc_in(size, placement);
            trip(bench, block, pointer(block));
            free(block);
        };
        (0..warm).for_each(|_| each());
        let each_time = microseconds(300, || (), |()| each());
        table.row(name, &[Some(on_kept), Some(each_time)]);
        measured.push((name, on_kept, each_time));
    }
    let theirs = driver.managed(PAGE);
    let arg = KernelArg::U64(theirs);
    let block = std::ptr::with_exposed_provenance_mut(theirs as usize);
    (0..30).for_each(|_| trip(bench, block, arg));
    let on_kept = microseconds(300, || (), |()| trip(bench, block, arg));
    driver.free(theirs);
    let each_time = microseconds(
        100,
        || (),
        |()| {
            let theirs = driver.managed(PAGE);
            trip(bench, std::ptr::with_exposed_provenance_mut(theirs as usize), KernelArg::U64(theirs));
            driver.free(theirs);
        },
    );
    table.row("cuMemAllocManaged", &[Some(on_kept), Some(each_time)]);
    let alone = alloc_in(PAGE, Placement::Device);
    let wait = || {
        bench.kernels.add(&bench.gpu.stream, pointer(alone), PAGE);
        bench.gpu.stream.synchronize().expect("a wait");
    };
    (0..30).for_each(|_| wait());
    let floor = microseconds(300, || (), |()| wait());
    free(alone);
    table.row("a kernel and its wait alone", &[Some(floor), None]);
    table.note("the driver pins a page on the host once it has gone back and forth some rounds: 'block kept' shows what comes after");
    for (name, on_kept, each_time) in measured.into_iter().take(2) {
        bench.results.at_most(format!("small round trip, {name}, block kept, µs"), on_kept, 15.0, 11.0);
        bench.results.at_most(
            format!("small round trip, {name}, allocated each time, µs"),
            each_time,
            15.0,
            11.0,
        );
    }
    Ok(vec![table])
}

/// 64 MiB for a kernel that writes all of it.
pub fn device_fill(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    const SIZE: usize = 64 * MIB;
    const ROUNDS: usize = 15;
    let columns = ["µs"];
    let mut table = Workload::new("device", "64 MiB: allocate and fill by a kernel", "µs", &columns);
    let Bench { gpu, kernels, results } = bench;
    let (stream, driver) = (&gpu.stream, &gpu.driver);
    let fill = |block: *mut u8| {
        kernels.fill(stream, pointer(block), SIZE);
        stream.synchronize().expect("a wait");
    };
    // SAFETY: live blocks of so many bytes that no kernel uses now.
    let host_writes = |block: *mut u8| unsafe { block.write_bytes(3, SIZE) };

    let cold = microseconds(5, give_all_back, |()| {
        let block = alloc_in(SIZE, Placement::Device);
        fill(block);
        free(block);
    });
    table.row("unimalloc 'device', cold", &[Some(cold)]);

    let kept = alloc_in(SIZE, Placement::Device);
    let spare = alloc_in(SIZE, Placement::Device);
    fill(kept);
    fill(spare);
    free(spare);
    let mut resident = || fill(kept);
    let (mut allocating, mut freeing) = (Vec::new(), Vec::new());
    let mut warm = || {
        let start = Instant::now();
        let block = alloc_in(SIZE, Placement::Device);
        allocating.push(start.elapsed().as_secs_f64() * 1e6);
        fill(block);
        let start = Instant::now();
        free(block);
        freeing.push(start.elapsed().as_secs_f64() * 1e6);
    };
    let mut ordered = || {
        let block = alloc_on(SIZE, Placement::Device, stream);
        fill(block);
        free(block);
    };
    let mut ratios = [Vec::new(), Vec::new()];
    let mut times = vec![Vec::new(); 3];
    for _ in 0..60 {
        let turn = in_turns(1, &mut [&mut resident, &mut warm, &mut ordered]);
        ratios[0].push(turn[1] / turn[0]);
        ratios[1].push(turn[2] / turn[0]);
        times.iter_mut().zip(&turn).for_each(|(times, time)| times.push(*time));
    }
    let names = ["a block kept on the GPU", "unimalloc 'device', warm", "unimalloc 'device', on the stream"];
    for (name, times) in names.iter().zip(&mut times) {
        table.row(*name, &[Some(median(times))]);
    }
    table.note(format!(
        "of the warm time, {:.2} µs are the allocation and {:.2} µs the free",
        median(&mut allocating),
        median(&mut freeing)
    ));
    let [warm, ordered] = ratios.map(|mut ratios| median(&mut ratios));
    free(kept);

    // One block, so that what the host wrote is what comes next.
    give_all_back();
    let written = |round: &mut dyn FnMut()| {
        microseconds(
            ROUNDS,
            || {
                let block = alloc_in(SIZE, Placement::Device);
                host_writes(block);
                free(block);
            },
            |()| round(),
        )
    };
    let settled = written(&mut || {
        let block = alloc_in(SIZE, Placement::Device);
        fill(block);
        free(block);
    });
    let settled_ordered = written(&mut || {
        let block = alloc_on(SIZE, Placement::Device, stream);
        fill(block);
        free(block);
    });
    table.row("'device', host wrote it all", &[Some(settled)]);
    table.row("'device', host wrote, on the stream", &[Some(settled_ordered)]);
    give_all_back();

    let fresh = microseconds(
        5,
        || (),
        |()| {
            let block = driver.managed(SIZE);
            kernels.fill(stream, KernelArg::U64(block), SIZE);
            stream.synchronize().expect("a wait");
            driver.free(block);
        },
    );
    table.row("cuMemAllocManaged, fresh", &[Some(fresh)]);
    let theirs = driver.managed(SIZE);
    let block = std::ptr::with_exposed_provenance_mut(theirs as usize);
    let migrated = microseconds(ROUNDS, || host_writes(block), |()| fill(block));
    driver.free(theirs);
    table.row("plain migration, host wrote it all", &[Some(migrated)]);
    match driver.managed_pool(256 * MIB) {
        Ok(pool) => {
            let round = || {
                let block = pool.alloc(SIZE, stream.handle());
                kernels.fill(stream, KernelArg::U64(block), SIZE);
                stream.synchronize().expect("a wait");
                driver.free_async(block, stream.handle());
            };
            round();
            let pooled = microseconds(ROUNDS, || (), |()| round());
            driver.synchronize(stream.handle());
            table.row("CUDA 13 managed pool, warm", &[Some(pooled)]);
            let pooled = microseconds(
                ROUNDS,
                || {
                    let theirs = pool.alloc(SIZE, stream.handle());
                    stream.synchronize().expect("a wait");
                    host_writes(std::ptr::with_exposed_provenance_mut(theirs as usize));
                    driver.free_async(theirs, stream.handle());
                    stream.synchronize().expect("a wait");
                },
                |()| round(),
            );
            driver.synchronize(stream.handle());
            table.row("CUDA 13 managed pool, host wrote", &[Some(pooled)]);
        }
        Err(error) => table.note(error),
    }
    let plain = microseconds(
        ROUNDS,
        || (),
        |()| {
            let block = driver.device_async(SIZE, stream.handle());
            kernels.fill(stream, KernelArg::U64(block), SIZE);
            stream.synchronize().expect("a wait");
            driver.free_async(block, stream.handle());
        },
    );
    driver.synchronize(stream.handle());
    table.row("cuMemAllocAsync, warm", &[Some(plain)]);

    results.at_most("64 MiB 'device', warm, against fill of resident memory", warm, 1.3, 1.05);
    results.at_most("64 MiB 'device', warm, on the stream, against the same", ordered, 1.3, 1.05);
    results.at_most(
        "64 MiB 'device' after the host wrote it, against plain migration",
        settled / migrated,
        0.1,
        1.0 / 15.0,
    );
    results.at_most("the same, on the stream", settled_ordered / migrated, 0.1, 1.0 / 15.0);
    table.note("times include the wait for the kernel; 'warm' blocks were last used by the GPU");
    Ok(vec![table])
}

/// The CPU writes one block and a kernel another, in turn.
pub fn neighbours(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["µs a round"];
    let mut table =
        Workload::new("neighbours", "The CPU writes block A, a kernel block B, in turn", "µs", &columns);
    let round = |a: *mut u8, b: *mut u8| {
        let one = || {
            // SAFETY: a live block of 1 KiB that no kernel uses.
            unsafe { a.write_bytes(1, KIB) };
            bench.kernels.fill(&bench.gpu.stream, pointer(b), KIB);
            bench.gpu.stream.synchronize().expect("a wait");
        };
        (0..30).for_each(|_| one());
        microseconds(300, || (), |()| one())
    };
    let page = alloc(ADVICE_FREE);
    table.row("no advice, one page", &[Some(round(page, page.wrapping_add(2 * KIB)))]);
    free(page);
    let (a, b) = (alloc(KIB), alloc(KIB));
    let same_page = a as usize / PAGE == b as usize / PAGE;
    table.row("'auto', neighbours of 1 KiB", &[Some(round(a, b))]);
    free(a);
    free(b);
    table.note(format!(
        "the two 'auto' blocks were on {} page",
        if same_page { "one" } else { "more than one" }
    ));
    let (a, b) = (alloc_in(KIB, Placement::Host), alloc_in(KIB, Placement::Device));
    table.row("'host' and 'device'", &[Some(round(a, b))]);
    free(a);
    free(b);
    Ok(vec![table])
}

/// What decides where small blocks go that name no placement.
pub fn small_blocks(bench: &mut Bench) -> Result<Vec<Workload>, String> {
    let columns = ["prefer the host", "no advice", "'device'"];
    let mut table = Workload::new("small", "Blocks of 16 KiB by who uses them", "µs", &columns);
    const SIZE: usize = 16 * KIB;
    const COUNT: usize = 64;
    let stream = &bench.gpu.stream;
    let wait = || stream.synchronize().expect("a wait");
    // Without advice: quarters of blocks that are too large for it.
    let sets: [Vec<*mut u8>; 3] = [
        (0..COUNT).map(|_| alloc_in(SIZE, Placement::Host)).collect(),
        (0..COUNT / 4)
            .flat_map(|_| {
                let block = alloc(ADVICE_FREE);
                (0..4).map(move |quarter| block.wrapping_add(quarter * SIZE))
            })
            .collect(),
        (0..COUNT).map(|_| alloc_in(SIZE, Placement::Device)).collect(),
    ];
    // SAFETY: live blocks of `SIZE` bytes that no kernel uses now.
    let cpu = |block: *mut u8| unsafe { block.write_bytes(1, SIZE) };
    let gpu = |block: *mut u8| bench.kernels.add(stream, pointer(block), SIZE);

    let each = |work: &dyn Fn(&[*mut u8]) -> f64| sets.each_ref().map(|set| Some(work(set)));
    let first =
        each(&|set| microseconds(1, || (), |()| set.iter().for_each(|block| cpu(*block))) / COUNT as f64);
    table.row("first write by the CPU", &first);
    let rows: [(&str, &dyn Fn(*mut u8)); 4] = [
        ("CPU alone", &cpu),
        ("kernel alone", &|block| {
            gpu(block);
            wait();
        }),
        ("CPU writes, kernel reads", &|block| {
            cpu(block);
            gpu(block);
            wait();
        }),
        ("CPU, ten kernels", &|block| {
            cpu(block);
            (0..10).for_each(|_| gpu(block));
            wait();
        }),
    ];
    for (name, work) in rows {
        let values = each(&|set| {
            let round = || set.iter().for_each(|block| work(*block));
            round();
            microseconds(10, || (), |()| round()) / COUNT as f64
        });
        table.row(name, &values);
    }
    let values = each(&|set| {
        let round = || {
            set.iter().for_each(|block| gpu(*block));
            wait();
        };
        round();
        microseconds(20, || (), |()| round()) / COUNT as f64
    });
    table.row("64 kernels, one wait", &values);
    for (at, set) in sets.iter().enumerate() {
        let step = if at == 1 { 4 } else { 1 };
        set.iter().step_by(step).for_each(|block| free(*block));
    }
    let moved = alloc(SIZE);
    // SAFETY: a live block.
    unsafe { stream.prefetch(moved, SIZE, PrefetchTo::Device) }.map_err(|error| error.to_string())?;
    wait();
    let kernel = microseconds(
        100,
        || (),
        |()| {
            gpu(moved);
            wait();
        },
    );
    table.row("kernel alone, prefetched", &[Some(kernel), None, None]);
    free(moved);
    Ok(vec![table])
}
