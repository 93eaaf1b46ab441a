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
    /// The number of the heap; 0 if there is none.
    id: u64,
    /// The slots that use or used this heap; null if none.
    slots: Cell<*const Slots>,
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
        // In the child of a fork a lock that a heap needs may be held by a thread that is not there.
        let heap = (!fork::forked()).then(|| Heap::new(home, first));
        let cell = Rc::new(Self {
            busy: Cell::new(false),
            encoded,
            home,
            id: heap.as_ref().map_or(0, Heap::id),
            slots: Cell::new(ptr::null()),
            heap: UnsafeCell::new(heap),
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

    pub(super) fn set_slots(&self, slots: &Slots) {
        self.slots.set(slots);
    }

    fn slots(&self) -> Option<&Slots> {
        // SAFETY: null, or slots of this thread, which live until it ends; cells never leave their thread.
        unsafe { self.slots.get().as_ref() }
    }

    /// Where the heap is, if no slow path uses it now. What an earlier call answered must not be used any more.
    pub(super) fn idle_heap(&self) -> *mut Heap {
        if self.busy.get() {
            return ptr::null_mut();
        }
        // SAFETY: not busy, so nobody has a reference; this one ends here.
        unsafe { &mut *self.heap.get() }.as_mut().map_or(ptr::null_mut(), |heap| heap)
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.get()
    }

    /// The number of the heap; 0 while a slow path uses it.
    pub(crate) fn id(&self) -> u64 {
        if self.busy.get() {
            0
        } else {
            self.id
        }
    }

    /// Runs `f` with the heap, which then counts as busy. `None` where it is busy already.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Heap) -> R) -> Option<R> {
        struct Idle<'a>(&'a HeapCell);
        impl Drop for Idle<'_> {
            fn drop(&mut self) {
                self.0.busy.set(false);
                self.0.slots().into_iter().for_each(Slots::resume);
            }
        }
        if self.busy.replace(true) {
            return None;
        }
        self.slots().into_iter().for_each(|slots| slots.suspend(self));
        let _idle = Idle(self);
        // SAFETY: `busy` was false and is true now, so this is the only reference until `_idle` is dropped.
        unsafe { &mut *self.heap.get() }.as_mut().map(f)
    }
}

impl Drop for HeapCell {
    fn drop(&mut self) {
        if let Some(slots) = self.slots() {
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
