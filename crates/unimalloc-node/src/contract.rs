//! The backend objects: regions, pools, slots and the free functions over bare addresses.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use napi::Result;
use napi_derive::napi;
use unimalloc::{
    set_last_error, AllocError, HasSegmentPool, LocalAllocatorSelector, MemoryBackend, PolicySlotSelection,
};

use crate::dispatch::{with_backend, with_policy, Backend, Policy};
use crate::failure::free_failure;

/// An address from JavaScript. The face passes integers below 2^53 only.
fn pointer(address: f64) -> *mut u8 {
    address as usize as *mut u8
}

/// An address for JavaScript: 0 is null.
fn address<T>(pointer: *mut T) -> f64 {
    pointer as usize as f64
}

/// A byte count from JavaScript; what is no whole number of bytes becomes a size that every call refuses.
fn size(bytes: f64) -> usize {
    if bytes >= 0.0 && bytes.fract() == 0.0 && bytes <= isize::MAX as f64 {
        bytes as usize
    } else {
        usize::MAX
    }
}

/// Regions that came from `allocate`, by backend and start. Only these may be given back or changed from JavaScript: what the allocator
/// itself got from the backend is not the program's to release.
static REGIONS: Mutex<BTreeMap<(u8, usize), usize>> = Mutex::new(BTreeMap::new());

fn regions() -> MutexGuard<'static, BTreeMap<(u8, usize), usize>> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the range lies in one region that JavaScript allocated.
fn in_own_region(backend: Backend, start: usize, bytes: usize) -> bool {
    regions().range(..=(backend as u8, start)).next_back().is_some_and(|(&(of, base), &len)| {
        of == backend as u8 && start.checked_add(bytes).is_some_and(|end| end <= base + len)
    })
}

/// A region, or 0 with the reason in `lastReason`.
#[napi(catch_unwind)]
pub fn backend_allocate(backend: u32, bytes: f64) -> Result<f64> {
    let backend = Backend::from(backend);
    let bytes = size(bytes);
    // SAFETY: a bad size answers null; the region belongs to the caller until it is given back.
    let start = with_backend!(backend, B => unsafe { B::allocate(bytes) });
    if !start.is_null() {
        regions().insert((backend as u8, start as usize), bytes);
    }
    Ok(address(start))
}

/// Gives a region back; false with the reason in `lastReason`.
#[napi(catch_unwind)]
pub fn backend_deallocate(backend: u32, start: f64, bytes: f64) -> Result<bool> {
    let backend = Backend::from(backend);
    let start = pointer(start);
    let key = (backend as u8, start as usize);
    // Off the list before it goes: the backend may hand the same address to another thread at once.
    let Some(len) = regions().remove(&key) else {
        set_last_error(AllocError::NotRegistered);
        return Ok(false);
    };
    // SAFETY: the region came from `allocate`, and the backend itself checks the size. The lock is not held: this may wait for the device.
    let released = with_backend!(backend, B => unsafe { B::deallocate(start, size(bytes)) });
    if !released {
        regions().insert(key, len);
    }
    Ok(released)
}

/// What to do to a range of a region.
#[derive(Clone, Copy)]
enum RangeAction {
    Reset,
    Guard,
    Decommit,
}

fn on_range(backend: u32, start: f64, bytes: f64, action: RangeAction) -> bool {
    let backend = Backend::from(backend);
    let (start, bytes) = (pointer(start), size(bytes));
    if !in_own_region(backend, start as usize, bytes) {
        set_last_error(AllocError::InvalidRange);
        return false;
    }
    // SAFETY: the range lies in a region that the program allocated, and that it is the program's word not to use.
    with_backend!(backend, B => unsafe {
        match action {
            RangeAction::Reset => B::page_reset(start, bytes),
            RangeAction::Guard => B::make_guard(start, bytes),
            RangeAction::Decommit => B::decommit(start, bytes),
        }
    })
}

/// Drops the pages of a range, which then reads as zero.
#[napi(catch_unwind)]
pub fn backend_page_reset(backend: u32, start: f64, bytes: f64) -> Result<bool> {
    Ok(on_range(backend, start, bytes, RangeAction::Reset))
}

/// Makes a range inaccessible.
#[napi(catch_unwind)]
pub fn backend_make_guard(backend: u32, start: f64, bytes: f64) -> Result<bool> {
    Ok(on_range(backend, start, bytes, RangeAction::Guard))
}

/// Releases the pages of a range but keeps its addresses.
#[napi(catch_unwind)]
pub fn backend_decommit(backend: u32, start: f64, bytes: f64) -> Result<bool> {
    Ok(on_range(backend, start, bytes, RangeAction::Decommit))
}

/// What a backend can do.
#[napi(object)]
pub struct Capabilities {
    /// Whether `pageReset` does something.
    pub page_reset: bool,
    /// Whether `makeGuard` does something.
    pub make_guard: bool,
    /// Whether `decommit` does something.
    pub decommit: bool,
    /// Whether a per-CPU block cache suits the backend.
    pub cpu_cache: bool,
}

