//! Slot words: one 16-bit word of host memory per block.
//!
//! A word is either a free-list link (the index of the next free block of the span, or [`END`]) or a state. States are
//! `0xF000` and above, so that no index collides with them: a span has at most 4,096 blocks.

/// End of a free list.
pub(crate) const END: u16 = 0xEFFF;
/// Never handed out since the span was made.
pub(crate) const UNUSED: u16 = 0xEFFE;

/// Which state a word of `0xF000` and above is in; the low byte holds [flags](SHARED) of a live block.
pub(crate) const STATE: u16 = 0xFF00;
/// Handed out.
pub const LIVE: u16 = 0xFF00;
/// Free, and held in its owner's cache.
pub(crate) const CACHED: u16 = 0xFE00;
/// Freed, but the GPU may still use it.
pub(crate) const PENDING: u16 = 0xFD00;
/// Freed, and kept back from reuse for a while.
pub(crate) const QUARANTINED: u16 = 0xFC00;
/// Free, and held by a magazine outside this crate, which may hand it out.
pub const HELD: u16 = 0xFA00;
/// Freed by a thread that does not keep the span, and not taken up by its keeper yet.
pub(crate) const REMOTE: u16 = 0xFB00;

/// The block is (or was) used on a stream.
pub(crate) const MARKED: u16 = 0x02;

/// Whether the word says that the block is handed out, with any flags.
#[inline(always)]
pub(crate) const fn is_live(word: u16) -> bool {
    word & STATE == LIVE
}

/// Whether a word says that the block is live or pending: not free yet.
#[inline(always)]
pub(crate) const fn can_be_freed(word: u16) -> bool {
    is_live(word) || word == PENDING
}
