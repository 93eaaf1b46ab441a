//! A hint to the processor. It reads nothing, cannot fault, and brings no page back from a device: an address that is not
//! mapped on this side is passed over.

/// Longer blocks are found by the processor itself, once it sees the first lines written one after the other.
const MOST: usize = 512;
const LINE: usize = 64;

/// Asks for the first cache lines of a block whose contents are written soon.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn prefetch(address: usize, bytes: usize) {
    use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};

    let first = std::ptr::without_provenance::<i8>(address);
    for offset in (0..bytes.min(MOST)).step_by(LINE) {
        // SAFETY: nothing is read through the pointer, and a prefetch of any address changes caches alone.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(offset)) };
    }
}

/// Stable Rust has no such hint here.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn prefetch(_address: usize, _bytes: usize) {}
