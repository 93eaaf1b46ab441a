//! An allocator as JavaScript sees it: an account over the process-wide pools, with its own ceiling and statistics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::dispatch::{Backend, Policy};

/// The books of one allocator. Shared by every block it owns, so that a block freed late, by the garbage collector
/// or on another thread, still settles with its owner.
///
/// Invariant: `current_bytes` is the sum of the usable bytes of the blocks JavaScript still holds, `pending_bytes` of those it let
/// go while the GPU may still use them, and `current_bytes + pending_bytes <= limit` whenever the limit was not lowered.
#[derive(Debug)]
pub struct Account {
    pub backend: Backend,
    pub policy: Policy,
    pub device: u16,
    limit: u64,
    /// Current plus pending bytes: what the limit bounds. One word, so that admission is one atomic step.
    held_bytes: AtomicU64,
    pending_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    total_bytes: AtomicU64,
    current_count: AtomicU64,
    peak_count: AtomicU64,
    total_count: AtomicU64,
    requested_bytes: AtomicU64,
    refusals: AtomicU64,
}

/// Figures of one account, in the order in which [`Figures::write`] lays them out for JavaScript.
pub const FIGURES: usize = 10;

impl Account {
    pub fn new(backend: Backend, policy: Policy, device: u16, limit: u64) -> Self {
        Self {
            backend,
            policy,
            device,
            limit,
            held_bytes: AtomicU64::new(0),
            pending_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            current_count: AtomicU64::new(0),
            peak_count: AtomicU64::new(0),
            total_count: AtomicU64::new(0),
            requested_bytes: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
        }
    }

    /// Whether a block of at least `bytes` can still be admitted: spares a trip to the backend that
    /// [`admit`](Self::admit) would only undo.
    pub fn has_room(&self, bytes: u64) -> bool {
        bytes <= self.limit.saturating_sub(self.held_bytes.load(Relaxed))
    }

    /// Enters a block into the books, or leaves them unchanged and answers false.
    pub fn admit(&self, usable: u64, requested: u64) -> bool {
        let admitted = self
            .held_bytes
            .fetch_update(Relaxed, Relaxed, |held| held.checked_add(usable).filter(|sum| *sum <= self.limit));
        let Ok(before) = admitted else { return false };
        // Saturating: another thread may move bytes to pending between the two loads.
        let current = (before + usable).saturating_sub(self.pending_bytes.load(Relaxed));
        self.peak_bytes.fetch_max(current, Relaxed);
        self.total_bytes.fetch_add(usable, Relaxed);
        self.requested_bytes.fetch_add(requested, Relaxed);
        self.total_count.fetch_add(1, Relaxed);
        let count = self.current_count.fetch_add(1, Relaxed) + 1;
        self.peak_count.fetch_max(count, Relaxed);
        true
    }

    /// JavaScript let the block go; it still counts against the limit until [`settle`](Self::settle).
    pub fn let_go(&self, usable: u64, requested: u64) {
        self.pending_bytes.fetch_add(usable, Relaxed);
        self.requested_bytes.fetch_sub(requested, Relaxed);
        self.current_count.fetch_sub(1, Relaxed);
    }

    /// The block went back to the pools.
    pub fn settle(&self, usable: u64) {
        self.held_bytes.fetch_sub(usable, Relaxed);
        self.pending_bytes.fetch_sub(usable, Relaxed);
    }

    pub fn count_refusal(&self) {
        self.refusals.fetch_add(1, Relaxed);
    }

    /// Starts the peaks afresh from what is live now.
    pub fn reset_peak(&self) {
        self.peak_bytes.store(self.current_bytes(), Relaxed);
        self.peak_count.store(self.current_count.load(Relaxed), Relaxed);
    }

    fn current_bytes(&self) -> u64 {
        self.held_bytes.load(Relaxed).saturating_sub(self.pending_bytes.load(Relaxed))
    }

    /// Current, peak and total bytes; current, peak and total count; requested, pending, limit, refusals.
    pub fn figures(&self) -> [f64; FIGURES] {
        let limit = if self.limit == u64::MAX { f64::INFINITY } else { self.limit as f64 };
        [
            self.current_bytes() as f64,
            self.peak_bytes.load(Relaxed) as f64,
            self.total_bytes.load(Relaxed) as f64,
            self.current_count.load(Relaxed) as f64,
            self.peak_count.load(Relaxed) as f64,
            self.total_count.load(Relaxed) as f64,
            self.requested_bytes.load(Relaxed) as f64,
            self.pending_bytes.load(Relaxed) as f64,
            limit,
            self.refusals.load(Relaxed) as f64,
        ]
    }
}

/// What is due to an account when a block of it has passed its streams.
///
/// Owned by exactly one side: by this value until its tag was accepted by the allocator, then by the tag.
pub struct Settlement(*mut (Arc<Account>, u64));

impl Settlement {
    pub fn new(account: &Arc<Account>, usable: u64) -> Self {
        Self(Box::into_raw(Box::new((Arc::clone(account), usable))))
    }

    pub fn tag(&self) -> u64 {
        self.0.expose_provenance() as u64
    }

    pub fn settle(self) {
        Self::notify(self.tag(), 0);
    }

    /// Nothing is due: the block stays where it is.
    pub fn forget(self) {
        // SAFETY: made by `new`, and owned by this value, which ends here.
        drop(unsafe { Box::from_raw(self.0) });
    }

    /// For the allocator, which calls it once for a tag that it has accepted, on any thread.
    pub fn notify(tag: u64, _block_bytes: usize) {
        let settlement: *mut (Arc<Account>, u64) = std::ptr::with_exposed_provenance_mut(tag as usize);
        // SAFETY: the tag is that of a settlement made by `new`, which is passed to this function once.
        let (account, usable) = *unsafe { Box::from_raw(settlement) };
        account.settle(usable);
    }
}

/// Accounts by the number that JavaScript knows them by. A number is never used again, so a stale one finds nothing.
static ACCOUNTS: Mutex<Vec<Option<Arc<Account>>>> = Mutex::new(Vec::new());

fn accounts() -> MutexGuard<'static, Vec<Option<Arc<Account>>>> {
    // A panic cannot leave the vector half-changed: no code that can panic runs under this lock.
    ACCOUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens an account and answers its number.
pub fn open(account: Account) -> u32 {
    let mut accounts = accounts();
    accounts.push(Some(Arc::new(account)));
    (accounts.len() - 1) as u32
}

/// The account of that number, unless it was closed.
pub fn find(number: u32) -> Option<Arc<Account>> {
    accounts().get(number as usize).cloned().flatten()
}

/// Forgets the number. Blocks keep the account itself until the last of them is gone.
pub fn close(number: u32) {
    if let Some(slot) = accounts().get_mut(number as usize) {
        *slot = None;
    }
}
