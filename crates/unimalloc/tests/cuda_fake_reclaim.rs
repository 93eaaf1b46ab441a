//! Pending memory under pressure, against the stand-in driver: whoever waits for it gets it, also what another thread is
//! taking up at the moment, and what waits stays in proportion. Each test is a process of its own.
#![cfg(target_os = "linux")]

mod common;

use std::ffi::{c_void, CStr};
use std::thread;
use std::time::{Duration, Instant};

use common::stand_in::{Gpu, SIZE};
use common::{alloc, free};
use fake_cuda::Build;
use unimalloc::cuda::Stream;
use unimalloc::{
    last_error, pending_stats, record_use, stats, take_up_pending, thread_alloc, trim, AllocError,
    CudaUnifiedBackend, StandardPolicy,
};

type B = CudaUnifiedBackend;

const MIB: usize = 1 << 20;

type Environment = &'static [(&'static str, &'static str)];
const PLAIN: Environment = &[];
const SLOW_QUERY: Environment =
    &[("UNIMALLOC_MAX_BYTES", "64MiB"), ("FAKE_CUDA_DELAY_US", "cuEventQuery=400000")];
const SLOW_RECORD: Environment =
    &[("UNIMALLOC_MAX_BYTES", "64MiB"), ("FAKE_CUDA_DELAY_US", "cuEventRecord=400000")];
const SLOW: Environment =
    &[("UNIMALLOC_MAX_BYTES", "64MiB"), ("FAKE_CUDA_DELAY_US", "cuEventQuery=200,cuEventRecord=200")];
const SMALL: Environment = &[("UNIMALLOC_MAX_BYTES", "128MiB")];

macro_rules! in_child {
    ($name:ident, $environment:expr, |$gpu:ident| $body:block) => {
        #[test]
        fn $name() {
            Build::new().in_child(stringify!($name), $environment, || {
                let $gpu = Gpu::new();
                $body
            });
        }
    };
}

fn try_block(size: usize) -> Result<*mut u8, AllocError> {
    let block = thread_alloc::<StandardPolicy, B>(size, 256);
    if block.is_null() {
        Err(last_error().expect("a null has a reason"))
    } else {
        Ok(block)
    }
}

fn free_block(block: *mut u8) {
    free::<StandardPolicy, B>(block).unwrap();
}

/// A block of 40 MiB, used on the stream, whose work is done, and freed.
fn freed_after_use(gpu: &Gpu, stream: &Stream) {
    let used = alloc::<StandardPolicy, B>(40 * MIB, 256);
    gpu.write(stream, used, 1);
    free_block(used);
    stream.synchronize().unwrap();
}

// The delay keeps the other thread busy between taking the batch up and giving the block back.
in_child!(a_refusal_waits_for_what_another_thread_is_taking_up, SLOW_QUERY, |gpu| {
    let stream = Stream::new(0).unwrap();
    freed_after_use(&gpu, &stream);
    thread::scope(|scope| {
        let other = scope.spawn(|| take_up_pending(false));
        thread::sleep(Duration::from_millis(100));
        assert!(!other.is_finished(), "the other thread was too fast for this test");
        let block = try_block(40 * MIB).expect("the memory was on its way back");
        free_block(block);
        other.join().unwrap();
    });
});

in_child!(a_refusal_waits_for_a_batch_that_another_thread_is_closing, SLOW_RECORD, |gpu| {
    let stream = Stream::new(0).unwrap();
    thread::scope(|scope| {
        // The block is a full batch: its free records the event.
        let other = scope.spawn(|| freed_after_use(&gpu, &stream));
        while pending_stats().blocks == 0 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(100));
        assert!(!other.is_finished(), "the other thread was too fast for this test");
        let block = try_block(40 * MIB).expect("the memory was on its way back");
        free_block(block);
        other.join().unwrap();
    });
});

in_child!(threads_that_share_a_small_budget_are_never_refused_what_is_only_pending, SLOW, |gpu| {
    // Two blocks fit and each thread holds one at a time, so there is always room once what is pending is back.
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = Stream::new(0).unwrap();
                for round in 0..60 {
                    let block = try_block(24 * MIB).unwrap_or_else(|error| panic!("{round}: {error}"));
                    gpu.spin(&stream, 1);
                    gpu.write(&stream, block, 1);
                    free_block(block);
                }
            });
        }
    });
});

/// Temporaries of `size`, one at a time, on a GPU that keeps up: the most that was held, and the events per free.
fn temporaries(gpu: &Gpu, size: usize, rounds: usize) -> (usize, f64) {
    let stream = Stream::new(0).unwrap();
    let mut most = 0;
    let before = gpu.fake.counter("cuEventRecord");
    for _ in 0..rounds {
        let block = try_block(size).unwrap();
        gpu.write(&stream, block, 1);
        free_block(block);
        stream.synchronize().unwrap();
        most = most.max(stats::<B>().reserved_bytes);
    }
    (most, (gpu.fake.counter("cuEventRecord") - before) as f64 / rounds as f64)
}

