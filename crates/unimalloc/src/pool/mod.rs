//! Layer 3: the memory a backend gave us, shared by all threads.
//!
//! [`BackendPools`] is one static bundle per backend type. Spans are cut from segments under one lock, which is held for
//! a few hundred nanoseconds and never across a call of the backend. Huge blocks have a pool of their own.

mod directory;
mod huge;
mod runs;

use std::sync::{Mutex, OnceLock};

use crate::backend::{BackendOps, MemoryBackend};
use crate::error::{last_error, set_last_error, AllocError, FreeError};
use crate::meta::address_map::AddressMap;
use crate::meta::geometry::{class_size, round_up, span_bytes, GRANULE, MAX_ALIGN};
use crate::meta::span::{Shape, Span, DEDICATED, NO_SEGMENT};
use crate::meta::{descriptor, slot};
use crate::placement::Place;
use crate::policy::Policy;
use crate::sync::{lock, AtomicUsize, Ordering};

pub(crate) use directory::PoolKey;
use directory::{Change, Directory, Region};
pub use huge::GlobalHugePool;

use Ordering::{AcqRel, Relaxed};

/// Every granule that any backend's pools hold, to the span it belongs to.
static MAP: AddressMap<Span> = AddressMap::new();

/// The span whose granules hold `address`.
#[inline(always)]
pub(crate) fn span_of(address: usize) -> Option<&'static Span> {
    MAP.get(address)
}

/// A live view of a set of segments.
pub struct GlobalSegmentPool {
    len: AtomicUsize,
    bytes: AtomicUsize,
}

impl GlobalSegmentPool {
    const fn new() -> Self {
        Self { len: AtomicUsize::new(0), bytes: AtomicUsize::new(0) }
    }

    /// Segments in the pool.
    pub fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    /// Whether the pool holds no segment.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes those segments hold.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    fn apply(&self, segments: isize, bytes: isize) {
        self.len.fetch_add(segments as usize, Relaxed);
        self.bytes.fetch_add(bytes as usize, Relaxed);
    }
}

/// The pools of one backend type. All threads share them.
pub struct BackendPools {
    /// Segments that hold no live block: cached, ready for use.
    pub segment: GlobalSegmentPool,
    /// Segments with blocks of threads that have ended.
    pub orphan: GlobalSegmentPool,
    /// Cached huge blocks.
    pub huge: GlobalHugePool,
    directory: Mutex<Directory>,
    /// What free granules of our segments map to.
    vacant: OnceLock<&'static Span>,
    reserved: AtomicUsize,
    refused_remote: AtomicUsize,
    corruptions: AtomicUsize,
}

impl Default for BackendPools {
    fn default() -> Self {
        Self::new()
    }
}

impl BackendPools {
    /// Empty pools. Make one static per backend type; [`backend_pools!`](crate::backend_pools) does.
    pub const fn new() -> Self {
        Self {
            segment: GlobalSegmentPool::new(),
            orphan: GlobalSegmentPool::new(),
            huge: GlobalHugePool::new(),
            directory: Mutex::new(Directory::new()),
            vacant: OnceLock::new(),
            reserved: AtomicUsize::new(0),
            refused_remote: AtomicUsize::new(0),
            corruptions: AtomicUsize::new(0),
        }
    }

    /// Double frees that were found only when the block's keeper looked at it, and refused then.
    pub fn late_double_frees(&self) -> usize {
        self.refused_remote.load(Relaxed)
    }

    pub(crate) fn report_late_double_frees(&self, count: usize) {
        if count != 0 {
            self.refused_remote.fetch_add(count, Relaxed);
        }
    }

    /// Free-list links and slot words that did not verify.
    pub fn corruptions(&self) -> usize {
        self.corruptions.load(Relaxed)
    }

    pub(crate) fn report_corruption(&self) {
        self.corruptions.fetch_add(1, Relaxed);
    }

    fn apply(&self, change: Change) {
        if change.empty_segments != 0 {
            self.segment.apply(change.empty_segments, change.empty_bytes);
        }
        if change.orphan_segments != 0 {
            self.orphan.apply(change.orphan_segments, change.orphan_bytes);
        }
    }
}

/// A backend that has pools, and so can be allocated from.
///
/// [`backend_pools!`](crate::backend_pools) implements it.
pub trait HasSegmentPool: MemoryBackend + Sized {
    /// This backend's pools.
    fn pools() -> &'static BackendPools;

    /// Segments that hold no live block.
    fn global_segment_pool() -> &'static GlobalSegmentPool {
        &Self::pools().segment
    }

    /// Segments with blocks of threads that have ended.
    fn global_orphan_pool() -> &'static GlobalSegmentPool {
        &Self::pools().orphan
    }

    /// Cached huge blocks.
    fn global_huge_pool() -> &'static GlobalHugePool {
        &Self::pools().huge
    }
}

