//! The allocators that are compared, each through the calls a Rust program would make.

use std::ffi::c_void;

use unimalloc::{HardenedPolicy, HostBackend, SecurePolicy, StandardPolicy};

/// An allocator. Blocks are aligned to 16 bytes.
pub trait Peer: 'static {
    /// Its name in tables.
    const NAME: &'static str;

    /// A block of `size` bytes; null on failure.
    fn alloc(size: usize) -> *mut u8;

    /// Frees a block.
    ///
    /// # Safety
    /// `block` came from [`alloc`](Self::alloc) or [`realloc`](Self::realloc) with this `size`, and is freed once.
    unsafe fn free(block: *mut u8, size: usize);

    /// Resizes a block; the old address is dead afterwards.
    ///
    /// # Safety
    /// As [`free`](Self::free), for `old` bytes.
    unsafe fn realloc(block: *mut u8, old: usize, new: usize) -> *mut u8;

    /// Called first on every thread that allocates.
    fn enter_thread() {}
    /// Called last on every thread that allocated.
    fn leave_thread() {}
}

macro_rules! unimalloc_peer {
    ($peer:ident, $policy:ty, $name:literal) => {
        #[doc = concat!("This crate's subject: `", $name, "`.")]
        pub struct $peer;

        impl Peer for $peer {
            const NAME: &'static str = $name;

            #[inline(always)]
            fn alloc(size: usize) -> *mut u8 {
                unimalloc::thread_alloc::<$policy, HostBackend>(size, 16)
            }

            #[inline(always)]
            unsafe fn free(block: *mut u8, _: usize) {
                // SAFETY: the caller's promise.
                if let Err(error) = unsafe { unimalloc::thread_free::<$policy, HostBackend>(block) } {
                    refused(error);
                }
            }

            unsafe fn realloc(block: *mut u8, _: usize, new: usize) -> *mut u8 {
                // SAFETY: the caller's promise.
                unsafe { unimalloc::thread_realloc::<$policy, HostBackend>(block, new, 16) }
            }
        }
    };
}

unimalloc_peer!(Unimalloc, StandardPolicy, "unimalloc");
unimalloc_peer!(UnimallocSecure, SecurePolicy, "unimalloc-secure");
unimalloc_peer!(UnimallocHardened, HardenedPolicy, "unimalloc-hardened");

/// A benchmark that frees what it does not own measures nothing.
#[cold]
fn refused(error: unimalloc::FreeError) -> ! {
    panic!("a free was refused: {error}")
}

/// mimalloc v3.
pub struct Mimalloc;

impl Peer for Mimalloc {
    const NAME: &'static str = "mimalloc";

    #[inline(always)]
    fn alloc(size: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { libmimalloc_sys::mi_malloc(size) }.cast()
    }

    #[inline(always)]
    unsafe fn free(block: *mut u8, _: usize) {
        // SAFETY: the caller's promise.
        unsafe { libmimalloc_sys::mi_free(block.cast()) }
    }

    unsafe fn realloc(block: *mut u8, _: usize, new: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { libmimalloc_sys::mi_realloc(block.cast(), new) }.cast()
    }
}

/// The version of mimalloc that was linked, as `3.1.5`.
pub fn mimalloc_version() -> String {
    // SAFETY: the call only reads a constant.
    let version = unsafe { libmimalloc_sys::mi_version() };
    // 10,000 a major version since 3.2, 100 before.
    let unit = if version >= 10_000 { 10_000 } else { 100 };
    let minor = version % unit;
    if unit == 10_000 {
        format!("{}.{}.{}", version / unit, minor / 100, minor % 100)
    } else {
        format!("{}.{}.{}", version / unit, minor / 10, minor % 10)
    }
}

/// The C library's `malloc`.
pub struct System;

impl Peer for System {
    const NAME: &'static str = "system";

    #[inline(always)]
    fn alloc(size: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { libc::malloc(size) }.cast()
    }

    #[inline(always)]
    unsafe fn free(block: *mut u8, _: usize) {
        // SAFETY: the caller's promise.
        unsafe { libc::free(block.cast::<c_void>()) }
    }

