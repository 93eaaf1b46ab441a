//! Span descriptors: recycled by capacity, never freed, so that stale references stay valid.
//!
//! Each backend's pools recycle their own. A thread that still holds a reference to a span that was retired since may
//! find another span of the same pools there, never one that belongs under another pool's lock.

use super::geometry::MAX_BLOCKS;
use super::span::Span;
use crate::sync::{const_fn, lock, AtomicU16, Mutex};

/// Capacities are powers of two from 1 to [`MAX_BLOCKS`], and twice that for encoded spans.
const KINDS: usize = MAX_BLOCKS.trailing_zeros() as usize + 2;

/// Descriptors that are in no use.
pub(crate) struct Descriptors(Mutex<[Unused; KINDS]>);

/// Those of one capacity. The list has room for all that were ever made, so that taking one back needs no memory.
struct Unused {
    spans: Vec<&'static Span>,
    made: usize,
}

/// A descriptor is made only while the process's heap has this much left besides. Lists and trees of a few hundred bytes, also on
/// the way of a free, would abort without.
const HEADROOM: usize = 64 << 10;

fn kind(slots: usize) -> usize {
    slots.next_power_of_two().trailing_zeros() as usize
}

impl Descriptors {
    const_fn! {
        /// None yet.
        pub(crate) fn new() -> Self {
            Self(Mutex::new([const { Unused { spans: Vec::new(), made: 0 } }; KINDS]))
        }
    }

    /// A descriptor with room for `slots` slot words. `None` if the process has no memory left for one.
    pub(crate) fn take(&self, slots: usize) -> Option<&'static Span> {
        {
            let unused = &mut lock(&self.0)[kind(slots)];
            if let Some(span) = unused.spans.pop() {
                return Some(span);
            }
            unused.spans.try_reserve(unused.made + 1).ok()?;
            // One that then cannot be made has its place all the same.
            unused.made += 1;
        }
        if Vec::<u8>::new().try_reserve_exact(HEADROOM).is_err() {
            return None;
        }
        let slots = 1usize << kind(slots);
        let words = filled(slots, || AtomicU16::new(0))?;
        let mut span = Vec::new();
        span.try_reserve_exact(1).ok()?;
        span.push(Span::new(words.leak()));
        span.leak().first()
    }

    /// Takes back a descriptor that no map entry and no list refers to any more.
    pub(crate) fn recycle(&self, span: &'static Span) {
        lock(&self.0)[kind(span.slots().len())].spans.push(span);
    }
}

/// A vector of `len` values, or none where memory is wanting: that is for the caller to hear of, and no reason to abort.
fn filled<T>(len: usize, value: impl FnMut() -> T) -> Option<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).ok()?;
    values.resize_with(len, value);
    Some(values)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::meta::geometry::{class_of, class_size, span_bytes, CLASSES, GRANULE, SHARED_CLASSES};

    /// Host bytes for the whole of a span: its descriptor, two bytes for each slot, and its entries in the address map.
    fn metadata(class: usize) -> usize {
        let bytes = span_bytes(class, 32 << 20).unwrap();
        let slots = (bytes / class_size(class)).next_power_of_two();
        size_of::<Span>() + slots * size_of::<AtomicU16>() + bytes / GRANULE * 8
    }

    #[test]
    fn a_descriptor_stays_three_cache_lines() {
        assert!(size_of::<Span>() <= 3 * 64, "{} bytes", size_of::<Span>());
    }

    #[test]
    fn metadata_is_at_most_two_per_cent_of_blocks_from_256_bytes() {
        for class in class_of(256)..CLASSES {
            let bytes = span_bytes(class, 32 << 20).unwrap();
            let blocks = bytes / class_size(class) * class_size(class);
            let parts = metadata(class) * 10_000 / blocks;
            assert!(parts <= 200, "{} bytes: {parts} parts of 10,000", class_size(class));
        }
    }

    #[test]
    fn on_average_it_is_at_most_one() {
        let classes = class_of(256)..SHARED_CLASSES;
        let all: usize = classes.clone().map(|class| span_bytes(class, 32 << 20).unwrap()).sum();
        let metadata: usize = classes.map(metadata).sum();
        assert!(metadata * 100 <= all, "{metadata} of {all}");
    }
}
