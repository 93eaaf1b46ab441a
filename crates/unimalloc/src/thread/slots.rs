//! Which heap a thread allocates from: two slots per thread and backend, one per free-list mode.
//!
//! The fast pointers are plain thread-locals without a destructor. A separate sentinel, touched when the first heap is
//! made, tears the slots down when the thread ends; after that calls go to the [shared heaps](super::SharedHeaps). A thread
//! that only frees never makes a heap.
//!
//! ```text
//! Uninit --first allocation--> Live --thread teardown--> Dead
//! ```

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;

use super::allocator::{known_cell, HeapCell, ThreadAllocator};
use super::heap::Heap;
use super::shared::SharedHeaps;
use crate::backend::fork;
use crate::error::{set_last_error, AllocError};
use crate::policy::AllocPolicy;
use crate::pool::{HasSegmentPool, Home};

/// This thread's slots for one backend. [`backend_pools!`](crate::backend_pools) makes the thread-local.
pub struct Slots {
    /// What the hot path uses: the plain heap, null unless its slot is live, no guarded call is running, and no slow path
    /// uses the heap.
    hot: Cell<*mut Heap>,
    /// The heap of each mode: null unless the slot is live and no guarded call is running.
    fast: [Cell<*const HeapCell>; 2],
    /// Null until the first heap is made.
    state: Cell<*const State>,
    dead: Cell<bool>,
    /// The slots of another backend on this thread, in the list that [`MADE`] begins.
    next: Cell<*const Slots>,
}

thread_local! {
    /// The slots of this thread whose state was made: the hot paths that a child of a fork must not take.
    static MADE: Cell<*const Slots> = const { Cell::new(ptr::null()) };
}

/// Runs in the child of a fork, on the thread that forked: no heap may be used any more.
fn cut_off() {
    let mut at = MADE.with(Cell::get);
    // SAFETY: the list holds slots of this thread, each once; they live until the thread ends.
    while let Some(slots) = unsafe { at.as_ref() } {
        slots.forbid();
        at = slots.next.get();
    }
}

#[derive(Default)]
struct State {
    slots: [Slot; 2],
    guarded: Cell<bool>,
}

#[derive(Default)]
struct Slot {
    own: RefCell<Option<Rc<HeapCell>>>,
    /// A hand-made allocator's heap that stands in for `own`; its last handle clears this.
    registered: Cell<Option<*const HeapCell>>,
}

impl Default for Slots {
    fn default() -> Self {
        Self::new()
    }
}

impl Slots {
    /// Uninitialised slots.
    pub const fn new() -> Self {
        Self {
            hot: Cell::new(ptr::null_mut()),
            fast: [const { Cell::new(ptr::null()) }; 2],
            state: Cell::new(ptr::null()),
            dead: Cell::new(false),
            next: Cell::new(ptr::null()),
        }
    }

    /// The plain heap, if a hot path may use it now: one that calls nothing outside this crate while it does. A reference made of
    /// it must be gone before anything else can use the heap: before any call of a backend or a closure.
    ///
    /// Valid then, and not borrowed: non-null only while `fast[0]` is, whose heap it points to, and while no slow path has a
    /// reference to it (`HeapCell::with` sees to that).
    #[inline(always)]
    pub(crate) fn hot(&self) -> *mut Heap {
        self.hot.get()
    }

    /// Whether a heap with this number is certainly not this thread's plain one.
    pub(crate) fn is_foreign(&self, id: u64) -> bool {
        // SAFETY: as `hot` says; only the number is read, and the reference ends here.
        match unsafe { self.hot().as_ref() } {
            Some(heap) => heap.id() != id,
            None => self.state.get().is_null(),
        }
    }

    /// Takes the heap of a cell from the hot path while a slow path uses it.
    pub(super) fn suspend(&self, cell: *const HeapCell) {
        if ptr::eq(self.fast[0].get(), cell) {
            self.hot.set(ptr::null_mut());
        }
    }

