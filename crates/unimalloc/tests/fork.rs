//! The child of a fork: every call answers `Forked`, at once and without a lock that another thread may have held.
//!
//! Children report by exit code, and an alarm ends one that hangs.
#![cfg(unix)]

mod common;

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Mutex;
use std::thread;

use common::{alloc, free};
use unimalloc::*;

type B = HostBackend;

/// Forks one at a time: each child must only see the threads that its own test made.
static ONE: Mutex<()> = Mutex::new(());

/// Runs `child` in a fork; what it answers must be empty. It may not use the test's output.
fn in_child(child: impl FnOnce() -> Vec<u8>) {
    // SAFETY: the child calls the allocator, whose calls are made for this, and the system's malloc, which stays usable
    // in a child; then it exits without running anything of its parent.
    match unsafe { libc::fork() } {
        -1 => panic!("fork failed"),
        0 => {
            // SAFETY: as above.
            unsafe { libc::alarm(20) };
            let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(vec![255]);
            // SAFETY: ends this process alone.
            unsafe { libc::_exit(wrong.first().map_or(0, |at| i32::from(*at))) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: waits for our own child.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status), "the child was ended by signal {}", libc::WTERMSIG(status));
            assert_eq!(libc::WEXITSTATUS(status), 0, "which check failed");
        }
    }
}

/// Ends the threads of a test, also when it fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Numbers of the checks that fail.
struct Checks(Vec<u8>);

impl Checks {
    fn check(&mut self, number: u8, holds: bool) {
        if !holds {
            self.0.push(number);
        }
    }

    /// The call answered that it failed, and `Forked` is the reason.
    fn forked(&mut self, number: u8, call: impl FnOnce() -> bool) {
        set_last_error(AllocError::NoDevice);
        self.check(number, call() && last_error() == Some(AllocError::Forked));
    }
}

/// Calls everything there is, with blocks and an allocator of the parent.
fn call_everything(blocks: &[usize], handle: &mut ThreadAllocator<B>) -> Vec<u8> {
    let mut checks = Checks(Vec::new());
    let c = &mut checks;
    // First what a warm hot path would serve.
    c.forked(1, || thread_alloc::<StandardPolicy, B>(64, 16).is_null());
    for &block in blocks {
        c.check(2, free::<StandardPolicy, B>(block as *mut u8) == Err(FreeError::Forked));
        c.check(3, free::<HardenedPolicy, B>(block as *mut u8) == Err(FreeError::Forked));
        c.forked(4, || usable_size::<B>(block as *const u8) == 0);
        // SAFETY: the block is the parent's, and the call is refused.
        c.forked(5, || unsafe { thread_realloc::<StandardPolicy, B>(block as *mut u8, 100, 1) }.is_null());
    }
    c.forked(6, || thread_alloc::<SecurePolicy, B>(64, 16).is_null());
    c.forked(7, || thread_alloc::<HardenedPolicy, B>(64, 16).is_null());
    c.forked(8, || thread_alloc::<StandardPolicy, B>(64 << 20, 16).is_null());
    c.forked(9, || alloc_with::<StandardPolicy, B>(64, 16, &AllocOptions::default()).is_null());
    c.forked(10, || <B as LocalAllocatorSelector<B>>::with_allocator(|_| ()).is_none());
    // SAFETY: the closure does not run.
    c.forked(11, || unsafe { <B as LocalAllocatorSelector<B>>::with_allocator_unguarded(|_| ()) }.is_none());
    c.forked(12, || <HardenedPolicy as PolicySlotSelection<B>>::with_allocator(|_| ()).is_none());
    c.forked(13, || <B as LocalAllocatorSelector<B>>::get_allocator_ptr().is_null());
    c.forked(14, || B::get_allocator_ptr_raw_for_encryption::<false>().is_null());
    c.forked(15, || <HardenedPolicy as PolicySlotSelection<B>>::get_allocator_ptr().is_null());
    c.forked(16, || {
        B::register_current_allocator_ptr(handle.as_ptr());
        true
    });
    c.forked(17, || handle.alloc::<StandardPolicy>(64, 16).is_null());
    // SAFETY: the free is refused.
    c.check(18, unsafe { handle.free::<StandardPolicy>(blocks[0] as *mut u8) } == Err(FreeError::Forked));
    c.forked(19, || trim::<B>(0) == 0);
    c.forked(20, || decay::<B>() == 0);
    c.forked(21, || set_retention::<B>(0) == 0);
    c.forked(22, || stats::<B>().reserved_bytes == 0);
    // SAFETY: nothing is released.
    c.forked(23, || !unsafe { B::deallocate(blocks[0] as *mut u8, 4096) });
    // SAFETY: any size may be asked for.
    c.forked(24, || unsafe { B::allocate(4096) }.is_null());
    // SAFETY: as above.
    c.forked(25, || unsafe { CudaUnifiedBackend::allocate(4096) }.is_null());
    c.forked(26, || thread_alloc::<StandardPolicy, CudaUnifiedBackend>(64, 16).is_null());
    c.check(27, !is_cuda_available());
    let mut fresh = ThreadAllocator::<B>::new_encrypted();
    c.forked(28, || fresh.alloc::<HardenedPolicy>(64, 16).is_null());
    drop(fresh);
    c.forked(29, || Arena::<B>::new().alloc(64, 16).is_null());
    c.check(30, free::<StandardPolicy, B>(ptr::null_mut()) == Ok(()));
    // A thread of the child is no better off, and ends well.
    c.check(
        31,
        thread::spawn(|| thread_alloc::<StandardPolicy, B>(64, 16).is_null()).join().unwrap_or(false),
    );
    checks.0
}

