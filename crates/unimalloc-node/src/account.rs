//! An allocator as JavaScript sees it: an account over the process-wide pools, with its own ceiling and statistics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::dispatch::{Backend, Policy};
use crate::thread_number::ThreadNumber;

/// A figure that JavaScript sees as a double: exact up to 2^53.
#[derive(Debug, Default)]
#[repr(transparent)]
struct Cell(AtomicU64);

impl Cell {
    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// For cells that only the account's own thread writes to.
    fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    /// As `set`.
    fn add(&self, value: f64) {
        self.set(self.get() + value);
    }

    /// For cells that any thread writes to.
    fn add_shared(&self, value: f64) {
        // The closure refuses no value.
        let _ = self.0.fetch_update(Relaxed, Relaxed, |bits| Some((f64::from_bits(bits) + value).to_bits()));
    }
}

/// Figures of the blocks that native code keeps the books of, or a change of them.
#[derive(Debug, Default)]
#[repr(C)]
struct Held<T> {
    /// Current plus pending.
    bytes: T,
    pending_bytes: T,
    count: T,
    requested_bytes: T,
}

/// The figures of an account, which JavaScript maps: `ts/ledger.ts` has the same order.
#[derive(Debug, Default)]
#[repr(C)]
struct Cells {
    /// What the account's own thread did: it writes without locked operations, of which a pair of calls would need half a dozen.
    held: Held<Cell>,
    /// Blocks that a magazine handed out: JavaScript keeps the books, and writes these when native code is to look at them.
    pooled_bytes: Cell,
    pooled_count: Cell,
    peak_bytes: Cell,
    peak_count: Cell,
    total_bytes: Cell,
    total_count: Cell,
    refusals: Cell,
    limit: Cell,
    /// What other threads did, to be added to `held`. They only ever let blocks go. All other cells are the own thread's, in native code and in
    /// JavaScript.
    elsewhere: Held<Cell>,
}

/// How many cells there are.
pub const CELLS: usize = size_of::<Cells>() / size_of::<Cell>();

/// The books of one allocator. Shared by every block it owns, so that a block freed late, by the garbage collector
/// or on another thread, still settles with its owner.
///
/// ```text
/// current bytes = held - pending + pooled      held + pooled <= limit
/// ```
///
/// `held` is the sum of the usable bytes of the blocks that native code knows of, `pending` of those among them that JavaScript let
/// go while the GPU may still use them, `pooled` of the blocks that a magazine handed out.
#[derive(Debug)]
pub struct Account {
    pub backend: Backend,
    pub policy: Policy,
    pub device: u16,
    /// That opened it.
    thread: ThreadNumber,
    cells: Cells,
}

/// Figures of one account, in the order in which [`Account::figures`] lays them out for JavaScript.
pub const FIGURES: usize = 10;

impl Account {
    /// `limit` is in bytes and may be infinite.
    pub fn new(backend: Backend, policy: Policy, device: u16, limit: f64) -> Self {
        let cells = Cells::default();
        cells.limit.set(limit);
        Self { backend, policy, device, thread: ThreadNumber::current(), cells }
    }

    /// Where JavaScript finds the cells: valid as long as the account is.
    pub fn cells(&self) -> *mut f64 {
        std::ptr::from_ref(&self.cells).cast_mut().cast()
    }

    /// Whether a block of at least `bytes` can still be admitted: spares a trip to the backend that
    /// [`admit`](Self::admit) would only undo.
    pub fn has_room(&self, bytes: u64) -> bool {
        let (used, limit) = self.load();
        used + bytes as f64 <= limit
    }

    /// Bytes that count against the limit, and the limit.
    pub fn load(&self) -> (f64, f64) {
        let cells = &self.cells;
        (self.held(|held| &held.bytes) + cells.pooled_bytes.get(), cells.limit.get())
    }

