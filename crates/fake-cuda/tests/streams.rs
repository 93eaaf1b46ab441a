//! Streams, events, kernels, capture, and what a device without concurrent access does.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use fake_cuda::{Build, Loaded};
use std::ffi::{c_char, c_int, c_void};
use std::os::unix::process::ExitStatusExt;
use std::ptr;
use std::time::{Duration, Instant};

fn kernels() -> usize {
    let (code, module) = module(KERNELS);
    assert_eq!(code, 0);
    module
}

fn fill(module: usize, stream: usize, address: usize, count: u32, value: f32, threads: u32) -> u32 {
    let params = [ptr::from_ref(&address).cast(), ptr::from_ref(&count).cast(), ptr::from_ref(&value).cast()];
    launch(function(module, "fill_f32"), 1, threads, stream, &params)
}

fn floats(address: usize, count: usize) -> &'static [f32] {
    // SAFETY: the tests ask only for live blocks of that size, after a synchronisation.
    unsafe { std::slice::from_raw_parts(address as *const f32, count) }
}

fn query(event: usize) -> u32 {
    cu!(cuEventQuery(event => usize))
}

fn record(event: usize, stream: usize) -> u32 {
    cu!(cuEventRecord(event => usize, stream => usize))
}

#[test]
fn kernels_compute() {
    Build::new().in_child("kernels_compute", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        let [a, b, c] = [(); 3].map(|()| managed(4096).1);
        assert_eq!(fill(module, stream, a, 1024, 1.5, 1024), 0);
        assert_eq!(fill(module, stream, b, 1024, 2.0, 512), 0);
        let (n, factor) = (1024u32, 10.0f32);
        let params = [ptr::from_ref(&b).cast(), ptr::from_ref(&n).cast(), ptr::from_ref(&factor).cast()];
        assert_eq!(launch(function(module, "scale"), 4, 256, stream, &params), 0);
        let params = [
            ptr::from_ref(&a).cast(),
            ptr::from_ref(&b).cast(),
            ptr::from_ref(&c).cast(),
            ptr::from_ref(&n).cast(),
        ];
        assert_eq!(launch(function(module, "vector_add"), 4, 256, stream, &params), 0);
        assert_eq!(synchronize(stream), 0);
        // The second fill had threads for half of the elements.
        assert_eq!((floats(c, 1024)[0], floats(c, 1024)[511], floats(c, 1024)[512]), (21.5, 21.5, 1.5));
        let (n, value) = (3u32, 9u8);
        let odd = a + 1;
        let params = [ptr::from_ref(&odd).cast(), ptr::from_ref(&n).cast(), ptr::from_ref(&value).cast()];
        assert_eq!(launch(function(module, "write_u8"), 1, 32, stream, &params), 0);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(floats(a, 1)[0].to_ne_bytes()[1..], [9, 9, 9]);
        assert_eq!(Loaded::find().unwrap().counter("kernels"), 5);
    });
}

#[test]
fn what_a_launch_refuses() {
    Build::new().in_child("what_a_launch_refuses", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        let milliseconds = 1u32;
        let params: [*const c_void; 1] = [ptr::from_ref(&milliseconds).cast()];
        let spin = function(module, "spin");
        for (blocks, threads) in [(0, 1), (1, 0), (1, 1025)] {
            assert_eq!(launch(spin, blocks, threads, stream, &params), INVALID_VALUE);
        }
        assert_eq!(launch(spin, 1, 1, 0xBAD, &params), INVALID_HANDLE);
        assert_eq!(launch(0xBAD, 1, 1, stream, &params), INVALID_HANDLE);
        assert_eq!(launch(function(module, "unknown"), 1, 1, stream, &[]), 801);
        let mut missing = 0usize;
        let name = c"missing".as_ptr();
        assert_eq!(
            cu!(cuModuleGetFunction(&mut missing => *mut usize, module => usize, name => *const c_char)),
            NOT_FOUND
        );
        let (mut offset, mut size) = (0usize, 0usize);
        let fill = function(module, "fill_f32");
        let mut info = |index: usize| {
            let code = cu!(cuFuncGetParamInfo(
                fill => usize, index => usize, &mut offset => *mut usize, &mut size => *mut usize,
            ));
            (code, offset, size)
        };
        assert_eq!((info(0), info(2)), ((0, 0, 8), (0, 12, 4)));
        assert_eq!(info(3).0, INVALID_VALUE);
        assert_eq!(cu!(cuModuleUnload(module => usize)), 0);
        assert_eq!(launch(spin, 1, 1, stream, &params), INVALID_HANDLE);
    });
}