    /// Gives the hot path the heap that it may use now.
    pub(super) fn resume(&self) {
        self.hot.set(self.fast(false).map_or(ptr::null_mut(), HeapCell::idle_heap));
    }

    /// The heap of a mode, unless a guarded call is running.
    #[inline(always)]
    pub(crate) fn fast(&self, encoded: bool) -> Option<&HeapCell> {
        // SAFETY: non-null fast pointers are kept alive by `own`, or by a handle that clears the pointer before the
        // heap goes (`unregister`), and are only ever used on this thread.
        unsafe { self.fast[usize::from(encoded)].get().as_ref() }
    }

    /// As [`fast`](Self::fast), for a call in which code of the program's may run: there it may drop the last handle of the heap.
    #[inline]
    pub(crate) fn fast_kept(&self, encoded: bool) -> Option<Rc<HeapCell>> {
        let cell = self.fast[usize::from(encoded)].get();
        if cell.is_null() {
            return None;
        }
        // SAFETY: alive, as `fast` says, and fast pointers come from `Rc::as_ptr`; the count is the new handle's.
        unsafe {
            Rc::increment_strong_count(cell);
            Some(Rc::from_raw(cell))
        }
    }

    fn state(&self) -> Option<&State> {
        // SAFETY: null, or a box that `tear_down` frees after it set this to null; used on this thread alone.
        unsafe { self.state.get().as_ref() }
    }

    /// Makes the state unless the thread is being torn down or the process forked.
    fn live_state(&self, arm: impl FnOnce() -> bool) -> Option<&State> {
        if fork::forked() {
            set_last_error(AllocError::Forked);
            return None;
        }
        if self.dead.get() {
            return None;
        }
        if self.state.get().is_null() {
            if !arm() {
                self.dead.set(true); // the sentinel is gone: this thread's teardown has passed it
                return None;
            }
            self.state.set(Box::into_raw(Box::new(State::default())));
            // Once per thread: a state is never made again after the teardown.
            self.next.set(MADE.replace(self));
            fork::cut_off_with(cut_off);
        }
        self.state()
    }

    fn current(&self, state: &State, encoded: bool) -> *const HeapCell {
        let slot = &state.slots[usize::from(encoded)];
        slot.registered.get().unwrap_or_else(|| slot.own.borrow().as_ref().map_or(ptr::null(), Rc::as_ptr))
    }

    /// Points the fast pointers at what the state says.
    fn refresh(&self) {
        for encoded in [false, true] {
            let cell = match self.state() {
                Some(state) if !state.guarded.get() && !fork::forked() => self.current(state, encoded),
                _ => ptr::null(),
            };
            self.fast[usize::from(encoded)].set(cell);
            // SAFETY: null, or kept alive as `fast` says.
            if let Some(cell) = unsafe { cell.as_ref() } {
                cell.set_slots(self);
            }
        }
        self.resume();
    }

    /// The current heap of a mode, made if needed. `None` while dead or forked.
    pub(crate) fn cell(&self, home: Home, encoded: bool, arm: impl FnOnce() -> bool) -> Option<Rc<HeapCell>> {
        let state = self.live_state(arm)?;
        let slot = &state.slots[usize::from(encoded)];
        let registered = slot.registered.get().and_then(known_cell);
        if let Some(current) = registered.or_else(|| slot.own.borrow().clone()) {
            return Some(current);
        }
        let cell = HeapCell::make(home, encoded);
        *state.slots[usize::from(encoded)].own.borrow_mut() = Some(cell.clone());
        self.refresh();
        Some(cell)
    }

    /// As [`cell`](Self::cell), for allocation on behalf of free functions: `None` also inside a guarded call.
    pub(crate) fn unguarded_cell(
        &self,
        home: Home,
        encoded: bool,
        arm: impl FnOnce() -> bool,
    ) -> Option<Rc<HeapCell>> {
        if self.is_guarded() {
            return None;
        }
        self.cell(home, encoded, arm)
    }

    pub(crate) fn is_guarded(&self) -> bool {
        self.state().is_some_and(|state| state.guarded.get())
    }

