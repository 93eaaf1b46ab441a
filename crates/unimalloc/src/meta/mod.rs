//! Layer 2: what the allocator knows about memory, kept in ordinary host memory.
//!
//! Nothing here reads or writes a byte of a block. Descriptors are `&'static`: they are recycled, never unmapped, so a
//! stale reader sees old or new values but never invalid memory.

pub(crate) mod address_map;
mod codec;
pub(crate) mod descriptor;
pub(crate) mod geometry;
pub(crate) mod inbox;
pub(crate) mod marks;
pub(crate) mod slot;
pub(crate) mod span;