#[test]
fn a_refused_module_leaves_a_log() {
    Build::new().in_child("a_refused_module_leaves_a_log", &[], || {
        start();
        let text = std::ffi::CString::new(format!("{KERNELS}.visible .entry broken( {{ }}")).unwrap();
        let mut log = [0u8; 256];
        let options: [c_int; 2] = [5, 6];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = 0usize;
        let code = cu!(cuModuleLoadDataEx(
            &mut module => *mut usize, text.as_ptr() => *const c_char, 2 => u32, options.as_ptr() => *const c_int,
            values.as_mut_ptr() => *mut *mut c_void,
        ));
        let written = values[1] as usize;
        assert_eq!((code, module), (218, 0));
        let log = std::ffi::CStr::from_bytes_until_nul(&log).unwrap().to_str().unwrap();
        assert!(log.contains("syntax error") && written > log.len() / 2, "{written}: {log}");
    });
}

#[test]
fn streams_run_beside_the_host_and_in_order() {
    Build::new().in_child("streams_run_beside_the_host_and_in_order", &[], || {
        start();
        let (module, one, two) = (kernels(), stream(), stream());
        let (_, address) = managed(4096);
        let (begin, end, other) = (event(), event(), event());
        assert_eq!((query(begin), synchronize(one)), (0, 0));
        let clock = Instant::now();
        assert_eq!(record(begin, one), 0);
        spin(module, one, 600);
        assert_eq!(fill(module, one, address, 4, 3.0, 4), 0);
        assert_eq!(record(end, one), 0);
        assert_eq!(record(other, two), 0);
        assert_eq!(synchronize(two), 0);
        assert_eq!((query(other), query(end)), (0, NOT_READY));
        assert_eq!(cu!(cuStreamQuery(one => usize)), NOT_READY);
        assert_eq!(floats(address, 4), [0.0; 4]);
        assert_eq!(cu!(cuStreamWaitEvent(two => usize, end => usize, 0 => u32)), 0);
        assert_eq!(synchronize(two), 0);
        assert!(
            clock.elapsed() >= Duration::from_millis(595),
            "the second stream waited for the first one's event"
        );
        assert_eq!((query(end), floats(address, 4)), (0, &[3.0; 4][..]));
        let mut elapsed = 0f32;
        assert_eq!(cu!(cuEventElapsedTime(&mut elapsed => *mut f32, begin => usize, end => usize)), 0);
        assert!(elapsed >= 595.0, "{elapsed} ms");
    });
}

#[test]
fn a_free_waits_for_the_device() {
    Build::new().in_child("a_free_waits_for_the_device", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        let (_, address) = managed(4096);
        spin(module, stream, 100);
        let clock = Instant::now();
        assert_eq!(free(address), 0);
        assert!(clock.elapsed() >= Duration::from_millis(90));
    });
}

#[test]
fn handles_come_again() {
    Build::new().in_child("handles_come_again", &[], || {
        start();
        let first = stream();
        let mut ids = [0u64; 2];
        assert_eq!(cu!(cuStreamGetId(first => usize, &mut ids[0] => *mut u64)), 0);
        assert_eq!(cu!(cuStreamDestroy_v2(first => usize)), 0);
        assert_eq!(cu!(cuStreamDestroy_v2(first => usize)), INVALID_HANDLE);
        assert_eq!(stream(), first);
        assert_eq!(cu!(cuStreamGetId(first => usize, &mut ids[1] => *mut u64)), 0);
        assert_ne!(ids[0], ids[1]);
    });
}

