//! Layer 6: frees that wait for the GPU.
//!
//! A launch returns before its kernel has run, so a block that is freed then may still be written to. Launches, copies,
//! fills and prefetches *mark* the blocks they use with their stream; [`record_use`] does the same for foreign code.
//! Freeing a marked block makes it PENDING, and it is reused only when every stream it was on has passed the point where
//! it was freed ([`pending`]). There is one event per batch of frees, never one per free, and any thread that needs
//! memory takes up what has passed.

mod marks;
mod pending;
mod queue;
mod tracks;
mod uses;

use crate::pool::Urgency;

/// Takes up the pending frees whose streams have passed, and with `wait` waits for all of them first. Answers whether any
/// was taken up. The pools do this by themselves when they need memory.
pub fn take_up_pending(wait: bool) -> bool {
    pending::reclaim(if wait { Urgency::Wait } else { Urgency::Look }, &mut |_, _| false)
}

pub(crate) use pending::{defer, farewell, reuse_on, Deferred};
pub use pending::{pending_stats, Notify, PendingStats};
pub(crate) use uses::mark_block;
pub use uses::record_use;
