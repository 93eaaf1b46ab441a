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

mod api;
pub mod backend;
pub mod cuda;
mod error;
mod macros;
mod meta;
mod placement;
mod policy;
mod pool;
mod random;
mod stream;
mod sync;
mod thread;

#[doc(hidden)]
pub use api::audit;
pub use api::magazine;
pub use api::{
    alloc_on_stream, alloc_with, block_of, decay, free_notify, set_retention, stats, thread_alloc,
    thread_free, thread_realloc, trim, usable_size, AllocOptions, Arena, BackendStats, BlockInfo,
    DecayThread, Freed,
};
pub use backend::{is_cuda_available, BackendCounters, CudaUnifiedBackend, HostBackend, MemoryBackend};
pub use error::{last_error, set_last_error, AllocError, FreeError};
pub use placement::{Place, Placement};
pub use policy::{AllocPolicy, HardenedPolicy, Policy, SecurePolicy, StandardPolicy, POISON};
#[doc(hidden)]
pub use pool::Audit;
pub use pool::{BackendPools, GlobalHugePool, GlobalSegmentPool, HasSegmentPool};
pub use stream::{pending_stats, record_use, take_up_pending, Notify, PendingStats};
pub use thread::{LocalAllocatorSelector, PolicySlotSelection, ThreadAllocator};
#[doc(hidden)]
pub use thread::{SharedHeaps, Slots, ThreadSlots};
