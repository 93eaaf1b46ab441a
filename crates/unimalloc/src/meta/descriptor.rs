//! Span descriptors: recycled by capacity, never freed, so that stale references stay valid.
//!
//! Each backend's pools recycle their own. A thread that still holds a reference to a span that was retired since may
//! find another span of the same pools there, never one that belongs under another pool's lock.

use super::geometry::MAX_BLOCKS;
use super::span::Span;
use crate::sync::{const_fn, lock, AtomicU16, AtomicU64, Mutex};

/// Capacities are powers of two from 1 to [`MAX_BLOCKS`], and twice that for encoded spans.
const KINDS: usize = MAX_BLOCKS.trailing_zeros() as usize + 2;

/// Descriptors that are in no use.
pub(crate) struct Descriptors(Mutex<[Vec<&'static Span>; KINDS]>);

fn kind(slots: usize) -> usize {
    slots.next_power_of_two().trailing_zeros() as usize
}

impl Descriptors {
    const_fn! {
        /// None yet.
        pub(crate) fn new() -> Self {
            Self(Mutex::new([const { Vec::new() }; KINDS]))
        }
    }

    /// A descriptor with room for `slots` slot words.
    pub(crate) fn take(&self, slots: usize) -> &'static Span {
        if let Some(span) = lock(&self.0)[kind(slots)].pop() {
            return span;
        }
        let slots = 1usize << kind(slots);
        let slots: Vec<_> = (0..slots).map(|_| AtomicU16::new(0)).collect();
        let remote: Vec<_> = (0..slots.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Box::leak(Box::new(Span::new(slots.leak(), remote.leak())))
    }

    /// Takes back a descriptor that no map entry and no list refers to any more.
    pub(crate) fn recycle(&self, span: &'static Span) {
        lock(&self.0)[kind(span.slots().len())].push(span);
    }
}
