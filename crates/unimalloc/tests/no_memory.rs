//! A process that has no address space left, for blocks or for the allocator's own books. Each test is a process of its own.
#![cfg(target_os = "linux")]

use fake_cuda::Build;
use unimalloc::{
    audit, last_error, thread_alloc, thread_free, trim, AllocError, AllocPolicy, HardenedPolicy, HostBackend,
    StandardPolicy,
};

const MIB: usize = 1 << 20;

fn alloc<P: AllocPolicy>(size: usize) -> *mut usize {
    thread_alloc::<P, HostBackend>(size, 16).cast()
}

fn free<P: AllocPolicy>(block: *mut usize) {
    // SAFETY: the tests free each block once, and use none after that.
    unsafe { thread_free::<P, HostBackend>(block.cast()) }.unwrap();
}

/// Lets the process have this many bytes of address space more than it has now.
fn leave(bytes: usize) {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').next().unwrap().parse().unwrap();
    let limit = (pages * 4096 + bytes) as libc::rlim_t;
    // SAFETY: the structure is whole, and read before the call returns.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &libc::rlimit { rlim_cur: limit, rlim_max: limit }) };
    assert_eq!(set, 0);
    // A process that aborts for want of memory may wait for ever in its own report of that.
    // SAFETY: nobody else uses the alarm.
    unsafe { libc::alarm(60) };
}

/// Allocates until there is nothing left, frees all, and does it again. The blocks are linked through themselves: the test has
/// no memory of its own either.
fn exhaust<P: AllocPolicy>(size: usize, left: usize) {
    free::<P>(alloc::<P>(size));
    leave(left);
    for round in 0..2 {
        let mut head = std::ptr::null_mut();
        let mut count = 0;
        loop {
            let block = alloc::<P>(size);
            if block.is_null() {
                break;
            }
            // SAFETY: the block is live, aligned, and large enough for an address.
            unsafe { block.cast::<*mut usize>().write(head) };
            head = block;
            count += 1;
        }
        assert_eq!(last_error(), Some(AllocError::OutOfMemory), "round {round}");
        assert!(count * size > left / 4, "round {round}: only {count} blocks of {size} bytes");
        (0..100).for_each(|_| assert!(alloc::<P>(size).is_null()));
        while !head.is_null() {
            // SAFETY: written above, and the block is still live.
            let next = unsafe { head.cast::<*mut usize>().read() };
            free::<P>(head);
            head = next;
        }
    }
    trim::<HostBackend>(0);
    audit::<HostBackend>().unwrap();
}

macro_rules! exhausted {
    ($name:ident, $policy:ty, $size:literal, $left:literal) => {
        #[test]
        fn $name() {
            // A heap of a thread's own has address space to spare, and would hide what this is about.
            Build::new().in_child(stringify!($name), &[("MALLOC_ARENA_MAX", "1")], || {
                exhaust::<$policy>($size, $left * MIB);
            });
        }
    };
}

// What fails first, the blocks or the books, depends on where the limit falls between two growths of the process's own heap.
exhausted!(blocks_of_16_bytes_end_with_a_null, StandardPolicy, 16, 40);
exhausted!(blocks_of_16_bytes_end_with_a_null_a_little_later, StandardPolicy, 16, 41);
exhausted!(blocks_of_1000_bytes_end_with_a_null, StandardPolicy, 1000, 36);
exhausted!(blocks_of_3_mebibytes_end_with_a_null, StandardPolicy, 3_000_000, 40);
exhausted!(hardened_blocks_of_100_bytes_end_with_a_null, HardenedPolicy, 100, 40);
