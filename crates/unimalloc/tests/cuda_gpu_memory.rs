//! What blocks hold and where they are, on a real GPU. Run with `--ignored`.
#![cfg(target_os = "linux")]

#[path = "cuda_gpu_support/mod.rs"]
mod support;

use std::thread;

use support::*;
use unimalloc::cuda::{KernelArg, PrefetchTo, Stream};
use unimalloc::{
    alloc_on_stream, audit, block_of, last_error, stats, thread_alloc, thread_realloc, trim, usable_size,
    AllocError, CudaUnifiedBackend, FreeError, HardenedPolicy, Placement, StandardPolicy,
};

const PLACEMENTS: [Placement; 4] =
    [Placement::Auto, Placement::Host, Placement::Device, Placement::ReadMostly];

#[test]
#[ignore = "needs a GPU"]
fn the_host_and_kernels_see_each_others_bytes() {
    let gpu = Gpu::new();
    for placement in PLACEMENTS {
        for size in [64, 4 * KIB, 100 * KIB, 3 * MIB, 40 * MIB] {
            let block = alloc_as::<StandardPolicy>(size, placement);
            for round in 0..3_u32 {
                write(block, size, round + 10);
                gpu.run("twice_plus_one", &gpu.stream, size / 4, &[at(block), words(size)]);
                gpu.stream.synchronize().unwrap();
                let expected = (round + 10) * 2 + 1;
                assert!(
                    read(block, size).iter().all(|word| *word == expected),
                    "{placement:?}, {size} bytes, round {round}"
                );
            }
            free(block);
        }
        take_up();
        trim::<B>(0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn realloc_keeps_what_a_kernel_wrote() {
    let gpu = Gpu::new();
    for placement in [Placement::Auto, Placement::Device] {
        let mut block = alloc_as::<StandardPolicy>(8 * KIB, placement);
        gpu.fill(&gpu.stream, block, 8 * KIB, 77);
        gpu.stream.synchronize().unwrap();
        for size in [100 * KIB, MIB, 33 * MIB, 8 * KIB] {
            // SAFETY: the block is live and the GPU is done with it.
            block = unsafe { thread_realloc::<StandardPolicy, B>(block, size, 256) };
            assert!(!block.is_null(), "{:?}", last_error());
            assert!(read(block, 8 * KIB).iter().all(|word| *word == 77), "{placement:?}, {size}");
        }
        free(block);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_that_runs_past_its_block_does_not_hurt_the_allocator() {
    let gpu = Gpu::new();
    let size = 4 * KIB;
    let blocks: Vec<_> = (0..400).map(|_| alloc(size)).collect();
    let victim = blocks[40];
    // Over its neighbours, free ones too, and over whole spans beyond.
    blocks.iter().skip(200).step_by(2).for_each(|block| free(*block));
    gpu.fill(&gpu.stream, victim, 600 * KIB, u32::MAX);
    gpu.stream.synchronize().unwrap();
    for (index, block) in blocks.iter().enumerate() {
        if index < 200 || index % 2 == 1 {
            assert!(usable_size::<B>(*block) >= size);
            free(*block);
        } else {
            assert_eq!(try_free(*block), Err(FreeError::DoubleFree));
        }
    }
    take_up();
    let again: Vec<_> = (0..2000).map(|_| alloc(size)).collect();
    let mut sorted = again.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), again.len(), "a block was handed out twice");
    again.into_iter().for_each(free);
    audit::<B>().unwrap();
    assert_eq!(stats::<B>().corruptions, 0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_redzone_that_a_kernel_wrote_to_is_found() {
    let gpu = Gpu::new();
    let before = stats::<B>().corruptions;
    for (size, placement) in [(1000, Placement::Auto), (MIB, Placement::Device)] {
        let block = alloc_as::<HardenedPolicy>(size, placement);
        let end = usable_size::<B>(block) as u64;
        // A number marks nothing, so the free looks at once.
        let args = [unmarked(block), KernelArg::U64(end), KernelArg::U8(1)];
        gpu.run("write_at", &gpu.stream, 1, &args);
        gpu.stream.synchronize().unwrap();
        assert_eq!(try_free(block), Err(FreeError::Corrupted), "{size}");
    }
    assert_eq!(stats::<B>().corruptions - before, 2);
}

#[test]
#[ignore = "needs a GPU"]
fn the_page_table_tells_which_side_has_the_pages() {
    let gpu = Gpu::new();
    trim::<B>(0);
    let size = 4 * MIB;
    // No advice: pages go where they are touched.
    let block = alloc_as::<StandardPolicy>(size, Placement::Auto);
    assert_eq!(present(block, size).0, 0, "fresh pages are nowhere");
    write(block, size, 1);
    let (there, all) = present(block, size);
    assert_eq!(there, all, "pages that the CPU wrote are present");
    gpu.fill(&gpu.stream, block, size, 2);
    gpu.stream.synchronize().unwrap();
    assert_eq!(present(block, size).0, 0, "pages that a kernel wrote are not");
    assert!(read(block, size).iter().all(|word| *word == 2));
    let (there, all) = present(block, size);
    assert_eq!(there, all, "and are again once the CPU has read them");
    // SAFETY: a live block.
    unsafe { gpu.stream.prefetch(block, size, PrefetchTo::Device) }.unwrap();
    gpu.stream.synchronize().unwrap();
    assert_eq!(present(block, size).0, 0);
    free(block);
    take_up();
}

#[test]
#[ignore = "needs a GPU"]
fn device_blocks_that_the_host_wrote_are_on_the_device_when_they_are_handed_out() {
    let gpu = Gpu::new();
    for size in [512 * KIB, 4 * MIB, 64 * MIB] {
        trim::<B>(0);
        let block = alloc_as::<StandardPolicy>(size, Placement::Device);
        assert_eq!(present(block, size).0, 0, "fresh");
        write(block, size, 1);
        assert!(present(block, size).0 > 0);
        free(block);
        let again = alloc_as::<StandardPolicy>(size, Placement::Device);
        assert_eq!(again, block, "{size}: the same memory");
        assert_eq!(present(again, size).0, 0, "{size}: its pages were moved before it was handed out");
        // On a stream the move comes before what is queued next.
        write(again, size, 2);
        free(again);
        let on = alloc_on_stream::<StandardPolicy, B>(size, 256, &place(Placement::Device), &gpu.stream);
        gpu.fill(&gpu.stream, on, size, 3);
        gpu.stream.synchronize().unwrap();
        assert!(read(on, size).iter().all(|word| *word == 3), "{size}");
        free(on);
        take_up();
        trim::<B>(0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn small_blocks_stay_with_the_host_when_a_kernel_uses_them() {
    let gpu = Gpu::new();
    for placement in [Placement::Auto, Placement::Host] {
        let block = alloc_as::<StandardPolicy>(4 * KIB, placement);
        write(block, 4 * KIB, 5);
        gpu.run("twice_plus_one", &gpu.stream, KIB, &[at(block), words(4 * KIB)]);
        gpu.stream.synchronize().unwrap();
        let (there, all) = present(block, 4 * KIB);
        assert_eq!(there, all, "{placement:?}: nothing migrated");
        assert!(read(block, 4 * KIB).iter().all(|word| *word == 11));
        free(block);
    }
    take_up();
}

#[test]
#[ignore = "needs a GPU"]
fn the_budget_refuses_before_the_driver_would_oversubscribe() {
    let _gpu = Gpu::new();
    take_up();
    trim::<B>(0);
    let limit = stats::<B>().reserved_bytes + 96 * MIB; // other tests leave corrupted blocks behind
    CudaUnifiedBackend::set_limit(Some(limit as u64));
    let mut blocks = Vec::new();
    loop {
        let block = thread_alloc::<StandardPolicy, B>(20 * MIB, 256);
        if block.is_null() {
            break;
        }
        blocks.push(block);
    }
    assert_eq!(last_error(), Some(AllocError::Budget));
    assert!((4..=5).contains(&blocks.len()), "{}", blocks.len());
    assert!(stats::<B>().reserved_bytes <= limit);
    for size in [5 << 30, 1 << 40, 1 << 46] {
        assert!(thread_alloc::<StandardPolicy, B>(size, 256).is_null(), "{size}");
        assert_eq!(last_error(), Some(AllocError::Budget), "{size}");
    }
    free(blocks.pop().unwrap());
    let block = thread_alloc::<StandardPolicy, B>(20 * MIB, 256);
    assert!(!block.is_null(), "what was freed can be had again: {:?}", last_error());
    blocks.push(block);
    blocks.into_iter().for_each(free);
    CudaUnifiedBackend::set_limit(Some(LIMIT));
}

#[test]
#[ignore = "needs a GPU"]
fn addresses_four_gibibytes_away_are_not_mistaken_for_blocks() {
    let gpu = Gpu::new();
    for size in [64, 4 * KIB, 300 * KIB, 20 * MIB] {
        let block = alloc(size);
        for distance in [1 << 32, 1 << 33, 3 << 32, 1 << 40] {
            for address in [block.wrapping_add(distance), block.wrapping_sub(distance)] {
                assert_eq!(block_of::<B>(address), None, "{size}, {distance:#x}");
                assert_eq!(usable_size::<B>(address), 0);
                assert_eq!(try_free(address), Err(FreeError::NotOurs), "{size}, {distance:#x}");
            }
        }
        // Offsets of 64 bits reach kernels whole: from 4 GiB before the block, 4 GiB and 8 bytes on.
        let base = block.wrapping_sub(1 << 32);
        write(block, 64, 0);
        let args = [KernelArg::U64(base as u64), KernelArg::U64((1 << 32) + 8), KernelArg::U8(9)];
        gpu.run("write_at", &gpu.stream, 1, &args);
        gpu.stream.synchronize().unwrap();
        assert_eq!(read(block, 16), [0, 0, 9, 0]);
        free(block);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn threads_without_a_context_and_with_one_of_their_own() {
    type Create = unsafe extern "C" fn(*mut Handle, u32, i32) -> u32;
    let gpu = Gpu::new();
    // SAFETY: these entries have these types.
    let (get, set, destroy, create) = unsafe {
        (
            entry::<Get>(c"cuCtxGetCurrent"),
            entry::<Set>(c"cuCtxSetCurrent"),
            entry::<Set>(c"cuCtxDestroy_v2"),
            entry::<Create>(c"cuCtxCreate_v2"),
        )
    };
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        assert_eq!(unsafe { get(&mut context) }, 0);
        context
    };
    let use_memory = || {
        let stream = Stream::new(0).unwrap();
        for (size, placement) in
            [(KIB, Placement::Auto), (MIB, Placement::Device), (40 * MIB, Placement::Auto)]
        {
            let block = alloc_as::<StandardPolicy>(size, placement);
            gpu.fill(&stream, block, KIB, 42);
            stream.synchronize().unwrap();
            assert!(read(block, KIB).iter().all(|word| *word == 42));
            free(block);
        }
    };
    thread::scope(|scope| {
        let threads = [
            scope.spawn(|| {
                assert!(current().is_null());
                use_memory();
                assert!(current().is_null());
            }),
            scope.spawn(|| {
                let mut own = std::ptr::null_mut();
                // SAFETY: the driver writes one handle, and makes the context current.
                assert_eq!(unsafe { create(&mut own, 0, 0) }, 0);
                use_memory();
                assert_eq!(current(), own);
                // SAFETY: the context is this thread's, and nothing uses it.
                unsafe {
                    set(std::ptr::null_mut());
                    destroy(own);
                }
            }),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    take_up();
    trim::<B>(0);
}
