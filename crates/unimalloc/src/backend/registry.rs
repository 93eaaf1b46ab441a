//! The bounded record of what a backend has handed out: which makes a release of garbage a typed `false`.
//!
//! Every operation by exact base is O(1). No lock is held while the caller talks to a driver or the operating
//! system: a release takes its entry out first, and confirms that or puts it back afterwards.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::AllocError;

/// Allocations that can be live at a time unless the option or `UNIMALLOC_REGISTRY_CAPACITY` says otherwise.
pub(crate) const DEFAULT_CAPACITY: usize = 65_536;
const CAPACITY_VARIABLE: &str = "UNIMALLOC_REGISTRY_CAPACITY";

const SHARDS: usize = 64;
const CHUNK: usize = 2 << 20;
/// Chunks that a lookup by inner address walks down before it scans: those of a 32 MiB segment.
const CHUNKS_WALKED: usize = 16;

/// One allocation of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Bytes, as asked for.
    pub size: usize,
    /// The device whose context it was made in; 0 for the host.
    pub device: u16,
    /// What the backend must know to release it.
    pub kind: u8,
}

/// Live allocations by base address.
///
/// `held` = the entries of all shards + their releases in flight + insertions under way, and an insertion never
/// takes `held` above the capacity.
pub(crate) struct Registry {
    shards: [Mutex<Shard>; SHARDS],
    held: AtomicUsize,
    capacity: AtomicUsize,
}

struct Shard {
    entries: HashMap<usize, Entry, ByAddress>,
    /// Entries taken out whose memory is on its way back. The table keeps room for all of them.
    in_flight: usize,
}

/// The capacity has not been looked up yet.
const UNSET: usize = usize::MAX;

impl Registry {
    pub(crate) const fn new() -> Self {
        Self {
            shards: [const { Mutex::new(Shard { entries: HashMap::with_hasher(ByAddress), in_flight: 0 }) };
                SHARDS],
            held: AtomicUsize::new(0),
            capacity: AtomicUsize::new(UNSET),
        }
    }

    /// Allocations that may be live at once. A malformed environment variable answers `InvalidConfiguration`.
    pub(crate) fn capacity(&self) -> Result<usize, AllocError> {
        let known = self.capacity.load(Ordering::Relaxed);
        if known != UNSET {
            return Ok(known);
        }
        let read = match std::env::var(CAPACITY_VARIABLE) {
            Ok(text) if text.trim().is_empty() => DEFAULT_CAPACITY,
            Ok(text) => parse_capacity(&text).ok_or(AllocError::InvalidConfiguration)?,
            Err(std::env::VarError::NotPresent) => DEFAULT_CAPACITY,
            Err(std::env::VarError::NotUnicode(_)) => return Err(AllocError::InvalidConfiguration),
        };
        // An option set meanwhile wins over the environment.
        match self.capacity.compare_exchange(UNSET, read, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(read),
            Err(set) => Ok(set),
        }
    }

    /// Sets the capacity. Below the live count it stops new allocations only.
    pub(crate) fn set_capacity(&self, capacity: usize) {
        self.capacity.store(capacity.min(UNSET - 1), Ordering::Relaxed);
    }

    /// Allocations recorded now, those being released included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Records a fresh allocation. On an error nothing is recorded, and the caller releases it.
    pub(crate) fn insert(&self, base: usize, entry: Entry) -> Result<(), AllocError> {
        let capacity = self.capacity()?;
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| (held < capacity).then_some(held + 1))
            .map_err(|_| AllocError::RegistryFull)?;
        let result = self.insert_counted(base, entry);
        if result.is_err() {
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
        result
    }

    fn insert_counted(&self, base: usize, entry: Entry) -> Result<(), AllocError> {
        let mut shard = self.shard(base);
        let room = shard.in_flight + 1;
        if shard.entries.try_reserve(room).is_err() {
            return Err(AllocError::OutOfMemory);
        }
        if shard.entries.contains_key(&base) {
            // The source handed out an address that is still live here. The record in place has an owner and stays.
            return Err(AllocError::Unsupported);
        }
        shard.entries.insert(base, entry);
        Ok(())
    }

