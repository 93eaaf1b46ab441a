//! Redzones: the bytes right behind what was asked for, which nobody may write. Every Hardened block has one.

use super::{Policy, POISON};
use crate::backend::BackendOps;

const BYTES: usize = 16;
const PATTERN: u8 = 0xFD;

/// Bytes a block of this policy loses to its redzone.
pub(crate) const fn bytes(policy: Policy) -> usize {
    if policy.encoded() {
        BYTES
    } else {
        0
    }
}

/// Writes the redzone behind the first `usable` bytes of a block. False if the backend could not.
///
/// # Safety
/// The block is live, the caller's, and has room for `usable` bytes and the redzone.
pub(crate) unsafe fn write(ops: &BackendOps, block: *mut u8, usable: usize, policy: Policy) -> bool {
    // SAFETY: the redzone lies in the block, which the caller owns.
    !policy.encoded() || unsafe { (ops.fill)(block.add(usable), PATTERN, BYTES) }
}

/// Whether nobody wrote to the redzone behind the first `usable` bytes of a block.
///
/// # Safety
/// As [`write`].
pub(crate) unsafe fn intact(ops: &BackendOps, block: *const u8, usable: usize, policy: Policy) -> bool {
    // SAFETY: as in `write`.
    !policy.encoded() || unsafe { (ops.holds)(block.add(usable), PATTERN, BYTES) }
}

/// Checks the redzone behind the `usable` bytes of a block that nobody uses any more, and poisons those. False where the
/// redzone was written to; then nothing was poisoned.
///
/// # Safety
/// As [`write`], and nobody needs the block's contents.
pub(crate) unsafe fn check_and_poison(
    ops: &BackendOps,
    block: *mut u8,
    usable: usize,
    policy: Policy,
) -> bool {
    if !policy.poisons() {
        return true;
    }
    // SAFETY: the caller's block.
    let intact = unsafe { intact(ops, block, usable, policy) };
    if intact {
        // SAFETY: as above. Where the fill fails the context is lost, and the contents with it.
        let _ = unsafe { (ops.fill)(block, POISON, usable) };
    }
    intact
}
