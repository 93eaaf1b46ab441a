//! The free functions: allocate and free on whatever thread one is.

use super::blocks::{find, refuse, release, Found, Freed, Request};
use crate::backend::fork;
use crate::cuda::Stream;
use crate::error::{last_error, set_last_error, AllocError, FreeError};
use crate::meta::geometry::{shared_class_for, GRANULE};
use crate::meta::slot;
use crate::meta::span::Remote;
use crate::placement::{Place, Placement};
use crate::policy::{redzone, AllocPolicy, Policy, StandardPolicy};
use crate::pool::{span_of, HasSegmentPool, Home, Urgency};
use crate::stream::Notify;
use crate::sync::Ordering::Relaxed;
use crate::thread::heap::BinKey;
use crate::thread::slots::{with_heap, Slots, ThreadSlots};
use crate::thread::ThreadAllocator;

/// What an allocation may ask for besides size and alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AllocOptions {
    /// Device and placement; blocks of different places never share a segment.
    pub place: Place,
    /// Whether the block must read as zero. Secure and Hardened blocks always do.
    pub zeroed: bool,
    /// Blocks of different groups never share a span.
    pub group: u8,
}

/// Allocates `size` bytes, aligned to `align`, from this thread's allocator; null with the reason in
/// [`last_error`](crate::last_error).
///
/// `align` is a power of two up to 2 MiB. Size 0 is served as the smallest class: unique, and freed once like any other.
/// Inside a [`with_allocator`](crate::LocalAllocatorSelector::with_allocator) closure and during a thread's teardown
/// the block comes from a shared heap.
#[inline]
pub fn thread_alloc<P: AllocPolicy, B: ThreadSlots>(size: usize, align: usize) -> *mut u8 {
    if matches!(P::POLICY, Policy::Standard) && align <= GRANULE && align.is_power_of_two() {
        let class = shared_class_for(size, align);
        // SAFETY: as `hot` says; `alloc_cached` calls nothing outside this crate, and the reference ends with it.
        let cached = unsafe { B::with_slots(Slots::hot).as_mut() }.and_then(|heap| heap.alloc_cached(class));
        if let Some(address) = cached {
            return address as *mut u8;
        }
    }
    alloc_with::<P, B>(size, align, &AllocOptions::default())
}

/// As [`thread_alloc`], with options.
#[cold]
#[inline(never)]
pub fn alloc_with<P: AllocPolicy, B: ThreadSlots>(
    size: usize,
    align: usize,
    options: &AllocOptions,
) -> *mut u8 {
    let key = BinKey { place: options.place, policy: P::POLICY, group: options.group };
    match Request::new(size, align, key, options.zeroed) {
        Ok(request) => serve::<B>(request, P::POLICY, None),
        Err(error) => refuse(error),
    }
}

/// A block for a request, or null with the reason in `last_error`.
#[inline(always)]
fn serve<B: ThreadSlots>(request: Request, policy: Policy, stream: Option<&Stream>) -> *mut u8 {
    let mut is_second = false;
    loop {
        let served = with_heap::<B, _>(policy.encoded(), |heap| request.serve(heap, stream));
        let block = served.unwrap_or(std::ptr::null_mut());
        if !block.is_null() || std::mem::replace(&mut is_second, true) || !return_caches::<B>() {
            return block;
        }
    }
}

/// After a refusal: gives back what this thread's other heap caches, or an idle shared one. False where nothing came back.
#[cold]
#[inline(never)]
fn return_caches<B: ThreadSlots>() -> bool {
    let Some(reason) = last_error().filter(|reason| reason.is_shortage()) else { return false };
    let home = Home::of::<B>();
    let before = home.returns();
    give_back_caches::<B>(Urgency::Look);
    set_last_error(reason);
    home.returns() != before
}

