//! Address → descriptor, in two dependent loads.
//!
//! A two-level radix over the granule number: the root covers 48 bits of address in 4 GiB steps, a leaf covers 4 GiB in
//! granules. Leaves are made on first use and never unmapped. Lookups are wait-free and bounds-checked; any address,
//! also a wild one, gets an answer.

use std::ptr;

use super::geometry::GRANULE_SHIFT;
use crate::sync::{AtomicPtr, Ordering};

/// The model checkers have a map of their own in each run, with few entries.
const ADDRESS_BITS: u32 = if cfg!(loom) {
    22
} else if cfg!(shuttle) {
    26
} else {
    48
};
/// A leaf covers 4 GiB.
const LEAF_SHIFT: u32 = if cfg!(any(loom, shuttle)) { 20 } else { 32 };
const LEAF_BITS: u32 = LEAF_SHIFT - GRANULE_SHIFT;
const LEAF_LEN: usize = 1 << LEAF_BITS;
const ROOT_LEN: usize = 1 << (ADDRESS_BITS - LEAF_SHIFT);

struct Leaf<T: 'static>([AtomicPtr<T>; LEAF_LEN]);

/// The leaf that a thread's blocks are expected in. A lookup that begins with it waits for one load less: the comparison is
/// predicted, where the root's entry would have to arrive.
pub(crate) struct Near<T: 'static> {
    /// Beyond all of the map where there is no guess; `leaf` is null then and only then.
    root: usize,
    leaf: *const Leaf<T>,
}

// SAFETY: the leaf is shared with all threads already, and never freed.
unsafe impl<T: Sync> Send for Near<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Near<T> {}

impl<T> Near<T> {
    /// No guess.
    pub(crate) const fn nowhere() -> Self {
        Self { root: usize::MAX, leaf: ptr::null() }
    }

    /// Whether the guess says something about this address.
    #[inline(always)]
    pub(crate) fn covers(&self, address: usize) -> bool {
        self.root == address >> LEAF_SHIFT
    }

    /// As [`AddressMap::get`]; `None` also for addresses that the guess does not cover.
    #[inline(always)]
    pub(crate) fn get(&self, address: usize) -> Option<&'static T> {
        if !self.covers(address) {
            return None;
        }
        // SAFETY: no address is beyond the map, so there is a guess: a leaf of the map, and those are never freed.
        entry(unsafe { &*self.leaf }, address)
    }
}

#[inline(always)]
fn entry<T>(leaf: &Leaf<T>, address: usize) -> Option<&'static T> {
    let entry = leaf.0[(address >> GRANULE_SHIFT) & (LEAF_LEN - 1)].load(Ordering::Acquire);
    // SAFETY: entries are null or come from a `&'static T` (`set` takes nothing else).
    unsafe { entry.as_ref() }
}

/// A map from granules to `&'static T`.
pub(crate) struct AddressMap<T: 'static> {
    root: [AtomicPtr<Leaf<T>>; ROOT_LEN],
}