    fn raw(&self, encoded: bool) -> *mut c_void {
        if fork::forked() {
            set_last_error(AllocError::Forked);
            return ptr::null_mut();
        }
        self.state().map_or(ptr::null_mut(), |state| self.current(state, encoded).cast_mut().cast())
    }

    fn register(&self, home: Home, pointer: *mut c_void, arm: impl FnOnce() -> bool) {
        let Some(state) = self.live_state(arm) else { return };
        if state.guarded.get() {
            return set_last_error(AllocError::Reentrant);
        }
        if pointer.is_null() {
            state.slots.iter().for_each(|slot| slot.registered.set(None));
            return self.refresh();
        }
        let Some(cell) = known_cell(pointer.cast_const().cast()).filter(|cell| cell.is_of(home)) else {
            return set_last_error(AllocError::NotRegistered);
        };
        let slot = &state.slots[usize::from(cell.encoded())];
        let own = slot.own.borrow().as_ref().is_some_and(|own| Rc::ptr_eq(own, &cell));
        slot.registered.set(if own { None } else { Some(Rc::as_ptr(&cell)) });
        cell.set_slots(self);
        self.refresh();
    }

    /// The last handle of a registered heap is going.
    pub(super) fn unregister(&self, cell: *const HeapCell) {
        if let Some(state) = self.state() {
            for slot in &state.slots {
                if slot.registered.get() == Some(cell) {
                    slot.registered.set(None);
                }
            }
            self.refresh();
        }
    }

    /// The thread ends. Called by the sentinel, once; safe to call again.
    pub fn tear_down(&self) {
        self.dead.set(true);
        self.hot.set(ptr::null_mut());
        self.fast.iter().for_each(|fast| fast.set(ptr::null()));
        let state = self.state.replace(ptr::null());
        if !state.is_null() {
            // SAFETY: from `Box::into_raw` in `live_state`, taken out of the cell just now.
            let state = unsafe { Box::from_raw(state.cast_mut()) };
            if fork::forked() {
                std::mem::forget(state); // another thread may have held a lock of the pools at the fork
            }
        }
    }

    /// In the child of a fork: no heap may be used any more.
    pub fn forbid(&self) {
        self.hot.set(ptr::null_mut());
        self.fast.iter().for_each(|fast| fast.set(ptr::null()));
    }

    /// Runs `f` with the guard armed, or answers `None` where it is armed already.
    fn guarded<R>(&self, f: impl FnOnce() -> R) -> Option<R> {
        struct Disarm<'a>(&'a Slots);
        impl Drop for Disarm<'_> {
            fn drop(&mut self) {
                if let Some(state) = self.0.state() {
                    state.guarded.set(false);
                }
                self.0.refresh();
            }
        }
        let state = self.state()?;
        if state.guarded.replace(true) {
            return None;
        }
        let disarm = Disarm(self);
        self.refresh();
        let result = f();
        drop(disarm);
        Some(result)
    }
}

/// The statics and thread-locals behind a backend's slots. [`backend_pools!`](crate::backend_pools) implements it.
///
/// # Safety
/// `with_slots` passes the same slots for all calls on one thread, and they live until the thread ends. `arm_sentinel`
/// answers true only if [`Slots::tear_down`] will be called on them before that.
pub unsafe trait ThreadSlots: HasSegmentPool {
    /// Runs `f` with this thread's slots.
    fn with_slots<R>(f: impl FnOnce(&Slots) -> R) -> R;
    /// Makes sure that the slots are torn down with the thread; false when it is too late for that.
    fn arm_sentinel() -> bool;
    /// The heaps of last resort.
    fn shared() -> &'static SharedHeaps;
}

/// The per-thread allocators of a backend.
///
/// Every call concerns the calling thread alone. All but the `raw` getters make the thread's allocator if needed.
pub trait LocalAllocatorSelector<B: HasSegmentPool> {
    /// Runs `f` with this thread's plain allocator, guarded: a call from inside `f` on the same thread answers `None`
    /// and does not run its closure. A panic in `f` releases the guard and passes through. `None` with the reason in
    /// [`last_error`](crate::last_error) also while the thread is torn down and in the child of a fork.
    fn with_allocator<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R>;

