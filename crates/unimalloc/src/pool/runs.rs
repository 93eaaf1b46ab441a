//! Runs of free granules: a bitmap per segment, and an index of segments by their longest run.

use crate::meta::geometry::MAX_GRANULES;

const WORDS: usize = MAX_GRANULES / 64;

/// The free granules of one segment. Bit set: free.
#[derive(Clone)]
pub(super) struct Runs {
    words: [u64; WORDS],
    free: u16,
    longest: u16,
}

impl Runs {
    /// All of `granules` free.
    pub(super) fn new(granules: usize) -> Self {
        let mut runs = Self { words: [0; WORDS], free: 0, longest: 0 };
        runs.put(0, granules);
        runs
    }

    pub(super) fn free(&self) -> usize {
        usize::from(self.free)
    }

    pub(super) fn is_free(&self, granule: usize) -> bool {
        self.words[granule / 64] >> (granule % 64) & 1 == 1
    }

    /// Length of the longest run.
    pub(super) fn longest(&self) -> usize {
        usize::from(self.longest)
    }

    /// Takes `count` granules whose first is a multiple of `align`: the lowest that fit.
    pub(super) fn take(&mut self, count: usize, align: usize) -> Option<usize> {
        if count > self.longest() {
            return None;
        }
        let mut at = self.next(0, true)?;
        loop {
            let end = self.next(at, false).unwrap_or(MAX_GRANULES);
            let start = at.next_multiple_of(align);
            if start + count <= end {
                self.write(start, count, false);
                self.free -= count as u16;
                self.longest = self.measure();
                return Some(start);
            }
            at = self.next(end, true)?;
        }
    }

    /// Gives back `count` granules from `start`.
    pub(super) fn put(&mut self, start: usize, count: usize) {
        self.write(start, count, true);
        self.free += count as u16;
        let before = (0..start).rev().take_while(|&at| self.words[at / 64] >> (at % 64) & 1 == 1).count();
        let end = self.next(start, false).unwrap_or(MAX_GRANULES);
        self.longest = self.longest.max((before + end - start) as u16);
    }

    /// The first granule from `from` on that is free (or not).
    fn next(&self, from: usize, free: bool) -> Option<usize> {
        let mut word = from / 64;
        let mut mask = u64::MAX << (from % 64);
        while word < WORDS {
            let bits = if free { self.words[word] } else { !self.words[word] } & mask;
            if bits != 0 {
                return Some(word * 64 + bits.trailing_zeros() as usize);
            }
            word += 1;
            mask = u64::MAX;
        }
        None
    }

    fn write(&mut self, start: usize, count: usize, free: bool) {
        let mut at = start;
        while at < start + count {
            let take = (64 - at % 64).min(start + count - at);
            let mask = (u64::MAX >> (64 - take)) << (at % 64);
            debug_assert_eq!(self.words[at / 64] & mask, if free { 0 } else { mask });
            self.words[at / 64] ^= mask;
            at += take;
        }
    }

    fn measure(&self) -> u16 {
        let (mut longest, mut at) = (0, 0);
        while let Some(start) = self.next(at, true) {
            at = self.next(start, false).unwrap_or(MAX_GRANULES);
            longest = longest.max(at - start);
        }
        longest as u16
    }
}

/// Segments by the length of their longest free run: the tightest that fits is found by a bit scan.
pub(super) struct RunIndex {
    lists: Vec<Vec<u32>>,
    nonempty: [u64; WORDS + 1],
}

impl RunIndex {
    pub(super) const fn new() -> Self {
        Self { lists: Vec::new(), nonempty: [0; WORDS + 1] }
    }

    /// Adds a segment and returns its position, to be kept for [`remove`](Self::remove).
    pub(super) fn insert(&mut self, longest: usize, segment: u32) -> u32 {
        if self.lists.is_empty() {
            self.lists.resize_with(MAX_GRANULES + 1, Vec::new);
        }
        self.nonempty[longest / 64] |= 1 << (longest % 64);
        self.lists[longest].push(segment);
        self.lists[longest].len() as u32 - 1
    }

    /// Removes the segment at `position`; returns the segment that took its place, if any.
    pub(super) fn remove(&mut self, longest: usize, position: u32) -> Option<u32> {
        let list = &mut self.lists[longest];
        list.swap_remove(position as usize);
        if list.is_empty() {
            self.nonempty[longest / 64] &= !(1 << (longest % 64));
        }
        list.get(position as usize).copied()
    }

    /// A segment whose longest run is at least `count`, as tight as there is.
    pub(super) fn find(&self, count: usize) -> Option<u32> {
        let mut word = count / 64;
        let mut mask = u64::MAX << (count % 64);
        while word <= WORDS {
            let bits = self.nonempty[word] & mask;
            if bits != 0 {
                return self.lists[word * 64 + bits.trailing_zeros() as usize].last().copied();
            }
            word += 1;
            mask = u64::MAX;
        }
        None
    }

    /// Length of the longest free run of any segment.
    pub(super) fn longest(&self) -> usize {
        (0..=WORDS)
            .rev()
            .find(|&word| self.nonempty[word] != 0)
            .map_or(0, |word| word * 64 + 63 - self.nonempty[word].leading_zeros() as usize)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn runs_agree_with_a_plain_model() {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut model = [true; MAX_GRANULES];
        let mut runs = Runs::new(MAX_GRANULES);
        let mut held: Vec<(usize, usize)> = Vec::new();
        for _ in 0..20_000 {
            if random(2) == 0 {
                let (count, align) = (1 + random(40), 1 << random(6));
                let expected = (0..MAX_GRANULES)
                    .step_by(align)
                    .find(|&at| at + count <= MAX_GRANULES && model[at..at + count].iter().all(|free| *free));
                let got = runs.take(count, align);
                // The lowest run that fits may start unaligned; a later one may hold the aligned start.
                assert_eq!(got, expected);
                if let Some(start) = got {
                    model[start..start + count].fill(false);
                    held.push((start, count));
                }
            } else if !held.is_empty() {
                let (start, count) = held.swap_remove(random(held.len()));
                model[start..start + count].fill(true);
                runs.put(start, count);
            }
            let longest = model.split(|free| !free).map(<[bool]>::len).max().unwrap();
            assert_eq!((runs.longest(), runs.free()), (longest, model.iter().filter(|free| **free).count()));
        }
    }

    #[test]
    fn the_index_finds_the_tightest_segment() {
        let mut index = RunIndex::new();
        assert_eq!(index.find(1), None);
        let at = [index.insert(512, 0), index.insert(3, 1), index.insert(7, 2), index.insert(7, 3)];
        assert_eq!(index.find(4), Some(3));
        assert_eq!(index.find(8), Some(0));
        assert_eq!(index.longest(), 512);
        assert_eq!(index.remove(7, at[2]), Some(3));
        assert_eq!(index.remove(512, at[0]), None);
        assert_eq!((index.find(8), index.longest()), (None, 7));
    }
}