#[test]
fn the_default_stream_is_ordered_with_blocking_ones() {
    Build::new().in_child("the_default_stream_is_ordered_with_blocking_ones", &[], || {
        start();
        let (module, apart) = (kernels(), stream());
        let mut blocking = 0usize;
        assert_eq!(cu!(cuStreamCreate(&mut blocking => *mut usize, 0 => u32)), 0);
        let (on_default, on_apart) = (event(), event());
        spin(module, blocking, 500);
        assert_eq!(record(on_default, 0), 0);
        assert_eq!(record(on_apart, apart), 0);
        assert_eq!(synchronize(apart), 0);
        assert_eq!((query(on_default), query(on_apart)), (NOT_READY, 0));
        assert_eq!(synchronize(0), 0);
        assert_eq!(cu!(cuStreamQuery(blocking => usize)), 0);
    });
}

#[test]
fn faults_lose_the_context() {
    Build::new().in_child("faults_lose_the_context", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        assert_eq!(launch(function(module, "fault"), 1, 1, stream, &[]), 0);
        assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
        assert_eq!(managed(4096).0, ILLEGAL_ADDRESS);
        assert_eq!(cu!(cuStreamQuery(stream => usize)), ILLEGAL_ADDRESS);
    });
}

#[test]
fn a_kernel_that_leaves_its_block_faults() {
    Build::new().in_child("a_kernel_that_leaves_its_block_faults", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        let (_, address) = managed(4096);
        assert_eq!(fill(module, stream, address, 1024, 1.0, 1024), 0);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(fill(module, stream, address + 4, 1024, 1.0, 1024), 0);
        assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
    });
}

#[test]
fn captures_forbid_and_replay() {
    Build::new().in_child("captures_forbid_and_replay", &[], || {
        start();
        let (module, stream, other) = (kernels(), stream(), stream());
        let (_, address) = managed(4096);
        let begin = |mode: u32| cu!(cuStreamBeginCapture_v2(stream => usize, mode => u32));
        let mut graph = 0usize;
        assert_eq!(cu!(cuStreamBeginCapture_v2(0 => usize, 0 => u32)), 900);

        // Recorded, not run; replayed when the graph is launched.
        assert_eq!(begin(0), 0);
        assert_eq!(fill(module, stream, address, 4, 5.0, 4), 0);
        let mut status = 9u32;
        assert_eq!(cu!(cuStreamIsCapturing(stream => usize, &mut status => *mut u32)), 0);
        assert_eq!(status, 1);
        let marker = event();
        assert_eq!(record(marker, stream), 0);
        assert_eq!(cu!(cuStreamEndCapture(stream => usize, &mut graph => *mut usize)), 0);
        assert_eq!((synchronize(stream), floats(address, 4)[0]), (0, 0.0));
        let mut executable = 0usize;
        assert_eq!(
            cu!(cuGraphInstantiateWithFlags(&mut executable => *mut usize, graph => usize, 0 => u64)),
            0
        );
        assert_eq!(cu!(cuGraphLaunch(executable => usize, stream => usize)), 0);
        assert_eq!((synchronize(stream), floats(address, 4)[3]), (0, 5.0));

        // An allocation breaks a global capture, from any thread, unless the thread's mode is relaxed.
        assert_eq!(begin(0), 0);
        let mut mode = 2u32;
        assert_eq!(cu!(cuThreadExchangeStreamCaptureMode(&mut mode => *mut u32)), 0);
        assert_eq!((mode, managed(4096).0), (0, 0));
        assert_eq!(cu!(cuThreadExchangeStreamCaptureMode(&mut mode => *mut u32)), 0);
        assert_eq!((mode, managed(4096).0), (2, 900));
        assert_eq!(cu!(cuStreamEndCapture(stream => usize, &mut graph => *mut usize)), 901);
        assert_eq!((graph, managed(4096).0), (0, 0));

        // To ask an event of a capture breaks it.
        assert_eq!((begin(2), record(marker, stream), query(marker)), (0, 0, 907));
        assert_eq!(cu!(cuStreamEndCapture(stream => usize, &mut graph => *mut usize)), 901);
        assert_eq!(query(marker), INVALID_VALUE);

        // Synchronising the stream itself breaks it too; another stream is free.
        assert_eq!(begin(2), 0);
        assert_eq!((synchronize(other), synchronize(stream)), (0, 900));
        assert_eq!(cu!(cuStreamEndCapture(stream => usize, &mut graph => *mut usize)), 901);
        assert_eq!(synchronize(stream), 0);
    });
}

