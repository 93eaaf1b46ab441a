//! Span descriptors: recycled by capacity, never freed, so that stale references stay valid.

use std::sync::Mutex;

use super::geometry::MAX_BLOCKS;
use super::span::Span;
use crate::sync::{lock, AtomicU16, AtomicU64};

/// Capacities are powers of two from 1 to [`MAX_BLOCKS`].
const KINDS: usize = MAX_BLOCKS.trailing_zeros() as usize + 1;

static FREE: Mutex<[Vec<&'static Span>; KINDS]> = Mutex::new([const { Vec::new() }; KINDS]);

fn kind(capacity: usize) -> usize {
    capacity.next_power_of_two().trailing_zeros() as usize
}

/// A descriptor with room for `capacity` blocks.
pub(crate) fn take(capacity: usize) -> &'static Span {
    if let Some(span) = lock(&FREE)[kind(capacity)].pop() {
        return span;
    }
    let slots = 1usize << kind(capacity);
    let slots: Vec<_> = (0..slots).map(|_| AtomicU16::new(0)).collect();
    let remote: Vec<_> = (0..slots.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
    Box::leak(Box::new(Span::new(slots.leak(), remote.leak())))
}

/// Takes back a descriptor that no map entry and no list refers to any more.
pub(crate) fn recycle(span: &'static Span) {
    lock(&FREE)[kind(span.slots().len())].push(span);
}
