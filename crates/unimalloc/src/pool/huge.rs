//! Huge blocks that are free but not given back: best fit, by device and placement.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::meta::span::Span;
use crate::placement::Place;
use crate::sync::{lock, AtomicUsize, Ordering};

/// A free huge block is used again only for a request of at least 7/8 of its size: waste stays within 12.5 %.
fn largest_for(size: usize) -> usize {
    size + size / 7
}

/// By size and address: the first entry at or above a size is the best fit, in logarithmic time.
type BySize = BTreeMap<(usize, usize), &'static Span>;

/// Cached huge blocks of one backend. The numbers are live.
pub struct GlobalHugePool {
    places: Mutex<BTreeMap<Place, BySize>>,
    len: AtomicUsize,
    bytes: AtomicUsize,
}

impl GlobalHugePool {
    pub(super) const fn new() -> Self {
        Self { places: Mutex::new(BTreeMap::new()), len: AtomicUsize::new(0), bytes: AtomicUsize::new(0) }
    }

    /// Cached blocks.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether no block is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes the cached blocks hold.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn put(&self, place: Place, span: &'static Span) {
        let mut places = lock(&self.places);
        places.entry(place).or_default().insert((span.block(), span.base()), span);
        self.len.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(span.block(), Ordering::Relaxed);
    }

    fn taken(&self, span: &'static Span) -> &'static Span {
        self.len.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(span.block(), Ordering::Relaxed);
        span
    }

    /// The smallest block of at least `size` bytes that wastes no more than 12.5 %.
    pub(super) fn take(&self, place: Place, size: usize) -> Option<&'static Span> {
        let mut places = lock(&self.places);
        let blocks = places.get_mut(&place)?;
        let (&key, _) = blocks.range((size, 0)..=(largest_for(size), usize::MAX)).next()?;
        blocks.remove(&key).map(|span| self.taken(span))
    }

    /// The largest block of at least `least` bytes, if any.
    pub(super) fn take_largest(&self, least: usize) -> Option<&'static Span> {
        let mut places = lock(&self.places);
        let blocks = places.values_mut().max_by_key(|blocks| blocks.keys().next_back().copied())?;
        let (&key, _) = blocks.range((least, 0)..).next_back()?;
        blocks.remove(&key).map(|span| self.taken(span))
    }

    /// Size of the largest block.
    pub(super) fn largest(&self) -> usize {
        let places = lock(&self.places);
        places
            .values()
            .filter_map(|blocks| blocks.keys().next_back())
            .map(|(size, _)| *size)
            .max()
            .unwrap_or(0)
    }
}
