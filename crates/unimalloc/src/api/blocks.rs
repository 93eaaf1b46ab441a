//! From a request to a block, and from an address back: the steps all public calls share.

use std::ptr;

use crate::backend::fork;
use crate::cuda::Stream;
use crate::error::{last_error, set_last_error, AllocError, FreeError};
use crate::log::say;
use crate::meta::geometry::{class_for, class_size, GRANULE, MAX_ALIGN};
use crate::meta::slot;
use crate::meta::span::{Remote, Span};
use crate::placement::Placement;
use crate::policy::{redzone, Policy};
use crate::pool::{is_dedicated, span_of, Home};
use crate::stream::{self, Deferred, Notify};
use crate::sync::Ordering::{AcqRel, Relaxed};
use crate::thread::heap::{BinKey, Heap};

/// A block that its stream may have back at once was last used by the GPU, as far as we know. From here on it is worth a look
/// whether the host has touched it since: a microsecond, where moving live pages back would take milliseconds.
const REUSE_LOOK: usize = 16 << 20;

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
        // At least one byte that may be used, so that a live block's usable size is never 0.
        match size.max(1).checked_add(redzone::bytes(key.policy)) {
            Some(size) if size <= isize::MAX as usize - MAX_ALIGN => Ok(Self { size, align, key, zeroed }),
            _ => Err(AllocError::InvalidSize),
        }
    }

    /// A pending block that was last used on `stream`, for use on it without waiting; null if there is none that fits.
    pub(super) fn reuse(self, home: Home, stream: &Stream) -> *mut u8 {
        if self.zeroed {
            return ptr::null_mut();
        }
        let key = home.key(self.key.pool_key());
        let class = self.class(home);
        let fits = |span: &'static Span| {
            let fits = match class {
                Some(class) => usize::from(span.class.load(Relaxed)) == class,
                None => {
                    is_dedicated(span)
                        && span.base().is_multiple_of(self.align)
                        && span.block() >= self.size
                        && span.block() - self.size <= (self.size / 8).max(MAX_ALIGN)
                }
            };
            fits && home.owns(span)
                && span.key.load(Relaxed) == key
                && span.lane.load(Relaxed) == self.key.policy as u8
                && span.group.load(Relaxed) == self.key.group
        };
        let Some((span, index)) = stream::reuse_on(stream, fits) else { return ptr::null_mut() };
        let block = span.address(index) as *mut u8;
        if span.block() >= REUSE_LOOK {
            // SAFETY: the block is ours, and its contents are nobody's once the stream has passed.
            unsafe { (home.ops.settle)(block, span.block(), self.key.place, true, Some(stream)) };
        }
        block
    }

    /// The size class that serves the request, if blocks of a class do.
    pub(super) fn class(self, home: Home) -> Option<usize> {
        if self.align > GRANULE {
            return None;
        }
        class_for(self.size, self.align).filter(|class| home.fits_segment(*class))
    }

    #[cold]
    fn tell_refusal(self) {
        if let Some(reason) = last_error() {
            let (Self { size, align, .. }, place) = (self, self.key.place);
            say!(
                Level::Warn,
                "refused bytes={size} align={align} device={} placement={:?} reason={reason:?}: {reason}",
                place.device,
                place.placement
            );
        }
    }

    /// A block from `heap`, or null with the reason in `last_error`. Contents are ready when this returns, or on `stream`
    /// in its order.
    pub(super) fn serve(self, heap: &mut Heap, stream: Option<&Stream>) -> *mut u8 {
        let home = heap.home;
        let (address, block, mut is_zero) = match self.class(home) {
            Some(class) => {
                let (at, block) = (heap.bin_of(self.key, class), class_size(class));
                (heap.alloc(at, block - self.size), block, false)
            }
            None => {
                let (key, lane) = (self.key.pool_key(), self.key.policy as u8);
                match home.take_dedicated(key, self.size, self.align, lane) {
                    Some((span, is_zero)) => {
                        span.set_slack(0, span.block() - self.size);
                        (span.base(), span.block(), is_zero)
                    }
                    None => (0, 0, false),
                }
            }
        };
        if address == 0 {
            self.tell_refusal();
            return ptr::null_mut();
        }
        let block_start = address as *mut u8;
        let usable =
            if self.key.policy.encoded() { self.size - redzone::bytes(self.key.policy) } else { block };
        if let Some(stream) = stream {
            let _ = stream::mark_block(home, block_start, stream); // what is queued for it below, and by the caller
        }
        if self.key.place.placement == Placement::Device {
            // SAFETY: the block is ours, and its contents are nobody's.
            unsafe { (home.ops.settle)(block_start, block, self.key.place, used_by_device(address), stream) };
        }
        if let (Some(stream), true) = (stream, self.zeroed && !is_zero) {
            // Ordered on the caller's stream instead of waited for.
            // SAFETY: the block is ours, and stays so until the stream has passed: it is marked.
            if unsafe { stream.fill(block_start, 0, usable) }.is_ok() {
                is_zero = true;
            }
        }
        // SAFETY: the block is live, `block` bytes long, and nobody else's until we return it.
        let ready = unsafe {
            (!self.zeroed || is_zero || (home.ops.fill)(block_start, 0, usable))
                && redzone::write(home.ops, block_start, usable, self.key.policy)
        };
        if !ready {
            // SAFETY: nobody has seen the block. A failure to fill it (a lost context) is what the caller hears of.
            let _ = unsafe { release(home, block_start, Some(heap), None) };
            return ptr::null_mut();
        }
        block_start
    }
}