#[test]
fn advice_is_remembered_and_a_discard_destroys() {
    Build::new().in_child("advice_is_remembered_and_a_discard_destroys", &[], || {
        start();
        let stream = stream();
        let (_, address) = managed(2 << 20);
        let last_prefetch = || {
            let mut place: c_int = 9;
            let out = ptr::from_mut(&mut place).cast::<c_void>();
            assert_eq!(
                cu!(cuMemRangeGetAttribute(
                    out => *mut c_void, 4 => usize, 4 => c_int, address => usize, 2 << 20 => usize,
                )),
                0
            );
            place
        };
        assert_eq!(last_prefetch(), -2);
        let prefetch = |bytes: usize, device: c_int| {
            cu!(cuMemPrefetchAsync(address => usize, bytes => usize, device => c_int, stream => usize))
        };
        assert_eq!((prefetch(2 << 20, -1), synchronize(stream), last_prefetch()), (0, 0, -1));
        assert_eq!((prefetch(2 << 20, 7), prefetch((2 << 20) + 1, 0), prefetch(0, 0)), (101, 1, 1));
        // Location type 1 is a device; both numbers travel in one register.
        assert_eq!(
            cu!(cuMemPrefetchAsync_v2(
                address => usize, 2 << 20 => usize, 1 => u64, 0 => u32, stream => usize,
            )),
            0
        );
        assert_eq!((synchronize(stream), last_prefetch()), (0, 0));
        assert_eq!(cu!(cuMemAdvise(address => usize, 4096 => usize, 3 => c_int, -1 => c_int)), 0);
        assert_eq!(cu!(cuMemAdvise(address => usize, 4096 => usize, 9 => c_int, -1 => c_int)), INVALID_VALUE);

        let (sizes, places, indices) = ([2usize << 20], [1u64], [0usize]);
        assert_eq!(
            cu!(cuMemDiscardAndPrefetchBatchAsync(
                [address].as_ptr() => *const usize, sizes.as_ptr() => *const usize, 1 => usize,
                places.as_ptr() => *const u64, indices.as_ptr() => *const usize, 1 => usize, 0 => u64, stream => usize,
            )),
            0
        );
        assert_eq!(synchronize(stream), 0);
        assert_eq!(floats(address, 1)[0].to_ne_bytes(), [0xDB; 4]);
    });
}

#[test]
fn pointers_are_known() {
    Build::new().in_child("pointers_are_known", &[], || {
        start();
        let (_, address) = managed(8192);
        let ask = |which: c_int, at: usize| {
            let mut value = 0u64;
            let out = ptr::from_mut(&mut value).cast::<c_void>();
            let code = cu!(cuPointerGetAttribute(out => *mut c_void, which => c_int, at => usize));
            (code, value)
        };
        assert_eq!((ask(8, address + 100), ask(2, address)), ((0, 1), (0, 2)));
        assert_eq!((ask(11, address + 8191), ask(12, address)), ((0, address as u64), (0, 8192)));
        assert_eq!(ask(8, address + 8192).0, INVALID_VALUE);
        let mut device = 0usize;
        assert_eq!(cu!(cuMemAlloc_v2(&mut device => *mut usize, 4096 => usize)), 0);
        assert_eq!(ask(8, device), (0, 0));
    });
}

const APART: (&str, &str) = ("FAKE_CUDA_CONCURRENT", "0");

