//! Layer 1: where memory comes from.
//!
//! A backend hands out and takes back whole, page-aligned regions. It knows nothing of blocks. Everything above
//! reaches it through [`BackendOps`], a table of plain functions, so that the core is compiled once.

use crate::placement::Place;

mod budget;
pub mod cuda;
mod host;
mod registry;

pub use cuda::{is_cuda_available, CudaUnifiedBackend};
pub use host::HostBackend;

/// A source of page-aligned memory regions.
///
/// # Safety
///
/// `allocate` returns null or the start of at least `size` bytes, aligned to 4,096, that nobody else uses until
/// `deallocate` returned true for it. No method may unwind, and all may be called from any thread.
pub unsafe trait MemoryBackend: 'static {
    /// Whether [`page_reset`](Self::page_reset) does something.
    const SUPPORTS_PAGE_RESET: bool = false;
    /// Whether [`make_guard`](Self::make_guard) does something.
    const SUPPORTS_MAKE_GUARD: bool = false;
    /// Whether [`decommit`](Self::decommit) does something.
    const SUPPORTS_DECOMMIT: bool = false;
    /// Whether a lock-free per-CPU block cache suits this backend.
    const ENABLE_CPU_CACHE: bool = false;
    /// Whether memory fresh from [`allocate`](Self::allocate) reads as zero.
    const ZEROED_ON_ALLOCATE: bool = false;

    /// Returns `size` bytes, or null with the reason in [`last_error`](crate::last_error).
    ///
    /// # Safety
    /// None beyond the trait's: a bad size answers null with `InvalidSize`.
    unsafe fn allocate(size: usize) -> *mut u8;

    /// Gives back what [`allocate`](Self::allocate) returned. True only once it is confirmed.
    ///
    /// # Safety
    /// Nobody uses the region any more.
    unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool;

    /// Drops the physical pages of a range, which then reads as zero. False if nothing was done.
    ///
    /// # Safety
    /// The range belongs to the caller, and its contents are not needed.
    unsafe fn page_reset(ptr: *mut u8, size: usize) -> bool;

    /// Makes a range inaccessible: touching it faults. False if nothing was done.
    ///
    /// # Safety
    /// The range belongs to the caller, and nobody will touch it.
    unsafe fn make_guard(ptr: *mut u8, size: usize) -> bool;

    /// Releases the physical pages of a range but keeps the addresses reserved. False if nothing was done.
    ///
    /// # Safety
    /// The range belongs to the caller, and nobody will touch it.
    unsafe fn decommit(ptr: *mut u8, size: usize) -> bool;

    /// As [`allocate`](Self::allocate), for a device and a placement. Backends with one kind of memory ignore them.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    unsafe fn allocate_at(size: usize, place: Place) -> *mut u8 {
        let _ = place;
        // SAFETY: the same contract, passed on.
        unsafe { Self::allocate(size) }
    }

    /// Sets `len` bytes to `byte`, complete when it returns, on the side where the bytes live. False if it could not.
    ///
    /// # Safety
    /// The range lies inside a block that the caller owns.
    unsafe fn fill(ptr: *mut u8, byte: u8, len: usize) -> bool {
        // SAFETY: the caller owns the range.
        unsafe { ptr.write_bytes(byte, len) };
        true
    }

    /// Copies `len` bytes between two blocks, complete when it returns. False if it could not.
    ///
    /// # Safety
    /// Both ranges lie inside blocks that the caller owns, and do not overlap.
    unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> bool {
        // SAFETY: the caller owns both ranges, and they are disjoint.
        unsafe { to.copy_from_nonoverlapping(from, len) };
        true
    }

    /// Bytes to ask for at a time when blocks are to be cut from them: a power of two, 2 MiB to 32 MiB.
    fn segment_bytes() -> usize {
        32 << 20
    }
}

/// A backend's functions as a table, so that nothing above this layer is generic over it.
#[derive(Clone, Copy)]
pub(crate) struct BackendOps {
    pub allocate_at: unsafe fn(usize, Place) -> *mut u8,
    pub deallocate: unsafe fn(*mut u8, usize) -> bool,
    pub page_reset: unsafe fn(*mut u8, usize) -> bool,
    pub fill: unsafe fn(*mut u8, u8, usize) -> bool,
    pub copy: unsafe fn(*mut u8, *const u8, usize) -> bool,
    pub segment_bytes: fn() -> usize,
    pub zeroed_on_allocate: bool,
    pub supports_page_reset: bool,
}

impl BackendOps {
    pub(crate) const fn of<B: MemoryBackend>() -> Self {
        Self {
            allocate_at: B::allocate_at,
            deallocate: B::deallocate,
            page_reset: B::page_reset,
            fill: B::fill,
            copy: B::copy,
            segment_bytes: B::segment_bytes,
            zeroed_on_allocate: B::ZEROED_ON_ALLOCATE,
            supports_page_reset: B::SUPPORTS_PAGE_RESET,
        }
    }
}
