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

pub(super) struct Bin {
    /// Capacity is fixed at `limit` on first use; a push below it never reallocates.
    pub cache: Vec<Cached>,
    pub limit: u16,
    pub class: u16,
    /// Spans with free blocks, linked; the head is used first. Holds at most one span without used blocks.
    pub partial: Option<&'static Span>,
}

/// A cache holds up to this many bytes of blocks, but at least two blocks and at most `MAX_CACHED`.
const CACHE_BYTES: usize = 128 << 10;
const MAX_CACHED: usize = 128;

impl Bin {
    /// Without a cache (`cached` false) every allocation goes to a span's free list, and verifies it.
    pub fn new(class: usize, cached: bool) -> Self {
        let size = class_size(class);
        let limit = match size {
            _ if !cached => 0,
            size if size > SHARED_MAX => 1,
            size => (CACHE_BYTES / size).clamp(2, MAX_CACHED),
        };
        Self { cache: Vec::new(), limit: limit as u16, class: class as u16, partial: None }
    }

    /// Blocks to move at a time between cache and spans.
    pub fn batch(&self) -> usize {
        (usize::from(self.limit) / 2).max(1)
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
