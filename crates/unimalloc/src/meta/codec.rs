//! Keyed, tagged free-list links, for spans of the Hardened lane.
//!
//! A descriptor of such a span has twice the slot words: the word of block `i` and, half the array further, its tag.
//!
//! ```text
//! word(i) = a state, or link ^ (mac(i, 0) mod 2^13)      tag(i) = mac(i, word(i))
//! ```
//!
//! The tag of a block that is handed out, or on its way back, is `mac(i, LIVE) ^ slack(i)`: how many bytes of the block lie
//! behind its redzone. A forged tag gives some other slack, and there is no redzone.
//!
//! Whoever writes to a slot word without the process's key has one chance in 65,536 that the tag still fits. The mix is
//! not a cryptographic MAC: it is there to notice stray and naive writes to host memory, in a few cycles.

use std::sync::atomic::AtomicU64;
use std::sync::Once;

use super::slot;
use crate::random::seed;
use crate::sync::{AtomicU16, Ordering::Relaxed};

/// Links are 12-bit indices; this one is the list's end.
const END: u16 = 0x1FFF;
const MASK: u16 = 0x1FFF;

/// The process's keys: two loads without a question whether they are there.
static ADD: AtomicU64 = AtomicU64::new(0);
static MULTIPLY: AtomicU64 = AtomicU64::new(0);

/// Draws the keys. Called before a span gets tags, so whoever knows of such a span reads them whole.
pub(super) fn make_keys() {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        ADD.store(seed(), Relaxed);
        MULTIPLY.store(seed() | 1, Relaxed);
    });
}

#[derive(Clone, Copy)]
struct Keys {
    add: u64,
    multiply: u64,
}

impl Keys {
    /// Sixteen bits that depend on the keys, the span, the block and the word.
    #[inline(always)]
    fn mac(self, span: usize, index: u16, word: u16) -> u16 {
        let mixed = (span as u64 ^ (u64::from(index) << 16) ^ u64::from(word)).wrapping_add(self.add);
        let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(self.multiply);
        ((mixed ^ (mixed >> 29)).wrapping_mul(self.multiply) >> 48) as u16
    }
}

/// The slot words and tags of one span.
#[derive(Clone, Copy)]
pub(super) struct Coded<'a> {
    /// Distinguishes spans, so that words cannot be moved between them.
    span: usize,
    words: &'a [AtomicU16],
    tags: &'a [AtomicU16],
    keys: Keys,
}

impl<'a> Coded<'a> {
    #[inline(always)]
    pub fn new(span: usize, slots: &'a [AtomicU16]) -> Self {
        let (words, tags) = slots.split_at(slots.len() / 2);
        let keys = Keys { add: ADD.load(Relaxed), multiply: MULTIPLY.load(Relaxed) };
        Self { span, words, tags, keys }
    }

    #[inline(always)]
    fn mac(&self, index: u16, word: u16) -> u16 {
        self.keys.mac(self.span, index, word)
    }

    /// Writes a state and its tag.
    #[inline(always)]
    pub fn set_state(&self, index: u16, state: u16) {
        let at = usize::from(index);
        self.words[at].store(state, Relaxed);
        self.tags[at].store(self.mac(index, state), Relaxed);
    }

    /// Makes a block live, with its slack.
    #[inline(always)]
    pub fn set_live(&self, index: u16, slack: u16) {
        self.words[usize::from(index)].store(slot::LIVE, Relaxed);
        self.set_slack(index, slack);
    }

    /// Notes the slack of a live block.
    #[inline(always)]
    pub fn set_slack(&self, index: u16, slack: u16) {
        self.tags[usize::from(index)].store(self.mac(index, slot::LIVE) ^ slack, Relaxed);
    }

    /// The slack of a block that is live, or was and is not free yet.
    #[inline(always)]
    pub fn slack(&self, index: u16) -> u16 {
        self.tags[usize::from(index)].load(Relaxed) ^ self.mac(index, slot::LIVE)
    }

    /// Writes a link and its tag.
    #[inline(always)]
    pub fn set_link(&self, index: u16, link: u16) {
        let link = if link == slot::END { END } else { link };
        self.set_state(index, link ^ (self.mac(index, 0) & MASK));
    }

    /// The word, if its tag fits.
    #[inline(always)]
    fn verified(&self, index: u16) -> Option<u16> {
        let at = usize::from(index);
        let word = self.words.get(at)?.load(Relaxed);
        (self.tags.get(at)?.load(Relaxed) == self.mac(index, word)).then_some(word)
    }

    /// Whether the word and its tag fit.
    #[inline(always)]
    pub fn verify(&self, index: u16) -> bool {
        self.verified(index).is_some()
    }

    /// The link of a free block; `None` where the tag does not fit or the link leads nowhere.
    #[inline(always)]
    pub fn link(&self, index: u16, capacity: u16) -> Option<u16> {
        match self.verified(index)? ^ (self.mac(index, 0) & MASK) {
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
        make_keys();
        let coded = Coded::new(0x1234_5640, &slots);
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