fn a_few_blocks() -> Vec<usize> {
    vec![
        alloc::<StandardPolicy, B>(64, 16) as usize,
        alloc::<SecurePolicy, B>(64, 16) as usize,
        alloc::<HardenedPolicy, B>(64, 16) as usize,
        alloc::<StandardPolicy, B>(20 << 20, 16) as usize,
    ]
}

fn free_all(blocks: Vec<usize>) {
    blocks.into_iter().for_each(|block| free::<StandardPolicy, B>(block as *mut u8).unwrap());
}

#[test]
fn every_call_in_a_child_answers_forked() {
    let _one = ONE.lock().unwrap();
    let blocks = a_few_blocks();
    free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(64, 16)).unwrap(); // so that the cache has one
    let mut handle = ThreadAllocator::<B>::new();
    in_child(|| call_everything(&blocks, &mut handle));
    free_all(blocks); // the parent is as it was
}

#[test]
fn a_child_does_not_wait_for_a_lock_that_another_thread_held() {
    let _one = ONE.lock().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    // Through every lock: segments, huge blocks, descriptors, shared heaps, the registry.
                    let blocks: Vec<_> = [700_000, 3 << 20, 9 << 20]
                        .iter()
                        .flat_map(|size| {
                            [alloc::<StandardPolicy, B>(*size, 16), alloc::<HardenedPolicy, B>(*size / 8, 16)]
                        })
                        .collect();
                    blocks.into_iter().for_each(|block| free::<StandardPolicy, B>(block).unwrap());
                    trim::<B>(16 << 20);
                }
            });
        }
        let _stop = Stop(&stop);
        let blocks = a_few_blocks();
        let mut handle = ThreadAllocator::<B>::new();
        for _ in 0..100 {
            in_child(|| call_everything(&blocks, &mut handle));
        }
        free_all(blocks);
    });
}

#[test]
fn a_fork_inside_a_closure_stays_cut_off_after_it() {
    let _one = ONE.lock().unwrap();
    let blocks = a_few_blocks();
    let mut handle = ThreadAllocator::<B>::new();
    // SAFETY: the child does what `in_child` says.
    let child = <B as LocalAllocatorSelector<B>>::with_allocator(|allocator| {
        // SAFETY: as above.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(20) };
            if !allocator.alloc::<StandardPolicy>(64, 16).is_null() {
                // SAFETY: as above.
                unsafe { libc::_exit(100) };
            }
        }
        child
    })
    .unwrap();
    if child == 0 {
        let wrong = call_everything(&blocks, &mut handle);
        // SAFETY: as above.
        unsafe { libc::_exit(wrong.first().map_or(0, |at| i32::from(*at))) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    free_all(blocks);
}

#[test]
fn a_child_of_a_process_that_had_used_nothing_yet_is_free_to_use_the_host_backend() {
    let _one = ONE.lock().unwrap();
    // In a process of its own: this one has used the backend.
    if std::env::var_os("UNIMALLOC_TEST_FRESH").is_none() {
        let fresh = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_child_of_a_process_that_had_used_nothing_yet_is_free_to_use_the_host_backend",
            ])
            .env("UNIMALLOC_TEST_FRESH", "1")
            .output()
            .unwrap();
        return assert!(fresh.status.success(), "{fresh:?}");
    }
    in_child(|| {
        let block = thread_alloc::<StandardPolicy, B>(64, 16);
        let mut checks = Checks(Vec::new());
        checks.check(1, !block.is_null());
        checks.check(2, free::<StandardPolicy, B>(block) == Ok(()));
        checks.0
    });
}