    /// Takes an allocation out **before** its memory goes back: the source may hand the same address to another
    /// thread at once, and a second release meanwhile must be refused. Its place stays counted until
    /// [`finish_release`](Self::finish_release) says how it went.
    pub(crate) fn begin_release(&self, base: usize, size: usize) -> Result<Entry, AllocError> {
        let mut shard = self.shard(base);
        match shard.entries.get(&base) {
            Some(entry) if entry.size == size => {}
            _ => return Err(AllocError::NotRegistered),
        }
        shard.in_flight += 1;
        shard.entries.remove(&base).ok_or(AllocError::NotRegistered)
    }

    /// Ends what [`begin_release`](Self::begin_release) began. When the release failed the allocation is recorded
    /// again, so that a later call can succeed.
    pub(crate) fn finish_release(&self, base: usize, entry: Entry, released: bool) {
        let mut shard = self.shard(base);
        shard.in_flight -= 1;
        if released {
            self.held.fetch_sub(1, Ordering::Relaxed);
        } else {
            // Every insertion kept room for the releases in flight, so this one never allocates.
            shard.entries.insert(base, entry);
        }
    }

    /// The live allocation that has all of `[start, start + len)` inside it.
    pub(crate) fn containing(&self, start: usize, len: usize) -> Option<(usize, Entry)> {
        let end = start.checked_add(len)?;
        let holds = |base: usize, entry: &Entry| base <= start && end <= base.saturating_add(entry.size);
        if let Some(entry) = self.get(start) {
            return holds(start, &entry).then_some((start, entry));
        }
        let mut chunk = start & !(CHUNK - 1);
        for _ in 0..CHUNKS_WALKED {
            if let Some(entry) = self.get(chunk) {
                if holds(chunk, &entry) {
                    return Some((chunk, entry));
                }
                // Allocations are disjoint: nothing further down reaches past this one. A base above it and not on
                // a chunk's start may still hold the range.
                break;
            }
            match chunk.checked_sub(CHUNK) {
                Some(below) => chunk = below,
                None => break,
            }
        }
        // Ranges of large allocations, and of those whose base is not 2 MiB-aligned.
        self.shards.iter().find_map(|shard| {
            let shard = lock(shard);
            shard
                .entries
                .iter()
                .find(|(&base, entry)| holds(base, entry))
                .map(|(&base, &entry)| (base, entry))
        })
    }

    /// The allocation that starts at `base`.
    pub(crate) fn get(&self, base: usize) -> Option<Entry> {
        self.shard(base).entries.get(&base).copied()
    }

    fn shard(&self, base: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[(mix(base as u64) >> 58) as usize])
    }
}

/// No code that can panic runs under a shard's lock except the table's own growth, which leaves it consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn parse_capacity(text: &str) -> Option<usize> {
    text.trim().parse().ok().filter(|&capacity| capacity > 0 && capacity < UNSET)
}

/// Fibonacci hashing of a page address: base addresses come from the system, not from an attacker.
#[derive(Clone, Copy, Default)]
struct ByAddress;

impl BuildHasher for ByAddress {
    type Hasher = AddressHasher;
    fn build_hasher(&self) -> AddressHasher {
        AddressHasher(0)
    }
}

struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0 ^ u64::from(byte));
        }
    }
    fn write_usize(&mut self, value: usize) {
        // The shard is chosen by the top bits of one multiplication; a second one keeps the table's bits independent.
        self.0 = mix(mix(value as u64));
    }
}

