//! What several test binaries share.
#![allow(dead_code, missing_docs, unused_imports, unused_macros)] // each binary uses a part

pub mod faulty;
pub mod model;
pub mod pages;
pub mod prot_none;
#[cfg(target_os = "linux")]
pub mod stand_in;

use unimalloc::{thread_alloc, thread_free, AllocPolicy, FreeError, ThreadSlots};

/// Tests that free an address twice hold this: another test that runs at the same time might be given it in between, and
/// then the second free is a good one.
pub fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Allocates, or fails the test with the reason.
pub fn alloc<P: AllocPolicy, B: ThreadSlots>(size: usize, align: usize) -> *mut u8 {
    let block = thread_alloc::<P, B>(size, align);
    assert!(!block.is_null(), "{size} bytes, aligned to {align}: {:?}", unimalloc::last_error());
    assert_eq!(block as usize % align, 0, "{size} bytes, aligned to {align}");
    block
}

/// Frees.
pub fn free<P: AllocPolicy, B: ThreadSlots>(block: *mut u8) -> Result<(), FreeError> {
    // SAFETY: tests hand in blocks they own, or addresses that must be refused.
    unsafe { thread_free::<P, B>(block) }
}

/// A small, seeded generator (SplitMix64), so that a failure can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Sizes as programs have them: mostly small, some large.
    pub fn size(&mut self, most: usize) -> usize {
        let bits = self.below(most.ilog2() as usize + 1);
        (1 << bits) + self.below(1 << bits)
    }
}
