//! Redzones: bytes at the end of each Hardened block that nobody may write.

use super::Policy;
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
pub(crate) unsafe fn intact(ops: &BackendOps, block: *const u8, size: usize, policy: Policy) -> bool {
    // SAFETY: as in `write`.
    !policy.encoded() || unsafe { (ops.holds)(block.add(size - BYTES), PATTERN, BYTES) }
}
