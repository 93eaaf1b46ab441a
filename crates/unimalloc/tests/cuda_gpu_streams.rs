//! Frees that wait for the GPU, on a real one. Run with `--ignored`.
#![cfg(target_os = "linux")]

#[path = "cuda_gpu_support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use support::*;
use unimalloc::cuda::{KernelArg, Stream};
use unimalloc::{
    alloc_on_stream, audit, last_error, pending_stats, record_use, take_up_pending, thread_alloc, trim,
    AllocError, FreeError, Placement, SecurePolicy, StandardPolicy,
};

const SIZE: usize = 4 * KIB;

/// Blocks of the class, all live at once and written by the CPU; answers them.
fn others(count: usize, value: u32) -> Vec<*mut u8> {
    let blocks: Vec<_> = (0..count).map(|_| alloc(SIZE)).collect();
    blocks.iter().for_each(|block| write(*block, SIZE, value));
    blocks
}

#[test]
#[ignore = "needs a GPU"]
fn a_free_during_a_kernel_returns_at_once_and_the_block_is_let_alone() {
    let gpu = Gpu::new();
    for size in [SIZE, 300 * KIB, 20 * MIB] {
        let used = alloc(size);
        write(used, SIZE, 1);
        gpu.late_fill(&gpu.stream, at(used), SIZE, 2, 20);
        let start = Instant::now();
        free(used);
        let took = start.elapsed();
        assert!(took < Duration::from_millis(2), "{size}: the free took {took:?}");
        assert_eq!(try_free(used), Err(FreeError::DoubleFree));
        let next: Vec<_> = (0..8).map(|_| alloc(size)).collect();
        assert!(!next.contains(&used), "{size}: handed out under the kernel");
        assert!(!gpu.stream.query().unwrap(), "{size}: the kernel ended before the test");
        gpu.stream.synchronize().unwrap();
        take_up();
        let again: Vec<_> = (0..600 * usize::from(size == SIZE) + 8).map(|_| alloc(size)).collect();
        assert!(again.contains(&used), "{size}: never reused");
        again.into_iter().chain(next).for_each(free);
    }
}

/// Blocks that were allocated, and written by the CPU, while a kernel that was launched on a freed block still runs: how
/// many of them that kernel then wrote to.
fn corrupted(gpu: &Gpu, launch: impl Fn(&Stream, *mut u8)) -> usize {
    const KERNELS: u32 = 0xBAD;
    const CPU: u32 = 0x600D;
    let used = alloc(SIZE);
    write(used, SIZE, 0);
    launch(&gpu.stream, used);
    free(used);
    let next = others(50, CPU);
    assert!(!gpu.stream.query().unwrap(), "the kernel ended before the test");
    gpu.stream.synchronize().unwrap();
    let wrong = next.iter().filter(|block| read(**block, SIZE).contains(&KERNELS)).count();
    next.into_iter().for_each(free);
    wrong
}

#[test]
#[ignore = "needs a GPU"]
fn what_the_guard_prevents_is_seen_where_it_is_off() {
    let gpu = Gpu::new();
    // A plain number is no pointer to the allocator: it does not learn of the use, as with foreign code.
    let off = corrupted(&gpu, |stream, block| gpu.late_fill(stream, unmarked(block), SIZE, 0xBAD, 20));
    assert_eq!(off, 1, "without the guard the kernel must be seen to write to the block's next owner");
    let on = corrupted(&gpu, |stream, block| gpu.late_fill(stream, at(block), SIZE, 0xBAD, 20));
    assert_eq!(on, 0);
    let told = corrupted(&gpu, |stream, block| {
        gpu.late_fill(stream, unmarked(block), SIZE, 0xBAD, 20);
        record_use::<B>(block.wrapping_add(100), stream).unwrap();
    });
    assert_eq!(told, 0);
    take_up();
}

