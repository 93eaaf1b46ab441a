//! What a backend's pools hold.

use crate::backend::fork;
use crate::error::{set_last_error, AllocError};
use crate::pool::{HasSegmentPool, Home};

/// A backend's memory, shared by all threads. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackendStats {
    /// Held from the backend.
    pub reserved_bytes: usize,
    /// Of those, in free runs of segments and in cached huge blocks. What threads hold in their own caches is not counted.
    pub cached_bytes: usize,
    /// The largest block that they serve without asking the backend.
    pub largest_free_bytes: usize,
    /// The process-wide ceiling; `u64::MAX` without one.
    pub limit_bytes: u64,
    /// Regions that the backend gave.
    pub backend_allocations: u64,
    /// Regions that it took back.
    pub backend_frees: u64,
    /// Calls that it refused.
    pub backend_failures: u64,
    /// Free-list links, slot words and redzones that did not verify.
    pub corruptions: u64,
}

/// A backend's numbers now. Walks the segments: not for hot paths.
///
/// All zero in the child of a `fork`.
pub fn stats<B: HasSegmentPool>() -> BackendStats {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return BackendStats::default();
    }
    let home = Home::of::<B>();
    let (cached_bytes, largest_free_bytes) = home.cached();
    let counters = B::counters();
    BackendStats {
        reserved_bytes: home.reserved(),
        cached_bytes,
        largest_free_bytes,
        limit_bytes: counters.limit_bytes,
        backend_allocations: counters.allocations,
        backend_frees: counters.frees,
        backend_failures: counters.failures,
        corruptions: home.pools.corruptions() as u64,
    }
}
