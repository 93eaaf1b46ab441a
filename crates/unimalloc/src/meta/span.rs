//! A span: a run of granules cut into blocks of one size, and everything known about those blocks.
//!
//! ```text
//! capacity = used + (blocks on the free list) + (capacity - fresh)
//! used     = live + cached by the owner or a magazine + pending + quarantined
//!            + freed remotely and not drained yet + 1 if pinned
//! ```
//!
//! **Who writes what.** While a span is mapped, its shape is constant. Its free list, `fresh`, `used`, the list links and
//! the slot words of free blocks belong to its *keeper*: the heap whose id is in `keeper`, or whoever claimed the
//! orphan, or the pool while it holds no blocks. Any thread may read slot words and free blocks as [`remote`] says. All
//! fields are atomics, so a stale reader (a double free racing with the span's retirement) reads old or new values and is
//! turned away by the checks, never into undefined behaviour.

mod recount;
mod remote;
#[cfg(all(test, not(shuttle)))]
pub(crate) mod samples;

use std::ptr::{self, NonNull};

use super::codec::{make_keys, Coded};
use super::geometry::{exact_index, reciprocal, GRANULE};
use super::inbox::Inbox;
use super::marks::MarkTable;
use super::slot;
use crate::error::FreeError;
use crate::policy::{redzone, Policy};
use crate::random::Random;
use crate::sync::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering};

pub(crate) use remote::{Remote, ACTIVE, ORPHAN, TOLD};
use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// `bin` of a span with one block that no heap keeps: huge, or aligned beyond a granule.
pub(crate) const DEDICATED: u32 = u32::MAX;
/// `segment` of a span that is not cut from one.
pub(crate) const NO_SEGMENT: u32 = u32::MAX;

#[repr(C, align(64))]
pub(crate) struct Span {
    // What every free reads, and nobody writes while blocks are freed: one cache line that all who free here can keep.
    /// Id of the heap that may free blocks of this span without atomics, or 0: nobody, or its lane needs more care.
    owner: AtomicU64,
    base: AtomicUsize,
    slots: &'static [AtomicU16],
    reciprocal: AtomicU64,
    /// Where the owner caches blocks of this span: an address that only the heap with the id in `owner` follows, which stored it.
    owner_bin: AtomicPtr<()>,
    /// Which backend's pools the memory belongs to: an address that is compared, never followed.
    home: AtomicUsize,
    bin: AtomicU32,
    capacity: AtomicU16,
    /// Policy of the blocks, as [`Policy`](crate::Policy)'s discriminant.
    pub(crate) lane: AtomicU8,
    coded: AtomicU8,
    // Where remote frees and the keeper meet, and what its slow paths read.
    /// A bit for each row of blocks in which remote frees may be found.
    dirty: AtomicU64,
    state: AtomicU8,
    /// A magazine maps the span: it must keep its shape. The keeper's.
    pinned: AtomicU8,
    /// Blocks of different groups never share a span.
    pub(crate) group: AtomicU8,
    inbox_index: AtomicU32,
    inbox: AtomicPtr<Inbox>,
    keeper: AtomicU64,
    /// Of an orphan: at least as many of its blocks were freed remotely and not taken up.
    returned: AtomicU32,
    pub(crate) segment: AtomicU32,
    granules: AtomicU32,
    /// Which pool the span's memory belongs to, as an index of [`BackendPools`].
    pub(crate) key: AtomicU32,
    block: AtomicUsize,
    pub(crate) class: AtomicU16,
    // What the keeper alone writes, and often: in a cache line that remote frees do not read.
    next: AtomicPtr<Span>,
    prev: AtomicPtr<Span>,
    pub(crate) free_head: AtomicU16,
    /// Blocks from here on were never handed out.
    pub(crate) fresh: AtomicU16,
    pub(crate) used: AtomicU16,
    /// Whether some list of the keeper (or the orphan list) holds the span.
    listed: AtomicU8,
    /// For a span that is not cut from a segment: the region as the backend returned it.
    pub(crate) region: AtomicUsize,
    pub(crate) region_bytes: AtomicUsize,
    /// The [slack](Self::slack) of the one block of a span.
    slack: AtomicUsize,
    /// Streams by block, made at the first launch that uses a block here. Stays with the descriptor.
    marks: AtomicPtr<MarkTable>,
}

/// A span's shape, constant while it is mapped.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub base: usize,
    pub granules: usize,
    pub block: usize,
    pub capacity: usize,
    pub class: u16,
    pub lane: u8,
    pub group: u8,
    pub coded: bool,
    pub key: u32,
    pub segment: u32,
    pub home: usize,
}