    /// As [`with_allocator`](Self::with_allocator) without arming the guard; `None` while a guarded call is running.
    ///
    /// # Safety
    /// `f` must not call this thread's allocator again except through its argument.
    unsafe fn with_allocator_unguarded<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R>;

    /// Identity of this thread's plain allocator. Null only while the thread is torn down or in the child of a fork.
    fn get_allocator_ptr() -> *mut c_void;

    /// As [`get_allocator_ptr`](Self::get_allocator_ptr), null until the allocator exists.
    fn get_allocator_ptr_raw() -> *mut c_void;

    /// Makes the allocator whose [`as_ptr`](ThreadAllocator::as_ptr) this is, made on this thread and alive, the
    /// thread's allocator of its mode. Null restores the thread's own ones. Anything else is refused and changes
    /// nothing: [`last_error`](crate::last_error) is `NotRegistered`, or `Reentrant` inside a guarded call.
    fn register_current_allocator_ptr(ptr: *mut c_void);

    /// As [`with_allocator`](Self::with_allocator), for the allocator of the policy's mode.
    fn with_allocator_for_policy<P: AllocPolicy, R>(
        f: impl FnOnce(&mut ThreadAllocator<B>) -> R,
    ) -> Option<R>;

    /// As [`with_allocator_unguarded`](Self::with_allocator_unguarded), for the allocator of the policy's mode.
    ///
    /// # Safety
    /// As [`with_allocator_unguarded`](Self::with_allocator_unguarded).
    unsafe fn with_allocator_unguarded_for_policy<P: AllocPolicy, R>(
        f: impl FnOnce(&mut ThreadAllocator<B>) -> R,
    ) -> Option<R>;

    /// As [`get_allocator_ptr`](Self::get_allocator_ptr), for the policy's mode.
    fn get_allocator_ptr_for_policy<P: AllocPolicy>() -> *mut c_void;

    /// As [`get_allocator_ptr_raw`](Self::get_allocator_ptr_raw), for the policy's mode.
    fn get_allocator_ptr_raw_for_policy<P: AllocPolicy>() -> *mut c_void;

    /// As [`get_allocator_ptr_raw`](Self::get_allocator_ptr_raw), for encoded or plain free lists.
    fn get_allocator_ptr_raw_for_encryption<const ENCRYPTED: bool>() -> *mut c_void;
}

fn with_mode<B: ThreadSlots, R>(
    encoded: bool,
    guard: bool,
    f: impl FnOnce(&mut ThreadAllocator<B>) -> R,
) -> Option<R> {
    B::with_slots(|slots| {
        if slots.is_guarded() {
            set_last_error(if fork::forked() { AllocError::Forked } else { AllocError::Reentrant });
            return None;
        }
        let cell = slots.cell(Home::of::<B>(), encoded, B::arm_sentinel)?;
        let mut handle = ThreadAllocator::from_cell(cell);
        if guard {
            slots.guarded(|| f(&mut handle))
        } else {
            Some(f(&mut handle))
        }
    })
}

fn pointer<B: ThreadSlots>(encoded: bool) -> *mut c_void {
    B::with_slots(|slots| {
        slots
            .cell(Home::of::<B>(), encoded, B::arm_sentinel)
            .map_or(ptr::null_mut(), |cell| Rc::as_ptr(&cell).cast_mut().cast())
    })
}

impl<B: ThreadSlots> LocalAllocatorSelector<B> for B {
    fn with_allocator<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R> {
        with_mode(false, true, f)
    }

    unsafe fn with_allocator_unguarded<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R> {
        with_mode(false, false, f)
    }

    fn get_allocator_ptr() -> *mut c_void {
        pointer::<B>(false)
    }

    fn get_allocator_ptr_raw() -> *mut c_void {
        B::with_slots(|slots| slots.raw(false))
    }

