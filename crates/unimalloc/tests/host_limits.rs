//! The host backend's ceilings and its behaviour after a fork. Each test is a process of its own.
#![cfg(target_os = "linux")]

use fake_cuda::Build;
use unimalloc::{last_error, AllocError, HostBackend, MemoryBackend};

const MIB: usize = 1 << 20;

fn allocate(size: usize) -> *mut u8 {
    // SAFETY: any size may be asked for.
    unsafe { HostBackend::allocate(size) }
}

fn live(size: usize) -> *mut u8 {
    let base = allocate(size);
    assert!(!base.is_null(), "{:?}", last_error());
    base
}

fn refused(size: usize, reason: AllocError) {
    assert!(allocate(size).is_null());
    assert_eq!(last_error(), Some(reason));
}

fn deallocate(base: *mut u8, size: usize) -> bool {
    // SAFETY: no test uses a region after this.
    unsafe { HostBackend::deallocate(base, size) }
}

macro_rules! in_child {
    ($name:ident, [$($variable:literal = $value:literal),*], $body:block) => {
        #[test]
        fn $name() {
            Build::new().in_child(stringify!($name), &[$(($variable, $value)),*], || $body);
        }
    };
}

in_child!(the_variable_is_the_ceiling_until_an_option_replaces_it, ["UNIMALLOC_MAX_BYTES" = "64MiB"], {
    assert_eq!(HostBackend::segment_bytes(), 8 * MIB);
    let base = live(48 * MIB);
    refused(32 * MIB, AllocError::Budget);
    HostBackend::set_limit(Some(80 << 20));
    let second = live(32 * MIB);
    refused(4096, AllocError::Budget);
    HostBackend::set_limit(None);
    refused(4096, AllocError::Budget);
    assert!(deallocate(base, 48 * MIB));
    let third = live(32 * MIB);
    assert!(deallocate(second, 32 * MIB) && deallocate(third, 32 * MIB));
    let counters = HostBackend::counters();
    assert_eq!((counters.allocations, counters.frees, counters.failures, counters.live_bytes), (3, 3, 3, 0));
    assert_eq!(counters.limit_bytes, 64 << 20);
});

in_child!(more_than_is_available_is_refused_before_the_system_is_asked, [], {
    let limit = HostBackend::counters().limit_bytes as usize;
    let total = HostBackend::total_bytes().unwrap() as usize;
    assert!(limit > MIB && limit < total, "{limit} of {total}");
    refused(total.next_multiple_of(4096), AllocError::Budget);
    // Untouched, so that no page is used. Half of the rest must be there even if other processes grow meanwhile.
    let base = live((limit / 2).next_multiple_of(4096));
    refused((limit / 4 * 3).next_multiple_of(4096), AllocError::Budget);
    assert!(deallocate(base, (limit / 2).next_multiple_of(4096)));
});

in_child!(a_percentage_is_of_all_memory, ["UNIMALLOC_MAX_BYTES" = "1%"], {
    let total = HostBackend::total_bytes().unwrap();
    assert_eq!(HostBackend::counters().limit_bytes, (total as f64 * 0.01) as u64);
});

in_child!(bad_variables_are_said, ["UNIMALLOC_MAX_BYTES" = "8 gigs", "UNIMALLOC_REGISTRY_CAPACITY" = "0"], {
    refused(4096, AllocError::InvalidConfiguration);
    HostBackend::set_limit(Some(MIB as u64));
    refused(4096, AllocError::InvalidConfiguration);
    HostBackend::set_registry_capacity(1);
    let base = live(4096);
    refused(4096, AllocError::RegistryFull);
    assert!(deallocate(base, 4096));
    assert_eq!(HostBackend::counters().live_bytes, 0);
});

in_child!(a_forked_child_gets_errors_and_the_parent_goes_on, [], {
    let base = live(MIB);
    // SAFETY: the child calls only code that takes no lock there, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = Some(AllocError::Forked);
        // SAFETY: the region is live and ours; the child ends without running exit handlers.
        unsafe {
            let held = allocate(MIB).is_null()
                && last_error() == forked
                && !deallocate(base, MIB)
                && last_error() == forked
                && !HostBackend::page_reset(base, MIB);
            libc::_exit(i32::from(!held));
        }
    }
    let mut status = 1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    assert!(deallocate(base, MIB));
});
