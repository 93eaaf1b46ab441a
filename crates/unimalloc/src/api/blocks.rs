//! From a request to a block, and from an address back: the steps all public calls share.

use std::ptr;

use crate::backend::fork;
use crate::error::{set_last_error, AllocError, FreeError};
use crate::meta::geometry::{class_for, GRANULE, MAX_ALIGN};
use crate::meta::slot;
use crate::meta::span::{Remote, Span};
use crate::policy::{redzone, Policy, POISON};
use crate::pool::{is_dedicated, span_of, Home};
use crate::sync::Ordering::Relaxed;
use crate::thread::heap::{BinKey, Heap};

/// An allocation, checked.
#[derive(Clone, Copy)]
pub(super) struct Request {
    size: usize,
    align: usize,
    key: BinKey,
    zeroed: bool,
}

impl Request {
    /// Checks size and alignment; null's reason otherwise.
    pub(super) fn new(size: usize, align: usize, key: BinKey, zeroed: bool) -> Result<Self, AllocError> {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(AllocError::InvalidAlignment);
        }
        let zeroed = zeroed || key.policy.zeroes();
        match size.checked_add(redzone::bytes(key.policy)) {
            Some(size) if size <= isize::MAX as usize - MAX_ALIGN => Ok(Self { size, align, key, zeroed }),
            _ => Err(AllocError::InvalidSize),
        }
    }

    /// A block from `heap`, or null with the reason in `last_error`.
    pub(super) fn serve(self, heap: &mut Heap) -> *mut u8 {
        let home = heap.home;
        let class = if self.align <= GRANULE { class_for(self.size, self.align) } else { None };
        let (address, block, is_zero) = match class {
            Some(class) if home.fits_segment(class) => {
                let at = heap.bins_of(self.key) + class;
                (heap.alloc(at), crate::meta::geometry::class_size(class), false)
            }
            _ => {
                let (key, lane) = (self.key.pool_key(), self.key.policy as u8);
                match home.take_dedicated(key, self.size, self.align, lane) {
                    Some((span, is_zero)) => (span.base(), span.block(), is_zero),
                    None => (0, 0, false),
                }
            }
        };
        if address == 0 {
            return ptr::null_mut();
        }
        let block_start = address as *mut u8;
        let usable = block - redzone::bytes(self.key.policy);
        // SAFETY: the block is live, `block` bytes long, and nobody else's until we return it.
        let ready = unsafe {
            (!self.zeroed || is_zero || (home.ops.fill)(block_start, 0, usable))
                && redzone::write(home.ops, block_start, block, self.key.policy)
        };
        if !ready {
            // SAFETY: nobody has seen the block. A failure to fill it (a lost context) is what the caller hears of.
            let _ = unsafe { release(home, block_start, Some(heap)) };
            return ptr::null_mut();
        }
        block_start
    }
}

/// A live block.
pub(super) struct Found {
    pub span: &'static Span,
    pub index: usize,
    /// Its slot word when it was looked at: live, with flags.
    pub word: u16,
}

/// The live block that starts at `address`.
pub(super) fn find(home: Home, address: usize) -> Result<Found, FreeError> {
    let span = span_of(address).filter(|span| home.owns(span)).ok_or(FreeError::NotOurs)?;
    let found = span.slot_at(address).filter(|(index, _)| *index < usize::from(span.capacity()));
    let Some((index, slot)) = found else { return Err(span.why_not(address)) };
    let word = slot.load(Relaxed);
    if !slot::is_live(word) {
        return Err(FreeError::DoubleFree);
    }
    Ok(Found { span, index, word })
}

/// Frees the block at `address`, whoever allocated it. `heap` is the calling thread's, if it may be used now.
///
/// # Safety
/// Nobody uses the block any more.
pub(super) unsafe fn release(home: Home, block: *mut u8, heap: Option<&mut Heap>) -> Result<(), FreeError> {
    if fork::forked() {
        return Err(FreeError::Forked);
    }
    let Found { span, index, word } = find(home, block as usize)?;
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    if !span.verify(index as u16) {
        home.pools.report_corruption();
        return Err(FreeError::Corrupted);
    }
    // SAFETY: the block is live and the caller gives it up; it is `span.block()` bytes long.
    if !unsafe { redzone::intact(home.ops, block, span.block(), policy) } {
        home.pools.report_corruption();
        return Err(FreeError::Corrupted);
    }
    if policy.poisons() {
        let usable = span.block() - redzone::bytes(policy);
        // SAFETY: as above. Where the fill fails the context is lost, and the contents with it.
        let _ = unsafe { (home.ops.fill)(block, POISON, usable) };
    }
    if is_dedicated(span) {
        return home.free_dedicated(span, word);
    }
    match heap {
        Some(heap) if heap.id() == span.keeper() => heap.free_kept(span, index as u16),
        _ => {
            if let Remote::Orphan = span.free_remote(index, word)? {
                home.visit_orphan(span);
            }
        }
    }
    Ok(())
}

/// Reports why there is no block, and answers null.
#[cold]
pub(super) fn refuse(error: AllocError) -> *mut u8 {
    set_last_error(error);
    ptr::null_mut()
}