#[test]
fn without_concurrent_access_a_touch_faults() {
    let output = Build::new().child_output("without_concurrent_access_a_touch_faults", &[APART], || {
        start();
        let (module, stream) = (kernels(), stream());
        let (_, address) = managed(4096);
        assert_eq!(fill(module, stream, address, 4, 5.0, 4), 0);
        assert_eq!((synchronize(stream), floats(address, 4)[0]), (0, 5.0));
        eprintln!("before the launch");
        spin(module, stream, 2000);
        let seen = floats(address, 4)[0];
        eprintln!("read {seen}");
    });
    if let Some(output) = output {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{text}");
        assert!(text.contains("before the launch") && !text.contains("read 5"), "{text}");
    }
}

/// Whether the host may touch a byte.
fn readable(address: usize) -> bool {
    let (mut byte, mut pipe) = (0u8, [0; 2]);
    // SAFETY: the pipe's ends are live; a write from memory that is not accessible fails instead of faulting.
    unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        let written = libc::write(pipe[1], address as *const c_void, 1) == 1;
        if written {
            libc::read(pipe[0], ptr::from_mut(&mut byte).cast(), 1);
        }
        libc::close(pipe[0]);
        libc::close(pipe[1]);
        written
    }
}

#[test]
fn without_concurrent_access_work_and_allocation_go_on() {
    Build::new().in_child("without_concurrent_access_work_and_allocation_go_on", &[APART], || {
        start();
        let (module, one, two) = (kernels(), stream(), stream());
        let mut concurrent: c_int = 9;
        assert_eq!(cu!(cuDeviceGetAttribute(&mut concurrent => *mut c_int, 89 => c_int, 0 => c_int)), 0);
        assert_eq!(concurrent, 0);
        let (_, address) = managed(2 << 20);
        spin(module, one, 500);
        let (code, second) = managed(4096);
        assert_eq!(code, 0);
        assert_eq!(fill(module, two, address, 8, 2.0, 8), 0);
        assert_eq!(fill(module, two, second, 8, 4.0, 8), 0);
        // The second stream is done and the device is not: memory stays closed.
        assert_eq!(synchronize(two), 0);
        assert!(!readable(address) && !readable(second));
        assert_eq!(cu!(cuCtxSynchronize()), 0);
        assert!(readable(address) && readable(second));
        assert_eq!((floats(address, 8)[7], floats(second, 8)[7]), (2.0, 4.0));
        assert_eq!(
            cu!(cuMemPrefetchAsync(address => usize, 4096 => usize, 0 => c_int, one => usize)),
            101,
            "invalid device, as the real one says"
        );
        assert_eq!((free(address), free(second)), (0, 0));
    });
}

#[test]
fn events_that_are_still_to_be_recorded_keep_no_memory_from_the_host() {
    let slowly = [APART, ("FAKE_CUDA_LAG_US", "50000")];
    Build::new().in_child(
        "events_that_are_still_to_be_recorded_keep_no_memory_from_the_host",
        &slowly,
        || {
            start();
            let (one, two, done) = (stream(), stream(), event());
            let (_, address) = managed(4096);
            let fill = || {
                assert_eq!(cu!(cuMemsetD8Async(address => usize, 1 => u8, 4096 => usize, one => usize)), 0)
            };
            // The event of the work itself says that it is done, a moment before its stream is.
            fill();
            assert!(!readable(address));
            assert_eq!(record(done, one), 0);
            assert_eq!(cu!(cuEventSynchronize(done => usize)), 0);
            assert!(readable(address));
            assert_eq!(synchronize(one), 0);
            // Events of another stream are no work.
            (0..4).for_each(|_| assert_eq!(record(event(), two), 0));
            fill();
            assert_eq!(synchronize(one), 0);
            assert!(readable(address));
            assert_eq!(cu!(cuStreamQuery(two => usize)), NOT_READY, "all had been recorded before the test");
            // A stream that waits for another's work is at work itself only if it was given some.
            fill();
            assert_eq!(record(done, one), 0);
            assert_eq!(cu!(cuStreamWaitEvent(two => usize, done => usize, 0 => u32)), 0);
            assert!(!readable(address));
            assert_eq!(synchronize(one), 0);
            assert!(readable(address));
            assert_eq!((synchronize(two), free(address)), (0, 0));
        },
    );
}

