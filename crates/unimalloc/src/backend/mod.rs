//! Layer 1: where memory comes from.
//!
//! A backend hands out and takes back whole, page-aligned regions. It knows nothing of blocks. Everything above
//! reaches it through `BackendOps`, a table of plain functions, so that the core is compiled once.

use crate::cuda::Stream;
use crate::error::{set_last_error, AllocError};
use crate::placement::{Hint, Place, Placement};

#[cfg(not(loom))]
mod budget;
#[cfg(not(loom))]
pub mod cuda;
pub(crate) mod fork;
#[cfg(not(loom))]
mod host;
#[cfg(not(loom))]
mod registry;
#[cfg(not(loom))]
mod system_memory;

#[cfg(not(loom))]
pub use cuda::{is_cuda_available, CudaUnifiedBackend};
#[cfg(not(loom))]
pub use host::HostBackend;

/// A source of page-aligned memory regions.
///
/// # Safety
///
/// `allocate` returns null or the start of at least `size` bytes, aligned to 4,096, that nobody else uses until
/// `deallocate` returned true for it. No method may unwind, and all may be called from any thread.
///
/// [`fill`](Self::fill) and [`copy`](Self::copy) do what they say, memory reads as zero where
/// [`ZEROED_ON_ALLOCATE`](Self::ZEROED_ON_ALLOCATE) says so, and the CPU may read and write it; where it may not, the backend has those two of its own and
/// no [`Arena`](crate::Arena) of it serves a collection. Its [pools](crate::HasSegmentPool::pools) are one static bundle that no other backend has: what they hold goes back
/// through this backend's `deallocate`.
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

    /// Where blocks below 64 KiB without a placement of their own are kept.
    const SMALL_AUTO: Placement = Placement::Auto;

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

    /// Drops the physical pages of a range, which then reads as zero. False if nothing was done. A backend that has not this nor the next
    /// two leaves them out.
    ///
    /// # Safety
    /// The range belongs to the caller, and its contents are not needed.
    unsafe fn page_reset(ptr: *mut u8, size: usize) -> bool {
        let _ = (ptr, size);
        unsupported()
    }

    /// Makes a range inaccessible: touching it faults. False if nothing was done.
    ///
    /// # Safety
    /// The range belongs to the caller, and nobody will touch it.
    unsafe fn make_guard(ptr: *mut u8, size: usize) -> bool {
        let _ = (ptr, size);
        unsupported()
    }

    /// Releases the physical pages of a range but keeps the addresses reserved. False if nothing was done.
    ///
    /// # Safety
    /// The range belongs to the caller, and nobody will touch it.
    unsafe fn decommit(ptr: *mut u8, size: usize) -> bool {
        let _ = (ptr, size);
        unsupported()
    }

    /// As [`allocate`](Self::allocate), for a device and a placement. Backends with one kind of memory ignore them.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    unsafe fn allocate_at(size: usize, place: Place) -> *mut u8 {
        let _ = place;
        // SAFETY: the same contract, passed on.
        unsafe { Self::allocate(size) }
    }

    /// What a placement does here, beyond keeping blocks of different placements apart. A backend that has an
    /// [`allocate_at`](Self::allocate_at) of its own has this too.
    fn placement_hint(place: Place) -> Hint {
        match place.placement {
            Placement::Auto => Hint::Applied,
            _ => Hint::NotApplicable(
                "this backend has one kind of memory, in one place: leave the placement out",
            ),
        }
    }

    /// Sets `len` bytes to `byte`, complete when it returns, on the side where the bytes live. False if it could not.
    ///
    /// # Safety
    /// The range lies inside a block that the caller owns.
    unsafe fn fill(ptr: *mut u8, byte: u8, len: usize) -> bool {
        if len == 16 {
            // A redzone: two words, where `memset` would first have to find out.
            // SAFETY: the caller owns the range.
            unsafe { ptr.cast::<[u8; 16]>().write([byte; 16]) };
        } else {
            // SAFETY: the caller owns the range.
            unsafe { ptr.write_bytes(byte, len) };
        }
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

    /// Moves the pages of an uninitialised block to the side that its placement prefers, where the other side used them
    /// last; ordered on `stream`, or complete when it returns. `used_by_device` says that the latest use that the
    /// allocator knows of was by the device. Only a hint.
    ///
    /// # Safety
    /// The block is the caller's, and nobody needs its contents.
    unsafe fn settle(ptr: *mut u8, len: usize, place: Place, used_by_device: bool, stream: Option<&Stream>) {
        let _ = (ptr, len, place, used_by_device, stream);
    }

    /// Whether `len` bytes all equal `byte`, read on the side where they live. True where they cannot be read.
    ///
    /// # Safety
    /// The range lies inside a block that the caller owns.
    unsafe fn holds(ptr: *const u8, byte: u8, len: usize) -> bool {
        // SAFETY: the caller owns the range.
        let (chunks, rest) = unsafe { std::slice::from_raw_parts(ptr, len) }.as_chunks::<16>();
        chunks.iter().all(|chunk| *chunk == [byte; 16]) && rest.iter().all(|found| *found == byte)
    }

    /// Bytes to ask for at a time when blocks are to be cut from them: a power of two, 2 MiB to 32 MiB.
    fn segment_bytes() -> usize {
        SEGMENT_MAX
    }

    /// What went through this backend since the process started. All zero for a backend that does not count.
    fn counters() -> BackendCounters {
        BackendCounters::default()
    }
}

