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

pub mod backend;
pub mod cuda;
mod error;
mod placement;

pub use backend::{is_cuda_available, CudaUnifiedBackend, HostBackend, MemoryBackend};
pub use error::{last_error, set_last_error, AllocError, FreeError};
pub use placement::{Place, Placement};
