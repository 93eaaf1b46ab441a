//! Initialisation, contexts, allocation, release and their injected failures.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use fake_cuda::{Build, Calls, Loaded};
use std::ffi::{c_int, c_void};

#[test]
fn nothing_works_before_init() {
    Build::new().in_child("nothing_works_before_init", &[], || {
        let mut count: c_int = 0;
        assert_eq!(cu!(cuDeviceGetCount(&mut count => *mut c_int)), NOT_INITIALIZED);
        assert_eq!(managed(4096).0, NOT_INITIALIZED);
        let mut version: c_int = 0;
        assert_eq!(cu!(cuDriverGetVersion(&mut version => *mut c_int)), 0);
        assert_eq!(version, 13_000);
        assert_eq!(cu!(cuInit(1 => u32)), INVALID_VALUE);
        init();
        init();
        assert_eq!(cu!(cuDeviceGetCount(&mut count => *mut c_int)), 0);
        assert_eq!(count, 1);
        assert_eq!(Loaded::find().unwrap().counter("context_creations"), 0);
    });
}

#[test]
fn init_fails_as_told() {
    Build::new().in_child("init_fails_as_told", &[("FAKE_CUDA_INIT_ERROR", "34")], || {
        assert_eq!(cu!(cuInit(0 => u32)), 34);
        assert_eq!(managed(4096).0, NOT_INITIALIZED);
    });
}

#[test]
fn no_device_is_an_init_error() {
    Build::new().in_child("no_device_is_an_init_error", &[("FAKE_CUDA_DEVICES", "0")], || {
        assert_eq!(cu!(cuInit(0 => u32)), 100);
    });
}

#[test]
fn a_variable_that_is_not_understood_is_loud() {
    let name = "a_variable_that_is_not_understood_is_loud";
    let output = Build::new().child_output(name, &[("FAKE_CUDA_DEVICE", "2")], || {
        assert_eq!(cu!(cuInit(0 => u32)), 999);
    });
    if let Some(output) = output {
        assert!(output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains("FAKE_CUDA_DEVICE=\"2\" is not understood"));
    }
}

#[test]
fn allocation_and_release() {
    Build::new().in_child("allocation_and_release", &[], || {
        init();
        assert_eq!(managed(4096).0, INVALID_CONTEXT);
        start();
        let fake = Loaded::find().unwrap();
        assert_eq!(managed(0).0, INVALID_VALUE);
        let mut none = 0usize;
        assert_eq!(cu!(cuMemAllocManaged(&mut none => *mut usize, 4096 => usize, 8 => u32)), INVALID_VALUE);
        let (code, address) = managed(3 << 20);
        assert_eq!((code, address % (4 << 20)), (0, 0));
        // SAFETY: the driver gave exactly these bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, 3 << 20) };
        bytes.fill(7);
        assert_eq!((fake.counter("live_managed"), fake.counter("live_managed_bytes")), (1, 3 << 20));
        assert_eq!(free(address + 4096), INVALID_VALUE);
        assert_eq!(free(0x1000), INVALID_VALUE);
        let stale = cu!(cuMemFree(address as u32 => u32));
        assert_eq!(stale, INVALID_CONTEXT);
        // The address says whose it is: a thread without a context can free it, but not allocate.
        std::thread::spawn(move || assert_eq!((managed(4096).0, free(address)), (INVALID_CONTEXT, 0)))
            .join()
            .unwrap();
        assert_eq!(free(address), INVALID_VALUE);
        assert_eq!(free(0), 0);
        assert_eq!((fake.counter("live_managed"), fake.counter("peak_managed_bytes")), (0, 3 << 20));
        assert_eq!((fake.counter("cuMemFree_v2"), fake.counter("cuMemFree")), (5, 1));
    });
}