/// What went through a backend since the process started. Moved on confirmed results only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BackendCounters {
    /// Regions handed out.
    pub allocations: u64,
    /// Regions released for certain.
    pub frees: u64,
    /// Requests answered with null.
    pub failures: u64,
    /// Bytes of the regions that are held now.
    pub live_bytes: u64,
    /// The ceiling on `live_bytes` as of the latest look; `u64::MAX` for none.
    pub limit_bytes: u64,
}

const SEGMENT_MIN: usize = 2 << 20;
const SEGMENT_MAX: usize = 32 << 20;

/// Bytes of a segment under a ceiling: an eighth of it, so that a few pools fit side by side, as a power of two.
fn segment_bytes_for(ceiling: u64) -> usize {
    let eighth = usize::try_from(ceiling / 8).unwrap_or(usize::MAX).clamp(SEGMENT_MIN, SEGMENT_MAX);
    1 << eighth.ilog2()
}

/// What a hook that a backend does not have answers: `false`, with the reason in [`last_error`](crate::last_error).
fn unsupported() -> bool {
    set_last_error(AllocError::Unsupported);
    false
}

/// Whether a backend can be asked for this many bytes.
fn valid_size(size: usize) -> bool {
    size > 0 && size.is_multiple_of(4096) && isize::try_from(size).is_ok()
}

/// A backend's functions as a table, so that nothing above this layer is generic over it.
#[derive(Clone, Copy)]
pub(crate) struct BackendOps {
    pub allocate_at: unsafe fn(usize, Place) -> *mut u8,
    pub deallocate: unsafe fn(*mut u8, usize) -> bool,
    pub fill: unsafe fn(*mut u8, u8, usize) -> bool,
    pub copy: unsafe fn(*mut u8, *const u8, usize) -> bool,
    pub holds: unsafe fn(*const u8, u8, usize) -> bool,
    pub settle: unsafe fn(*mut u8, usize, Place, bool, Option<&Stream>),
    pub segment_bytes: fn() -> usize,
    pub small_auto: Placement,
    pub zeroed_on_allocate: bool,
}

impl BackendOps {
    pub(crate) const fn of<B: MemoryBackend>() -> Self {
        Self {
            allocate_at: B::allocate_at,
            deallocate: B::deallocate,
            fill: B::fill,
            copy: B::copy,
            holds: B::holds,
            settle: B::settle,
            segment_bytes: B::segment_bytes,
            small_auto: B::SMALL_AUTO,
            zeroed_on_allocate: B::ZEROED_ON_ALLOCATE,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn segments_shrink_under_a_small_ceiling() {
        for (ceiling, bytes) in [
            (0, 2 << 20),
            (16 << 20, 2 << 20),
            (31 << 20, 2 << 20),
            (32 << 20, 4 << 20),
            (100 << 20, 8 << 20),
            (256 << 20, 32 << 20),
            (u64::MAX, 32 << 20),
        ] {
            assert_eq!(segment_bytes_for(ceiling), bytes, "{ceiling}");
        }
    }

    #[test]
    fn sizes() {
        assert!(valid_size(4096) && valid_size(isize::MAX as usize & !4095));
        for bad in [0, 1, 4095, 4097, usize::MAX, usize::MAX & !4095, 1 << (usize::BITS - 1)] {
            assert!(!valid_size(bad), "{bad}");
        }
    }
}
