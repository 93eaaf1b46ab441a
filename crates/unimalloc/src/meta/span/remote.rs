//! Frees by threads that do not keep the span, and the states it goes through because of them.
//!
//! ```text
//! ACTIVE --owner parks it--> FULL --first remote free--> TOLD --owner--> ACTIVE
//! ACTIVE --thread exit--> ORPHAN --adopter or freeing thread claims--> ACTIVE
//! ACTIVE --free list does not verify--> LOST
//! ```
//!
//! A remote free turns the block's slot word to REMOTE, which decides between racing frees. That word is the message: the
//! keeper finds it by looking. Where to look is said by `dirty`, a bit for each *row* of neighbouring blocks, which the
//! first free in a row sets and the others find set. So the usual remote free is one locked operation.
//!
//! ```text
//! freer:   word LIVE -> REMOTE;   the row's bit is clear? set it;   look at the state
//! keeper:  take all bits;  take every REMOTE word in their rows
//! parking: state = FULL;   any bit?
//! ```
//!
//! Each line writes before it reads what the other side writes, all sequentially consistent: of two such threads one sees
//! the other.
//!
//! - *A freer that finds the bit set* and a keeper that takes it: the freer read before the keeper cleared, so the keeper's
//!   look at the words, which comes after, finds the freer's. A freer that reads later finds the bit clear.
//! - *A freer that finds the span not FULL* and a keeper that parks it: the bit was set before, by that freer or an earlier
//!   one, and not taken since, or the word was taken with it. So the keeper sees the bit, or the block is home.
//!
//! In a row without its bit no word is REMOTE, once its freer is done. A bit without such a word is possible: the keeper came
//! between a freer's two steps, or freed the block itself at the same time. It costs a look, and the look clears it.
//!
//! A REMOTE word is turned into something else by the keeper alone, which frees the block as it does so: once. A keeper that
//! frees the block itself, by a plain store, at the very moment another thread does, overwrites REMOTE; the block is then in
//! the keeper's hands, once, and neither thread is told that the other was there.
//!
//! **Orphans** have nobody who would look. Each freer counts itself in `returned`, and the one that brings it to `used` visits
//! the span: takes its blocks up, and retires it. Who gave the span up counts those that saw it before it was an orphan. One that
//! both count, or one that counts itself late, makes the sum too large and a visit too early; it is never too small.

use super::Span;
use crate::error::FreeError;
use crate::meta::inbox::Inbox;
use crate::meta::slot;
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::sync::{model_fence, AtomicU16};

/// The keeper drains it when it needs blocks; a remote free need not tell anyone.
pub(crate) const ACTIVE: u8 = 0;
/// The keeper has no free block in it and looks at it again only when told.
pub(crate) const FULL: u8 = 1;
/// A remote free has told the keeper.
pub(crate) const TOLD: u8 = 2;
/// Its thread ended; whoever moves it to `ACTIVE` is its keeper.
pub(crate) const ORPHAN: u8 = 3;
/// Its free list does not verify: nobody allocates from it again. Its live blocks can be freed.
pub(crate) const LOST: u8 = 4;

/// Blocks in a row: two cache lines of slot words, and as many rows as `dirty` has bits in the largest span. The model
/// checkers have spans of few blocks, and rows to match.
const ROW: usize = if cfg!(loom) {
    2
} else if cfg!(shuttle) {
    4
} else {
    64
};

/// What a remote free found.
pub(crate) enum Remote {
    /// The keeper will see it.
    Done,
    /// The span is an orphan and may be empty now: the caller should [claim](Span::claim_orphan) it and look.
    Orphan,
}

/// The bit of a block's row. An index beyond the span, which only a free that races with the span's retirement can have,
/// gets some bit.
#[inline(always)]
const fn row_bit(index: usize) -> u64 {
    1u64.wrapping_shl((index / ROW) as u32)
}

impl Span {
    /// Frees a live (or pending) block from a thread that does not keep the span. `word` is its slot word as it was checked.
    #[inline]
    pub(crate) fn free_remote(&self, index: usize, word: u16) -> Result<Remote, FreeError> {
        let Some(slot) = self.slots.get(index) else { return Err(FreeError::DoubleFree) };
        if !slot::can_be_freed(word) || slot.compare_exchange(word, slot::REMOTE, SeqCst, Relaxed).is_err() {
            return Err(FreeError::DoubleFree);
        }
        model_fence();
        let row = row_bit(index);
        if self.dirty.load(SeqCst) & row == 0 {
            self.dirty.fetch_or(row, SeqCst);
        }
        model_fence();
        match self.state.load(SeqCst) {
            FULL => self.tell(),
            ORPHAN if self.count_returned(1) => return Ok(Remote::Orphan),
            _ => {}
        }
        Ok(Remote::Done)
    }

