//! [`ThreadAllocator`]: a reference-counted handle on a heap of this thread.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::rc::{Rc, Weak};

use super::heap::{BinKey, Heap};
use super::slots::Slots;
use crate::backend::fork;
use crate::policy::Policy;
use crate::pool::{HasSegmentPool, Home};

/// A heap and what is known about it on its thread.
pub(crate) struct HeapCell {
    /// Set while a slow path runs: the backend may call back into the allocator.
    busy: Cell<bool>,
    encoded: bool,
    home: Home,
    /// The slots this heap is registered in by hand; null if none.
    registered_in: Cell<*const Slots>,
    heap: UnsafeCell<Option<Heap>>,
}

thread_local! {
    /// Every heap made on this thread that still has a handle.
    static MADE: RefCell<Vec<Weak<HeapCell>>> = const { RefCell::new(Vec::new()) };
}

/// The live heap of this thread with this identity. Reads nothing through the pointer.
pub(super) fn known_cell(identity: *const HeapCell) -> Option<Rc<HeapCell>> {
    MADE.try_with(|made| {
        made.borrow().iter().find(|cell| ptr::eq(cell.as_ptr(), identity)).and_then(Weak::upgrade)
    })
    .ok()
    .flatten()
}

impl HeapCell {
    pub(super) fn make(home: Home, encoded: bool) -> Rc<Self> {
        let first = BinKey::of(if encoded { Policy::Hardened } else { Policy::Standard });
        let cell = Rc::new(Self {
            busy: Cell::new(false),
            encoded,
            home,
            registered_in: Cell::new(ptr::null()),
            // In the child of a fork a lock that a heap needs may be held by a thread that is not there.
            heap: UnsafeCell::new((!fork::forked()).then(|| Heap::new(home, first))),
        });
        // In a later destructor of a thread that is ending the list is gone; then nobody can register either.
        let _ = MADE.try_with(|made| made.borrow_mut().push(Rc::downgrade(&cell)));
        cell
    }

    pub(crate) fn encoded(&self) -> bool {
        self.encoded
    }

    pub(super) fn is_of(&self, home: Home) -> bool {
        ptr::eq(self.home.pools, home.pools)
    }

    pub(super) fn set_registered_in(&self, slots: *const Slots) {
        self.registered_in.set(slots);
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.get()
    }

    /// The heap, for a hot path that calls nothing outside this crate while it uses it. `None` while a slow path runs.
    ///
    /// # Safety
    /// The reference must be gone before anything else can use this cell: before any call of a backend or a closure.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn hot(&self) -> Option<&mut Heap> {
        if self.busy.get() {
            return None;
        }
        // SAFETY: not busy, so no slow path holds a reference; cells are used on one thread only (`Rc`), and the
        // caller promises that hot paths do not nest.
        unsafe { &mut *self.heap.get() }.as_mut()
    }

    /// Runs `f` with the heap, which then counts as busy. `None` where it is busy already.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Heap) -> R) -> Option<R> {
        struct Idle<'a>(&'a Cell<bool>);
        impl Drop for Idle<'_> {
            fn drop(&mut self) {
                self.0.set(false);
            }
        }
        if self.busy.replace(true) {
            return None;
        }
        let _idle = Idle(&self.busy);
        // SAFETY: `busy` was false and is true now, so this is the only reference until `_idle` is dropped.
        unsafe { &mut *self.heap.get() }.as_mut().map(f)
    }
}

impl Drop for HeapCell {
    fn drop(&mut self) {
        // SAFETY: null, or this thread's slots, which live until the thread ends; handles never leave their thread.
        if let Some(slots) = unsafe { self.registered_in.get().as_ref() } {
            slots.unregister(self);
        }
        let identity: *const Self = self;
        let _ = MADE.try_with(|made| made.borrow_mut().retain(|cell| !ptr::eq(cell.as_ptr(), identity)));
        if fork::forked() {
            // Another thread may have held a lock of the pools at the fork: leave everything as it is.
            std::mem::forget(self.heap.get_mut().take());
        }
    }
}

/// A handle on a heap of this thread: neither `Send` nor `Sync`.
///
/// Blocks may be freed from any thread, also after the handle is gone. Dropping the last handle gives free memory back
/// to the backend's pools and leaves live blocks valid.
pub struct ThreadAllocator<B: HasSegmentPool> {
    cell: Rc<HeapCell>,
    backend: PhantomData<(B, *mut ())>,
}

impl<B: HasSegmentPool> ThreadAllocator<B> {
    /// A fresh heap with plain free lists, for Standard and Secure. No backend call is made before the first allocation.
    #[allow(clippy::new_without_default)] // which mode it has should be read where it is made
    pub fn new() -> Self {
        Self::from_cell(HeapCell::make(Home::of::<B>(), false))
    }

    /// A fresh heap with encoded free lists, for Hardened.
    pub fn new_encrypted() -> Self {
        Self::from_cell(HeapCell::make(Home::of::<B>(), true))
    }

    pub(super) fn from_cell(cell: Rc<HeapCell>) -> Self {
        Self { cell, backend: PhantomData }
    }

    pub(crate) fn cell(&self) -> &HeapCell {
        &self.cell
    }

    /// Identity of the heap: stable, and equal to
    /// [`get_allocator_ptr`](crate::LocalAllocatorSelector::get_allocator_ptr) once registered.
    pub fn as_ptr(&self) -> *mut c_void {
        Rc::as_ptr(&self.cell).cast_mut().cast()
    }
}
