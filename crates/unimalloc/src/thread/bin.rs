//! A size class of a heap: a stack of cached blocks, and the spans with free blocks behind it.

use super::bins::BinIndex;
use crate::meta::geometry::SHARED_MAX;
use crate::meta::span::Span;
use crate::sync::AtomicU16;

/// A free block in a heap's cache: its address, and its slot word (which says CACHED) so that a hit need not look it up.
#[derive(Clone, Copy)]
pub(super) struct Cached {
    pub address: usize,
    pub slot: &'static AtomicU16,
}

pub(crate) struct Bin {
    /// The block that is handed out next is the last. No room before first use, then for a few, more each time that frees find
    /// none, up to `limit`: so the hot path needs one check where it pushes.
    cache: Vec<Cached>,
    /// Spans with free blocks, linked; the head is used first. Holds at most one span without used blocks.
    pub partial: Option<&'static Span>,
    limit: u16,
    /// Which of the heap's bins it is.
    pub at: BinIndex,
}

/// A cache holds up to this many bytes of blocks, but at least two blocks and at most `MAX_CACHED`.
const CACHE_BYTES: usize = 128 << 10;
const MAX_CACHED: usize = 2048;
/// Entries at first.
const FIRST: usize = 128;

impl Bin {
    /// Without a cache (`cached` false) every allocation goes to a span's free list, and verifies it.
    pub fn new(at: BinIndex, cached: bool) -> Self {
        let size = at.block();
        let limit = match size {
            _ if !cached => 0,
            size if size > SHARED_MAX => 1,
            size => (CACHE_BYTES / size).clamp(2, MAX_CACHED),
        };
        Self { cache: Vec::new(), partial: None, limit: limit as u16, at }
    }

    /// Blocks to move at a time between cache and spans.
    pub fn batch(&self) -> usize {
        (self.room() / 2).max(1)
    }

    /// Blocks there is room for, or would be at first use.
    fn room(&self) -> usize {
        self.cache.capacity().max(FIRST.min(usize::from(self.limit)))
    }

    /// Blocks in the cache.
    pub fn len(&self) -> usize {
        self.cache.len()
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
        self.cache.pop()
    }

    /// Caches a block; false if the cache is full, or was never used.
    #[inline(always)]
    pub fn push(&mut self, block: Cached) -> bool {
        let has_room = self.cache.len() < self.cache.capacity();
        if has_room {
            self.cache.push(block);
        }
        has_room
    }

    /// Makes room on first use, so that blocks can be pushed: as many as are [vacant](Self::vacant) then.
    pub fn prepare(&mut self) {
        self.resize(self.room());
    }

    /// Makes twice the room, up to the limit: a program that frees so many at a time tends to allocate as many again.
    pub fn grow(&mut self) {
        self.resize((2 * self.room()).min(usize::from(self.limit)));
    }

    /// Leaves the room as it is where the process has no memory for more.
    fn resize(&mut self, room: usize) {
        let _ = self.cache.try_reserve_exact(room.saturating_sub(self.len()));
    }

    /// Blocks that can be pushed.
    pub fn vacant(&self) -> usize {
        self.cache.capacity() - self.len()
    }

    /// Gives the memory of an empty cache back.
    pub fn shrink(&mut self) {
        if self.cache.is_empty() {
            self.cache = Vec::new();
        }
    }

    /// Makes room for blocks that waited for the GPU, which come back in batches of so many bytes.
    pub fn widen(&mut self, bytes: usize) {
        if self.limit != 0 {
            let wide = (bytes / self.at.block()).min(FIRST);
            self.limit = self.limit.max(wide as u16);
        }
    }

    /// The oldest `count` blocks but for the first `skip`.
    pub fn oldest(&self, skip: usize, count: usize) -> &[Cached] {
        &self.cache[skip..count]
    }

    /// Forgets the `count` oldest blocks.
    pub fn drop_oldest(&mut self, count: usize) {
        self.cache.drain(..count);
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