    /// A figure of all threads.
    fn held(&self, figure: impl Fn(&Held<Cell>) -> &Cell) -> f64 {
        figure(&self.cells.held).get() + figure(&self.cells.elsewhere).get()
    }

    fn change(&self, by: &Held<f64>) {
        if self.thread == ThreadNumber::current() {
            let held = &self.cells.held;
            held.bytes.add(by.bytes);
            held.pending_bytes.add(by.pending_bytes);
            held.count.add(by.count);
            held.requested_bytes.add(by.requested_bytes);
        } else {
            let elsewhere = &self.cells.elsewhere;
            elsewhere.bytes.add_shared(by.bytes);
            elsewhere.pending_bytes.add_shared(by.pending_bytes);
            elsewhere.count.add_shared(by.count);
            elsewhere.requested_bytes.add_shared(by.requested_bytes);
        }
    }

    /// Enters a block into the books, or leaves them unchanged and answers false. For the account's own thread: others only make what is
    /// used less.
    pub fn admit(&self, usable: u64, requested: u64) -> bool {
        if !self.has_room(usable) {
            return false;
        }
        self.take_over(usable, requested);
        let cells = &self.cells;
        cells.total_bytes.add(usable as f64);
        cells.total_count.add(1.0);
        cells.peak_bytes.set(cells.peak_bytes.get().max(self.current_bytes()));
        cells.peak_count.set(cells.peak_count.get().max(self.current_count()));
        true
    }

    /// Native code takes over the books of a block that a magazine handed out; JavaScript takes it off its own.
    pub fn take_over(&self, usable: u64, requested: u64) {
        self.change(&Held {
            bytes: usable as f64,
            pending_bytes: 0.0,
            count: 1.0,
            requested_bytes: requested as f64,
        });
    }

    /// JavaScript let the block go; it still counts against the limit until [`settle`](Self::settle).
    pub fn let_go(&self, usable: u64, requested: u64) {
        self.change(&Held {
            bytes: 0.0,
            pending_bytes: usable as f64,
            count: -1.0,
            requested_bytes: -(requested as f64),
        });
    }

    /// JavaScript let the block go, and it went back to the pools at once.
    pub fn end(&self, usable: u64, requested: u64) {
        self.change(&Held {
            bytes: -(usable as f64),
            pending_bytes: 0.0,
            count: -1.0,
            requested_bytes: -(requested as f64),
        });
    }

    /// The block went back to the pools.
    pub fn settle(&self, usable: u64) {
        let usable = usable as f64;
        self.change(&Held { bytes: -usable, pending_bytes: -usable, count: 0.0, requested_bytes: 0.0 });
    }

    /// For the account's own thread.
    pub fn count_refusal(&self) {
        self.cells.refusals.set(self.cells.refusals.get() + 1.0);
    }

    /// Starts the peaks afresh from what is live now. For the account's own thread.
    pub fn reset_peak(&self) {
        self.cells.peak_bytes.set(self.current_bytes());
        self.cells.peak_count.set(self.current_count());
    }

    fn current_bytes(&self) -> f64 {
        // Not below zero: another thread may move bytes to pending between the two loads.
        (self.held(|held| &held.bytes) - self.held(|held| &held.pending_bytes)).max(0.0)
            + self.cells.pooled_bytes.get()
    }

    fn current_count(&self) -> f64 {
        self.held(|held| &held.count) + self.cells.pooled_count.get()
    }

    /// Current, peak and total bytes; current, peak and total count; requested, pending, limit, refusals. To total and requested JavaScript
    /// adds what its magazines handed out.
    pub fn figures(&self) -> [f64; FIGURES] {
        let cells = &self.cells;
        [
            self.current_bytes(),
            cells.peak_bytes.get(),
            cells.total_bytes.get(),
            self.current_count(),
            cells.peak_count.get(),
            cells.total_count.get(),
            self.held(|held| &held.requested_bytes),
            self.held(|held| &held.pending_bytes),
            cells.limit.get(),
            cells.refusals.get(),
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