    unsafe fn realloc(block: *mut u8, _: usize, new: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { libc::realloc(block.cast(), new) }.cast()
    }
}

#[cfg(feature = "peers")]
mod others {
    use super::Peer;

    /// jemalloc.
    pub struct Jemalloc;

    impl Peer for Jemalloc {
        const NAME: &'static str = "jemalloc";

        #[inline(always)]
        fn alloc(size: usize) -> *mut u8 {
            // SAFETY: no workload asks for zero bytes.
            unsafe { tikv_jemalloc_sys::malloc(size) }.cast()
        }

        #[inline(always)]
        unsafe fn free(block: *mut u8, size: usize) {
            // SAFETY: the caller's promise; the size lets jemalloc skip a lookup, as its Rust crate does.
            unsafe { tikv_jemalloc_sys::sdallocx(block.cast(), size, 0) }
        }

        unsafe fn realloc(block: *mut u8, _: usize, new: usize) -> *mut u8 {
            // SAFETY: the caller's promise.
            unsafe { tikv_jemalloc_sys::realloc(block.cast(), new) }.cast()
        }
    }

    /// snmalloc.
    pub struct Snmalloc;

    impl Peer for Snmalloc {
        const NAME: &'static str = "snmalloc";

        #[inline(always)]
        fn alloc(size: usize) -> *mut u8 {
            // SAFETY: any size may be asked for.
            unsafe { snmalloc_sys::sn_rust_alloc(16, size) }.cast()
        }

        #[inline(always)]
        unsafe fn free(block: *mut u8, size: usize) {
            // SAFETY: the caller's promise.
            unsafe { snmalloc_sys::sn_rust_dealloc(block.cast(), 16, size) };
        }

        unsafe fn realloc(block: *mut u8, old: usize, new: usize) -> *mut u8 {
            // SAFETY: the caller's promise.
            unsafe { snmalloc_sys::sn_rust_realloc(block.cast(), 16, old, new) }.cast()
        }
    }

    /// rpmalloc.
    pub struct Rpmalloc;

    impl Peer for Rpmalloc {
        const NAME: &'static str = "rpmalloc";

        #[inline(always)]
        fn alloc(size: usize) -> *mut u8 {
            // SAFETY: the thread was initialised by `enter_thread`.
            unsafe { rpmalloc_sys::rpmalloc(size) }.cast()
        }

        #[inline(always)]
        unsafe fn free(block: *mut u8, _: usize) {
            // SAFETY: the caller's promise.
            unsafe { rpmalloc_sys::rpfree(block.cast()) }
        }

        unsafe fn realloc(block: *mut u8, _: usize, new: usize) -> *mut u8 {
            // SAFETY: the caller's promise.
            unsafe { rpmalloc_sys::rprealloc(block.cast(), new) }.cast()
        }

        fn enter_thread() {
            static ONCE: std::sync::Once = std::sync::Once::new();
            // SAFETY: once per process, before any other call.
            ONCE.call_once(|| _ = unsafe { rpmalloc_sys::rpmalloc_initialize() });
            // SAFETY: the process was initialised above; initialising a thread again does nothing.
            unsafe { rpmalloc_sys::rpmalloc_thread_initialize() };
        }

        fn leave_thread() {
            // SAFETY: this thread makes no further call before it initialises itself again.
            unsafe { rpmalloc_sys::rpmalloc_thread_finalize() };
        }
    }
}

#[cfg(feature = "peers")]
pub use others::{Jemalloc, Rpmalloc, Snmalloc};

/// Calls `$each!(Peer)` for every peer that was built, unimalloc and mimalloc first.
#[macro_export]
macro_rules! for_each_peer {
    ($each:ident) => {
        $each!($crate::peer::Unimalloc);
        $each!($crate::peer::Mimalloc);
        $each!($crate::peer::System);
        #[cfg(feature = "peers")]
        {
            $each!($crate::peer::Jemalloc);
            $each!($crate::peer::Snmalloc);
            $each!($crate::peer::Rpmalloc);
        }
        $each!($crate::peer::UnimallocSecure);
        $each!($crate::peer::UnimallocHardened);
    };
}
