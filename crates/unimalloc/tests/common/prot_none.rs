//! A backend whose memory cannot be touched: proof that bookkeeping never does. Written as an outside crate would.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::pages;
use unimalloc::{backend_pools, set_last_error, AllocError, MemoryBackend};

/// Reserved addresses without access: any read or write of a block faults.
pub struct ProtNone;

pub static REGIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: mappings are fresh, page-aligned, exclusive, and unmapped only by `deallocate`.
unsafe impl MemoryBackend for ProtNone {
    unsafe fn allocate(size: usize) -> *mut u8 {
        let region = pages::reserve(size);
        if region.is_null() {
            set_last_error(AllocError::OutOfMemory);
            return region;
        }
        REGIONS.fetch_add(1, Ordering::Relaxed);
        region
    }

    unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
        // SAFETY: the caller passes a region of ours that nobody uses.
        let released = unsafe { pages::unmap(ptr, size) };
        REGIONS.fetch_sub(usize::from(released), Ordering::Relaxed);
        released
    }
}

backend_pools!(ProtNone);
