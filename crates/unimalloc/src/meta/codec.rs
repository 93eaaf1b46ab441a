//! Keyed, tagged free-list links, for spans of the Hardened lane.
//!
//! A descriptor of such a span has twice the slot words: the word of block `i` and, half the array further, its tag.
//!
//! ```text
//! word(i) = a state, or link ^ (mac(i, 0) mod 2^13)      tag(i) = mac(i, word(i))
//! ```
//!
//! Whoever writes to a slot word without the process's key has one chance in 65,536 that the tag still fits. The mix is
//! not a cryptographic MAC: it is there to notice stray and naive writes to host memory, in a few cycles.

use std::sync::OnceLock;

use super::slot;
use crate::random::seed;
use crate::sync::{AtomicU16, Ordering::Relaxed};

/// Links are 12-bit indices; this one is the list's end.
const END: u16 = 0x1FFF;
const MASK: u16 = 0x1FFF;

struct Keys {
    add: u64,
    multiply: u64,
}

fn keys() -> &'static Keys {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    KEYS.get_or_init(|| Keys { add: seed(), multiply: seed() | 1 })
}

/// Sixteen bits that depend on the keys, the span, the block and the word.
fn mac(span: usize, index: u16, word: u16) -> u16 {
    let keys = keys();
    let mixed = (span as u64 ^ (u64::from(index) << 16) ^ u64::from(word)).wrapping_add(keys.add);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(keys.multiply);
    ((mixed ^ (mixed >> 29)).wrapping_mul(keys.multiply) >> 48) as u16
}

/// The slot words and tags of one span.
#[derive(Clone, Copy)]
pub(super) struct Coded<'a> {
    /// Distinguishes spans, so that words cannot be moved between them.
    pub span: usize,
    pub slots: &'a [AtomicU16],
}

impl Coded<'_> {
    fn tag(&self, index: u16) -> &AtomicU16 {
        &self.slots[self.slots.len() / 2 + usize::from(index)]
    }

    /// Writes a state and its tag.
    pub fn set_state(&self, index: u16, state: u16) {
        self.slots[usize::from(index)].store(state, Relaxed);
        self.tag(index).store(mac(self.span, index, state), Relaxed);
    }

    /// Writes a link and its tag.
    pub fn set_link(&self, index: u16, link: u16) {
        let link = if link == slot::END { END } else { link };
        self.set_state(index, link ^ (mac(self.span, index, 0) & MASK));
    }

    /// Whether the word and its tag fit.
    pub fn verify(&self, index: u16) -> bool {
        let word = self.slots[usize::from(index)].load(Relaxed);
        self.tag(index).load(Relaxed) == mac(self.span, index, word)
    }

    /// The link of a free block; `None` where the tag does not fit or the link leads nowhere.
    pub fn link(&self, index: u16, capacity: u16) -> Option<u16> {
        if !self.verify(index) {
            return None;
        }
        let word = self.slots[usize::from(index)].load(Relaxed);
        match word ^ (mac(self.span, index, 0) & MASK) {
            END => Some(slot::END),
            link if link < capacity => Some(link),
            _ => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn links_come_back_and_changed_words_or_tags_are_noticed() {
        let slots: Vec<_> = (0..32).map(|_| AtomicU16::new(0)).collect();
        let coded = Coded { span: 0x1234_5640, slots: &slots };
        for link in (0..16).chain([slot::END]) {
            coded.set_link(5, link);
            assert_eq!(coded.link(5, 16), Some(link));
        }
        let mut unnoticed = 0;
        for flip in 1..=u16::MAX {
            let word = slots[5].fetch_xor(flip, Relaxed);
            unnoticed += u32::from(coded.verify(5));
            slots[5].store(word, Relaxed);
        }
        assert!(unnoticed <= 8, "{unnoticed} of 65535 changed words passed");
        slots[16 + 5].fetch_xor(1, Relaxed);
        assert_eq!(coded.link(5, 16), None);
    }
}
