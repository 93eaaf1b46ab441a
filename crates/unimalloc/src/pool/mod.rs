//! Layer 3: the memory a backend gave us, shared by all threads.
//!
//! [`BackendPools`] is one static bundle per backend type. Spans are cut from segments under one lock, which is held for
//! a few hundred nanoseconds and never across a call of the backend. Huge blocks have a pool of their own.

mod audit;
mod directory;
mod huge;
mod reclaim;
mod runs;

use std::sync::OnceLock;

use crate::backend::{BackendOps, MemoryBackend};
use crate::error::{reason_of, set_last_error, AllocError, FreeError};
use crate::log::say;
use crate::meta::address_map::{AddressMap, Near};
use crate::meta::descriptor::Descriptors;
use crate::meta::geometry::{
    class_size, largest_block_in, round_up, span_bytes, GRANULE, MAX_ALIGN, MAX_GRANULES,
};
use crate::meta::slot;
use crate::meta::span::{Shape, Span, DEDICATED, NO_SEGMENT};
use crate::placement::Place;
use crate::policy::Policy;
use crate::sync::{const_fn, global, lock, AtomicUsize, Mutex, Ordering};

pub use audit::Audit;
pub(crate) use directory::PoolKey;
use directory::{Change, Directory, Region};
pub use huge::GlobalHugePool;

use Ordering::{AcqRel, Relaxed};

global! {
    /// Every granule that any backend's pools hold, to the span it belongs to.
    static MAP: AddressMap<Span> = AddressMap::new();
}

/// The span whose granules hold `address`.
#[inline(always)]
pub(crate) fn span_of(address: usize) -> Option<&'static Span> {
    MAP.get(address)
}

/// The guess for addresses near this span's.
pub(crate) fn near(span: &Span) -> Near<Span> {
    MAP.near(span.base())
}

/// A live view of a set of segments.
pub struct GlobalSegmentPool {
    len: AtomicUsize,
    bytes: AtomicUsize,
}