impl<T: Sync> AddressMap<T> {
    #[cfg(not(loom))]
    #[allow(clippy::large_stack_arrays, clippy::declare_interior_mutable_const)] // only ever a static's initialiser
    pub(crate) const fn new() -> Self {
        Self { root: [const { AtomicPtr::new(ptr::null_mut()) }; ROOT_LEN] }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self { root: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())) }
    }

    /// The descriptor of the granule that holds `address`.
    #[inline(always)]
    pub(crate) fn get(&self, address: usize) -> Option<&'static T> {
        entry(self.known_leaf(address >> LEAF_SHIFT)?, address)
    }

    /// The guess that addresses near this one come next.
    pub(crate) fn near(&self, address: usize) -> Near<T> {
        let root = address >> LEAF_SHIFT;
        self.known_leaf(root).map_or(Near::nowhere(), |leaf| Near { root, leaf })
    }

    #[inline(always)]
    fn known_leaf(&self, root: usize) -> Option<&'static Leaf<T>> {
        let leaf = self.root.get(root)?.load(Ordering::Acquire);
        // SAFETY: the root holds null or a leaf that `leaf` published with release and that is never freed.
        unsafe { leaf.as_ref() }
    }

    /// Makes room for entries of `granules` granules from `address` on. False if the process has no memory left for it.
    pub(crate) fn prepare(&self, address: usize, granules: usize) -> bool {
        let first = address >> GRANULE_SHIFT;
        (first >> LEAF_BITS..=(first + granules.max(1) - 1) >> LEAF_BITS)
            .all(|leaf| self.leaf(leaf).is_some())
    }

    /// Makes `granules` granules from `address` (granule-aligned) answer `value`. The caller owns that range, and
    /// has [prepared](Self::prepare) it.
    pub(crate) fn set(&self, address: usize, granules: usize, value: Option<&'static T>) {
        let value = value.map_or(ptr::null_mut(), |value| ptr::from_ref(value).cast_mut());
        let first = address >> GRANULE_SHIFT;
        let mut granule = first;
        while granule < first + granules {
            let end = (first + granules).min((granule | (LEAF_LEN - 1)) + 1);
            let leaf = self.leaf(granule >> LEAF_BITS);
            debug_assert!(leaf.is_some(), "the range was not prepared");
            let entries = leaf.map_or(&[][..], |leaf| &leaf.0[granule & (LEAF_LEN - 1)..][..end - granule]);
            entries.iter().for_each(|entry| entry.store(value, Ordering::Release));
            granule = end;
        }
    }

    /// Calls `each` with the number of every mapped granule; for checks.
    pub(crate) fn for_each(&self, mut each: impl FnMut(usize, &'static T)) {
        for (at, leaf) in self.root.iter().enumerate() {
            // SAFETY: as in `get`.
            let Some(leaf) = (unsafe { leaf.load(Ordering::Acquire).as_ref() }) else { continue };
            for (within, entry) in leaf.0.iter().enumerate() {
                // SAFETY: as in `get`.
                if let Some(value) = unsafe { entry.load(Ordering::Acquire).as_ref() } {
                    each((at << LEAF_BITS) + within, value);
                }
            }
        }
    }

    /// Whether every address of the range can be mapped.
    pub(crate) fn covers(address: usize, bytes: usize) -> bool {
        address.checked_add(bytes).is_some_and(|end| end <= 1 << ADDRESS_BITS)
    }

    fn leaf(&self, index: usize) -> Option<&'static Leaf<T>> {
        let mut leaf = self.root[index].load(Ordering::Acquire);
        if leaf.is_null() {
            let fresh = Box::into_raw(Self::fresh_leaf()?);
            match self.root[index].compare_exchange(
                ptr::null_mut(),
                fresh,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => leaf = fresh,
                Err(winner) => {
                    // SAFETY: `fresh` came from `Box::into_raw` just now and was not published.
                    drop(unsafe { Box::from_raw(fresh) });
                    leaf = winner;
                }
            }
        }
        // SAFETY: leaves are published once and never freed.
        unsafe { leaf.as_ref() }
    }

    #[cfg(not(any(loom, shuttle)))]
    fn fresh_leaf() -> Option<Box<Leaf<T>>> {
        let layout = std::alloc::Layout::new::<Leaf<T>>();
        // SAFETY: the layout's size is not zero.
        let leaf = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<Leaf<T>>();
        // SAFETY: allocated with this layout; a zeroed `AtomicPtr` is a null one, so the leaf is valid and empty.
        (!leaf.is_null()).then(|| unsafe { Box::from_raw(leaf) })
    }

    #[cfg(any(loom, shuttle))]
    fn fresh_leaf() -> Option<Box<Leaf<T>>> {
        Some(Box::new(Leaf(std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())))))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    static MAP: AddressMap<u32> = AddressMap::new();
    static ONE: u32 = 1;
    static TWO: u32 = 2;

    #[test]
    fn ranges_that_cross_leaves_are_found_whole_and_neighbours_are_not() {
        let base = (7 << 32) - 3 * 65536;
        MAP.set(base, 10, Some(&ONE));
        MAP.set(base + 10 * 65536, 1, Some(&TWO));
        assert_eq!(MAP.get(base - 1), None);
        for address in (base..base + 10 * 65536).step_by(4096) {
            assert_eq!(MAP.get(address), Some(&1));
        }
        assert_eq!(MAP.get(base + 10 * 65536 + 65535), Some(&2));
        MAP.set(base, 11, None);
        assert_eq!(MAP.get(base), None);
    }

    #[test]
    fn wild_addresses_answer_nothing() {
        for address in [0, 1, 8, 1 << 47, 1 << 48, usize::MAX, usize::MAX - 65535, 0xdead_beef] {
            assert_eq!(MAP.get(address), None);
        }
    }
}
