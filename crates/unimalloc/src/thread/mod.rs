//! Layer 5: allocators that belong to one thread.
//!
//! A [`heap`] caches free blocks per size class and keeps the spans they come from. Each thread has two per backend, one
//! with plain and one with encoded free lists, found through its [`slots`]. [`ThreadAllocator`] is a handle on a heap.

mod allocator;
mod bin;
mod bins;
pub(crate) mod heap;
mod prefetch;
mod shared;
pub(crate) mod slots;
#[cfg(test)]
mod tampering;

pub use allocator::ThreadAllocator;
pub use shared::SharedHeaps;
pub use slots::{LocalAllocatorSelector, PolicySlotSelection, Slots, ThreadSlots};
