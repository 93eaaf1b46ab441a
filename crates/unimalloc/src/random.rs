//! Random numbers for shuffling and keys, seeded from the operating system's source.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
/// Good enough to shuffle; keys come straight from [`seed`].
pub(crate) struct Random(u64);

/// 64 bits that an outsider cannot predict.
pub(crate) fn seed() -> u64 {
    getrandom::u64().unwrap_or_else(|_| {
        // No random source (a sandbox without the system call): the standard library's hasher keys are the next best.
        use std::hash::{BuildHasher, Hasher};
        std::collections::hash_map::RandomState::new().build_hasher().finish()
    })
}

impl Random {
    pub(crate) fn seeded() -> Self {
        Self(seed())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is at least 1.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}