#[test]
fn contexts_are_a_stack_of_each_thread() {
    Build::new().in_child("contexts_are_a_stack_of_each_thread", &[("FAKE_CUDA_DEVICES", "2")], || {
        init();
        let fake = Loaded::find().unwrap();
        let current = || {
            let mut handle = 1usize;
            assert_eq!(cu!(cuCtxGetCurrent(&mut handle => *mut usize)), 0);
            handle
        };
        let mut contexts = [0usize; 2];
        for device in 0..2 {
            let out = &mut contexts[device as usize];
            assert_eq!(cu!(cuDevicePrimaryCtxRetain(out => *mut usize, device => c_int)), 0);
        }
        assert_eq!(current(), 0);
        assert_eq!(cu!(cuCtxPopCurrent_v2(std::ptr::null_mut() => *mut usize)), INVALID_CONTEXT);
        assert_eq!(cu!(cuCtxPushCurrent_v2(contexts[0] => usize)), 0);
        assert_eq!(cu!(cuCtxPushCurrent_v2(contexts[1] => usize)), 0);
        let mut device: c_int = -1;
        assert_eq!(cu!(cuCtxGetDevice(&mut device => *mut c_int)), 0);
        assert_eq!((current(), device), (contexts[1], 1));
        std::thread::spawn(move || assert_eq!(current(), 0)).join().unwrap();
        let mut popped = 0usize;
        assert_eq!(cu!(cuCtxPopCurrent_v2(&mut popped => *mut usize)), 0);
        assert_eq!((popped, current()), (contexts[1], contexts[0]));
        assert_eq!(cu!(cuCtxSetCurrent(0 => usize)), 0);
        assert_eq!(current(), 0);
        assert_eq!(cu!(cuCtxPushCurrent_v2(0xBAD => usize)), INVALID_CONTEXT);
        assert_eq!((fake.counter("context_creations"), fake.counter("live_contexts")), (2, 2));

        // The last release ends the context and what it owns; a retain makes it anew.
        assert_eq!(cu!(cuCtxPushCurrent_v2(contexts[0] => usize)), 0);
        assert_eq!(managed(4096).0, 0);
        assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(0 => c_int)), 0);
        assert_eq!(fake.counter("live_managed"), 0);
        assert_eq!(managed(4096).0, 709);
        assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(0 => c_int)), INVALID_CONTEXT);
        assert_eq!(cu!(cuDevicePrimaryCtxRetain(&mut contexts[0] => *mut usize, 0 => c_int)), 0);
        assert_eq!(managed(4096).0, 0);
    });
}

#[test]
fn failures_from_the_environment() {
    let variables = [("FAKE_CUDA_FAIL", "cuMemAllocManaged@2=2,cuMemFree_v2@2+=999")];
    Build::new().in_child("failures_from_the_environment", &variables, || {
        start();
        let addresses: Vec<_> = (0..4).map(|_| managed(4096)).collect();
        assert_eq!(addresses.iter().map(|(code, _)| *code).collect::<Vec<_>>(), [0, 2, 0, 0]);
        assert_eq!(free(addresses[0].1), 0);
        assert_eq!((free(addresses[2].1), free(addresses[3].1)), (999, 999));
        assert_eq!(Loaded::find().unwrap().counter("live_managed"), 2);
    });
}

#[test]
fn failures_at_run_time() {
    Build::new().in_child("failures_at_run_time", &[], || {
        start();
        let fake = Loaded::find().unwrap();
        let (_, address) = managed(4096);
        fake.fail("cuMemAllocManaged", Calls::Nth(2), 2);
        assert_eq!((managed(4096).0, managed(4096).0, managed(4096).0), (0, 2, 0));
        fake.fail("cuMemAllocManaged", Calls::From(1), 46);
        assert_eq!((managed(4096).0, managed(4096).0), (46, 46));
        fake.fail("cuMemAllocManaged", Calls::None, 1);
        assert_eq!(managed(4096).0, 0);
        fake.control("deinitialized", 1);
        assert_eq!(free(address), DEINITIALIZED);
        fake.control("deinitialized", 0);
        assert_eq!(free(address), 0);
    });
}

#[test]
fn misaligned_addresses() {
    Build::new().in_child("misaligned_addresses", &[("FAKE_CUDA_MISALIGN", "64KiB")], || {
        start();
        let (_, address) = managed(32 << 20);
        assert_eq!(address % (2 << 20), 64 << 10);
        Loaded::find().unwrap().control("misalign", 4096);
        let (_, second) = managed(2 << 20);
        assert_eq!(second % (2 << 20), 4096);
        assert_eq!((free(address), free(second)), (0, 0));
    });
}

#[test]
fn free_memory_as_told() {
    Build::new().in_child("free_memory_as_told", &[("FAKE_CUDA_TOTAL_BYTES", "1GiB")], || {
        start();
        let info = || {
            let (mut free, mut total) = (0usize, 0usize);
            assert_eq!(cu!(cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize)), 0);
            (free, total)
        };
        assert_eq!(info(), (1 << 30, 1 << 30));
        // Managed memory is practically never refused, even beyond what there is.
        let (code, address) = managed(2 << 30);
        assert_eq!((code, info().0), (0, 0));
        let mut device = 0usize;
        assert_eq!(cu!(cuMemAlloc_v2(&mut device => *mut usize, 4096 => usize)), 2);
        assert_eq!(free(address), 0);
        Loaded::find().unwrap().control("free_bytes", 12_345);
        assert_eq!(info(), (12_345, 1 << 30));
    });
}

