//! What the pools of one backend hold: segments with their free runs, and orphaned spans. Plain data behind one lock;
//! nothing here calls the backend.

use std::collections::BTreeMap;

use super::runs::{RunIndex, Runs};
use crate::meta::geometry::GRANULE;
use crate::meta::span::Span;
use crate::placement::Place;
use crate::sync::Ordering::Relaxed;

/// Memory is pooled by device and placement, and blocks with encoded free lists are kept apart from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolKey {
    pub place: Place,
    pub encoded: bool,
}

/// What an orphan's adopter must agree with: pool key, size class, lane and group.
type OrphanKey = (u32, u16, u8, u8);

/// A region that the backend gave us, cut into granules.
pub(super) struct Segment {
    pub base: usize,
    pub granules: usize,
    /// What to give back: the region as the backend returned it.
    pub region: Region,
    pub key: u32,
    runs: Runs,
    /// Its position in the run index.
    position: u32,
    /// Orphaned spans in it.
    orphans: u32,
    /// Where it is empty: the age of the pools when it became so.
    since: usize,
}

/// A region as the backend returned it. Our part of it may start later, for alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub address: usize,
    pub bytes: usize,
}

impl Segment {
    pub fn is_empty(&self) -> bool {
        self.runs.free() == self.granules
    }

    pub fn bytes(&self) -> usize {
        self.region.bytes
    }

    fn is_idle(&self, before: usize) -> bool {
        self.is_empty() && (self.since < before || before == usize::MAX)
    }

    /// Whether the granule is free.
    pub fn is_free(&self, granule: usize) -> bool {
        self.runs.is_free(granule)
    }

    /// Orphaned spans in it.
    pub fn orphans(&self) -> usize {
        self.orphans as usize
    }
}

/// How a change moved the numbers of the segment and orphan pools.
#[derive(Default, Clone, Copy)]
pub(super) struct Change {
    pub empty_segments: isize,
    pub empty_bytes: isize,
    pub orphan_segments: isize,
    pub orphan_bytes: isize,
}

pub(super) struct Directory {
    keys: Vec<PoolKey>,
    indexes: Vec<RunIndex>,
    segments: Vec<Option<Segment>>,
    vacant_ids: Vec<u32>,
    /// Heads of doubly linked lists through the spans.
    orphans: BTreeMap<OrphanKey, &'static Span>,
    /// Regions that could not be used and that the backend did not take back yet.
    pub strays: Vec<Region>,
}

impl Directory {
    pub const fn new() -> Self {
        Self {
            keys: Vec::new(),
            indexes: Vec::new(),
            segments: Vec::new(),
            vacant_ids: Vec::new(),
            orphans: BTreeMap::new(),
            strays: Vec::new(),
        }
    }

    /// The number of a key, given out on first use and constant from then on.
    pub fn key(&mut self, key: PoolKey) -> u32 {
        if let Some(at) = self.keys.iter().position(|known| *known == key) {
            return at as u32;
        }
        self.keys.push(key);
        self.indexes.push(RunIndex::new());
        self.keys.len() as u32 - 1
    }

    pub fn key_at(&self, key: u32) -> PoolKey {
        self.keys[key as usize]
    }

    fn reindex(&mut self, id: u32, change: impl FnOnce(&mut Segment)) {
        self.unindex(id);
        let Some(segment) = &mut self.segments[id as usize] else { return };
        change(segment);
        segment.position = self.indexes[segment.key as usize].insert(segment.runs.longest(), id);
    }

    fn unindex(&mut self, id: u32) {
        let Some(segment) = &self.segments[id as usize] else { return };
        let (longest, position) = (segment.runs.longest(), segment.position);
        if let Some(moved) = self.indexes[segment.key as usize].remove(longest, position) {
            if let Some(moved) = &mut self.segments[moved as usize] {
                moved.position = position;
            }
        }
    }

    /// Makes room for one more segment. False if the process has no memory left for it.
    pub fn reserve(&mut self) -> bool {
        // And for its number, once it is given back.
        !self.vacant_ids.is_empty()
            || (self.segments.try_reserve(1).is_ok()
                && self.vacant_ids.try_reserve(self.segments.len() + 1).is_ok())
    }

    /// Adds a region whose usable part starts at `base`.
    pub fn add_segment(
        &mut self,
        key: u32,
        region: Region,
        base: usize,
        granules: usize,
        age: usize,
    ) -> Change {
        let runs = Runs::new(granules);
        let id = self.vacant_ids.pop().unwrap_or_else(|| {
            self.segments.push(None);
            self.segments.len() as u32 - 1
        });
        let position = self.indexes[key as usize].insert(runs.longest(), id);
        self.segments[id as usize] =
            Some(Segment { base, granules, region, key, runs, position, orphans: 0, since: age });
        Change { empty_segments: 1, empty_bytes: region.bytes as isize, ..Change::default() }
    }

    /// Takes a run of `count` granules, its address a multiple of `align` granules; answers segment and address.
    pub fn take_run(&mut self, key: u32, count: usize, align: usize) -> Option<(u32, usize, Change)> {
        // A run this long holds an aligned start wherever it begins. Bases are aligned to 2 MiB.
        let id = self.indexes[key as usize].find(count + align - 1)?;
        let mut change = Change::default();
        let mut start = 0;
        self.reindex(id, |segment| {
            if segment.is_empty() {
                change.empty_segments -= 1;
                change.empty_bytes -= segment.bytes() as isize;
            }
            start = segment.runs.take(count, align).map_or(0, |at| segment.base + at * GRANULE);
        });
        debug_assert_ne!(start, 0);
        Some((id, start, change))
    }

