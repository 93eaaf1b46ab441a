//! A size class of a heap: a stack of cached blocks, and the spans with free blocks behind it.

use crate::meta::geometry::{class_size, SHARED_MAX};
use crate::meta::span::Span;
use crate::sync::AtomicU16;

/// A free block in a heap's cache: its address, and its slot word (which says CACHED) so that a hit need not look it up.
#[derive(Clone, Copy)]
pub(super) struct Cached {
    pub address: usize,
    pub slot: &'static AtomicU16,
}

/// Thirty-two bytes, so that a class becomes an address by a shift.
#[repr(C)]
pub(super) struct Bin {
    /// None before first use, then a few, more each time that frees find no room, up to `limit`: so the hot path needs one
    /// check where it pushes.
    entries: Box<[Cached]>,
    /// Entries in use: the first ones. The last of them is handed out next.
    len: u32,
    limit: u16,
    pub class: u16,
    /// Spans with free blocks, linked; the head is used first. Holds at most one span without used blocks.
    pub partial: Option<&'static Span>,
}

/// A cache holds up to this many bytes of blocks, but at least two blocks and at most `MAX_CACHED`.
const CACHE_BYTES: usize = 128 << 10;
const MAX_CACHED: usize = 2048;
/// Entries at first.
const FIRST: usize = 128;

impl Bin {
    /// Without a cache (`cached` false) every allocation goes to a span's free list, and verifies it.
    pub fn new(class: usize, cached: bool) -> Self {
        let size = class_size(class);
        let limit = match size {
            _ if !cached => 0,
            size if size > SHARED_MAX => 1,
            size => (CACHE_BYTES / size).clamp(2, MAX_CACHED),
        };
        Self { entries: Box::default(), len: 0, limit: limit as u16, class: class as u16, partial: None }
    }

    /// Blocks to move at a time between cache and spans.
    pub fn batch(&self) -> usize {
        (self.room() / 2).max(1)
    }

    /// Entries there are, or would be at first use.
    fn room(&self) -> usize {
        self.entries.len().max(FIRST.min(usize::from(self.limit)))
    }

    /// Blocks in the cache.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it never holds a block: each comes from a span's list, and goes back to it.
    pub fn is_cacheless(&self) -> bool {
        self.limit == 0
    }

    pub fn is_full(&self) -> bool {
        self.len() >= self.room()
    }

    /// The block that was cached last.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Cached> {
        let last = self.len.wrapping_sub(1); // of 0: beyond all entries
        let block = *self.entries.get(last as usize)?;
        self.len = last;
        Some(block)
    }

    /// Caches a block; false if the cache is full, or was never used.
    #[inline(always)]
    pub fn push(&mut self, address: usize, slot: &'static AtomicU16) -> bool {
        let Some(entry) = self.entries.get_mut(self.len as usize) else { return false };
        *entry = Cached { address, slot };
        self.len += 1;
        true
    }

    /// Makes the entries on first use, from any span, so that blocks can be pushed: as many as are [vacant](Self::vacant) then.
    pub fn prepare(&mut self, span: &'static Span) {
        self.resize(span, self.room());
    }

    /// Makes twice the room, up to the limit: a program that frees so many at a time tends to allocate as many again.
    pub fn grow(&mut self, span: &'static Span) {
        self.resize(span, (2 * self.room()).min(usize::from(self.limit)));
    }

    /// Leaves the entries as they are where the process has no memory for more.
    fn resize(&mut self, span: &'static Span, room: usize) {
        if let (true, Some(slot)) = (self.entries.len() < room, span.slots().first()) {
            let mut entries = Vec::new();
            if entries.try_reserve_exact(room).is_ok() {
                entries.extend_from_slice(&self.entries);
                // What an entry above `len` holds does not matter.
                entries.resize(room, Cached { address: span.base(), slot });
                self.entries = entries.into();
            }
        }
    }

    /// Blocks that can be pushed.
    pub fn vacant(&self) -> usize {
        self.entries.len() - self.len()
    }

    /// Gives the entries of an empty cache back.
    pub fn shrink(&mut self) {
        if self.len == 0 {
            self.entries = Box::default();
        }
    }

    /// Makes room for blocks that waited for the GPU, which come back in batches of so many bytes.
    pub fn widen(&mut self, bytes: usize) {
        if self.limit != 0 {
            let wide = (bytes / class_size(usize::from(self.class))).min(FIRST);
            self.limit = self.limit.max(wide as u16);
        }
    }

    /// Puts the blocks from `from` on in reverse.
    pub fn reverse(&mut self, from: usize) {
        let len = self.len();
        self.entries[from..len].reverse();
    }

    /// The oldest `count` blocks but for the first `skip`.
    pub fn oldest(&self, skip: usize, count: usize) -> &[Cached] {
        &self.entries[skip..count]
    }

    /// Forgets the `count` oldest blocks.
    pub fn drop_oldest(&mut self, count: usize) {
        let len = self.len();
        self.entries.copy_within(count..len, 0);
        self.len -= count as u32;
    }

    /// Whether the listed spans have this many free blocks, and one in any case.
    pub fn has_free(&self, count: usize) -> bool {
        let mut free = 0;
        let mut at = self.partial;
        while let Some(span) = at {
            free += span.free_blocks();
            if free >= count.max(1) {
                return true;
            }
            at = span.next();
        }
        false
    }

    pub fn link(&mut self, span: &'static Span) {
        span.link_before(self.partial);
        self.partial = Some(span);
    }

    pub fn unlink(&mut self, span: &'static Span) {
        let next = span.unlink();
        if self.partial.is_some_and(|head| std::ptr::eq(head, span)) {
            self.partial = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_stays_thirty_two_bytes() {
        assert_eq!(size_of::<Bin>(), 32);
    }
}
