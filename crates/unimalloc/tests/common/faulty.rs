//! A backend that fails on demand, written as an outside crate would write one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::pages;
use unimalloc::{set_last_error, AllocError};

const ALIGN: usize = 2 << 20;

/// What a faulty backend does wrong, and what it holds.
pub struct Faults {
    /// The request that is refused, counted from now; negative: none. Afterwards all are served again.
    pub refuse_at: AtomicIsize,
    /// How many requests after that one are refused too.
    pub refuse_more: AtomicIsize,
    /// So many releases are refused.
    pub refuse_frees: AtomicUsize,
    /// Bytes that bases lie above a multiple of 2 MiB.
    pub misalign: AtomicUsize,
    /// Bytes that may be held.
    pub limit: AtomicUsize,
    /// Refuse without saying why.
    pub silent: AtomicBool,
    /// Sleep so many microseconds in each call.
    pub slow_micros: AtomicU64,
    /// Called by each request, once per depth.
    pub hook: Mutex<Option<fn()>>,
    /// Refusals so far.
    pub refused: AtomicUsize,
    /// Releases of what is not held.
    pub bad_frees: AtomicUsize,
    /// Base → mapping and size.
    held: Mutex<BTreeMap<usize, (usize, usize, usize)>>,
}

impl Faults {
    pub const fn new() -> Self {
        Self {
            refuse_at: AtomicIsize::new(-1),
            refuse_more: AtomicIsize::new(0),
            refuse_frees: AtomicUsize::new(0),
            misalign: AtomicUsize::new(0),
            limit: AtomicUsize::new(usize::MAX),
            silent: AtomicBool::new(false),
            slow_micros: AtomicU64::new(0),
            hook: Mutex::new(None),
            refused: AtomicUsize::new(0),
            bad_frees: AtomicUsize::new(0),
            held: Mutex::new(BTreeMap::new()),
        }
    }

    /// No fault from now on.
    pub fn heal(&self) {
        self.refuse_at.store(-1, SeqCst);
        self.refuse_more.store(0, SeqCst);
        self.refuse_frees.store(0, SeqCst);
        self.misalign.store(0, SeqCst);
        self.limit.store(usize::MAX, SeqCst);
        self.silent.store(false, SeqCst);
        self.slow_micros.store(0, SeqCst);
        *self.hook.lock().unwrap() = None;
    }

    /// Regions and bytes that are held.
    pub fn held(&self) -> (usize, usize) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        (held.len(), held.values().map(|(_, _, size)| size).sum())
    }

    fn refuse(&self) -> *mut u8 {
        self.refused.fetch_add(1, SeqCst);
        if !self.silent.load(SeqCst) {
            set_last_error(AllocError::OutOfMemory);
        }
        std::ptr::null_mut()
    }

    fn dawdle(&self) {
        match self.slow_micros.load(SeqCst) {
            0 => {}
            micros => std::thread::sleep(Duration::from_micros(micros)),
        }
        std::thread_local! {
            static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
        }
        let hook = *self.hook.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hook) = hook {
            if !INSIDE.replace(true) {
                hook();
                INSIDE.set(false);
            }
        }
    }

    pub fn allocate(&self, size: usize) -> *mut u8 {
        self.dawdle();
        if self.refuse_at.load(SeqCst) >= 0 && self.refuse_at.fetch_sub(1, SeqCst) == 0 {
            return self.refuse();
        }
        if self.refuse_at.load(SeqCst) < 0 && self.refuse_more.load(SeqCst) > 0 {
            self.refuse_more.fetch_sub(1, SeqCst);
            return self.refuse();
        }
        if self.held().1.saturating_add(size) > self.limit.load(SeqCst) {
            return self.refuse();
        }
        let Some(mapped) = size.checked_add(2 * ALIGN) else { return self.refuse() };
        let start = pages::writable(mapped);
        if start.is_null() {
            return self.refuse();
        }
        let base = (start as usize).next_multiple_of(ALIGN) + self.misalign.load(SeqCst);
        self.held.lock().unwrap().insert(base, (start as usize, mapped, size));
        base as *mut u8
    }

    pub fn deallocate(&self, ptr: *mut u8, size: usize) -> bool {
        self.dawdle();
        let mut held = self.held.lock().unwrap();
        match held.get(&(ptr as usize)) {
            Some(&(start, mapped, known)) if known == size => {
                if self.refuse_frees.load(SeqCst) > 0 {
                    self.refuse_frees.fetch_sub(1, SeqCst);
                    set_last_error(AllocError::Driver(999));
                    return false;
                }
                held.remove(&(ptr as usize));
                // SAFETY: a mapping of ours that the caller gives up.
                unsafe { pages::unmap(start as *mut u8, mapped) }
            }
            _ => {
                self.bad_frees.fetch_add(1, SeqCst);
                false
            }
        }
    }
}

/// A backend of its own, with pools and faults that no other test shares.
macro_rules! faulty_backend {
    ($name:ident, $segment:expr) => {
        struct $name;

        impl $name {
            fn faults() -> &'static crate::common::faulty::Faults {
                static FAULTS: crate::common::faulty::Faults = crate::common::faulty::Faults::new();
                &FAULTS
            }
        }

        // SAFETY: regions are fresh mappings, exclusive and page-aligned, and unmapped only by `deallocate`.
        unsafe impl unimalloc::MemoryBackend for $name {
            unsafe fn allocate(size: usize) -> *mut u8 {
                Self::faults().allocate(size)
            }
            unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
                Self::faults().deallocate(ptr, size)
            }
            fn segment_bytes() -> usize {
                $segment
            }
        }

        unimalloc::backend_pools!($name);
    };
}
pub(crate) use faulty_backend;