/// A free-list link does not verify: something wrote to the span's bookkeeping.
#[derive(Debug)]
pub(crate) struct Broken;

impl Span {
    /// A descriptor for spans of up to `slots.len()` blocks.
    pub(crate) fn new(slots: &'static [AtomicU16]) -> Self {
        Self {
            owner: AtomicU64::new(0),
            base: AtomicUsize::new(0),
            slots,
            reciprocal: AtomicU64::new(0),
            owner_bin: AtomicPtr::new(ptr::null_mut()),
            home: AtomicUsize::new(0),
            bin: AtomicU32::new(DEDICATED),
            capacity: AtomicU16::new(0),
            lane: AtomicU8::new(0),
            coded: AtomicU8::new(0),
            dirty: AtomicU64::new(0),
            state: AtomicU8::new(ACTIVE),
            pinned: AtomicU8::new(0),
            group: AtomicU8::new(0),
            inbox_index: AtomicU32::new(0),
            inbox: AtomicPtr::new(ptr::null_mut()),
            keeper: AtomicU64::new(0),
            returned: AtomicU32::new(0),
            segment: AtomicU32::new(NO_SEGMENT),
            granules: AtomicU32::new(0),
            key: AtomicU32::new(0),
            block: AtomicUsize::new(1),
            class: AtomicU16::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
            prev: AtomicPtr::new(ptr::null_mut()),
            free_head: AtomicU16::new(slot::END),
            fresh: AtomicU16::new(0),
            used: AtomicU16::new(0),
            listed: AtomicU8::new(0),
            region: AtomicUsize::new(0),
            region_bytes: AtomicUsize::new(0),
            slack: AtomicUsize::new(0),
            marks: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Gives an unused descriptor a shape; every block is unused. Publish it in the address map afterwards.
    pub(crate) fn shape(&self, shape: Shape) {
        debug_assert!(
            (shape.capacity > 1 || !shape.coded)
                && shape.capacity << u32::from(shape.coded) <= self.slots.len()
                && shape.base.is_multiple_of(GRANULE)
        );
        for word in self.slots {
            word.store(slot::UNUSED, Relaxed);
        }
        self.dirty.store(0, Relaxed);
        self.returned.store(0, Relaxed);
        if let Some(marks) = self.marks() {
            marks.clear();
        }
        self.owner.store(0, Relaxed);
        self.keeper.store(0, Relaxed);
        self.base.store(shape.base, Relaxed);
        self.block.store(shape.block, Relaxed);
        self.reciprocal.store(reciprocal(shape.block, shape.capacity), Relaxed);
        self.bin.store(DEDICATED, Relaxed);
        self.lane.store(shape.lane, Relaxed);
        self.group.store(shape.group, Relaxed);
        if shape.coded {
            make_keys();
        }
        self.coded.store(u8::from(shape.coded), Relaxed);
        self.pinned.store(0, Relaxed);
        self.free_head.store(slot::END, Relaxed);
        self.fresh.store(0, Relaxed);
        self.used.store(0, Relaxed);
        self.capacity.store(shape.capacity as u16, Relaxed);
        self.segment.store(shape.segment, Relaxed);
        self.home.store(shape.home, Relaxed);
        self.granules.store(shape.granules as u32, Relaxed);
        self.key.store(shape.key, Relaxed);
        self.class.store(shape.class, Relaxed);
        self.listed.store(0, Relaxed);
        self.state.store(ACTIVE, Release);
    }

    /// Makes the heap `id` the keeper. With `owner_bin` its hot path may free blocks without looking further, and gets this
    /// address back by [`owner_bin`](Self::owner_bin).
    pub(crate) fn adopt(
        &self,
        id: u64,
        owner_bin: Option<NonNull<()>>,
        bin: u32,
        inbox: &'static Inbox,
        inbox_index: u32,
    ) {
        self.bin.store(bin, Relaxed);
        self.owner_bin.store(owner_bin.map_or(ptr::null_mut(), NonNull::as_ptr), Relaxed);
        self.inbox.store(ptr::from_ref(inbox).cast_mut(), Relaxed);
        self.inbox_index.store(inbox_index, Relaxed);
        self.keeper.store(id, Release);
        self.owner.store(if owner_bin.is_some() { id } else { 0 }, Release);
    }

    /// The heap that may free blocks here without atomics.
    #[inline(always)]
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Relaxed)
    }

