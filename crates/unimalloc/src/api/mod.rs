//! Layer 7: what users call.

mod arena;
pub(crate) mod blocks;
mod free_functions;
pub mod magazine;
mod retention;
mod stats;

pub use arena::Arena;
pub use blocks::Freed;
pub use free_functions::{
    alloc_on_stream, alloc_with, block_of, free_notify, thread_alloc, thread_free, thread_realloc, trim,
    usable_size, AllocOptions, BlockInfo,
};
pub use retention::{audit, decay, set_retention, DecayThread};
pub use stats::{stats, BackendStats};