    /// Sends the keeper of a parked span the message, unless another remote free does.
    #[cold]
    fn tell(&self) {
        if self.state.compare_exchange(FULL, TOLD, AcqRel, Acquire).is_ok() {
            // SAFETY: null or an inbox, and those are never freed. A stale one gets a spurious bit, which
            // its owner ignores; the keeper that parked the span published its own inbox before.
            if let Some(inbox) = unsafe { self.inbox.load(Acquire).as_ref() } {
                inbox.tell(self.inbox_index.load(Relaxed));
            }
        }
    }

    /// Whether blocks may have been freed here that were not taken up yet.
    pub(crate) fn has_remote(&self) -> bool {
        self.dirty.load(SeqCst) != 0
    }

    /// Whether the keeper will look at a block's row.
    pub(super) fn is_dirty(&self, index: usize) -> bool {
        self.dirty.load(Relaxed) & row_bit(index) != 0
    }

    /// The words of the rows whose bits are given, each row with its first block's index.
    fn rows(&self, mut rows: u64) -> impl Iterator<Item = (usize, &'static [AtomicU16])> {
        // Behind the words of a span with tags are the tags.
        let words = self.slots.get(..usize::from(self.capacity())).unwrap_or_default();
        std::iter::from_fn(move || {
            let first = (rows != 0).then(|| rows.trailing_zeros() as usize)? * ROW;
            rows &= rows - 1;
            let row = words.get(first..).unwrap_or_default();
            Some((first, &row[..row.len().min(ROW)]))
        })
    }

    /// Blocks that remote frees left here to be taken up. Stops counting, by rows, where it found `enough`.
    pub(crate) fn remote_count(&self, enough: usize) -> usize {
        let rows = self.dirty.load(SeqCst);
        model_fence();
        let mut count = 0;
        for (_, row) in self.rows(rows) {
            count += row.iter().filter(|word| word.load(SeqCst) == slot::REMOTE).count();
            if count >= enough {
                break;
            }
        }
        count
    }