/// As [`alloc_with`], for use on `stream`.
///
/// With [`Placement::Device`](crate::Placement::Device) and without zeroing, a block that was last used on the same stream
/// may be given out before the stream is done with it: work on the stream may use it at once, the host only after the
/// stream was waited for. Zeroing is ordered on the stream too. Every other block is one that the GPU is done with.
pub fn alloc_on_stream<P: AllocPolicy, B: ThreadSlots>(
    size: usize,
    align: usize,
    options: &AllocOptions,
    stream: &Stream,
) -> *mut u8 {
    let key = BinKey { place: options.place, policy: P::POLICY, group: options.group };
    let request = match Request::new(size, align, key, options.zeroed) {
        Ok(request) => request,
        Err(error) => return refuse(error),
    };
    if options.place.placement == Placement::Device && !fork::forked() {
        let block = request.reuse(Home::of::<B>(), stream);
        if !block.is_null() {
            return block;
        }
    }
    serve::<B>(request, P::POLICY, Some(stream))
}

/// Frees a block of this backend, from any thread and under any policy: the block keeps the policy it was allocated
/// under. Null is `Ok`. On an error nothing has happened.
///
/// # Safety
/// Nobody uses the block any more. Addresses that are no live block of this backend are found and refused, until the
/// address is handed out again.
#[inline]
pub unsafe fn thread_free<P: AllocPolicy, B: ThreadSlots>(ptr: *mut u8) -> Result<(), FreeError> {
    // SAFETY: as `hot` says; `free_cached` calls nothing outside this crate, and the reference ends with it.
    if unsafe { B::with_slots(Slots::hot).as_mut() }.is_some_and(|heap| heap.free_cached(ptr as usize)) {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { free_elsewhere::<B>(ptr) }
}

/// Frees a block that the hot path could not.
///
/// # Safety
/// As [`thread_free`].
#[inline(never)]
unsafe fn free_elsewhere<B: ThreadSlots>(ptr: *mut u8) -> Result<(), FreeError> {
    if let Some(result) = free_owned::<B>(ptr as usize) {
        return result;
    }
    // SAFETY: the caller's promise.
    unsafe { free_slow::<B>(ptr, None) }.map(|_| ())
}

/// The short way for the usual block: Standard, unmarked, and of a heap, mostly another thread's. What [`release`] does besides
/// does not concern it. `None`, with nothing done, for any other.
#[inline(always)]
fn free_owned<B: ThreadSlots>(address: usize) -> Option<Result<(), FreeError>> {
    let home = Home::of::<B>();
    let span = span_of(address)?;
    let owner = span.owner();
    // A heap owns only spans of Standard blocks that share them.
    if owner == 0 || !home.owns(span) || fork::forked() {
        return None;
    }
    if !B::with_slots(|slots| slots.is_foreign(owner)) {
        // SAFETY: as `hot` says; `free_again` calls nothing outside this crate, and the reference ends with it.
        let heap = unsafe { B::with_slots(Slots::hot).as_mut() }?;
        return heap.free_again(span, address).then_some(Ok(()));
    }
    let (index, slot) = span.slot_at(address)?;
    if slot.load(Relaxed) != slot::LIVE {
        return None;
    }
    Some(span.free_remote(index, slot::LIVE).map(|remote| {
        if let Remote::Orphan = remote {
            home.visit_orphan(span);
        }
    }))
}

/// As [`thread_free`], and says whether the block waits for streams it was used on; `notify` is called once it has passed.
///
/// # Safety
/// As [`thread_free`].
pub unsafe fn free_notify<B: ThreadSlots>(ptr: *mut u8, notify: Notify) -> Result<Freed, FreeError> {
    // SAFETY: the caller's promise.
    unsafe { free_slow::<B>(ptr, Some(notify)) }
}

#[cold]
#[inline(never)]
unsafe fn free_slow<B: ThreadSlots>(ptr: *mut u8, notify: Option<Notify>) -> Result<Freed, FreeError> {
    if ptr.is_null() {
        return Ok(Freed::Now);
    }
    let home = Home::of::<B>();
    let keeper = span_of(ptr as usize).map_or(0, |span| span.keeper());
    B::with_slots(|slots| {
        for encoded in [false, true] {
            if slots.fast(encoded).is_none_or(|cell| cell.id() != keeper) {
                continue;
            }
            if let Some(cell) = slots.fast_kept(encoded) {
                // SAFETY: the caller's promise.
                if let Some(result) = cell.with(|heap| unsafe { release(home, ptr, Some(heap), notify) }) {
                    return result;
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { release(home, ptr, None, notify) }
    })
}

/// Resizes a block. On success the old pointer is dead and its first bytes are in the new one; on failure null is
/// returned with the reason in [`last_error`](crate::last_error) and the block is untouched. A null `ptr` allocates.
///
/// The new block has the policy and group of the old one, at least the alignment `align`, and under Secure and Hardened
/// zeros in what is new.
///
/// # Safety
/// `ptr` is null or a live block of this backend that nobody else uses: work on streams that writes to it has been waited
/// for.
pub unsafe fn thread_realloc<P: AllocPolicy, B: ThreadSlots>(
    ptr: *mut u8,
    new_size: usize,
    align: usize,
) -> *mut u8 {
    if ptr.is_null() {
        return thread_alloc::<P, B>(new_size, align);
    }
    // SAFETY: the caller's promise.
    unsafe { realloc_with::<B>(ptr, new_size, align, false) }
}

/// As [`thread_realloc`] for a block; with `zeroed`, what is new reads as zero if all of the old block's tail does.
///
/// # Safety
/// `ptr` is a live block of this backend that nobody else uses.
pub(super) unsafe fn realloc_with<B: ThreadSlots>(
    ptr: *mut u8,
    new_size: usize,
    align: usize,
    zeroed: bool,
) -> *mut u8 {
    if fork::forked() {
        return refuse(AllocError::Forked);
    }
    let home = Home::of::<B>();
    let Ok(found) = find(home, ptr as usize) else { return refuse(AllocError::NotRegistered) };
    let policy = Policy::from_lane(found.span.lane.load(Relaxed));
    let old = found.span.usable(found.index as u16);
    let options = AllocOptions {
        place: home.place_of(found.span),
        zeroed: false,
        group: found.span.group.load(Relaxed),
    };
    let request = match Request::new(
        new_size,
        align,
        BinKey { place: options.place, policy, group: options.group },
        zeroed,
    ) {
        Ok(request) => request,
        Err(error) => return refuse(error),
    };
    // In place where the block is large enough and not more than twice as large as needed.
    let room = found.span.block() - redzone::bytes(policy);
    if new_size <= room && new_size > room / 2 && (ptr as usize).is_multiple_of(align) {
        // SAFETY: the caller's block, and `room` has as many bytes as that.
        if unsafe { resize_in_place(home, ptr, &found, new_size, zeroed) } {
            return ptr;
        }
    }
    let new = serve::<B>(request, policy, None);
    if new.is_null() {
        return new;
    }
    // SAFETY: both blocks are live and the caller's (or new), and distinct; each is at least this long.
    let copied = unsafe { (home.ops.copy)(new, ptr, old.min(new_size)) };
    let dead = if copied { ptr } else { new };
    // SAFETY: the block is live and, on success, the caller gave it up; otherwise nobody has seen it.
    let _ = unsafe { thread_free::<StandardPolicy, B>(dead) };
    if copied {
        new
    } else {
        std::ptr::null_mut()
    }
}

/// Gives a block a new size within its room. False where its redzone was written to or cannot be moved;
/// then its first bytes are as they were.
///
/// # Safety
/// As [`realloc_with`]; the block at `ptr` is `found` and has room for `new_size` bytes and its redzone.
unsafe fn resize_in_place(home: Home, ptr: *mut u8, found: &Found, new_size: usize, zeroed: bool) -> bool {
    let Found { span, index, .. } = *found;
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    let old = span.usable(index as u16);
    // SAFETY: the ranges lie inside the caller's block.
    unsafe {
        if !policy.encoded() {
            // What is cut off must read as zero if the block grows again.
            let _ = !(zeroed || policy.zeroes()) || (home.ops.fill)(ptr.add(new_size), 0, old - new_size);
            return true;
        }
        let new = new_size.max(1);
        let slack = span.block() - redzone::bytes(policy) - new;
        // A redzone that was written to is reported by the free of the old block.
        if slack > span.most_slack() || !redzone::intact(home.ops, ptr, old, policy) {
            return false;
        }
        // What is cut off, or what is new and takes the place of the old redzone.
        if !((home.ops.fill)(ptr.add(old.min(new)), 0, old.abs_diff(new))
            && redzone::write(home.ops, ptr, new, policy))
        {
            return false;
        }
        span.set_slack(index as u16, slack);
    }
    true
}

/// Bytes that may be used at `ptr`: at least what was asked for. 0 for a pointer that is not the start of a live block.
/// Under Hardened exactly what was asked for (at least 1): the byte behind it is the redzone's.
pub fn usable_size<B: HasSegmentPool>(ptr: *const u8) -> usize {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return 0;
    }
    let Ok(found) = find(Home::of::<B>(), ptr as usize) else { return 0 };
    found.span.usable(found.index as u16)
}

/// A live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// Address of its first byte.
    pub start: usize,
    /// Bytes that may be used from there.
    pub usable: usize,
}

/// The live block that `ptr` points into, at its start or inside it.
pub fn block_of<B: HasSegmentPool>(ptr: *const u8) -> Option<BlockInfo> {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return None;
    }
    let home = Home::of::<B>();
    let span = span_of(ptr as usize).filter(|span| home.owns(span))?;
    let (index, word) = span.block_around(ptr as usize)?;
    if !slot::is_live(word.load(Relaxed)) {
        return None;
    }
    Some(BlockInfo { start: span.address(index as u16), usable: span.usable(index as u16) })
}

/// Moves what the calling thread's and the shared heaps cache to the pools.
pub(super) fn give_back_caches<B: ThreadSlots>(urgency: Urgency) {
    Home::of::<B>().reclaim(urgency);
    B::with_slots(|slots| {
        for encoded in [false, true] {
            if let Some(cell) = slots.fast(encoded) {
                cell.with(|heap| heap.give_back_caches());
            }
        }
    });
    B::shared().give_back_caches();
}

/// Gives regions of a backend back in which nothing is live, until at most `keep_bytes` of such are left; returns the bytes
/// given back. May wait for the device. Free blocks that other threads hold in their caches stay there.
pub fn trim<B: ThreadSlots>(keep_bytes: usize) -> usize {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return 0;
    }
    let home = Home::of::<B>();
    give_back_caches::<B>(Urgency::Wait);
    home.trim(keep_bytes)
}

