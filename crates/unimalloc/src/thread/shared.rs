//! The heaps that serve calls no thread's own heap can: inside a guarded closure, inside the allocator itself, and after
//! a thread's teardown.

use super::heap::{BinKey, Heap};
use crate::policy::Policy;
use crate::pool::Home;
use crate::sync::{lock, Mutex};

/// Heaps that no thread owns, by free-list mode. [`backend_pools!`](crate::backend_pools) makes the static.
pub struct SharedHeaps {
    plain: Mutex<Vec<Heap>>,
    encoded: Mutex<Vec<Heap>>,
}

impl Default for SharedHeaps {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedHeaps {
    /// No heap yet.
    pub const fn new() -> Self {
        Self { plain: Mutex::new(Vec::new()), encoded: Mutex::new(Vec::new()) }
    }

    /// Runs `f` with a heap that nobody else uses meanwhile. The lock is not held while `f` runs, so `f` may call the
    /// backend, and a backend that calls the allocator gets another heap.
    pub(super) fn with<R>(&self, home: Home, encoded: bool, f: impl FnOnce(&mut Heap) -> R) -> R {
        let heaps = if encoded { &self.encoded } else { &self.plain };
        let first = BinKey::of(if encoded { Policy::Hardened } else { Policy::Standard });
        let idle = lock(heaps).pop();
        let mut heap = idle.unwrap_or_else(|| Heap::new(home, first));
        let result = f(&mut heap);
        lock(heaps).push(heap);
        result
    }

    /// Returns what idle shared heaps cache to the pools.
    pub(crate) fn give_back_caches(&self) {
        for heaps in [&self.plain, &self.encoded] {
            for heap in lock(heaps).iter_mut() {
                heap.give_back_caches();
            }
        }
    }
}