    /// Gives a run back.
    pub fn put_run(&mut self, id: u32, address: usize, count: usize, age: usize) -> Change {
        let mut change = Change::default();
        self.reindex(id, |segment| {
            segment.runs.put((address - segment.base) / GRANULE, count);
            if segment.is_empty() {
                segment.since = age;
                change.empty_segments += 1;
                change.empty_bytes += segment.bytes() as isize;
            }
        });
        change
    }

    /// Takes out the largest segment that has been empty since before `before`, so that it can be given back.
    pub fn remove_empty(&mut self, before: usize) -> Option<(Segment, Change)> {
        let idle = |segment: &Segment| segment.is_idle(before).then(|| segment.bytes());
        let sizes = self.segments.iter().enumerate();
        let (_, id) = sizes.filter_map(|(id, segment)| Some((idle(segment.as_ref()?)?, id))).max()?;
        self.unindex(id as u32);
        let segment = self.segments[id].take()?;
        self.vacant_ids.push(id as u32);
        let change =
            Change { empty_segments: -1, empty_bytes: -(segment.bytes() as isize), ..Change::default() };
        Some((segment, change))
    }

    /// Puts back a segment that the backend refused to take.
    pub fn restore(&mut self, segment: Segment) -> Change {
        self.add_segment(segment.key, segment.region, segment.base, segment.granules, segment.since)
    }

    /// All segments; for checks.
    pub fn segments(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0..).zip(&self.segments).filter_map(|(id, segment)| Some((id, segment.as_ref()?)))
    }

    /// All listed orphans; for checks.
    pub fn orphans(&self) -> Vec<&'static Span> {
        self.orphans
            .values()
            .flat_map(|head| std::iter::successors(Some(*head), |span| span.next()))
            .collect()
    }

    /// Bytes of the segments that have been empty since before `before`.
    pub fn idle_bytes(&self, before: usize) -> usize {
        self.segments.iter().flatten().filter(|segment| segment.is_idle(before)).map(Segment::bytes).sum()
    }

    /// Bytes of free granules, and of the longest free run.
    pub fn free_bytes(&self) -> (usize, usize) {
        let free = self.segments.iter().flatten().map(|segment| segment.runs.free()).sum::<usize>();
        let longest = self.indexes.iter().map(RunIndex::longest).max().unwrap_or(0);
        (free * GRANULE, longest * GRANULE)
    }

    // ---- orphans ----

    fn orphan_key(span: &Span) -> OrphanKey {
        (span.key.load(Relaxed), span.class.load(Relaxed), span.lane.load(Relaxed), span.group.load(Relaxed))
    }

    fn count_orphan(&mut self, span: &Span, up: bool) -> Change {
        let mut change = Change::default();
        if let Some(Some(segment)) = self.segments.get_mut(span.segment.load(Relaxed) as usize) {
            let before = segment.orphans;
            segment.orphans = if up { before + 1 } else { before.saturating_sub(1) };
            let step = isize::from(segment.orphans > 0) - isize::from(before > 0);
            change.orphan_segments = step;
            change.orphan_bytes = step * segment.bytes() as isize;
        }
        change
    }

    /// Lists a span whose thread ended and makes it claimable.
    pub fn add_orphan(&mut self, span: &'static Span) -> Change {
        let key = Self::orphan_key(span);
        let head = self.orphans.insert(key, span);
        span.link_before(head);
        let change = self.count_orphan(span, true);
        span.orphan();
        change
    }

    /// Takes a span that its caller claimed off its list.
    pub fn remove_orphan(&mut self, span: &'static Span) -> Change {
        if !span.is_listed() {
            return Change::default();
        }
        let key = Self::orphan_key(span);
        let next = span.unlink();
        if self.orphans.get(&key).is_some_and(|head| std::ptr::eq(*head, span)) {
            match next {
                Some(next) => self.orphans.insert(key, next),
                None => self.orphans.remove(&key),
            };
        }
        self.count_orphan(span, false)
    }

    /// Claims an orphan that an allocator with this key may adopt. Spans that a freeing thread claimed a moment ago
    /// are passed over; it takes them off the list itself.
    pub fn claim_orphan(&mut self, key: OrphanKey) -> Option<(&'static Span, Change)> {
        let mut at = self.orphans.get(&key).copied();
        while let Some(span) = at {
            if span.claim_orphan() {
                let change = self.remove_orphan(span);
                return Some((span, change));
            }
            at = span.next();
        }
        None
    }

    /// Claims every orphan that can be claimed now.
    pub fn claim_all_orphans(&mut self) -> (Vec<&'static Span>, Change) {
        let keys: Vec<_> = self.orphans.keys().copied().collect();
        let (mut claimed, mut sum) = (Vec::new(), Change::default());
        for key in keys {
            while let Some((span, change)) = self.claim_orphan(key) {
                claimed.push(span);
                sum.orphan_segments += change.orphan_segments;
                sum.orphan_bytes += change.orphan_bytes;
            }
        }
        (claimed, sum)
    }
}
