//! Layer 7: what users call.

mod blocks;
mod free_functions;
mod stats;

pub use free_functions::{
    alloc_with, block_of, thread_alloc, thread_free, thread_realloc, trim, usable_size, AllocOptions,
    BlockInfo,
};
pub use stats::{stats, BackendStats};