    fn register_current_allocator_ptr(ptr: *mut c_void) {
        B::with_slots(|slots| slots.register(Home::of::<B>(), ptr, B::arm_sentinel));
    }

    fn with_allocator_for_policy<P: AllocPolicy, R>(
        f: impl FnOnce(&mut ThreadAllocator<B>) -> R,
    ) -> Option<R> {
        with_mode(P::ENABLE_FREE_LIST_ENCRYPTION, true, f)
    }

    unsafe fn with_allocator_unguarded_for_policy<P: AllocPolicy, R>(
        f: impl FnOnce(&mut ThreadAllocator<B>) -> R,
    ) -> Option<R> {
        with_mode(P::ENABLE_FREE_LIST_ENCRYPTION, false, f)
    }

    fn get_allocator_ptr_for_policy<P: AllocPolicy>() -> *mut c_void {
        pointer::<B>(P::ENABLE_FREE_LIST_ENCRYPTION)
    }

    fn get_allocator_ptr_raw_for_policy<P: AllocPolicy>() -> *mut c_void {
        B::with_slots(|slots| slots.raw(P::ENABLE_FREE_LIST_ENCRYPTION))
    }

    fn get_allocator_ptr_raw_for_encryption<const ENCRYPTED: bool>() -> *mut c_void {
        B::with_slots(|slots| slots.raw(ENCRYPTED))
    }
}

/// The calls of [`LocalAllocatorSelector`], keyed by policy: Standard and Secure share the plain allocator, Hardened
/// has the encoded one.
pub trait PolicySlotSelection<B: HasSegmentPool> {
    /// As [`LocalAllocatorSelector::with_allocator`].
    fn with_allocator<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R>;

    /// As [`LocalAllocatorSelector::with_allocator_unguarded`].
    ///
    /// # Safety
    /// As [`LocalAllocatorSelector::with_allocator_unguarded`].
    unsafe fn with_allocator_unguarded<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R>;

    /// As [`LocalAllocatorSelector::get_allocator_ptr`].
    fn get_allocator_ptr() -> *mut c_void;

    /// As [`LocalAllocatorSelector::get_allocator_ptr_raw`].
    fn get_allocator_ptr_raw() -> *mut c_void;
}

impl<P: AllocPolicy, B: ThreadSlots> PolicySlotSelection<B> for P {
    fn with_allocator<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R> {
        with_mode(P::ENABLE_FREE_LIST_ENCRYPTION, true, f)
    }

    unsafe fn with_allocator_unguarded<R>(f: impl FnOnce(&mut ThreadAllocator<B>) -> R) -> Option<R> {
        with_mode(P::ENABLE_FREE_LIST_ENCRYPTION, false, f)
    }

    fn get_allocator_ptr() -> *mut c_void {
        pointer::<B>(P::ENABLE_FREE_LIST_ENCRYPTION)
    }

    fn get_allocator_ptr_raw() -> *mut c_void {
        B::with_slots(|slots| slots.raw(P::ENABLE_FREE_LIST_ENCRYPTION))
    }
}

/// Runs `f` with the heap that should serve this thread now, and says whether that is the thread's own.
pub(crate) fn with_heap<B: ThreadSlots, R>(encoded: bool, f: impl FnOnce(&mut Heap) -> R) -> Option<R> {
    let home = Home::of::<B>();
    let cell = B::with_slots(|slots| slots.unguarded_cell(home, encoded, B::arm_sentinel));
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return None;
    }
    match cell {
        Some(cell) if !cell.is_busy() => cell.with(f),
        _ => Some(B::shared().with(home, encoded, f)),
    }
}

/// Runs `f` with this thread's own plain heap, made if needed; `None` where it may not be used now.
pub(crate) fn with_own_heap<B: ThreadSlots, R>(f: impl FnOnce(&mut Heap) -> R) -> Option<R> {
    let home = Home::of::<B>();
    B::with_slots(|slots| slots.unguarded_cell(home, false, B::arm_sentinel))?.with(f)
}
