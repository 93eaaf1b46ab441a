//! Numbers for threads. The standard library's cost two locked operations each time a thread asks for its own.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Names a thread, once and for all: no other gets the number when it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadNumber(u64);

thread_local! {
    /// 0 before the thread has asked. Without a destructor: threads ask also while they end.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

impl ThreadNumber {
    /// That of the calling thread.
    pub fn current() -> Self {
        OWN.with(|own| {
            if own.get() == 0 {
                static LATEST: AtomicU64 = AtomicU64::new(0);
                own.set(LATEST.fetch_add(1, Relaxed) + 1);
            }
            Self(own.get())
        })
    }

    pub fn to_word(self) -> u64 {
        self.0
    }
}
