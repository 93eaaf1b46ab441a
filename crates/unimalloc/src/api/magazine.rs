//! Blocks lent to a magazine: a stack of free blocks outside this crate, which writes their slot words itself.
//!
//! A language runtime that cannot afford a native call per allocation keeps such a stack per size class. A lent block's
//! slot word is [`HELD`]; handing it out is one store of [`LIVE`], taking it back one of HELD, after a check that it was
//! LIVE: the same words that every native call checks, so both sides see one truth. Blocks come and go in batches.
//!
//! A span whose blocks are lent is *pinned*: its memory keeps its shape, and stays with the process, until the borrower
//! [unpins](unpin) it. So it can map the span once and make views of blocks without asking.

use super::blocks::{release, Request};
use crate::error::AllocError;
use crate::meta::geometry::{class_size, SHARED_MAX};
use crate::meta::slot;
use crate::meta::span::Span;
use crate::placement::Place;
use crate::policy::Policy;
use crate::pool::Home;
use crate::sync::{AtomicU16, Ordering::Relaxed};
use crate::thread::heap::BinKey;
use crate::thread::slots::{with_own_heap, ThreadSlots};

pub use crate::meta::slot::{HELD, LIVE};

/// A span with lent blocks. Valid until it is unpinned, on the thread that borrowed from it.
#[derive(Clone, Copy)]
pub struct LentSpan {
    span: &'static Span,
    /// Address of block 0.
    pub base: usize,
    /// Bytes from one block to the next.
    pub block: usize,
    /// Blocks.
    pub capacity: usize,
}

impl std::fmt::Debug for LentSpan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LentSpan({:#x}, {} x {})", self.base, self.capacity, self.block)
    }
}

impl PartialEq for LentSpan {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.span, other.span)
    }
}

impl LentSpan {
    fn of(span: &'static Span) -> Self {
        Self { span, base: span.base(), block: span.block(), capacity: usize::from(span.capacity()) }
    }

    /// Whether it still names the span that was lent: a descriptor is used again after its span was let go.
    fn is_current(&self) -> bool {
        self.span.is_pinned() && self.span.base() == self.base && self.span.block() == self.block
    }

    /// One word per block. The memory is never unmapped.
    ///
    /// # Safety
    /// Only words of blocks that were lent may be written to, HELD to those that nobody uses and LIVE to those that are handed out: a
    /// block whose word says that it is free may be handed out again, and the words of free blocks lead to others. Whatever else a
    /// word says, the allocator refuses or loses the block, and never faults by it.
    pub unsafe fn words(&self) -> &'static [AtomicU16] {
        self.span.slots()
    }
}

/// Borrows up to `count` blocks of `size` bytes, aligned to `align`, from this thread's allocator; the Standard policy.
///
/// `lend` gets each block's span, its index in it, and whether the span was pinned for it just now. Answers how many
/// there were, or why there is none. No other allocation of the same `group` may be made by other means.
pub fn borrow<B: ThreadSlots>(
    size: usize,
    align: usize,
    place: Place,
    group: u8,
    count: usize,
    mut lend: impl FnMut(LentSpan, u16, bool),
) -> Result<usize, AllocError> {
    let key = BinKey { place, policy: Policy::Standard, group };
    let request = Request::new(size, align, key, false)?;
    let home = Home::of::<B>();
    let class = request
        .class(home)
        .filter(|class| class_size(*class) <= SHARED_MAX)
        .ok_or(AllocError::InvalidSize)?;
    with_own_heap::<B, _>(|heap| {
        let at = heap.bin_of(key, class);
        for lent in 0..count {
            let address = heap.alloc(at, 0);
            let found = crate::pool::span_of(address).and_then(|span| Some((span, span.slot_at(address)?)));
            let Some((span, (index, word))) = found else {
                return if lent > 0 {
                    Ok(lent)
                } else {
                    Err(crate::last_error().unwrap_or(AllocError::OutOfMemory))
                };
            };
            word.store(slot::HELD, Relaxed);
            let fresh = !span.is_pinned();
            if fresh {
                span.pin();
            }
            lend(LentSpan::of(span), index as u16, fresh);
        }
        Ok(count)
    })
    .unwrap_or(Err(AllocError::Reentrant))
}

/// Gives a lent block back. False if its word does not say HELD: somebody wrote to it, or it was given back.
pub fn give_back<B: ThreadSlots>(span: LentSpan, index: u16) -> bool {
    let Some(word) = span.span.slots().get(usize::from(index)) else { return false };
    if !span.is_current() || word.compare_exchange(slot::HELD, slot::LIVE, Relaxed, Relaxed).is_err() {
        return false;
    }
    free_live::<B>(span, index)
}

/// Frees a block of the span that the borrower handed out and that nobody uses any more, if it is live and carries no
/// flag. For a borrower that is going.
///
/// # Safety
/// If the block is live, nobody uses it any more.
pub unsafe fn free_unflagged<B: ThreadSlots>(span: LentSpan, index: u16) -> bool {
    let word = span.span.slots().get(usize::from(index)).map(|word| word.load(Relaxed));
    span.is_current() && word == Some(slot::LIVE) && free_live::<B>(span, index)
}

fn free_live<B: ThreadSlots>(span: LentSpan, index: u16) -> bool {
    let home = Home::of::<B>();
    let block = span.span.address(index) as *mut u8;
    // SAFETY: a held block is in nobody's use, as whoever writes HELD promises; of a live one the caller of `free_unflagged` does.
    let freed = with_own_heap::<B, _>(|heap| unsafe { release(home, block, Some(heap), None) });
    // SAFETY: as above. Inside a guarded call the free is queued.
    freed.unwrap_or_else(|| unsafe { release(home, block, None, None) }).is_ok()
}

/// Lets a span go: the borrower has no mapping of it, and holds no block of it. False where blocks of it are still held,
/// from another thread than the one that borrowed, or for a span that was forsaken.
pub fn unpin<B: ThreadSlots>(span: LentSpan) -> bool {
    // The words beyond the last block say HELD never.
    if !span.is_current() || span.span.slots().iter().any(|word| word.load(Relaxed) == slot::HELD) {
        return false;
    }
    with_own_heap::<B, _>(|heap| heap.unpin(span.span)).unwrap_or(false)
}

/// Keeps a span for good, because something out of sight may use its bytes: no block of it is handed out again, by whatever
/// means it is freed. False from another thread than the one that borrowed.
pub fn forsake<B: ThreadSlots>(span: LentSpan) -> bool {
    span.is_current() && with_own_heap::<B, _>(|heap| heap.forsake(span.span)).unwrap_or(false)
}
