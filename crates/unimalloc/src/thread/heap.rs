//! A heap: the blocks and spans that one thread allocates from.
//!
//! ```text
//! hit:   pop the class's cache                      miss: take a batch from a partial span,
//! free:  push on it (slot word LIVE -> CACHED)            adopt an orphan, or cut a fresh span
//! ```
//!
//! Every free looks the exact address up and checks the slot word first. A full cache gives its older half back to the
//! spans; a span whose blocks are all free goes back to the pool, but for one per class, so that a lone alloc and free at
//! a span's edge do not cut and return it each time.

use std::collections::VecDeque;
use std::num::NonZeroU64;

use super::bin::Cached;
use super::bins::{BinIndex, Bins};
use super::prefetch::prefetch;
use crate::backend::fork;
use crate::error::{last_error, set_last_error, AllocError};
use crate::meta::address_map::Near;
use crate::meta::geometry::{class_size, SHARED_MAX};
use crate::meta::inbox::Inbox;
use crate::meta::slot;
use crate::meta::span::{Span, TOLD};
use crate::placement::{Place, Placement};
use crate::policy::Policy;
use crate::pool::{near, span_of, Home, PoolKey, SpanRequest, Urgency};
use crate::sync::Ordering::Relaxed;

/// What blocks must have in common to share a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BinKey {
    pub place: Place,
    pub policy: Policy,
    pub group: u8,
}

impl BinKey {
    pub(crate) const fn of(policy: Policy) -> Self {
        Self { place: Place::DEFAULT, policy, group: 0 }
    }

    pub(crate) fn pool_key(self) -> PoolKey {
        PoolKey { place: self.place, encoded: self.policy.encoded() }
    }
}

pub(crate) struct Heap {
    /// Monotonic: never used twice in a process, so a stale owner number matches nobody.
    id: NonZeroU64,
    /// For each key, in the order of `keys`.
    bins: Bins,
    keys: Vec<(BinKey, u32)>,
    /// Where in the address map the span is that came last.
    near: Near<Span>,
    pub(crate) home: Home,
    inbox: &'static Inbox,
    /// Every span this heap keeps, at the index it has in the inbox.
    tenants: Vec<Option<&'static Span>>,
    vacancies: Vec<u32>,
    /// Bytes of cached blocks above `SHARED_MAX`.
    large_cached: usize,
    /// The most of them.
    large_limit: usize,
    /// Freed blocks of encoded spans, oldest first.
    quarantined: VecDeque<(&'static Span, u16)>,
    quarantined_bytes: usize,
}

/// A heap caches no more than this many bytes of blocks above 512 KiB, or a batch of those that waited for the GPU: what of a batch
/// found no room would be returned to the pool and cut again each time.
const LARGE_CACHE_BYTES: usize = 16 << 20;

/// A heap keeps back this many bytes of freed blocks of encoded spans, or this many blocks if they are small: more would
/// push what the program uses out of the processor's cache. Blocks above a quarter of the bytes are reused at once.
const QUARANTINE_BYTES: usize = 1 << 20;
const QUARANTINE_BLOCKS: usize = 2048;
/// It releases a sixty-fourth of them at a time: one by one, each would take a full span up and fill it again.
const QUARANTINE_SLACK: usize = 64;

/// Blocks below this share pages with others, so that the two sides would fight over them.
const SMALL: usize = 64 << 10;

fn next_id() -> NonZeroU64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // A 64-bit count of heaps does not wrap.
    NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX)
}