#[test]
fn memory_operations_are_ordered_on_their_stream() {
    Build::new().in_child("memory_operations_are_ordered_on_their_stream", &[], || {
        start();
        let (module, stream) = (kernels(), stream());
        let (a, b) = (managed(4096).1, managed(4096).1);
        spin(module, stream, 300);
        assert_eq!(cu!(cuMemsetD8Async(a => usize, 0x11 => u8, 4096 => usize, stream => usize)), 0);
        assert_eq!(cu!(cuMemcpyAsync(b => usize, a => usize, 4096 => usize, stream => usize)), 0);
        assert_eq!(floats(b, 1)[0], 0.0);
        assert_eq!(synchronize(stream), 0);
        assert_eq!(floats(b, 1024)[1023].to_ne_bytes(), [0x11; 4]);
        assert_eq!(cu!(cuMemsetD8Async(a => usize, 0 => u8, 4097 => usize, stream => usize)), INVALID_VALUE);
        // Memory of the program itself: done when the call returns.
        let mut own = [0u8; 4];
        assert_eq!(cu!(cuMemcpyDtoH_v2(own.as_mut_ptr() => *mut u8, b => usize, 4 => usize)), 0);
        assert_eq!(own, [0x11; 4]);
    });
}

#[test]
fn host_functions_may_not_call_the_driver() {
    unsafe extern "C" fn call(result: *mut c_void) {
        let code = managed(4096).0;
        // SAFETY: the test passes its own integer and waits for the stream before it reads it.
        unsafe { result.cast::<u32>().write(code) };
    }
    Build::new().in_child("host_functions_may_not_call_the_driver", &[], || {
        start();
        let stream = stream();
        let mut code = 0u32;
        let data = ptr::from_mut(&mut code).cast::<c_void>();
        assert_eq!(
            cu!(cuLaunchHostFunc(
                stream => usize, call => unsafe extern "C" fn(*mut c_void), data => *mut c_void,
            )),
            0
        );
        assert_eq!((synchronize(stream), code), (0, 800));
    });
}

/// Everything at once, so that an order of locks or of waits that can deadlock shows as a test that never ends.
fn everything_at_once() {
    let context = start();
    let module = kernels();
    let threads: Vec<_> = (0..8u32)
        .map(|seed| {
            std::thread::spawn(move || {
                assert_eq!(cu!(cuCtxPushCurrent_v2(context => usize)), 0);
                for round in 0..60 {
                    let (own, done) = (stream(), event());
                    let (_, address) = managed(4096 << (round % 5));
                    assert_eq!(
                        cu!(cuMemsetD8Async(address => usize, 1 => u8, 4096 => usize, own => usize)),
                        0
                    );
                    assert_eq!(fill(module, own, address, 16, 1.0, 16), 0);
                    if (round + seed) % 7 == 0 {
                        assert_eq!(fill(module, 0, address, 16, 2.0, 16), 0);
                        assert_eq!(synchronize(0), 0);
                    }
                    assert_eq!(record(done, own), 0);
                    match round % 3 {
                        0 => assert_eq!(synchronize(own), 0),
                        1 => assert_eq!(cu!(cuEventSynchronize(done => usize)), 0),
                        _ => while query(done) == NOT_READY {},
                    }
                    assert_eq!(cu!(cuStreamDestroy_v2(own => usize)), 0);
                    assert_eq!(free(address), 0);
                    assert_eq!(cu!(cuEventDestroy_v2(done => usize)), 0);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let fake = Loaded::find().unwrap();
    let left =
        ["live_managed", "live_managed_bytes", "live_streams", "live_events"].map(|name| fake.counter(name));
    assert_eq!(left, [0; 4]);
    assert_eq!(cu!(cuCtxSynchronize()), 0);
}

#[test]
fn many_threads_and_streams() {
    Build::new().in_child("many_threads_and_streams", &[], everything_at_once);
}

#[test]
fn many_threads_and_streams_without_concurrent_access() {
    Build::new().in_child("many_threads_and_streams_without_concurrent_access", &[APART], everything_at_once);
}