impl<B: HasSegmentPool> ThreadAllocator<B> {
    /// Allocates `size` bytes, aligned to `align`; null with the reason in [`last_error`](crate::last_error), which is
    /// `ModeMismatch` where the policy's free-list mode is not this allocator's.
    pub fn alloc<P: AllocPolicy>(&mut self, size: usize, align: usize) -> *mut u8 {
        if P::ENABLE_FREE_LIST_ENCRYPTION != self.cell().encoded() {
            return refuse(AllocError::ModeMismatch);
        }
        if fork::forked() {
            return refuse(AllocError::Forked);
        }
        match Request::new(size, align, BinKey::of(P::POLICY), false) {
            Ok(request) => self
                .cell()
                .with(|heap| {
                    let block = request.serve(heap, None);
                    if block.is_null() && heap.yield_caches() {
                        return request.serve(heap, None);
                    }
                    block
                })
                .unwrap_or_else(|| refuse(AllocError::Reentrant)),
            Err(error) => refuse(error),
        }
    }

    /// Frees a block of this backend, whichever allocator it came from. Null is `Ok`.
    ///
    /// # Safety
    /// As [`thread_free`].
    pub unsafe fn free<P: AllocPolicy>(&mut self, ptr: *mut u8) -> Result<(), FreeError> {
        if ptr.is_null() {
            return Ok(());
        }
        let home = Home::of::<B>();
        // SAFETY: the caller's promise. While this heap's slow path runs the free is queued for it.
        self.cell()
            .with(|heap| unsafe { release(home, ptr, Some(heap), None) })
            .unwrap_or_else(|| unsafe { release(home, ptr, None, None) })
            .map(|_| ())
    }
}