/// What a backend can do.
#[napi(catch_unwind)]
pub fn backend_capabilities(backend: u32) -> Result<Capabilities> {
    Ok(with_backend!(Backend::from(backend), B => Capabilities {
        page_reset: B::SUPPORTS_PAGE_RESET,
        make_guard: B::SUPPORTS_MAKE_GUARD,
        decommit: B::SUPPORTS_DECOMMIT,
        cpu_cache: B::ENABLE_CPU_CACHE,
    }))
}

/// Count and bytes of the segment, orphan and huge pool, in this order.
#[napi(catch_unwind)]
pub fn pool_figures(backend: u32) -> Result<Vec<f64>> {
    Ok(with_backend!(Backend::from(backend), B => {
        let (segment, orphan) = (B::global_segment_pool(), B::global_orphan_pool());
        let huge = B::global_huge_pool();
        [segment.len(), segment.bytes(), orphan.len(), orphan.bytes(), huge.len(), huge.bytes()]
    })
    .map(|figure| figure as f64)
    .to_vec())
}

/// By which of the contract's ways a slot is chosen; the numbers are those of `ts/native.ts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `LocalAllocatorSelector`, without a policy.
    Plain,
    /// `LocalAllocatorSelector::*_for_policy`.
    ForPolicy,
    /// `PolicySlotSelection`.
    Selection,
}

impl From<u32> for Way {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::Plain,
            1 => Self::ForPolicy,
            _ => Self::Selection,
        }
    }
}

/// The address of this thread's allocator. With `raw`, 0 until it exists; otherwise it is made.
#[napi(catch_unwind)]
pub fn slot_pointer(backend: u32, policy: u32, way: u32, raw: bool) -> Result<f64> {
    let (policy, way) = (Policy::from(policy), Way::from(way));
    Ok(address(with_backend!(Backend::from(backend), B => with_policy!(policy, P => match (way, raw) {
        (Way::Plain, false) => <B as LocalAllocatorSelector<B>>::get_allocator_ptr(),
        (Way::Plain, true) => <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw(),
        (Way::ForPolicy, false) => <B as LocalAllocatorSelector<B>>::get_allocator_ptr_for_policy::<P>(),
        (Way::ForPolicy, true) => <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw_for_policy::<P>(),
        (Way::Selection, false) => <P as PolicySlotSelection<B>>::get_allocator_ptr(),
        (Way::Selection, true) => <P as PolicySlotSelection<B>>::get_allocator_ptr_raw(),
    }))))
}

/// As `slotPointer` with `raw`, by the mode of the free lists.
#[napi(catch_unwind)]
pub fn slot_pointer_for_encryption(backend: u32, encrypted: bool) -> Result<f64> {
    Ok(address(with_backend!(Backend::from(backend), B => if encrypted {
        <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw_for_encryption::<true>()
    } else {
        <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw_for_encryption::<false>()
    })))
}

/// Makes a hand-made allocator this thread's; 0 restores the thread's own. False when it was refused, with the reason in
/// `lastReason`.
#[napi(catch_unwind)]
pub fn register_slot(backend: u32, allocator: f64) -> Result<bool> {
    let allocator = pointer(allocator).cast();
    Ok(with_backend!(Backend::from(backend), B => {
        <B as LocalAllocatorSelector<B>>::register_current_allocator_ptr(allocator);
        if allocator.is_null() {
            true
        } else {
            // The call itself answers nothing: it took effect when the pointer is now one of the thread's two slots.
            [
                <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw_for_encryption::<false>(),
                <B as LocalAllocatorSelector<B>>::get_allocator_ptr_raw_for_encryption::<true>(),
            ]
            .contains(&allocator)
        }
    }))
}

/// A block by address, or 0 with the reason in `lastReason`.
#[napi(catch_unwind)]
pub fn thread_alloc(backend: u32, policy: u32, bytes: f64, align: f64) -> Result<f64> {
    Ok(address(with_backend!(Backend::from(backend), B => with_policy!(Policy::from(policy), P => {
        unimalloc::thread_alloc::<P, B>(size(bytes), size(align))
    }))))
}

/// Frees a block by address.
#[napi(catch_unwind)]
pub fn thread_free(backend: u32, policy: u32, block: f64) -> Result<()> {
    // SAFETY: the allocator checks the address exactly; that nobody uses the block any more is the program's word.
    unsafe { Backend::from(backend).free_now(Policy::from(policy), pointer(block)) }.map_err(free_failure)
}

/// Moves a block by address to a new size; 0 with the reason in `lastReason`, and then the block is as it was.
#[napi(catch_unwind)]
pub fn thread_realloc(backend: u32, policy: u32, block: f64, bytes: f64, align: f64) -> Result<f64> {
    // SAFETY: as for `thread_free`.
    Ok(address(unsafe {
        Backend::from(backend).realloc(Policy::from(policy), pointer(block), size(bytes), size(align))
    }))
}

/// Usable bytes of a block by address; 0 for anything but the start of a live block.
#[napi(catch_unwind)]
pub fn usable_size(backend: u32, block: f64) -> Result<f64> {
    Ok(Backend::from(backend).usable_size(pointer(block)) as f64)
}
