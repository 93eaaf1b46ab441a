//! Huge blocks that are free but not given back: best fit, by device and placement.

use std::collections::BTreeMap;

use crate::meta::span::Span;
use crate::placement::Place;
use crate::sync::{const_fn, lock, AtomicUsize, Mutex, Ordering};

/// A free huge block is used again only for a request of at least 7/8 of its size: waste stays within 12.5 %.
fn largest_for(size: usize) -> usize {
    size + size / 7
}

/// By size and address: the first entry at or above a size is the best fit, in logarithmic time.
type BySize = BTreeMap<(usize, usize), Cached>;

#[derive(Clone, Copy)]
struct Cached {
    span: &'static Span,
    /// The [age](super::BackendPools) at which it was put here.
    since: usize,
}

/// Cached huge blocks of one backend. The numbers are live.
pub struct GlobalHugePool {
    places: Mutex<BTreeMap<Place, BySize>>,
    len: AtomicUsize,
    bytes: AtomicUsize,
}

impl GlobalHugePool {
    const_fn! {
        pub(super) fn new() -> Self {
            Self { places: Mutex::new(BTreeMap::new()), len: AtomicUsize::new(0), bytes: AtomicUsize::new(0) }
        }
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

    pub(super) fn put(&self, place: Place, span: &'static Span, age: usize) {
        let mut places = lock(&self.places);
        let cached = Cached { span, since: age };
        places.entry(place).or_default().insert((span.block(), span.base()), cached);
        self.len.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(span.block(), Ordering::Relaxed);
    }

    fn remove(&self, blocks: &mut BySize, key: (usize, usize)) -> Option<&'static Span> {
        let cached = blocks.remove(&key)?;
        self.len.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(cached.span.block(), Ordering::Relaxed);
        Some(cached.span)
    }

    /// The smallest block of at least `size` bytes that wastes no more than 12.5 %.
    pub(super) fn take(&self, place: Place, size: usize) -> Option<&'static Span> {
        let mut places = lock(&self.places);
        let blocks = places.get_mut(&place)?;
        let (&key, _) = blocks.range((size, 0)..=(largest_for(size), usize::MAX)).next()?;
        self.remove(blocks, key)
    }

    /// The largest block of at least `least` bytes that has been here since before `before`, if any.
    pub(super) fn take_largest(&self, least: usize, before: usize) -> Option<&'static Span> {
        let mut places = lock(&self.places);
        let idle = |blocks: &BySize| {
            blocks.range((least, 0)..).rev().find(|(_, cached)| cached.since < before).map(|(key, _)| *key)
        };
        let (key, place) = places.iter().filter_map(|(place, blocks)| Some((idle(blocks)?, *place))).max()?;
        let blocks = places.get_mut(&place)?;
        self.remove(blocks, key)
    }

    /// Bytes of the blocks that have been here since before `before`.
    pub(super) fn idle_bytes(&self, before: usize) -> usize {
        let places = lock(&self.places);
        let idle = places.values().flat_map(BTreeMap::values).filter(|cached| cached.since < before);
        idle.map(|cached| cached.span.block()).sum()
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

    /// The blocks that are cached now; for checks.
    pub(super) fn all(&self) -> Vec<&'static Span> {
        lock(&self.places).values().flat_map(|blocks| blocks.values().map(|cached| cached.span)).collect()
    }
}