in_child!(temporaries_of_a_mebibyte_share_events_and_stay_in_proportion, PLAIN, |gpu| {
    let (most, events) = temporaries(&gpu, MIB, 1000);
    assert!(events <= 1.0 / 16.0, "{events} events per free");
    // One batch of a segment's worth that is filled, one that is used again, and what the looks in between took fresh.
    assert!(most <= 4 * 32 * MIB, "{} MiB for one block at a time", most / MIB);
});

in_child!(under_a_small_budget_pending_memory_takes_a_part_of_it, SMALL, |gpu| {
    for size in [MIB, 3 * MIB, 12 * MIB] {
        let (most, _) = temporaries(&gpu, size, 400);
        assert!(most <= 64 * MIB, "{} MiB for one block of {} MiB at a time", most / MIB, size / MIB);
        trim::<B>(0);
    }
});

const RELAXED: u32 = 2;

/// Begins or ends the capture of a stream's work into a graph, as foreign code would. Answers the driver's code.
fn capture(stream: &Stream, begin: bool) -> u32 {
    type Begin = unsafe extern "C" fn(*mut c_void, u32) -> u32;
    type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> u32;
    type Push = unsafe extern "C" fn(*mut c_void) -> u32;
    // SAFETY: the library is loaded; entries have these types; handles are live.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let entry = |name: &CStr| libc::dlsym(library, name.as_ptr());
        let handle = stream.handle() as *mut c_void;
        let mut context = std::ptr::null_mut();
        std::mem::transmute::<*mut c_void, Retain>(entry(c"cuDevicePrimaryCtxRetain"))(&mut context, 0);
        std::mem::transmute::<*mut c_void, Push>(entry(c"cuCtxPushCurrent_v2"))(context);
        if begin {
            std::mem::transmute::<*mut c_void, Begin>(entry(c"cuStreamBeginCapture_v2"))(handle, RELAXED)
        } else {
            let mut graph = std::ptr::null_mut();
            std::mem::transmute::<*mut c_void, End>(entry(c"cuStreamEndCapture"))(handle, &mut graph)
        }
    }
}

in_child!(a_foreign_stream_that_is_let_go_in_the_middle_of_a_capture_keeps_its_capture, PLAIN, |gpu| {
    let own = Stream::new(0).unwrap();
    // SAFETY: `own` outlives the foreign handle.
    let foreign = unsafe { Stream::from_raw(own.handle()) }.unwrap();
    let before = alloc::<StandardPolicy, B>(64 * MIB, 256);
    let started = Instant::now();
    gpu.spin(&own, 50);
    record_use::<B>(before, &foreign).unwrap();
    free_block(before); // a full batch: its event is before the capture
    let during: Vec<_> = (0..3).map(|_| alloc::<StandardPolicy, B>(SIZE, 256)).collect();
    let other = Stream::new(0).unwrap();
    gpu.write(&other, during[2], 1); // that this one passes later sets nothing free
    assert_eq!(capture(&own, true), 0);
    for block in &during {
        record_use::<B>(*block, &foreign).unwrap();
        free_block(*block);
    }
    drop(foreign);
    assert_eq!(capture(&own, false), 0, "the capture was spoilt");
    assert_eq!(pending_stats().blocks, 1);
    take_up_pending(true);
    // A graph may use what was freed during the capture at any time from now on; what came before has passed.
    let pending = pending_stats();
    assert_eq!((pending.blocks, pending.lost_blocks, pending.lost_bytes), (0, 3, 3 * SIZE));
    assert!(started.elapsed() >= Duration::from_millis(45), "the work before the capture was not waited for");
    let next: Vec<_> = (0..4000).map(|_| alloc::<StandardPolicy, B>(SIZE, 256)).collect();
    assert!(during.iter().all(|block| !next.contains(block)), "handed out to a second owner");
});

in_child!(many_frees_on_a_capturing_stream_do_not_ask_the_driver_each_time, PLAIN, |gpu| {
    let stream = Stream::new(0).unwrap();
    let used: Vec<_> = (0..4096).map(|_| alloc::<StandardPolicy, B>(SIZE, 256)).collect();
    assert_eq!(capture(&stream, true), 0);
    used.iter().for_each(|block| record_use::<B>(*block, &stream).unwrap());
    let before = gpu.fake.counter("cuStreamIsCapturing");
    let started = Instant::now();
    used.iter().for_each(|block| free_block(*block));
    let asked = gpu.fake.counter("cuStreamIsCapturing") - before;
    assert!(asked <= 8, "{asked} times for 4,096 frees, in {:?}", started.elapsed());
    assert_eq!(capture(&stream, false), 0);
    trim::<B>(0);
    assert_eq!(pending_stats().blocks, 0);
});
