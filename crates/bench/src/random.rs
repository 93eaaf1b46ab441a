//! A small seeded generator: workloads draw the same sizes for every peer.

/// SplitMix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    #[inline]
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// A number from `low` to `high`, both included.
    #[inline]
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// From `low` to `high` with every doubling as likely as the next: many small, few large.
    pub fn log_within(&mut self, low: usize, high: usize) -> usize {
        let doublings = (high / low).ilog2() as usize;
        let floor = low << self.below(doublings.max(1));
        (floor + self.below(floor)).min(high)
    }
}