#[test]
fn a_lost_context_stays_lost() {
    Build::new().in_child("a_lost_context_stays_lost", &[], || {
        start();
        let fake = Loaded::find().unwrap();
        let (_, address) = managed(4096);
        fake.control("lose_at_call", 2);
        assert_eq!(managed(4096).0, 0);
        assert_eq!(managed(4096).0, ILLEGAL_ADDRESS);
        assert_eq!(free(address), ILLEGAL_ADDRESS);
        assert_eq!(cu!(cuCtxSynchronize()), ILLEGAL_ADDRESS);
        let mut handle = 0usize;
        assert_eq!(cu!(cuCtxGetCurrent(&mut handle => *mut usize)), 0);
        // SAFETY: the block was never released: it stays readable.
        assert_eq!(unsafe { (address as *const u8).read_volatile() }, 0);
        // Not even a reset brings it back: that takes a new process.
        assert_eq!(cu!(cuDevicePrimaryCtxReset_v2(0 => c_int)), 0);
        assert_eq!(managed(4096).0, 709);
        assert_eq!(cu!(cuDevicePrimaryCtxRetain(&mut handle => *mut usize, 0 => c_int)), ILLEGAL_ADDRESS);
    });
}

#[test]
fn an_old_driver_lacks_what_came_later() {
    Build::new().driver(fake_cuda::OLD_VERSION).in_child("an_old_driver_lacks_what_came_later", &[], || {
        let mut version: c_int = 0;
        assert_eq!(cu!(cuDriverGetVersion(&mut version => *mut c_int)), 0);
        assert_eq!(version, 12_010);
        init();
        let named = |name: &str, version: c_int| {
            let name = std::ffi::CString::new(name).unwrap();
            let (mut address, mut status) = (std::ptr::null_mut::<c_void>(), -1);
            let code = cu!(cuGetProcAddress_v2(
                name.as_ptr() => *const std::ffi::c_char, &mut address => *mut *mut c_void, version => c_int, 0 => u64,
                &mut status => *mut c_int,
            ));
            (code, address, status)
        };
        for missing in ["cuMemAdvise_v2", "cuMemPrefetchAsync_v2", "cuMemDiscardAndPrefetchBatchAsync", "cuFuncGetParamInfo"] {
            assert!(symbol("libcuda.so.1", missing).is_null(), "{missing}");
        }
        assert_eq!(named("cuMemDiscardAndPrefetchBatchAsync", 13_000), (0, std::ptr::null_mut(), 1));
        assert_eq!(named("cuMemAdvise", 13_000), (0, symbol("libcuda.so.1", "cuMemAdvise"), 0));
        assert_eq!(named("cuMemFree", 12_000), (0, symbol("libcuda.so.1", "cuMemFree_v2"), 0));
        assert_eq!(named("cuNoSuchThing", 12_000), (0, std::ptr::null_mut(), 1));
    });
}

#[test]
fn a_new_driver_has_them() {
    Build::new().without("cuMemPrefetchBatchAsync").in_child("a_new_driver_has_them", &[], || {
        assert!(!symbol("libcuda.so.1", "cuMemAdvise_v2").is_null());
        assert!(!symbol("libcuda.so.1", "cuMemDiscardAndPrefetchBatchAsync").is_null());
        assert!(symbol("libcuda.so.1", "cuMemPrefetchBatchAsync").is_null());
        assert!(symbol("libcuda.so.1", "nvrtcVersion").is_null());
    });
}

#[test]
fn a_child_after_fork_is_not_initialized() {
    Build::new().in_child("a_child_after_fork_is_not_initialized", &[], || {
        start();
        // SAFETY: the child only makes a call that answers before it takes a lock, and leaves by _exit.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit((managed(4096).0 != NOT_INITIALIZED) as i32);
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        };
        assert_eq!(status, 0);
    });
}

#[test]
fn a_hundred_threads() {
    Build::new().in_child("a_hundred_threads", &[], || {
        let context = start();
        let threads: Vec<_> = (0..100)
            .map(|_| {
                std::thread::spawn(move || {
                    assert_eq!(cu!(cuCtxPushCurrent_v2(context => usize)), 0);
                    for _ in 0..20 {
                        let (code, address) = managed(65_536);
                        assert_eq!(code, 0);
                        assert_eq!(free(address), 0);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let fake = Loaded::find().unwrap();
        assert_eq!((fake.counter("live_managed"), fake.counter("cuMemAllocManaged")), (0, 2000));
    });
}

#[test]
fn calls_while_the_process_exits_are_seen() {
    extern "C" fn late() {
        managed(4096);
    }
    let name = "calls_while_the_process_exits_are_seen";
    let output = Build::new().child_output(name, &[("FAKE_CUDA_ABORT_ON_EXIT_CALLS", "1")], || {
        // Registered first, so it runs after the driver has gone.
        // SAFETY: a plain function of this program.
        unsafe { libc::atexit(late) };
        start();
    });
    if let Some(output) = output {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(output.status.signal(), Some(libc::SIGABRT));
        assert!(String::from_utf8_lossy(&output.stderr)
            .contains("cuMemAllocManaged called while the process exits"));
    }
}