impl GlobalSegmentPool {
    const_fn! {
        fn new() -> Self {
            Self { len: AtomicUsize::new(0), bytes: AtomicUsize::new(0) }
        }
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

/// How hard to look for blocks that became free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Take up what has passed; do not wait.
    Look,
    /// Wait for the device where blocks are pending.
    Wait,
}

/// Takes up pending frees; answers whether there were any. The second argument may take a passed block of a span over, as
/// its keeper can; where it answers false the block is freed as by another thread.
pub(crate) type Reclaim = fn(Urgency, &mut dyn FnMut(&'static Span, u16) -> bool) -> bool;

/// The pools of one backend type. All threads share them.
pub struct BackendPools {
    /// Segments that hold no live block: cached, ready for use.
    pub segment: GlobalSegmentPool,
    /// Segments with blocks of threads that have ended.
    pub orphan: GlobalSegmentPool,
    /// Cached huge blocks.
    pub huge: GlobalHugePool,
    directory: Mutex<Directory>,
    descriptors: Descriptors,
    /// What free granules of our segments map to.
    vacant: OnceLock<&'static Span>,
    reserved: AtomicUsize,
    /// How often memory came back to the pools; it wraps.
    returns: AtomicUsize,
    /// Threads that are giving regions back: what they hold is neither cached nor released for the moment.
    releasing: AtomicUsize,
    /// Free memory above this many bytes is given back.
    retained: AtomicUsize,
    /// Counts calls of `decay`: what was put away at an earlier age has been idle since.
    age: AtomicUsize,
    corruptions: AtomicUsize,
    /// Takes up pending frees; set by the stream layer when there may be some.
    reclaim: OnceLock<Reclaim>,
    /// Bytes of the segments that are asked for at present; 0 before the first look.
    segment_bytes: AtomicUsize,
}

impl Default for BackendPools {
    fn default() -> Self {
        Self::new()
    }
}

impl BackendPools {
    const_fn! {
        /// Empty pools. Make one static per backend type; [`backend_pools!`](crate::backend_pools) does.
        pub fn new() -> Self {
            Self {
                segment: GlobalSegmentPool::new(),
                orphan: GlobalSegmentPool::new(),
                huge: GlobalHugePool::new(),
                directory: Mutex::new(Directory::new()),
                descriptors: Descriptors::new(),
                vacant: OnceLock::new(),
                reserved: AtomicUsize::new(0),
                returns: AtomicUsize::new(0),
                releasing: AtomicUsize::new(0),
                retained: AtomicUsize::new(usize::MAX),
                age: AtomicUsize::new(0),
                corruptions: AtomicUsize::new(0),
                reclaim: OnceLock::new(),
                segment_bytes: AtomicUsize::new(0),
            }
        }
    }

    /// Free-list links and slot words that did not verify.
    pub fn corruptions(&self) -> usize {
        self.corruptions.load(Relaxed)
    }

    pub(crate) fn report_corruption(&self) {
        self.corruptions.fetch_add(1, Relaxed);
        say!(
            Level::Error,
            "corruption: something wrote outside its block; what it hit is not handed out again"
        );
    }

    pub(crate) fn set_reclaim(&self, reclaim: Reclaim) {
        self.reclaim.get_or_init(|| reclaim);
    }

    /// Changes the directory, and the numbers with it: under its lock, so that they are never those of a change that
    /// others overtook.
    fn change<R>(&self, f: impl FnOnce(&mut Directory) -> (R, Change)) -> R {
        let mut directory = lock(&self.directory);
        let (result, change) = f(&mut directory);
        if change.empty_segments != 0 {
            self.segment.apply(change.empty_segments, change.empty_bytes);
        }
        if change.orphan_segments != 0 {
            self.orphan.apply(change.orphan_segments, change.orphan_bytes);
        }
        result
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

/// Where memory came from that the pools did not have at first.
enum Obtained<T> {
    /// The backend: a region, and its first address that is aligned to 2 MiB.
    Region(Region, usize),
    /// The pools after all.
    Pooled(T),
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

    /// What free granules map to. `None` only before the first segment, if the process has no memory left.
    fn vacant(self) -> Option<&'static Span> {
        if let Some(span) = self.pools.vacant.get() {
            return Some(span);
        }
        let fresh = self.pools.descriptors.take(1)?;
        fresh.shape(Shape {
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
        let vacant = self.pools.vacant.get_or_init(|| fresh);
        if !std::ptr::eq(*vacant, fresh) {
            self.pools.descriptors.recycle(fresh); // another thread was first
        }
        Some(vacant)
    }

    /// Takes up frees that waited for the GPU; answers whether there were any.
    pub(crate) fn reclaim(self, urgency: Urgency) -> bool {
        self.reclaim_into(urgency, &mut |_, _| false)
    }

    /// As [`reclaim`](Self::reclaim); `take` may take blocks over that it keeps.
    pub(crate) fn reclaim_into(
        self,
        urgency: Urgency,
        take: &mut dyn FnMut(&'static Span, u16) -> bool,
    ) -> bool {
        self.pools.reclaim.get().is_some_and(|reclaim| reclaim(urgency, take))
    }

    /// Bytes of a segment, as of the last growth: looking may cost a driver call.
    pub(crate) fn segment_bytes(self) -> usize {
        match self.pools.segment_bytes.load(Relaxed) {
            0 => self.look_at_segment_bytes(),
            bytes => bytes,
        }
    }

    fn look_at_segment_bytes(self) -> usize {
        // An outside backend may answer anything: the nearest size that the bookkeeping is made for.
        let bytes = (self.ops.segment_bytes)().clamp(MAX_ALIGN, MAX_GRANULES * GRANULE);
        let bytes = 1 << bytes.ilog2();
        self.pools.segment_bytes.store(bytes, Relaxed);
        bytes
    }

    // ---- regions: what the backend gives and takes ----

    /// A region whose base is aligned to 2 MiB. Null from the backend is tried again after pending frees were waited for, which
    /// may bring what `pooled` finds, and after cached memory was given back, as much as is needed.
    fn obtain<T>(self, bytes: usize, place: Place, pooled: impl Fn() -> Option<T>) -> Option<Obtained<T>> {
        /// Another thread may get what was given back first, and its own memory comes back meanwhile: below a ceiling it is
        /// worth trying again, as long as anything comes back.
        const TRIES: usize = 64;
        /// What another thread has between two of the pools' books comes back without anyone to wait for: so often nothing is
        /// found before a refusal is final.
        const LOOKS: usize = 3;
        let mut looks = 0;
        let mut returns = self.pools.returns.load(Relaxed);
        let mut obtained = self.try_obtain(bytes, place);
        for _ in 0..TRIES {
            let Err(error) = obtained else { break };
            if !error.is_shortage() {
                break;
            }
            let reclaimed = self.reclaim(Urgency::Wait);
            // Not by way of the backend, where another thread may be faster.
            if let Some(found) = pooled() {
                return Some(Obtained::Pooled(found));
            }
            let before = std::mem::replace(&mut returns, self.pools.returns.load(Relaxed));
            let released = self.release_cached(bytes);
            // Else the looks before a refusal fill the page.
            let found = released > 0 || reclaimed;
            say!(
                if found { Level::Info } else { Level::Debug },
                "reclaim needed={bytes} released={released} pending={reclaimed} reason={error:?}"
            );
            if released == 0 && !reclaimed && before == returns {
                looks += 1;
                if looks == LOOKS {
                    break;
                }
                self.wait_for_releases();
            }
            obtained = self.try_obtain(bytes, place);
            if error != AllocError::Budget {
                break;
            }
        }
        if let Err(error) = obtained {
            say!(Level::Info, "not-obtained bytes={bytes} reason={error:?} reserved={}", self.reserved());
        }
        let (region, base) = obtained.map_err(set_last_error).ok()?;
        Some(Obtained::Region(region, base))
    }

    /// Asks the backend. The reason is the one it gives, or `OutOfMemory` where it gives none.
    fn ask(self, bytes: usize, place: Place) -> Result<Region, AllocError> {
        reason_of(|| {
            // SAFETY: `bytes` is a multiple of 2 MiB; the region is ours until `give_back`.
            let address = unsafe { (self.ops.allocate_at)(bytes, place) } as usize;
            (address != 0).then_some(Region { address, bytes })
        })
        .map_err(|reason| reason.unwrap_or(AllocError::OutOfMemory))
    }

    fn try_obtain(self, bytes: usize, place: Place) -> Result<(Region, usize), AllocError> {
        let mut region = self.ask(bytes, place)?;
        if region.address % MAX_ALIGN != 0 {
            self.decline(region);
            region = self.ask(bytes.checked_add(MAX_ALIGN).ok_or(AllocError::InvalidSize)?, place)?;
        }
        let base = region.address.checked_next_multiple_of(MAX_ALIGN);
        match base.filter(|&base| AddressMap::<Span>::covers(base, bytes)) {
            Some(base) if !MAP.prepare(base, bytes / GRANULE) => {
                self.decline(region);
                Err(AllocError::OutOfMemory)
            }
            Some(base) => {
                self.pools.reserved.fetch_add(region.bytes, Relaxed);
                Ok((region, base))
            }
            None => {
                self.decline(region);
                Err(AllocError::Unsupported)
            }
        }
    }

    /// Gives back a region that cannot be used. Where the backend does not take it now, it is kept for another try.
    fn decline(self, region: Region) {
        if !self.give_back(region) {
            self.pools.reserved.fetch_add(region.bytes, Relaxed);
            lock(&self.pools.directory).strays.push(region);
        }
    }

    fn give_back(self, region: Region) -> bool {
        // SAFETY: the region came from `allocate_at` with these values, and no block of it is live or mapped.
        unsafe { (self.ops.deallocate)(region.address as *mut u8, region.bytes) }
    }

    // ---- spans ----

    /// A span for a class, cut from a segment. `None` with the reason in `last_error`.
    pub(crate) fn take_span(self, request: SpanRequest) -> Option<&'static Span> {
        let block = class_size(usize::from(request.class));
        let Some(bytes) = span_bytes(usize::from(request.class), self.segment_bytes()) else {
            // Another thread found the budget smaller since the request was planned.
            set_last_error(AllocError::Budget);
            return None;
        };
        let capacity = bytes / block;
        let span = self.descriptor(capacity, request.lane)?;
        let Some((segment, base)) = self.take_run(request.key, bytes / GRANULE, 1) else {
            self.pools.descriptors.recycle(span);
            return None;
        };
        self.shape_span(span, request, segment, base, bytes / GRANULE, block, capacity);
        Some(span)
    }

    /// Whether blocks of a class are cut from segments at present.
    pub(crate) fn fits_segment(self, class: usize) -> bool {
        span_bytes(class, self.segment_bytes()).is_some()
    }

    /// An unused descriptor. Taken before the memory, which is easier to do without. `None` with the reason in `last_error`.
    fn descriptor(self, capacity: usize, lane: u8) -> Option<&'static Span> {
        let span = self.pools.descriptors.take(capacity << u32::from(is_coded(capacity, lane)));
        if span.is_none() {
            set_last_error(AllocError::OutOfMemory);
        }
        span
    }

    #[allow(clippy::too_many_arguments)] // the parts of a shape
    fn shape_span(
        self,
        span: &'static Span,
        request: SpanRequest,
        segment: u32,
        base: usize,
        granules: usize,
        block: usize,
        capacity: usize,
    ) {
        span.shape(Shape {
            base,
            granules,
            block,
            capacity,
            class: request.class,
            lane: request.lane,
            group: request.group,
            coded: is_coded(capacity, request.lane),
            key: request.key,
            segment,
            home: self.id(),
        });
        MAP.set(base, granules, Some(span));
    }

    fn take_run(self, key: u32, granules: usize, align: usize) -> Option<(u32, usize)> {
        let take = || {
            self.pools.change(|directory| match directory.take_run(key, granules, align) {
                Some((segment, base, change)) => (Ok((segment, base)), change),
                None => (Err(directory.key_at(key).place), Change::default()),
            })
        };
        loop {
            let place = match take() {
                Ok(run) => return Some(run),
                Err(place) => place,
            };
            let vacant = self.vacant();
            if vacant.is_none() || !lock(&self.pools.directory).reserve() {
                set_last_error(AllocError::OutOfMemory);
                return None;
            }
            // What this run was planned by may have shrunk since: it must still fit.
            let least = ((granules + align - 1) * GRANULE).next_power_of_two();
            let mut segment_bytes = self.look_at_segment_bytes().max(least);
            // Another thread may take the new segment's granules first; then we ask for one more.
            let (region, base) = loop {
                match self.obtain(segment_bytes, place, || take().ok()) {
                    Some(Obtained::Region(region, base)) => break (region, base),
                    Some(Obtained::Pooled(run)) => return Some(run),
                    None => {}
                }
                // Near the budget's end a smaller segment may still fit.
                segment_bytes /= 2;
                if segment_bytes < MAX_ALIGN || segment_bytes < (granules + align - 1) * GRANULE {
                    return None;
                }
            };
            MAP.set(base, segment_bytes / GRANULE, vacant);
            let (granules, age) = (segment_bytes / GRANULE, self.age());
            self.pools.change(|directory| ((), directory.add_segment(key, region, base, granules, age)));
        }
    }

    /// Gives a span without used blocks back to its segment. The caller was its keeper and has no list that holds it.
    pub(crate) fn retire(self, span: &'static Span) {
        debug_assert!(span.is_empty());
        let (base, granules) = (span.base(), span.granules());
        MAP.set(base, granules, self.vacant());
        span.disown();
        let segment = span.segment.load(Relaxed);
        self.pools.descriptors.recycle(span);
        let age = self.age();
        self.pools.change(|directory| ((), directory.put_run(segment, base, granules, age)));
        self.pools.returns.fetch_add(1, Relaxed);
    }

    /// Gives up a span that still has used blocks. The caller is its keeper and has no list that holds it.
    pub(crate) fn abandon(self, span: &'static Span) {
        self.pools.change(|directory| ((), directory.add_orphan(span)));
        if span.wants_visit() {
            self.visit_orphan(span); // frees that came between the keeper's last look and now told nobody
        }
    }

    /// Claims an orphan for an allocator that may adopt it.
    pub(crate) fn adopt(self, request: SpanRequest) -> Option<&'static Span> {
        let key = (request.key, request.class, request.lane, request.group);
        self.pools.change(|directory| match directory.claim_orphan(key) {
            Some((span, change)) => (Some(span), change),
            None => (None, Change::default()),
        })
    }

    /// After a remote free into an orphan: takes up its remote frees, and retires it when it is empty.
    pub(crate) fn visit_orphan(self, span: &'static Span) {
        while span.claim_orphan() {
            self.pools.change(|directory| ((), directory.remove_orphan(span)));
            if self.drain_claimed(span) {
                return;
            }
        }
    }

    /// Drains a claimed span and retires or lists it again. False if it should be visited once more.
    ///
    /// In an encoded span the remote frees stay until all its blocks are free: its next keeper quarantines them.
    fn drain_claimed(self, span: &'static Span) -> bool {
        let used = usize::from(span.used.load(Relaxed));
        if !span.is_coded() || span.remote_count(used) >= used {
            span.drain(|index| span.push(index));
        }
        if span.is_empty() {
            self.retire(span);
            return true;
        }
        self.pools.change(|directory| ((), directory.add_orphan(span)));
        !span.wants_visit()
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
        let cut = round_up(size.max(1), GRANULE)?;
        // Cut from a segment where even a segment's worth of free granules is sure to hold an aligned run.
        let segment_bytes = self.segment_bytes();
        if align > GRANULE && cut <= segment_bytes / 4 && cut + align - GRANULE <= segment_bytes {
            let align = align / GRANULE;
            let span = self.descriptor(1, lane)?;
            let Some((segment, base)) = self.take_run(number, cut / GRANULE, align) else {
                self.pools.descriptors.recycle(span);
                return None;
            };
            self.shape_span(span, request, segment, base, cut / GRANULE, cut, 1);
            span.slots()[0].store(slot::LIVE, Ordering::Release);
            return Some((span, false));
        }
        let Some(bytes) = round_up(size, MAX_ALIGN) else {
            set_last_error(AllocError::InvalidSize);
            return None;
        };
        let take = || self.pools.huge.take(key.place, bytes);
        let again = |span: &'static Span| {
            span.lane.store(lane, Relaxed);
            span.slots()[0].store(slot::LIVE, Ordering::Release);
            Some((span, false))
        };
        if let Some(span) = take().or_else(|| self.reclaim(Urgency::Look).then(take).flatten()) {
            return again(span);
        }
        let span = self.descriptor(1, lane)?;
        let (region, base) = match self.obtain(bytes, key.place, take) {
            Some(Obtained::Region(region, base)) => (region, base),
            pooled => {
                self.pools.descriptors.recycle(span);
                let Some(Obtained::Pooled(span)) = pooled else { return None };
                return again(span);
            }
        };
        self.shape_span(span, request, NO_SEGMENT, base, bytes / GRANULE, bytes, 1);
        span.region.store(region.address, Relaxed);
        span.region_bytes.store(region.bytes, Relaxed);
        span.slots()[0].store(slot::LIVE, Ordering::Release);
        Some((span, self.ops.zeroed_on_allocate))
    }

    /// Frees a dedicated block; any thread may. `word` is its slot word as it was checked: live or pending.
    pub(crate) fn free_dedicated(self, span: &'static Span, word: u16) -> Result<(), FreeError> {
        if !slot::can_be_freed(word)
            || span.slots()[0].compare_exchange(word, slot::UNUSED, AcqRel, Relaxed).is_err()
        {
            return Err(FreeError::DoubleFree);
        }
        if span.segment.load(Relaxed) == NO_SEGMENT {
            self.put_huge(span);
            self.enforce_retention();
        } else {
            self.retire(span);
        }
        Ok(())
    }

    // ---- what there is ----

    /// Device and placement of a span's memory.
    pub(crate) fn place_of(self, span: &Span) -> Place {
        lock(&self.pools.directory).key_at(span.key.load(Relaxed)).place
    }

    /// How often memory came back to the pools; it wraps.
    pub(crate) fn returns(self) -> usize {
        self.pools.returns.load(Relaxed)
    }

    /// Bytes the pools hold from the backend.
    pub(crate) fn reserved(self) -> usize {
        self.pools.reserved.load(Relaxed)
    }

    /// Bytes that are free (granules and huge blocks), and the size of the largest block that they serve.
    pub(crate) fn cached(self) -> (usize, usize) {
        let (free, longest) = lock(&self.pools.directory).free_bytes();
        // Without segments nothing need be known of their size, for which a device may have to be asked.
        let cut = if longest == 0 { 0 } else { largest_block_in(longest, self.segment_bytes()) };
        (free + self.pools.huge.bytes(), cut.max(self.pools.huge.largest()))
    }
}

/// Whether a span's free list is encoded: a single block has none.
fn is_coded(capacity: usize, lane: u8) -> bool {
    capacity > 1 && Policy::from_lane(lane).encoded()
}

/// Whether the span's blocks are freed through the pool instead of a heap.
pub(crate) fn is_dedicated(span: &Span) -> bool {
    span.bin() == DEDICATED
}