    /// Takes up all remote frees: hands each block's index and word to `freed`, which changes the word. The keeper calls it.
    #[inline]
    fn take_remote(&self, mut freed: impl FnMut(u16, &'static AtomicU16)) {
        if !self.has_remote() {
            return;
        }
        let rows = self.dirty.swap(0, SeqCst);
        model_fence();
        for (first, row) in self.rows(rows) {
            for (at, word) in row.iter().enumerate() {
                if word.load(SeqCst) == slot::REMOTE {
                    freed((first + at) as u16, word);
                }
            }
        }
    }

    /// Takes up all remote frees: hands the index of each block to `freed`, which changes its word. The keeper calls it.
    pub(crate) fn drain(&self, mut freed: impl FnMut(u16)) {
        self.take_remote(|index, _| freed(index));
    }

    /// As [`drain`](Self::drain), straight to the free list of a span without tags.
    pub(crate) fn drain_to_list(&self) {
        debug_assert!(!self.is_coded());
        let mut head = self.free_head.load(Relaxed);
        let mut count = 0;
        self.take_remote(|index, word| {
            word.store(head, Relaxed);
            head = index;
            count += 1;
        });
        self.free_head.store(head, Relaxed);
        self.used.store(self.used.load(Relaxed) - count, Relaxed);
    }

    // ---- state ----

    /// The keeper parks the span. False if remote frees may have come in meanwhile and it should drain instead.
    pub(crate) fn park(&self) -> bool {
        self.state.store(FULL, SeqCst);
        model_fence();
        if !self.has_remote() {
            return true;
        }
        // If someone told us meanwhile, the message is still under way and will be ignored.
        self.state.swap(ACTIVE, AcqRel);
        false
    }

    /// The keeper parks a span that has remote frees already, with the message that one of them would send.
    pub(crate) fn tell_oneself(&self, inbox: &Inbox) {
        self.state.store(TOLD, Release);
        inbox.tell(self.inbox_index());
    }

    pub(crate) fn state(&self) -> u8 {
        self.state.load(Relaxed)
    }

    /// The keeper takes up a parked span again.
    pub(crate) fn unpark(&self) {
        self.state.swap(ACTIVE, AcqRel);
    }

    /// The keeper found the free list broken. Remote frees are not taken up any more.
    pub(crate) fn lose(&self) {
        self.state.store(LOST, Release);
    }

    /// The keeper gives the span up. Afterwards anyone may claim it, and the caller must ask whether
    /// [someone should](Self::wants_visit).
    pub(crate) fn orphan(&self) {
        self.disown();
        self.keeper.store(0, Relaxed);
        self.returned.store(0, Relaxed);
        // A swap, not a store: a free may be moving FULL to TOLD, and one of the two must come first for everybody.
        self.state.swap(ORPHAN, SeqCst);
        model_fence();
    }

    /// Whether an orphan, given up a moment ago, should be visited for the frees that came before and told nobody. In an
    /// encoded span remote frees stay until all its blocks are free; in others they are taken up at once.
    pub(crate) fn wants_visit(&self) -> bool {
        if self.is_coded() {
            self.count_returned(self.remote_count(usize::MAX))
        } else {
            self.has_remote()
        }
    }

    /// Counts so many more blocks of an orphan as returned; whether none may be in use any more. To visit takes a lock, so
    /// not every free should. Nobody changes `used` of an orphan without claiming it.
    #[cold]
    fn count_returned(&self, count: usize) -> bool {
        let before = self.returned.fetch_add(count as u32, AcqRel) as usize;
        before + count >= usize::from(self.used.load(Relaxed))
    }

    /// Makes the caller the keeper of an orphan. False if it is none, or another was faster.
    pub(crate) fn claim_orphan(&self) -> bool {
        let claimed = self.state.compare_exchange(ORPHAN, ACTIVE, SeqCst, Relaxed).is_ok();
        model_fence();
        claimed
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::meta::span::samples::{full_span, told, INDEX};
    use crate::policy::Policy;

    fn free(span: &Span, index: usize) -> bool {
        matches!(span.free_remote(index, slot::LIVE).unwrap(), Remote::Orphan)
    }

    fn taken(span: &Span) -> Vec<u16> {
        let mut taken = Vec::new();
        span.drain(|index| {
            span.set_state(index, slot::CACHED);
            taken.push(index);
        });
        taken
    }

    #[test]
    fn a_drain_finds_what_was_freed_in_every_row_and_nothing_else() {
        for policy in [Policy::Standard, Policy::Hardened] {
            for capacity in [8, 256, 4096] {
                let (span, _) = full_span(capacity, policy);
                // Those are tags, which may look like anything.
                span.slots()[capacity..].iter().for_each(|tag| tag.store(slot::REMOTE, Relaxed));
                let freed: Vec<_> = (0..capacity).filter(|index| index % 61 % 7 == 3).collect();
                freed.iter().rev().for_each(|&index| assert!(!free(span, index)));
                assert_eq!(span.remote_count(usize::MAX), freed.len());
                assert_eq!(taken(span), freed.iter().map(|&index| index as u16).collect::<Vec<_>>());
                assert!(!span.has_remote() && span.remote_count(usize::MAX) == 0 && taken(span).is_empty());
                assert!(freed.iter().all(|&index| span.free_remote(index, slot::LIVE).is_err()));
            }
        }
    }

    #[test]
    fn a_bit_without_a_word_costs_one_look() {
        let (span, _) = full_span(256, Policy::Standard);
        free(span, 70);
        span.set_state(70, slot::CACHED); // freed by the keeper at the same time
        assert!(!span.park(), "there may be something");
        assert_eq!(span.remote_count(usize::MAX), 0);
        assert!(taken(span).is_empty());
        assert!(span.park());
    }

    #[test]
    fn a_free_into_a_parked_span_tells_its_keeper_though_its_row_was_marked_late() {
        let (span, inbox) = full_span(256, Policy::Standard);
        assert!(span.park());
        // By a freer whose block was taken up before it came to mark the row, and which is yet to look at the state.
        span.dirty.fetch_or(row_bit(70), SeqCst);
        assert!(told(inbox).is_empty());
        free(span, 71);
        assert_eq!((span.state(), told(inbox)), (TOLD, vec![INDEX]));
        free(span, 200);
        assert!(told(inbox).is_empty(), "once");
        span.unpark();
        assert_eq!(taken(span), [71, 200]);
    }

    #[test]
    fn the_last_free_into_an_orphan_says_so() {
        for policy in [Policy::Standard, Policy::Hardened] {
            let (span, _) = full_span(8, policy);
            span.orphan();
            assert!(!span.wants_visit());
            assert!((0..7).all(|index| !free(span, index)));
            assert!(free(span, 7));
            assert!(span.claim_orphan() && !span.claim_orphan());
            assert_eq!(span.remote_count(usize::MAX), 8);
        }
    }

    #[test]
    fn frees_that_came_before_an_encoded_span_was_an_orphan_count() {
        let (span, _) = full_span(8, Policy::Hardened);
        (0..5).for_each(|index| _ = free(span, index));
        span.orphan();
        assert!(!span.wants_visit(), "5 of 8");
        assert!(!free(span, 5) && !free(span, 6) && free(span, 7));
        // Those that came before are all there are.
        let (span, _) = full_span(8, Policy::Hardened);
        (0..8).for_each(|index| _ = free(span, index));
        span.orphan();
        assert!(span.wants_visit());
    }

    #[test]
    fn an_orphan_that_was_visited_too_early_is_visited_again() {
        let (span, _) = full_span(8, Policy::Hardened);
        span.orphan();
        assert!(!span.wants_visit());
        (0..5).for_each(|index| _ = free(span, index));
        // Freers that saw an earlier orphan and count themselves now.
        span.returned.fetch_add(2, Relaxed);
        assert!(free(span, 5), "early");
        assert!(span.claim_orphan());
        assert_eq!(span.remote_count(usize::MAX), 6);
        span.orphan();
        assert!(!span.wants_visit());
        assert!(!free(span, 6) && free(span, 7));
    }
}
