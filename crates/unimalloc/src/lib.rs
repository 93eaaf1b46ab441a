//! `malloc` for CUDA unified memory.
//!
//! One allocation is a pointer that the CPU and the GPU both use, with no copy between them. Bookkeeping is kept in
//! ordinary host memory, never in the blocks: allocating and freeing costs the same wherever a block's pages are,
//! and a kernel that runs past its block cannot corrupt the allocator.
//!
//! ```
//! use unimalloc::{thread_alloc, thread_free, HostBackend, StandardPolicy};
//!
//! let block = thread_alloc::<StandardPolicy, HostBackend>(1024, 256);
//! assert!(!block.is_null());
//! // SAFETY: the block is live, ours, and freed once.
//! unsafe { thread_free::<StandardPolicy, HostBackend>(block) }.unwrap();
//! ```

// Loom runs what threads share: `meta`, and the pools over it. Shuttle has all of the crate.
#![cfg_attr(loom, allow(dead_code, unused_imports))]

#[cfg(not(loom))]
mod api;
pub mod backend;
#[cfg(not(loom))]
pub mod cuda;
/// What the backend's table names of the driver layer.
#[cfg(loom)]
mod cuda {
    pub struct Stream;
}
mod error;
#[doc(hidden)]
pub mod log;
#[cfg(all(test, loom))]
mod loom_models;
#[cfg(not(loom))]
mod macros;
mod meta;
mod placement;
mod policy;
mod pool;
mod random;
#[cfg(all(test, shuttle))]
mod shuttle_models;
#[cfg(not(loom))]
mod stream;
mod sync;
#[cfg(not(loom))]
mod thread;

/// The collections that [`Arena`] serves, in the version whose `Allocator` it implements.
#[cfg(not(loom))]
pub use allocator_api2;
#[cfg(not(loom))]
#[doc(hidden)]
pub use api::audit;
#[cfg(not(loom))]
pub use api::magazine;
#[cfg(not(loom))]
pub use api::{
    alloc_on_stream, alloc_with, block_of, decay, free_notify, set_retention, stats, thread_alloc,
    thread_free, thread_realloc, trim, usable_size, AllocOptions, Arena, BackendStats, BlockInfo,
    DecayThread, Freed,
};
#[cfg(not(loom))]
pub use backend::{is_cuda_available, CudaUnifiedBackend, HostBackend};
pub use backend::{BackendCounters, MemoryBackend};
pub use error::{last_error, set_last_error, AllocError, FreeError};
pub use placement::{Hint, Place, Placement};
pub use policy::{AllocPolicy, HardenedPolicy, Policy, SecurePolicy, StandardPolicy, POISON};
#[doc(hidden)]
pub use pool::Audit;
pub use pool::{BackendPools, GlobalHugePool, GlobalSegmentPool, HasSegmentPool};
#[cfg(not(loom))]
pub use stream::{pending_stats, record_use, take_up_pending, Notify, PendingStats};
#[cfg(not(loom))]
pub use thread::{LocalAllocatorSelector, PolicySlotSelection, ThreadAllocator};
#[cfg(not(loom))]
#[doc(hidden)]
pub use thread::{SharedHeaps, Slots, ThreadSlots};

/// The blocks of the guide and of the README.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/guide/rust.md")]
    mod rust {}
    #[doc = include_str!("../../../README.md")]
    mod readme {}
}