/// A backend's functions and pools together.
#[derive(Clone, Copy)]
pub(crate) struct Home {
    pub ops: &'static BackendOps,
    pub pools: &'static BackendPools,
}

/// What a run of granules is for.
#[derive(Clone, Copy)]
pub(crate) struct SpanRequest {
    pub key: u32,
    pub class: u16,
    pub lane: u8,
    pub group: u8,
}

impl Home {
    pub(crate) fn of<B: HasSegmentPool>() -> Self {
        Self { ops: const { &BackendOps::of::<B>() }, pools: B::pools() }
    }

    fn id(self) -> usize {
        std::ptr::from_ref(self.pools) as usize
    }

    pub(crate) fn owns(self, span: &Span) -> bool {
        span.home() == self.id()
    }

    pub(crate) fn key(self, key: PoolKey) -> u32 {
        lock(&self.pools.directory).key(key)
    }

    fn vacant(self) -> &'static Span {
        self.pools.vacant.get_or_init(|| {
            let span = descriptor::take(1);
            span.shape(Shape {
                base: 0,
                granules: 0,
                block: 1,
                capacity: 0,
                class: 0,
                lane: 0,
                group: 0,
                coded: false,
                key: 0,
                segment: NO_SEGMENT,
                home: self.id(),
            });
            span
        })
    }

    // ---- regions: what the backend gives and takes ----

    /// A region whose base is aligned to 2 MiB. Null from the backend is tried again once after cached memory was
    /// given back, as much as is needed.
    fn obtain(self, bytes: usize, place: Place) -> Option<(Region, usize)> {
        self.try_obtain(bytes, place).or_else(|| {
            if !matches!(
                last_error(),
                Some(
                    AllocError::Budget
                        | AllocError::OutOfMemory
                        | AllocError::RegistryFull
                        | AllocError::Driver(2)
                )
            ) {
                return None;
            }
            if self.release_cached(bytes) == 0 {
                return None;
            }
            self.try_obtain(bytes, place)
        })
    }

    fn try_obtain(self, bytes: usize, place: Place) -> Option<(Region, usize)> {
        // SAFETY: `bytes` is a multiple of 2 MiB; the region is ours until `release` gives it back.
        let exact = unsafe { (self.ops.allocate_at)(bytes, place) } as usize;
        if exact == 0 {
            return None;
        }
        let region = Region { address: exact, bytes };
        if exact % MAX_ALIGN == 0 {
            return self.accept(region, exact, bytes);
        }
        self.give_back(region);
        let bytes_with_slack = bytes.checked_add(MAX_ALIGN)?;
        // SAFETY: as above.
        let address = unsafe { (self.ops.allocate_at)(bytes_with_slack, place) } as usize;
        if address == 0 {
            return None;
        }
        self.accept(Region { address, bytes: bytes_with_slack }, address.next_multiple_of(MAX_ALIGN), bytes)
    }

    fn accept(self, region: Region, base: usize, bytes: usize) -> Option<(Region, usize)> {
        if !AddressMap::<Span>::covers(base, bytes) {
            self.give_back(region);
            set_last_error(AllocError::Unsupported);
            return None;
        }
        self.pools.reserved.fetch_add(region.bytes, Relaxed);
        Some((region, base))
    }

    fn give_back(self, region: Region) -> bool {
        // SAFETY: the region came from `allocate_at` with these values, and no block of it is live or mapped.
        unsafe { (self.ops.deallocate)(region.address as *mut u8, region.bytes) }
    }

    fn release(self, region: Region) -> bool {
        let released = self.give_back(region);
        if released {
            self.pools.reserved.fetch_sub(region.bytes, Relaxed);
        }
        released
    }

    // ---- spans ----

    /// A span for a class, cut from a segment. `None` with the reason in `last_error`.
    pub(crate) fn take_span(self, request: SpanRequest) -> Option<&'static Span> {
        let block = class_size(usize::from(request.class));
        let segment_bytes = (self.ops.segment_bytes)();
        let bytes = span_bytes(usize::from(request.class), segment_bytes)?;
        let (segment, base) = self.take_run(request.key, bytes / GRANULE, 1, segment_bytes)?;
        let capacity = bytes / block;
        Some(self.make_span(request, segment, base, bytes / GRANULE, block, capacity))
    }

    /// Whether blocks of a class are cut from segments at present.
    pub(crate) fn fits_segment(self, class: usize) -> bool {
        span_bytes(class, (self.ops.segment_bytes)()).is_some()
    }

    fn make_span(
        self,
        request: SpanRequest,
        segment: u32,
        base: usize,
        granules: usize,
        block: usize,
        capacity: usize,
    ) -> &'static Span {
        // A single block has no free list to encode.
        let coded = capacity > 1 && Policy::from_lane(request.lane).encoded();
        let span = descriptor::take(capacity << u32::from(coded));
        span.shape(Shape {
            base,
            granules,
            block,
            capacity,
            class: request.class,
            lane: request.lane,
            group: request.group,
            coded,
            key: request.key,
            segment,
            home: self.id(),
        });
        MAP.set(base, granules, Some(span));
        span
    }

    fn take_run(self, key: u32, granules: usize, align: usize, segment_bytes: usize) -> Option<(u32, usize)> {
        let mut segment_bytes = segment_bytes;
        loop {
            let place = {
                let mut directory = lock(&self.pools.directory);
                if let Some((segment, base, change)) = directory.take_run(key, granules, align) {
                    self.pools.apply(change);
                    return Some((segment, base));
                }
                directory.key_at(key).place
            };
            // Another thread may take the new segment's granules first; then we ask for one more.
            let obtained = loop {
                if let Some(obtained) = self.obtain(segment_bytes, place) {
                    break obtained;
                }
                // Near the budget's end a smaller segment may still fit.
                segment_bytes /= 2;
                if segment_bytes < MAX_ALIGN || segment_bytes < (granules + align - 1) * GRANULE {
                    return None;
                }
            };
            let (region, base) = obtained;
            MAP.set(base, segment_bytes / GRANULE, Some(self.vacant()));
            let change = lock(&self.pools.directory).add_segment(key, region, base, segment_bytes / GRANULE);
            self.pools.apply(change);
        }
    }

    /// Gives a span without used blocks back to its segment. The caller was its keeper and has no list that holds it.
    pub(crate) fn retire(self, span: &'static Span) {
        debug_assert!(span.is_empty());
        let (base, granules) = (span.base(), span.granules());
        MAP.set(base, granules, Some(self.vacant()));
        let segment = span.segment.load(Relaxed);
        descriptor::recycle(span);
        let change = lock(&self.pools.directory).put_run(segment, base, granules);
        self.pools.apply(change);
    }

    /// Gives up a span that still has used blocks. The caller is its keeper and has no list that holds it.
    pub(crate) fn abandon(self, span: &'static Span) {
        let change = lock(&self.pools.directory).add_orphan(span);
        self.pools.apply(change);
        if span.has_remote() {
            self.visit_orphan(span); // those that came between the keeper's last look and now told nobody
        }
    }

    /// Claims an orphan for an allocator that may adopt it.
    pub(crate) fn adopt(self, request: SpanRequest) -> Option<&'static Span> {
        let key = (request.key, request.class, request.lane, request.group);
        let (span, change) = lock(&self.pools.directory).claim_orphan(key)?;
        self.pools.apply(change);
        Some(span)
    }

    /// After a remote free into an orphan: takes up its remote frees, and retires it when it is empty.
    pub(crate) fn visit_orphan(self, span: &'static Span) {
        while span.claim_orphan() {
            let change = lock(&self.pools.directory).remove_orphan(span);
            self.pools.apply(change);
            if self.drain_claimed(span) {
                return;
            }
        }
    }

    /// Drains a claimed span and retires or lists it again. False if remote frees came in after that.
    fn drain_claimed(self, span: &'static Span) -> bool {
        let refused = span.drain(|index| span.push(index));
        self.pools.report_late_double_frees(refused);
        if span.is_empty() {
            self.retire(span);
            return true;
        }
        let change = lock(&self.pools.directory).add_orphan(span);
        self.pools.apply(change);
        !span.has_remote()
    }

    // ---- dedicated blocks: huge, or aligned beyond a granule ----

    /// A block of its own. Its size is in `span.block()`. The second value tells whether it reads as zero.
    pub(crate) fn take_dedicated(
        self,
        key: PoolKey,
        size: usize,
        align: usize,
        lane: u8,
    ) -> Option<(&'static Span, bool)> {
        let number = self.key(key);
        let request = SpanRequest { key: number, class: u16::MAX, lane, group: 0 };
        let segment_bytes = (self.ops.segment_bytes)();
        let cut = round_up(size.max(1), GRANULE)?;
        if align > GRANULE && cut <= segment_bytes / 4 {
            let align = align / GRANULE;
            let (segment, base) = self.take_run(number, cut / GRANULE, align, segment_bytes)?;
            let span = self.make_span(request, segment, base, cut / GRANULE, cut, 1);
            span.slots()[0].store(slot::LIVE, Ordering::Release);
            return Some((span, false));
        }
        let Some(bytes) = round_up(size, MAX_ALIGN) else {
            set_last_error(AllocError::InvalidSize);
            return None;
        };
        if let Some(span) = self.pools.huge.take(key.place, bytes) {
            span.lane.store(lane, Relaxed);
            span.slots()[0].store(slot::LIVE, Ordering::Release);
            return Some((span, false));
        }
        let (region, base) = self.obtain(bytes, key.place)?;
        let span = self.make_span(request, NO_SEGMENT, base, bytes / GRANULE, bytes, 1);
        span.region.store(region.address, Relaxed);
        span.region_bytes.store(region.bytes, Relaxed);
        span.slots()[0].store(slot::LIVE, Ordering::Release);
        Some((span, self.ops.zeroed_on_allocate))
    }

    /// Frees a dedicated block; any thread may. `flags` are those the live word may carry.
    pub(crate) fn free_dedicated(self, span: &'static Span, word: u16) -> Result<(), FreeError> {
        if !slot::is_live(word)
            || span.slots()[0].compare_exchange(word, slot::UNUSED, AcqRel, Relaxed).is_err()
        {
            return Err(FreeError::DoubleFree);
        }
        if span.segment.load(Relaxed) == NO_SEGMENT {
            let place = lock(&self.pools.directory).key_at(span.key.load(Relaxed)).place;
            self.pools.huge.put(place, span);
        } else {
            self.retire(span);
        }
        Ok(())
    }

    /// Gives a cached huge block back to the backend; puts it back in the pool when that fails.
    fn release_huge(self, span: &'static Span) -> usize {
        let region = Region { address: span.region.load(Relaxed), bytes: span.region_bytes.load(Relaxed) };
        MAP.set(span.base(), span.granules(), None);
        if self.release(region) {
            descriptor::recycle(span);
            return region.bytes;
        }
        MAP.set(span.base(), span.granules(), Some(span));
        let place = lock(&self.pools.directory).key_at(span.key.load(Relaxed)).place;
        self.pools.huge.put(place, span);
        0
    }

    // ---- giving memory back ----

    /// Releases cached memory until at least `needed` bytes were given back or nothing is left; the largest first.
    /// May wait for the device.
    pub(crate) fn release_cached(self, needed: usize) -> usize {
        self.collect_orphans();
        let mut released = 0;
        while released < needed {
            let step = self.release_one();
            if step == 0 {
                break;
            }
            released += step;
        }
        released
    }

    /// Releases the largest cached huge block or, where none is larger, an empty segment.
    fn release_one(self) -> usize {
        let segment_bytes = (self.ops.segment_bytes)();
        if let Some(span) = self.pools.huge.take_largest(segment_bytes) {
            return self.release_huge(span);
        }
        let taken = lock(&self.pools.directory).remove_empty(0);
        if let Some((segment, change)) = taken {
            self.pools.apply(change);
            MAP.set(segment.base, segment.granules, None);
            if self.release(segment.region) {
                return segment.region.bytes;
            }
            MAP.set(segment.base, segment.granules, Some(self.vacant()));
            let change = lock(&self.pools.directory).restore(segment);
            self.pools.apply(change);
            return 0;
        }
        self.pools.huge.take_largest(0).map_or(0, |span| self.release_huge(span))
    }

    /// Takes up the remote frees of orphans, so that those without blocks become free memory.
    fn collect_orphans(self) {
        let (spans, changes) = lock(&self.pools.directory).claim_all_orphans();
        for change in changes {
            self.pools.apply(change);
        }
        for span in spans {
            if !self.drain_claimed(span) {
                self.visit_orphan(span);
            }
        }
    }

    /// Releases cached memory down to `keep` bytes.
    pub(crate) fn trim(self, keep: usize) -> usize {
        self.collect_orphans();
        let mut released = 0;
        while self.pools.segment.bytes() + self.pools.huge.bytes() > keep {
            let step = self.release_one();
            if step == 0 {
                break;
            }
            released += step;
        }
        released
    }

    /// Device and placement of a span's memory.
    pub(crate) fn place_of(self, span: &Span) -> Place {
        lock(&self.pools.directory).key_at(span.key.load(Relaxed)).place
    }

    /// Bytes the pools hold from the backend.
    pub(crate) fn reserved(self) -> usize {
        self.pools.reserved.load(Relaxed)
    }

    /// Bytes that are free (granules and huge blocks), and the largest free piece of them.
    pub(crate) fn cached(self) -> (usize, usize) {
        let (free, longest) = lock(&self.pools.directory).free_bytes();
        (free + self.pools.huge.bytes(), longest.max(self.pools.huge.largest()))
    }
}

/// Whether the span's blocks are freed through the pool instead of a heap.
pub(crate) fn is_dedicated(span: &Span) -> bool {
    span.bin() == DEDICATED
}