impl Heap {
    /// `first` is the key whose bins the hot path uses.
    pub(crate) fn new(home: Home, first: BinKey) -> Self {
        fork::watch();
        Self {
            id: next_id(),
            bins: Bins::new(!first.policy.encoded()),
            keys: vec![(first, home.key(first.pool_key()))],
            near: Near::nowhere(),
            home,
            inbox: Inbox::take(),
            tenants: Vec::new(),
            vacancies: Vec::new(),
            large_cached: 0,
            large_limit: LARGE_CACHE_BYTES,
            quarantined: VecDeque::new(),
            quarantined_bytes: 0,
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id.get()
    }

    /// The bin of a key and class.
    pub(crate) fn bin_of(&mut self, key: BinKey, class: usize) -> BinIndex {
        let number = self.keys.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            self.keys.push((key, self.home.key(key.pool_key())));
            self.bins.add(!key.policy.encoded());
            self.keys.len() - 1
        });
        BinIndex::of(number, class)
    }

    // ---- allocation ----

    /// A cached block of a class of the first key, if its blocks share spans.
    #[inline(always)]
    pub(crate) fn alloc_cached(&mut self, class: usize) -> Option<usize> {
        let block = self.bins.pop_first(class)?;
        block.slot.store(slot::LIVE, Relaxed);
        Some(block.address)
    }

    /// A block of bin `at`, or 0 with the reason in `last_error`. Of a Hardened one, `slack` bytes lie behind its redzone.
    pub(crate) fn alloc(&mut self, at: BinIndex, slack: usize) -> usize {
        self.settle();
        let bin = &mut self.bins[at];
        if let Some(block) = bin.pop() {
            if !at.is_shared() {
                self.large_cached -= at.block();
            }
            block.slot.store(slot::LIVE, Relaxed);
            return block.address;
        }
        if let (true, Some(span)) = (bin.is_cacheless(), bin.partial) {
            if let Some(address) = self.take_listed(at, span, slack) {
                return address;
            }
        }
        self.refill(at, slack)
    }

    /// A block off a span's list, live, for a bin without a cache: there each allocation comes this way. `None`, with nothing
    /// done, where the refill has to look: at a span without free blocks, or one whose list does not verify.
    fn take_listed(&mut self, at: BinIndex, span: &'static Span, slack: usize) -> Option<usize> {
        let index = span.pop().ok().flatten()?;
        span.set_live(index, slack);
        match span.first_listed() {
            // The next one's contents are written when it is handed out, and those kept back after it pushed it out of the
            // processor's nearest caches.
            Some(next) => prefetch(next, span.block()),
            None if !span.has_free() => self.park(at, span),
            None => {}
        }
        Some(span.address(index))
    }

    #[cold]
    fn refill(&mut self, at: BinIndex, slack: usize) -> usize {
        self.limit_quarantine();
        let mut looked = false;
        loop {
            if self.bins[at].len() > 0 {
                return self.alloc(at, slack); // what came back went to the cache
            }
            if let Some(span) = self.bins[at].partial {
                if let Some(address) = self.take_batch(at, span, slack) {
                    return address;
                }
                continue; // the span had nothing and is parked now
            }
            // Not before: by the time all listed spans are used up, those that were parked have many blocks again.
            if !std::mem::replace(&mut looked, true) && self.inbox.has_messages() {
                self.read_inbox();
                // Where only a few came back, another thread is at it: running after it block by block would cost both
                // threads more than a span that lets it get ahead.
                let few = self.bins[at].batch() / 4;
                if self.bins[at].len() > 0 || self.bins[at].has_free(few) {
                    continue;
                }
            }
            if !self.acquire(at) && self.bins[at].partial.is_none() {
                return 0;
            }
        }
    }

    /// Moves a batch of `span`'s blocks to the cache and returns one more, live.
    fn take_batch(&mut self, at: BinIndex, span: &'static Span, slack: usize) -> Option<usize> {
        if !span.has_free() {
            self.drain(span);
        }
        let Ok(first) = span.pop() else {
            self.quit(at, span);
            return None;
        };
        if first.is_some() {
            let bin = &mut self.bins[at];
            bin.prepare();
            let batch = bin.batch().min(bin.vacant() + 1);
            if batch > 1 {
                span.pop_batch(batch - 1, |address, slot| {
                    slot.store(slot::CACHED, Relaxed);
                    bin.push(Cached { address, slot });
                });
            }
        }
        if !span.has_free() {
            self.park(at, span);
        }
        first.map(|index| {
            span.set_live(index, slack);
            span.address(index)
        })
    }

    /// Gives up a span whose free list does not verify. Its live blocks stay valid and can be freed; none of its memory
    /// is handed out again.
    fn quit(&mut self, at: BinIndex, span: &'static Span) {
        self.bins[at].unlink(span);
        span.lose();
        self.tenants[span.inbox_index() as usize] = None; // the index stays taken: messages for it go nowhere
        self.home.pools.report_corruption();
    }

    /// Sets a span aside until a free comes in, or drains those that came in meanwhile.
    fn park(&mut self, at: BinIndex, span: &'static Span) {
        if span.has_remote() || !span.park() {
            let few = self.bins[at].batch() / 4;
            if span.remote_count(few) < few {
                // Too few to be worth it yet; the inbox brings the span back when nothing else is left.
                span.tell_oneself(self.inbox);
                return self.bins[at].unlink(span);
            }
            self.drain(span);
            if span.has_free() {
                return;
            }
            // What had come in was taken up before, or a free that raced with the block's own. What comes after this look is
            // found by the next.
            if !span.park() {
                return;
            }
        }
        self.bins[at].unlink(span);
    }

    /// Brings a span with free blocks into bin `at`; false with the reason in `last_error`.
    fn acquire(&mut self, at: BinIndex) -> bool {
        let (key, number) = self.keys[at.key()];
        let class = at.class();
        let number = match class_size(class) {
            size if size < SMALL && key.place.placement == Placement::Auto => self.small_auto(key, number),
            _ => number,
        };
        let request =
            SpanRequest { key: number, class: class as u16, lane: key.policy as u8, group: key.group };
        while let Some(span) = self.has_place().then(|| self.home.adopt(request)).flatten() {
            self.keep(at, span);
            self.drain(span);
            if span.has_free() {
                return true;
            }
            self.park(at, span);
            if self.bins[at].partial.is_some() {
                return true;
            }
        }
        let home = self.home;
        let passed = home.reclaim_into(Urgency::Look, &mut |span, index| {
            let ours = span.keeper() == self.id();
            if ours {
                let batch = home.segment_bytes();
                self.large_limit = self.large_limit.max(batch);
                self.bins[BinIndex::numbered(span.bin())].widen(batch);
                self.free_kept(span, index);
            }
            ours
        });
        if passed {
            // What other threads had taken up came through the spans' remote frees: full spans told us, the others hold it.
            self.read_inbox();
            if self.bins[at].partial.is_some() || self.bins[at].len() > 0 {
                return true;
            }
        }
        if !self.has_place() {
            set_last_error(AllocError::OutOfMemory);
            return false;
        }
        let span = self
            .home
            .take_span(request)
            .or_else(|| self.yield_caches().then(|| self.home.take_span(request)).flatten());
        let Some(span) = span else { return false };
        if key.policy.shuffles() {
            span.shuffle(&mut crate::random::Random::seeded());
        }
        self.keep(at, span);
        true
    }

    /// The pool for small blocks of a key without placement: the backend's choice.
    fn small_auto(&self, key: BinKey, number: u32) -> u32 {
        match self.home.ops.small_auto {
            Placement::Auto => number,
            placement => {
                let place = Place { placement, ..key.place };
                self.home.key(BinKey { place, ..key }.pool_key())
            }
        }
    }

    /// Makes room for the books of one more span. False if the process has no memory left for it.
    fn has_place(&mut self) -> bool {
        let next = self.tenants.len();
        self.vacancies.last().is_some()
            || (self.tenants.try_reserve(1).is_ok()
                && self.vacancies.try_reserve(next + 1).is_ok()
                && self.inbox.reserve(next as u32))
    }

    /// Becomes the keeper of a span and links it into bin `at`. There is a [place](Self::has_place) for it.
    fn keep(&mut self, at: BinIndex, span: &'static Span) {
        let index = self.vacancies.pop().unwrap_or_else(|| {
            self.tenants.push(None);
            self.tenants.len() as u32 - 1
        });
        self.tenants[index as usize] = Some(span);
        let fast = self.keys[at.key()].0.policy == Policy::Standard && at.is_shared();
        let bin = fast.then(|| self.bins.locate(at).cast());
        span.adopt(self.id(), bin, at.number(), self.inbox, index);
        self.near = near(span);
        self.bins[at].link(span);
    }

    // ---- free ----

    /// Frees a live block of a span that this heap owns outright. False: not that simple, nothing was done.
    #[inline(always)]
    pub(crate) fn free_cached(&mut self, address: usize) -> bool {
        let Some(span) = self.near.get(address) else { return false };
        if span.owner() != self.id.get() {
            return false;
        }
        let Some((_, slot)) = span.slot_at(address) else { return false };
        if slot.load(Relaxed) != slot::LIVE {
            return false;
        }
        let bin = span.owner_bin().cast();
        debug_assert_eq!(bin, self.bins.locate(BinIndex::numbered(span.bin())).as_ptr());
        // SAFETY: the owner is this heap. It alone stores its id there, after the place of one of its bins (`keep`), and takes the
        // id back before anybody else can keep the span; so what it reads is what it stored.
        if !unsafe { self.bins.push_latest(bin, Cached { address, slot }) } {
            return false;
        }
        // Last: some processors let no load pass a store whose address they do not know yet, and this one's comes late.
        slot.store(slot::CACHED, Relaxed);
        true
    }

    /// As `free_cached` of a block of this span, after that failed: where the block before this one found no room, or the look-up
    /// began in the wrong place. The next one begins where this one is.
    pub(crate) fn free_again(&mut self, span: &'static Span, address: usize) -> bool {
        if span.owner() != self.id.get() {
            return false;
        }
        if self.bins.is_crowded() {
            self.settle();
        } else if self.near.covers(address) {
            return false;
        }
        if !self.near.covers(address) {
            self.near = near(span);
        }
        self.free_cached(address)
    }

    /// Caches a block whose word says CACHED, also where there is no room yet or the block is large.
    #[cold]
    fn free_full(&mut self, at: BinIndex, block: Cached) {
        let size = at.block();
        let large = size > SHARED_MAX;
        if large && self.large_cached + size > self.large_limit {
            return self.put_back(at, block.address);
        }
        if self.bins[at].push(block) || self.make_room(at) && self.bins[at].push(block) {
            self.large_cached += if large { size } else { 0 };
        } else {
            self.put_back(at, block.address); // a bin without a cache
        }
    }

    /// Puts the block that was freed last where the others are.
    fn settle(&mut self) {
        if let Some((at, block)) = self.bins.take_latest() {
            self.free_full(at, block);
        }
    }

    /// Gives a cache without room more of it, or its older half back to the spans. False for a bin without a cache.
    fn make_room(&mut self, at: BinIndex) -> bool {
        let bin = &mut self.bins[at];
        if bin.is_cacheless() {
            return false;
        }
        bin.prepare();
        if bin.is_full() {
            bin.grow();
        }
        if bin.is_full() {
            let oldest = bin.batch();
            self.flush(at, oldest);
        }
        true
    }

    /// Frees a live block of a span that this heap keeps, in any lane; its contents were taken care of.
    pub(crate) fn free_kept(&mut self, span: &'static Span, index: u16) {
        if self.is_lost(span) {
            // Its free list is broken: the block is not handed out again, and a second free of it is noticed.
            return span.set_state(index, slot::QUARANTINED);
        }
        let at = BinIndex::numbered(span.bin());
        if span.is_coded() {
            self.keep_back(span, index);
            if span.block() > QUARANTINE_BYTES / 4 {
                self.has_room(at, span);
            }
            self.limit_quarantine();
        } else {
            let slot = &span.slots()[usize::from(index)];
            slot.store(slot::CACHED, Relaxed);
            self.free_full(at, Cached { address: span.address(index), slot });
        }
    }

    fn is_lost(&self, span: &'static Span) -> bool {
        !self
            .tenants
            .get(span.inbox_index() as usize)
            .is_some_and(|t| t.is_some_and(|t| std::ptr::eq(t, span)))
    }

    /// Keeps a freed block back from reuse until many more were freed. Lists and returns no span, so it
    /// may be called while one is being looked at.
    fn keep_back(&mut self, span: &'static Span, index: u16) {
        if span.block() > QUARANTINE_BYTES / 4 {
            span.push(index);
        } else {
            span.set_state(index, slot::QUARANTINED);
            self.quarantined.push_back((span, index));
            self.quarantined_bytes += span.block();
        }
    }

    fn limit_quarantine(&mut self) {
        let over = |count, most| count > most + most / QUARANTINE_SLACK;
        if over(self.quarantined_bytes, QUARANTINE_BYTES) || over(self.quarantined.len(), QUARANTINE_BLOCKS) {
            self.trim_quarantine(QUARANTINE_BYTES, QUARANTINE_BLOCKS);
        }
    }

    /// Releases the oldest blocks until no more than these are kept back.
    fn trim_quarantine(&mut self, bytes: usize, blocks: usize) {
        while self.quarantined_bytes > bytes || self.quarantined.len() > blocks {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        let Some((span, index)) = self.quarantined.pop_front() else { return };
        self.quarantined_bytes -= span.block();
        if self.is_lost(span) {
            return;
        }
        if !span.verify(index) {
            // The block's word was written to while it was kept back: it is not handed out again.
            return self.home.pools.report_corruption();
        }
        span.push(index);
        self.has_room(BinIndex::numbered(span.bin()), span);
    }

    /// Gives all blocks of a cache back to their spans.
    fn empty(&mut self, at: BinIndex) {
        self.settle();
        self.flush(at, self.bins[at].len());
    }

    /// Gives the `count` oldest blocks of a cache back to their spans.
    fn flush(&mut self, at: BinIndex, count: usize) {
        let mut position = 0;
        while position < count {
            let blocks = self.bins[at].oldest(position, count);
            let Some(span) = blocks.first().and_then(|block| span_of(block.address)) else { break };
            // Neighbours in the cache tend to come from one span, which then is looked up and looked at once.
            let run = blocks.iter().take_while(|block| span.holds(block.address)).count();
            span.push_batch(blocks[..run].iter().map(|block| block.slot));
            position += run;
            self.has_room(at, span);
        }
        self.bins[at].drop_oldest(count);
        let size = at.block();
        if size > SHARED_MAX {
            self.large_cached -= size * count;
        }
    }

    /// Puts a block that was cached on its span's free list.
    fn put_back(&mut self, at: BinIndex, address: usize) {
        let Some(span) = span_of(address) else { return };
        let Some((index, _)) = span.slot_at(address) else { return };
        span.push(index as u16);
        self.has_room(at, span);
    }

    /// After blocks of a span became free: lists it, or returns it to the pool if nothing of it is used.
    fn has_room(&mut self, at: BinIndex, span: &'static Span) {
        if !span.is_listed() {
            span.unpark();
            self.bins[at].link(span);
        }
        if !span.is_empty() {
            return;
        }
        let bin = &mut self.bins[at];
        let others = bin.partial.is_some_and(|head| !std::ptr::eq(head, span)) || span.next().is_some();
        if others || !at.is_shared() {
            bin.unlink(span);
            self.let_go(span);
        }
    }

    /// Returns a span without used blocks, on no list, to the pool.
    fn let_go(&mut self, span: &'static Span) {
        let index = span.inbox_index();
        self.tenants[index as usize] = None;
        self.vacancies.push(index);
        self.home.retire(span);
    }

    // ---- remote frees ----

    /// Takes up the remote frees of one span.
    fn drain(&mut self, span: &'static Span) {
        if span.is_coded() {
            span.drain(|index| self.keep_back(span, index));
        } else {
            span.drain_to_list();
        }
    }

    /// Takes up parked spans that remote frees told us of.
    fn read_inbox(&mut self) {
        if !self.inbox.has_messages() {
            return;
        }
        let mut told = Vec::new();
        self.inbox.take_told(|index| told.push(index));
        for index in told {
            let Some(Some(span)) = self.tenants.get(index as usize).copied() else { continue };
            if span.state() != TOLD {
                continue; // a message for an earlier tenant, or one that was overtaken
            }
            span.unpark();
            self.drain(span);
            let at = BinIndex::numbered(span.bin());
            if span.has_free() {
                if !self.cache_large(at, span) {
                    self.has_room(at, span);
                }
            } else {
                self.bins[at].link(span);
                self.park(at, span);
            }
        }
    }

    /// Caches the one block of a span that came back, where there is room: returning the span to the pool and cutting
    /// another costs some hundred nanoseconds.
    fn cache_large(&mut self, at: BinIndex, span: &'static Span) -> bool {
        let size = at.block();
        let bin = &mut self.bins[at];
        if size <= SHARED_MAX
            || span.is_coded()
            || bin.is_full()
            || self.large_cached + size > self.large_limit
        {
            return false;
        }
        bin.prepare();
        if bin.vacant() == 0 {
            return false; // no memory for the cache
        }
        let Ok(Some(index)) = span.pop() else { return false };
        let slot = &span.slots()[usize::from(index)];
        slot.store(slot::CACHED, Relaxed);
        bin.push(Cached { address: span.address(index), slot });
        self.large_cached += size;
        bin.link(span);
        self.park(at, span);
        true
    }

    /// A magazine lets a span go. False if the span is not kept here, not pinned, or serves nobody any more.
    pub(crate) fn unpin(&mut self, span: &'static Span) -> bool {
        if span.keeper() != self.id() || !span.is_pinned() || self.is_lost(span) {
            return false;
        }
        let at = BinIndex::numbered(span.bin());
        self.empty(at); // so that nothing of it is cached
        self.drain(span);
        span.unpin();
        if span.has_free() {
            self.has_room(at, span);
        }
        true
    }

    /// A magazine gives a span up for good: like one whose free list does not verify, it serves nobody any more. False if the
    /// span is not kept here or not pinned.
    pub(crate) fn forsake(&mut self, span: &'static Span) -> bool {
        if span.keeper() != self.id() || !span.is_pinned() || self.is_lost(span) {
            return false;
        }
        let (at, index) = (BinIndex::numbered(span.bin()), span.inbox_index());
        self.empty(at); // so that nothing of it is cached
        if span.is_listed() {
            self.bins[at].unlink(span);
        }
        span.adopt(self.id(), None, at.number(), self.inbox, index); // no fast frees: they would cache its blocks
        span.lose();
        self.tenants[index as usize] = None; // the index stays taken: messages for it go nowhere
        true
    }

    // ---- giving back ----

    /// After a refusal: gives back what is cached here, which may be what is missing. False where that cannot help.
    #[cold]
    pub(crate) fn yield_caches(&mut self) -> bool {
        let helps = last_error().is_some_and(AllocError::is_shortage);
        if helps {
            self.give_back_caches();
        }
        helps
    }

    /// Returns everything that is cached here to the pools. Live blocks stay where they are.
    pub(crate) fn give_back_caches(&mut self) {
        self.read_inbox();
        for index in 0..self.tenants.len() {
            if let Some(span) = self.tenants[index] {
                self.drain(span);
            }
        }
        self.trim_quarantine(0, 0);
        for at in self.bins.indices() {
            self.empty(at);
            self.bins[at].shrink();
        }
        for index in 0..self.tenants.len() {
            let Some(span) = self.tenants[index] else { continue };
            let at = BinIndex::numbered(span.bin());
            if span.is_empty() {
                if span.is_listed() {
                    self.bins[at].unlink(span);
                }
                self.let_go(span);
            } else if span.has_free() && !span.is_listed() {
                self.has_room(at, span);
            }
        }
    }
}

impl Drop for Heap {
    /// The thread ends: empty spans return to the pool, the others become orphans. Nothing here calls the backend.
    fn drop(&mut self) {
        self.give_back_caches();
        for at in self.bins.indices() {
            while let Some(span) = self.bins[at].partial {
                self.bins[at].unlink(span);
            }
        }
        for span in std::mem::take(&mut self.tenants).into_iter().flatten() {
            self.home.abandon(span);
        }
        self.inbox.recycle();
    }
}