#[test]
#[ignore = "needs a GPU"]
fn temporaries_of_a_deep_queue_never_meet() {
    let gpu = Gpu::new();
    let wrong = alloc_as::<StandardPolicy>(256, Placement::Host);
    write(wrong, 256, 0);
    let mut random = 1_u64;
    for round in 1..=3000_u32 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let size = 256 << ((random >> 40) % 9);
        let block = alloc(size);
        // The CPU writes while earlier kernels run: a block handed out too early has a kernel's bytes in it.
        write(block, size, round);
        let args = [at(block), words(size), KernelArg::U32(round), KernelArg::U32(!round), at(wrong)];
        gpu.run("check_and_set", &gpu.stream, size / 4, &args);
        free(block);
    }
    gpu.stream.synchronize().unwrap();
    assert_eq!(read(wrong, 4), [0]);
    free(wrong);
    take_up();
    assert_eq!(pending_stats().lost_blocks, 0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_block_on_two_streams_waits_for_both() {
    let gpu = Gpu::new();
    let other = Stream::new(0).unwrap();
    let used = alloc(SIZE);
    gpu.fill(&gpu.stream, used, SIZE, 1);
    gpu.late_fill(&other, at(used), SIZE, 2, 30);
    free(used);
    gpu.stream.synchronize().unwrap();
    assert_eq!(pending_stats().blocks, 1);
    let next = others(300, 5);
    assert!(!next.contains(&used) && !other.query().unwrap());
    other.synchronize().unwrap();
    take_up();
    next.into_iter().for_each(free);
}

#[test]
#[ignore = "needs a GPU"]
fn work_on_one_stream_may_share_a_block_in_its_order() {
    let gpu = Gpu::new();
    let other = Stream::new(0).unwrap();
    for size in [SIZE, 600 * KIB, 64 * MIB] {
        let on = |stream| alloc_on_stream::<StandardPolicy, B>(size, 256, &place(Placement::Device), stream);
        let first = on(&gpu.stream);
        gpu.late_fill(&gpu.stream, at(first), SIZE, 1, 20);
        free(first);
        let second = on(&gpu.stream);
        assert_eq!(second, first, "{size}");
        assert_ne!(on(&other), first, "{size}");
        gpu.run("twice_plus_one", &gpu.stream, SIZE / 4, &[at(second), words(SIZE)]);
        assert!(!gpu.stream.query().unwrap());
        gpu.stream.synchronize().unwrap();
        assert!(read(second, SIZE).iter().all(|word| *word == 3), "{size}");
        free(second);
        take_up();
        trim::<B>(0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn secure_blocks_start_as_zeros_and_are_poisoned_after_the_kernel() {
    let gpu = Gpu::new();
    for (size, placement) in [(SIZE, Placement::Auto), (MIB, Placement::Auto), (MIB, Placement::Device)] {
        let block = alloc_as::<SecurePolicy>(size, placement);
        gpu.fill(&gpu.stream, block, size, 0x1234_5678);
        gpu.late_fill(&gpu.stream, at(block), SIZE, 0x0BAD_0BAD, 20);
        free(block);
        assert!(!gpu.stream.query().unwrap(), "the free waited for the kernel");
        gpu.stream.synchronize().unwrap();
        take_up();
        // Its pages stay mapped: the segment is cached.
        assert!(read(block, SIZE).iter().all(|word| *word == 0xDEDE_DEDE), "{size}, {placement:?}");
        let blocks: Vec<_> = (0..40).map(|_| alloc_as::<SecurePolicy>(size, placement)).collect();
        for block in &blocks {
            assert!(read(*block, SIZE).iter().all(|word| *word == 0), "{size}, {placement:?}");
        }
        blocks.into_iter().for_each(free);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sixteen_threads_with_streams_of_their_own() {
    let gpu = Gpu::new();
    let wrong = alloc_as::<StandardPolicy>(256, Placement::Host);
    write(wrong, 256, 0);
    let (gpu_ref, wrong_at) = (&gpu, wrong as usize);
    let shared: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        for number in 1..=16_u32 {
            let shared = &shared;
            scope.spawn(move || {
                let stream = Stream::new(0).unwrap();
                for round in 0..150_u32 {
                    let size = 1024 << ((round + number) % 7);
                    let block = alloc(size);
                    let value = number << 16 | round;
                    write(block, size, value);
                    let wrong = KernelArg::Pointer(wrong_at as u64);
                    let args = [at(block), words(size), KernelArg::U32(value), KernelArg::U32(!value), wrong];
                    gpu_ref.run("check_and_set", &stream, size / 4, &args);
                    // Some blocks are freed by another thread, while the kernel may still run.
                    let slot = &shared[(number as usize * 7 + round as usize) % shared.len()];
                    let other = slot.swap(block as usize, Ordering::AcqRel);
                    if other != 0 {
                        free(other as *mut u8);
                    }
                }
                stream.synchronize().unwrap();
            });
        }
    });
    for slot in &shared {
        let block = slot.load(Ordering::Acquire);
        if block != 0 {
            free(block as *mut u8);
        }
    }
    assert_eq!(read(wrong, 4), [0]);
    free(wrong);
    take_up();
    trim::<B>(0);
    audit::<B>().unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn a_capture_in_this_thread_survives_allocating_and_freeing() {
    type Begin = unsafe extern "C" fn(Handle, u32) -> u32;
    type End = unsafe extern "C" fn(Handle, *mut Handle) -> u32;
    type Destroy = unsafe extern "C" fn(Handle) -> u32;
    let gpu = Gpu::new();
    let captured = Stream::new(0).unwrap();
    let busy: Vec<_> = (0..200).map(|_| alloc(SIZE)).collect();
    busy.iter().for_each(|block| gpu.fill(&gpu.stream, *block, SIZE, 1));
    let in_graph = alloc(SIZE);
    gpu.fill(&captured, in_graph, SIZE, 1); // loads the kernel before the capture
    captured.synchronize().unwrap();
    // SAFETY: these entries have these types; the handles are live.
    unsafe {
        let (retain, set) = (entry::<Retain>(c"cuDevicePrimaryCtxRetain"), entry::<Set>(c"cuCtxSetCurrent"));
        let (begin, end) = (entry::<Begin>(c"cuStreamBeginCapture_v2"), entry::<End>(c"cuStreamEndCapture"));
        let mut context = std::ptr::null_mut();
        assert_eq!(retain(&mut context, 0), 0);
        assert_eq!(set(context), 0);
        // Mode 0, global: any unsafe call of any thread would break it.
        assert_eq!(begin(captured.handle() as Handle, 0), 0);
        gpu.fill(&captured, in_graph, SIZE, 2);
        busy.into_iter().for_each(free);
        let next = others(600, 9); // queries events, records them, asks the driver for memory
        let large = alloc_as::<StandardPolicy>(16 * MIB, Placement::Device);
        next.into_iter().chain([large]).for_each(free);
        free(in_graph);
        let mut graph = std::ptr::null_mut();
        assert_eq!(end(captured.handle() as Handle, &mut graph), 0, "the capture was broken");
        assert!(!graph.is_null());
        entry::<Destroy>(c"cuGraphDestroy")(graph);
        set(std::ptr::null_mut());
    }
    gpu.stream.synchronize().unwrap();
    take_up();
}

#[test]
#[ignore = "needs a GPU"]
fn work_on_a_per_thread_default_stream_is_waited_for_from_another_thread() {
    const PER_THREAD: u64 = 2;
    let gpu = Gpu::new();
    // SAFETY: the driver's handle of the calling thread's default stream.
    let stream = unsafe { Stream::from_raw(PER_THREAD) }.unwrap();
    let used = alloc(SIZE);
    write(used, SIZE, 0);
    gpu.late_fill(&stream, at(used), SIZE, 0xBAD, 40);
    let address = used as usize;
    thread::scope(|scope| {
        // On this thread the handle means another stream, which has nothing to do: it must not answer for the first.
        scope.spawn(move || {
            free(address as *mut u8);
            let next = others(600, 0x600D);
            assert!(!next.contains(&(address as *mut u8)), "handed out under the kernel");
            take_up_pending(false);
            assert_eq!(pending_stats().blocks, 1, "taken up under the kernel");
            next.into_iter().for_each(free);
        });
    });
    assert!(!stream.query().unwrap(), "the kernel ended before the test");
    take_up(); // waits for the legacy stream, which comes after all blocking ones
    assert!(stream.query().unwrap(), "free before its kernel was done");
    drop(stream);
    assert_eq!(pending_stats().blocks, 0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_foreign_stream_that_is_let_go_in_the_middle_of_a_capture_keeps_its_capture() {
    // In a process of its own: what is lost stays in its figures.
    in_child(
        "a_foreign_stream_that_is_let_go_in_the_middle_of_a_capture_keeps_its_capture",
        a_capture_goes_on,
    );
}

fn a_capture_goes_on() {
    type Begin = unsafe extern "C" fn(Handle, u32) -> u32;
    type End = unsafe extern "C" fn(Handle, *mut Handle) -> u32;
    type Destroy = unsafe extern "C" fn(Handle) -> u32;
    let gpu = Gpu::new();
    let owner = Stream::new(0).unwrap();
    // SAFETY: `owner` outlives the foreign handle.
    let foreign = unsafe { Stream::from_raw(owner.handle()) }.unwrap();
    let in_graph = alloc(SIZE);
    gpu.fill(&owner, in_graph, SIZE, 1); // loads the kernel before the capture
    owner.synchronize().unwrap();
    let lost = pending_stats().lost_blocks;
    // SAFETY: these entries have these types; the handles are live.
    unsafe {
        let (retain, set) = (entry::<Retain>(c"cuDevicePrimaryCtxRetain"), entry::<Set>(c"cuCtxSetCurrent"));
        let (begin, end) = (entry::<Begin>(c"cuStreamBeginCapture_v2"), entry::<End>(c"cuStreamEndCapture"));
        let mut context = std::ptr::null_mut();
        assert_eq!(retain(&mut context, 0), 0);
        assert_eq!(set(context), 0);
        assert_eq!(begin(owner.handle() as Handle, 0), 0);
        gpu.fill(&foreign, in_graph, SIZE, 2);
        free(in_graph);
        drop(foreign); // would wait for the stream, and spoil its capture
        let mut graph = std::ptr::null_mut();
        assert_eq!(end(owner.handle() as Handle, &mut graph), 0, "the capture was broken");
        assert!(!graph.is_null());
        entry::<Destroy>(c"cuGraphDestroy")(graph);
        set(std::ptr::null_mut());
    }
    take_up();
    assert_eq!(pending_stats().lost_blocks, lost + 1, "a graph may still use it");
    assert!(!others(2000, 3).into_iter().inspect(|block| free(*block)).any(|block| block == in_graph));
}

#[test]
#[ignore = "needs a GPU"]
fn blocks_of_a_context_that_a_kernel_destroyed_are_accounted_as_lost() {
    in_child("blocks_of_a_context_that_a_kernel_destroyed_are_accounted_as_lost", || {
        let gpu = Gpu::new();
        let (used, kept) = (alloc(SIZE), alloc(SIZE));
        gpu.fill(&gpu.stream, used, SIZE, 1);
        gpu.run("fault", &gpu.stream, 1, &[]);
        free(used);
        assert!(gpu.stream.synchronize().is_err());
        trim::<B>(0);
        let pending = pending_stats();
        assert_eq!((pending.blocks, pending.lost_blocks), (0, 1), "{pending:?}");
        assert_eq!(try_free(used), Err(FreeError::DoubleFree));
        free(kept);
        assert!(thread_alloc::<StandardPolicy, B>(64 * MIB, 256).is_null());
        assert_eq!(last_error(), Some(AllocError::ContextLost));
        println!("the process lives");
    });
}
