//! Redzones: bytes at the end of each Hardened block that nobody may write.

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

/// Writes the redzone of a block of `size` bytes. False if the backend could not.
///
/// # Safety
/// The block is live and the caller's.
pub(crate) unsafe fn write(ops: &BackendOps, block: *mut u8, size: usize, policy: Policy) -> bool {
    // SAFETY: the redzone lies at the end of the block, which the caller owns.
    !policy.encoded() || unsafe { (ops.fill)(block.add(size - BYTES), PATTERN, BYTES) }
}

/// Whether nobody wrote to the redzone of a block of `size` bytes.
///
/// # Safety
/// The block is live and the caller's.
unsafe fn intact(ops: &BackendOps, block: *const u8, size: usize, policy: Policy) -> bool {
    // SAFETY: as in `write`.
    !policy.encoded() || unsafe { (ops.holds)(block.add(size - BYTES), PATTERN, BYTES) }
}

/// Checks the redzone of a block that nobody uses any more, and poisons the rest. False where the redzone was written to;
/// then nothing was poisoned.
///
/// # Safety
/// The block is the caller's, and nobody needs its contents.
pub(crate) unsafe fn check_and_poison(ops: &BackendOps, block: *mut u8, size: usize, policy: Policy) -> bool {
    if !policy.poisons() {
        return true;
    }
    // SAFETY: the caller's block.
    let intact = unsafe { intact(ops, block, size, policy) };
    if intact {
        // SAFETY: as above. Where the fill fails the context is lost, and the contents with it.
        let _ = unsafe { (ops.fill)(block, POISON, size - bytes(policy)) };
    }
    intact
}