    /// The owner is about to give the span up.
    pub(crate) fn disown(&self) {
        self.owner.store(0, Relaxed);
    }

    /// What the owner gave when it [adopted](Self::adopt) the span. Anybody else may read anything.
    #[inline(always)]
    pub(crate) fn owner_bin(&self) -> *mut () {
        self.owner_bin.load(Relaxed)
    }

    pub(crate) fn keeper(&self) -> u64 {
        self.keeper.load(Relaxed)
    }

    #[inline(always)]
    pub(crate) fn bin(&self) -> u32 {
        self.bin.load(Relaxed)
    }

    pub(crate) fn base(&self) -> usize {
        self.base.load(Relaxed)
    }

    pub(crate) fn block(&self) -> usize {
        self.block.load(Relaxed)
    }

    pub(crate) fn granules(&self) -> usize {
        self.granules.load(Relaxed) as usize
    }

    pub(crate) fn capacity(&self) -> u16 {
        self.capacity.load(Relaxed)
    }

    pub(crate) fn inbox_index(&self) -> u32 {
        self.inbox_index.load(Relaxed)
    }

    pub(crate) fn slots(&self) -> &'static [AtomicU16] {
        self.slots
    }

    pub(crate) fn home(&self) -> usize {
        self.home.load(Relaxed)
    }

    pub(crate) fn address(&self, index: u16) -> usize {
        self.base().wrapping_add(usize::from(index) * self.block())
    }

    /// The slot word of the block that starts exactly at `address`; `None` for any other address.
    #[inline(always)]
    pub(crate) fn slot_at(&self, address: usize) -> Option<(usize, &'static AtomicU16)> {
        let offset = address.wrapping_sub(self.base.load(Relaxed));
        let index = exact_index(offset, self.reciprocal.load(Relaxed))?;
        Some((index, self.slots.get(index)?))
    }

    /// The block that `address` lies in, as index and slot word, whatever its state.
    pub(crate) fn block_around(&self, address: usize) -> Option<(usize, &'static AtomicU16)> {
        let index = address.checked_sub(self.base())? / self.block().max(1);
        if index >= usize::from(self.capacity()) {
            return None;
        }
        Some((index, self.slots.get(index)?))
    }

    /// Why `address`, which this span's granules hold and where no block starts, cannot be freed.
    #[cold]
    pub(crate) fn why_not(&self, address: usize) -> FreeError {
        match self.block_around(address) {
            Some((_, word)) if slot::is_live(word.load(Relaxed)) => FreeError::Interior,
            _ => FreeError::DoubleFree,
        }
    }

    // ---- the keeper's free list ----

    /// Takes one free block: from the list first, then a fresh one. The caller sets its state.
    pub(crate) fn pop(&self) -> Result<Option<u16>, Broken> {
        let head = self.free_head.load(Relaxed);
        let index = if head != slot::END {
            let next = self.link(head).ok_or(Broken)?;
            self.free_head.store(next, Relaxed);
            head
        } else {
            let fresh = self.fresh.load(Relaxed);
            if fresh >= self.capacity() {
                return Ok(None);
            }
            self.fresh.store(fresh + 1, Relaxed);
            fresh
        };
        self.used.store(self.used.load(Relaxed) + 1, Relaxed);
        Ok(Some(index))
    }

    /// Puts a block that the keeper holds (live, cached…) back on the free list.
    pub(crate) fn push(&self, index: u16) {
        self.set_link(index, self.free_head.load(Relaxed));
        self.free_head.store(index, Relaxed);
        self.used.store(self.used.load(Relaxed) - 1, Relaxed);
    }

    /// Takes up to `count` free blocks of a span without tags: from the list first, then fresh ones. `taken` gets each
    /// block's address and word, and puts it in a state. A stack that it pushes them on hands fresh ones out after the
    /// others, and by address.
    pub(crate) fn pop_batch(&self, count: usize, mut taken: impl FnMut(usize, &'static AtomicU16)) {
        debug_assert!(!self.is_coded());
        let (base, block) = (self.base(), self.block());
        let (fresh, capacity) = (usize::from(self.fresh.load(Relaxed)), usize::from(self.capacity()));
        let mut left = count.min(self.free_blocks() - (capacity - fresh));
        let end = (fresh + count - left).min(capacity);
        for (at, word) in (fresh..end).zip(&self.slots[fresh..end]).rev() {
            taken(base + at * block, word);
        }
        self.fresh.store(end as u16, Relaxed);
        self.used.store(self.used.load(Relaxed) + (left + end - fresh) as u16, Relaxed);
        let mut head = self.free_head.load(Relaxed);
        while let (true, Some(word)) = (left > 0, self.slots.get(usize::from(head))) {
            // END is no index.
            let next = word.load(Relaxed);
            taken(base + usize::from(head) * block, word);
            head = next;
            left -= 1;
        }
        debug_assert_eq!(left, 0, "the list is shorter than the equation says");
        self.free_head.store(head, Relaxed);
    }

    /// Puts blocks that the keeper holds back on the free list of a span without tags, given by their words.
    pub(crate) fn push_batch<'a>(&self, words: impl Iterator<Item = &'a AtomicU16>) {
        debug_assert!(!self.is_coded());
        let first = self.slots.as_ptr() as usize;
        let mut head = self.free_head.load(Relaxed);
        let mut count = 0;
        for word in words {
            word.store(head, Relaxed);
            head = ((ptr::from_ref(word) as usize - first) / size_of::<AtomicU16>()) as u16;
            count += 1;
        }
        self.free_head.store(head, Relaxed);
        self.used.store(self.used.load(Relaxed) - count, Relaxed);
    }

    /// Whether an address lies in this span's granules.
    pub(crate) fn holds(&self, address: usize) -> bool {
        address.wrapping_sub(self.base()) < self.granules() * GRANULE
    }

    fn coded(&self) -> Option<Coded<'static>> {
        let span = ptr::from_ref(self) as usize;
        self.is_coded().then(|| Coded::new(span, self.slots))
    }

    /// Whether slot words carry tags: those of a Hardened span of several blocks, since one block has no free list.
    pub(crate) fn is_coded(&self) -> bool {
        self.coded.load(Relaxed) != 0
    }

    fn link(&self, index: u16) -> Option<u16> {
        match self.coded() {
            None => Some(self.slots[usize::from(index)].load(Relaxed)),
            Some(coded) => coded.link(index, self.capacity()),
        }
    }

    fn set_link(&self, index: u16, link: u16) {
        match self.coded() {
            None => self.slots[usize::from(index)].store(link, Relaxed),
            Some(coded) => coded.set_link(index, link),
        }
    }

    /// Puts a block in a state.
    pub(crate) fn set_state(&self, index: u16, state: u16) {
        match self.coded() {
            None => self.slots[usize::from(index)].store(state, Relaxed),
            Some(coded) => coded.set_state(index, state),
        }
    }

    /// Makes a block live; if it is a Hardened one, with its [slack](Self::slack).
    pub(crate) fn set_live(&self, index: u16, slack: usize) {
        match self.coded() {
            Some(coded) => {
                debug_assert!(slack <= self.most_slack());
                coded.set_live(index, slack as u16);
            }
            None => {
                self.slots[usize::from(index)].store(slot::LIVE, Relaxed);
                self.slack.store(slack, Relaxed);
            }
        }
    }

    /// Whether a free block's slot word is as we left it; always true without tags.
    pub(crate) fn verify(&self, index: u16) -> bool {
        self.coded().is_none_or(|coded| coded.verify(index))
    }

    /// Bytes of a live Hardened block behind its redzone; of a block that is not free yet, too. Meaningless for others.
    pub(crate) fn slack(&self, index: u16) -> usize {
        match self.coded() {
            Some(coded) => usize::from(coded.slack(index)),
            None => self.slack.load(Relaxed),
        }
    }

    /// Bytes of a live block that its user may touch: all of it, or under Hardened exactly what was asked for, so that the next
    /// byte is the redzone's.
    pub(crate) fn usable(&self, index: u16) -> usize {
        let policy = Policy::from_lane(self.lane.load(Relaxed));
        let room = self.block() - redzone::bytes(policy);
        if policy.encoded() {
            // A slack that was written to does not lead out of the block; what it leads to is no redzone.
            room.saturating_sub(self.slack(index))
        } else {
            room
        }
    }

    /// As [`usable`](Self::usable) of a live block, if its slot word and tag are as we left them.
    pub(crate) fn verified_usable(&self, index: u16) -> Option<usize> {
        match self.coded() {
            Some(coded) => {
                let room = self.block() - redzone::bytes(Policy::Hardened);
                room.checked_sub(usize::from(coded.slack(index))).filter(|usable| *usable > 0)
            }
            None => Some(self.usable(index)),
        }
    }

    /// The largest slack that can be noted.
    pub(crate) fn most_slack(&self) -> usize {
        if self.is_coded() {
            usize::from(u16::MAX)
        } else {
            usize::MAX
        }
    }

    /// Notes the slack of a live Hardened block, for its owner. A size class wastes less than [`most_slack`](Self::most_slack).
    pub(crate) fn set_slack(&self, index: u16, slack: usize) {
        match self.coded() {
            Some(coded) => {
                debug_assert!(slack <= self.most_slack());
                coded.set_slack(index, slack as u16);
            }
            None => self.slack.store(slack, Relaxed),
        }
    }

    /// A block that was on its way back is live again, with the slack it had.
    pub(crate) fn revive(&self, index: u16) {
        self.slots[usize::from(index)].store(slot::LIVE, Relaxed);
    }

    /// Puts all blocks of a fresh span on the free list in random order (Fisher and Yates).
    pub(crate) fn shuffle(&self, random: &mut Random) {
        let capacity = self.capacity();
        let mut order: Vec<u16> = (0..capacity).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last + 1));
        }
        self.fresh.store(capacity, Relaxed);
        for index in order {
            self.set_link(index, self.free_head.load(Relaxed));
            self.free_head.store(index, Relaxed);
        }
    }

    /// Whether a block can be popped without draining.
    pub(crate) fn has_free(&self) -> bool {
        self.free_head.load(Relaxed) != slot::END || self.fresh.load(Relaxed) < self.capacity()
    }

    /// The address of the block at the head of the free list.
    pub(crate) fn first_listed(&self) -> Option<usize> {
        let head = self.free_head.load(Relaxed);
        (head != slot::END).then(|| self.address(head))
    }

    pub(crate) fn free_blocks(&self) -> usize {
        // A pin counts as used, and is no block.
        usize::from(self.capacity() + u16::from(self.is_pinned()) - self.used.load(Relaxed))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.used.load(Relaxed) == 0
    }

    // ---- pins: the keeper's ----

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.load(Relaxed) != 0
    }

    /// Keeps the span from being retired.
    pub(crate) fn pin(&self) {
        self.pinned.store(1, Relaxed);
        self.used.store(self.used.load(Relaxed) + 1, Relaxed);
    }

    pub(crate) fn unpin(&self) {
        self.pinned.store(0, Relaxed);
        self.used.store(self.used.load(Relaxed) - 1, Relaxed);
    }

    // ---- marks ----

    pub(crate) fn marks(&self) -> Option<&'static MarkTable> {
        // SAFETY: null, or a leaked table that `marks_or_make` published with release.
        unsafe { self.marks.load(Acquire).as_ref() }
    }

    pub(crate) fn marks_or_make(&self) -> &'static MarkTable {
        if let Some(marks) = self.marks() {
            return marks;
        }
        let fresh: *mut MarkTable = Box::into_raw(Box::new(MarkTable::new(self.slots.len())));
        let published = match self.marks.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(winner) => {
                // SAFETY: from `Box::into_raw` just now, and not published.
                drop(unsafe { Box::from_raw(fresh) });
                winner
            }
        };
        // SAFETY: published once and never freed.
        unsafe { &*published }
    }

    // ---- list links: whoever owns the list that the span is on ----

    pub(crate) fn next(&self) -> Option<&'static Span> {
        // SAFETY: links are null or come from `&'static Span` (`link` takes nothing else).
        unsafe { self.next.load(Relaxed).as_ref() }
    }

    fn prev(&self) -> Option<&'static Span> {
        // SAFETY: as in `next`.
        unsafe { self.prev.load(Relaxed).as_ref() }
    }

    /// Puts the span at the front of the list that begins with `head`.
    pub(crate) fn link_before(&'static self, head: Option<&'static Span>) {
        let as_ptr =
            |span: Option<&'static Span>| span.map_or(ptr::null_mut(), |s| ptr::from_ref(s).cast_mut());
        self.prev.store(ptr::null_mut(), Relaxed);
        self.next.store(as_ptr(head), Relaxed);
        if let Some(head) = head {
            head.prev.store(as_ptr(Some(self)), Relaxed);
        }
        self.listed.store(1, Relaxed);
    }

    /// Takes the span off its list; returns the one after it, the new head where this was the head.
    pub(crate) fn unlink(&self) -> Option<&'static Span> {
        let (next, prev) = (self.next(), self.prev());
        if let Some(prev) = prev {
            prev.next.store(self.next.load(Relaxed), Relaxed);
        }
        if let Some(next) = next {
            next.prev.store(self.prev.load(Relaxed), Relaxed);
        }
        self.listed.store(0, Relaxed);
        next
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.listed.load(Relaxed) != 0
    }
}
