//! Counts a span's blocks one by one, and checks the equations that its fields promise.

use super::remote::{ACTIVE, FULL, LOST, ORPHAN, TOLD};
use super::Span;
use crate::meta::slot;
use crate::sync::Ordering::Relaxed;

/// A span's blocks by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Recount {
    pub live: usize,
    pub cached: usize,
    pub pending: usize,
    pub quarantined: usize,
    pub remote: usize,
    pub held: usize,
    pub listed: usize,
    pub fresh: usize,
    /// Bytes of the live blocks that their users may touch.
    pub usable: usize,
}

impl Span {
    /// Counts the blocks. An error says what does not add up. Nobody else may use the span meanwhile.
    pub(crate) fn recount(&self) -> Result<Recount, String> {
        let capacity = usize::from(self.capacity());
        let words = &self.slots[..capacity];
        if self.state.load(Relaxed) == LOST {
            let live = words.iter().filter(|word| slot::is_live(word.load(Relaxed))).count();
            return Ok(Recount { live, ..Recount::default() });
        }
        let mut count = Recount::default();
        let mut on_list = vec![false; capacity];
        let mut at = self.free_head.load(Relaxed);
        while at != slot::END {
            let seen = on_list.get_mut(usize::from(at)).ok_or(format!("link to block {at} of {capacity}"))?;
            if std::mem::replace(seen, true) {
                return Err(format!("the free list meets block {at} twice"));
            }
            count.listed += 1;
            at = self.link(at).ok_or(format!("the link of block {at} does not verify"))?;
        }
        let fresh = usize::from(self.fresh.load(Relaxed));
        let single = self.is_single();
        for (index, word) in words.iter().enumerate() {
            if on_list[index] {
                continue;
            }
            let word = word.load(Relaxed);
            match word & slot::STATE {
                slot::LIVE => {
                    count.live += 1;
                    count.usable += self.usable(index as u16);
                }
                slot::CACHED => count.cached += 1,
                slot::PENDING => count.pending += 1,
                slot::QUARANTINED => count.quarantined += 1,
                slot::REMOTE => count.remote += 1,
                slot::HELD => count.held += 1,
                _ if single || index >= fresh => count.fresh += 1,
                _ => return Err(format!("block {index} is on no list, and its word is {word:#x}")),
            }
            if word == slot::REMOTE && !self.is_dirty(index) {
                return Err(format!("block {index} was freed remotely where nobody will look"));
            }
            if !single && index >= fresh && word != slot::UNUSED {
                return Err(format!("block {index} was never handed out, and its word is {word:#x}"));
            }
        }
        let used = usize::from(self.used.load(Relaxed));
        let in_use =
            count.live + count.cached + count.pending + count.quarantined + count.remote + count.held;
        if !single && (used != in_use || capacity != used + count.listed + (capacity - fresh)) {
            return Err(format!("used {used}, fresh from {fresh}, capacity {capacity}, but {count:?}"));
        }
        let listed = self.is_listed();
        match self.state.load(Relaxed) {
            FULL | TOLD if listed => Err("a parked span is on a list".to_string()),
            FULL if self.has_remote() => Err("a remote free told nobody".to_string()),
            ORPHAN if !listed => Err("an orphan is on no list".to_string()),
            ORPHAN if count.remote >= used => {
                Err("an orphan of which nothing is used was not visited".to_string())
            }
            ORPHAN if self.returned.load(Relaxed) < count.remote as u32 => {
                Err("a free into an orphan was not counted".to_string())
            }
            ACTIVE | FULL | TOLD | ORPHAN => Ok(count),
            state => Err(format!("state {state}")),
        }
    }

    /// Whether the span is one block that no heap keeps.
    fn is_single(&self) -> bool {
        self.bin() == super::DEDICATED
    }
}