fn mix(value: u64) -> u64 {
    let product = (value >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn registry(capacity: usize) -> Registry {
        let registry = Registry::new();
        registry.set_capacity(capacity);
        registry
    }

    fn entry(size: usize) -> Entry {
        Entry { size, device: 0, kind: 0 }
    }

    fn release(registry: &Registry, base: usize, size: usize) -> Result<(), AllocError> {
        let entry = registry.begin_release(base, size)?;
        registry.finish_release(base, entry, true);
        Ok(())
    }

    #[test]
    fn exact_base_and_size_release_once() {
        let registry = registry(4);
        let made = Entry { size: 8 * PAGE, device: 3, kind: 1 };
        registry.insert(CHUNK, made).unwrap();
        assert_eq!(registry.begin_release(CHUNK + PAGE, 8 * PAGE), Err(AllocError::NotRegistered));
        assert_eq!(registry.begin_release(CHUNK, 4 * PAGE), Err(AllocError::NotRegistered));
        assert_eq!(registry.begin_release(CHUNK, 8 * PAGE), Ok(made));
        assert_eq!(registry.begin_release(CHUNK, 8 * PAGE), Err(AllocError::NotRegistered), "in flight");
        registry.finish_release(CHUNK, made, false);
        release(&registry, CHUNK, 8 * PAGE).expect("a failed release can be tried again");
        assert_eq!(registry.len(), 0);
        assert_eq!(release(&registry, CHUNK, 8 * PAGE), Err(AllocError::NotRegistered));
    }

    #[test]
    fn full_means_full_and_a_release_makes_room() {
        let registry = registry(2);
        registry.insert(PAGE, entry(PAGE)).unwrap();
        registry.insert(2 * PAGE, entry(PAGE)).unwrap();
        assert_eq!(registry.insert(3 * PAGE, entry(PAGE)), Err(AllocError::RegistryFull));
        let taken = registry.begin_release(PAGE, PAGE).unwrap();
        // Its place is kept, for it may have to come back.
        assert_eq!(registry.insert(3 * PAGE, entry(PAGE)), Err(AllocError::RegistryFull));
        registry.finish_release(PAGE, taken, true);
        registry.insert(3 * PAGE, entry(PAGE)).unwrap();
    }

    #[test]
    fn an_address_may_come_back_while_its_release_is_not_confirmed_yet() {
        let registry = registry(4);
        registry.insert(PAGE, entry(PAGE)).unwrap();
        let old = registry.begin_release(PAGE, PAGE).unwrap();
        registry.insert(PAGE, entry(2 * PAGE)).unwrap();
        registry.finish_release(PAGE, old, true);
        assert_eq!(registry.get(PAGE), Some(entry(2 * PAGE)));
        assert_eq!(registry.len(), 1);
    }

    #[test]
    fn a_live_base_is_not_overwritten() {
        let registry = registry(8);
        registry.insert(PAGE, Entry { device: 1, ..entry(PAGE) }).unwrap();
        assert_eq!(registry.insert(PAGE, entry(2 * PAGE)), Err(AllocError::Unsupported));
        assert_eq!(registry.get(PAGE).unwrap().device, 1);
        assert_eq!(registry.len(), 1);
    }

    #[test]
    fn ranges_are_found_in_segments_in_large_and_in_unaligned_allocations() {
        let registry = registry(16);
        let segment = 64 * CHUNK;
        let large = 200 * CHUNK;
        let odd = 5 * PAGE;
        registry.insert(segment, entry(16 * CHUNK)).unwrap();
        registry.insert(large, entry(100 * CHUNK)).unwrap();
        registry.insert(odd, entry(3 * PAGE)).unwrap();
        for (start, len, base) in [
            (segment, PAGE, segment),
            (segment + 15 * CHUNK, CHUNK, segment),
            (large + 90 * CHUNK, 10 * CHUNK, large),
            (odd + PAGE, 2 * PAGE, odd),
        ] {
            assert_eq!(registry.containing(start, len).map(|found| found.0), Some(base));
        }
        assert!(registry.containing(segment + 15 * CHUNK, CHUNK + PAGE).is_none(), "past the end");
        assert!(registry.containing(odd, 4 * PAGE).is_none(), "past the end, from the base");
        assert!(registry.containing(segment - PAGE, PAGE).is_none());
        assert!(registry.containing(usize::MAX - PAGE, 2 * PAGE).is_none(), "wraps");
        registry.begin_release(large, 100 * CHUNK).unwrap();
        assert!(registry.containing(large + 90 * CHUNK, PAGE).is_none(), "being released");
    }

    #[test]
    fn threads_never_exceed_the_capacity_and_lose_nothing() {
        let registry = registry(500);
        std::thread::scope(|scope| {
            for thread in 1..=4_usize {
                let registry = &registry;
                scope.spawn(move || {
                    for round in 0..2000_usize {
                        let base = (thread << 40) + (round + 1) * CHUNK;
                        registry.insert(base, entry(CHUNK)).unwrap();
                        assert!(registry.len() <= 500);
                        if round >= 100 {
                            release(registry, base - 100 * CHUNK, CHUNK).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(registry.len(), 400);
    }

    #[test]
    fn capacity_text() {
        assert_eq!(parse_capacity(" 12 "), Some(12));
        for bad in ["", "0", "-1", "many", "1.5"] {
            assert_eq!(parse_capacity(bad), None, "{bad:?}");
        }
    }
}