/// Whether the latest use of a block that we know of was by the device.
fn used_by_device(address: usize) -> bool {
    span_of(address)
        .and_then(|span| span.marks()?.word(span.slot_at(address)?.0))
        .is_some_and(|stream| stream.load(Relaxed) != 0)
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

/// What became of a free that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freed {
    /// The block can be reused.
    Now,
    /// It waits for the streams it was used on.
    Pending,
}

/// Frees the block at `block`, whoever allocated it. `heap` is the calling thread's, if it may be used now.
///
/// # Safety
/// Nobody uses the block any more, but for work queued on streams it is marked with.
pub(crate) unsafe fn release(
    home: Home,
    block: *mut u8,
    heap: Option<&mut Heap>,
    notify: Option<Notify>,
) -> Result<Freed, FreeError> {
    if fork::forked() {
        return Err(FreeError::Forked);
    }
    let Found { span, index, mut word } = find(home, block as usize)?;
    if word & slot::MARKED != 0 {
        match stream::defer(home, span, index, word, notify) {
            Deferred::Pending => return Ok(Freed::Pending),
            Deferred::DoubleFree => return Err(FreeError::DoubleFree),
            Deferred::Passed(pending) => word = pending,
        }
    }
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    if policy.poisons() {
        let usable = take_for_contents(home, span, index, word)?;
        word = slot::PENDING;
        // SAFETY: the word says PENDING and is ours, so that no other free touches the contents meanwhile.
        unsafe { clear_contents(home, span, index, usable, policy) }?;
    }
    if is_dedicated(span) {
        home.free_dedicated(span, word)?;
        return Ok(Freed::Now);
    }
    match heap {
        Some(heap) if heap.id() == span.keeper() => heap.free_kept(span, index as u16),
        _ => {
            if let Remote::Orphan = span.free_remote(index, word)? {
                home.visit_orphan(span);
            }
        }
    }
    Ok(Freed::Now)
}

/// Of several threads that free a block whose contents must be seen to, lets one do it: the one that turns its word to
/// PENDING. A loser that went on would poison what the winner's successor owns by then. Answers the block's usable bytes.
fn take_for_contents(home: Home, span: &'static Span, index: usize, word: u16) -> Result<usize, FreeError> {
    if word == slot::PENDING {
        return Ok(span.usable(index as u16)); // it was deferred, and is ours already
    }
    let Some(usable) = span.verified_usable(index as u16) else {
        home.pools.report_corruption();
        return Err(FreeError::Corrupted);
    };
    let taken = span.slots()[index].compare_exchange(word, slot::PENDING, AcqRel, Relaxed);
    taken.map(|_| usable).map_err(|_| FreeError::DoubleFree)
}

/// Checks the redzone and poisons the rest. Where the redzone was written to, the block becomes live again.
///
/// # Safety
/// The block's word says PENDING, set by the caller, and `usable` are its usable bytes.
unsafe fn clear_contents(
    home: Home,
    span: &'static Span,
    index: usize,
    usable: usize,
    policy: Policy,
) -> Result<(), FreeError> {
    let block = span.address(index as u16) as *mut u8;
    // SAFETY: the block is the caller's alone, and `usable` leaves room for the redzone.
    if unsafe { redzone::check_and_poison(home.ops, block, usable, policy) } {
        return Ok(());
    }
    span.revive(index as u16);
    home.pools.report_corruption();
    Err(FreeError::Corrupted)
}

/// Reports why there is no block, and answers null.
#[cold]
pub(super) fn refuse(error: AllocError) -> *mut u8 {
    set_last_error(error);
    ptr::null_mut()
}
