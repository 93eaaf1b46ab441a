//! Recounts what the pools say they hold, from the address map up. For tests; no other thread may use the backend
//! meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use super::directory::Directory;
use super::{Home, MAP};
use crate::meta::geometry::{GRANULE, GRANULE_SHIFT};
use crate::meta::slot;
use crate::meta::span::{Span, NO_SEGMENT};
use crate::sync::{lock, Ordering::Relaxed};

/// What a recount found. Blocks and their bytes, by where they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Audit {
    /// Handed out.
    pub live_blocks: usize,
    /// Their bytes, as rounded.
    pub live_bytes: usize,
    /// Those of them that their users may touch.
    pub usable_bytes: usize,
    /// In the caches of heaps.
    pub cached_blocks: usize,
    /// Freed, and waiting for the GPU.
    pub pending_blocks: usize,
    /// Freed, and kept back from reuse.
    pub quarantined_blocks: usize,
    /// Freed by another thread, and not taken up yet.
    pub remote_blocks: usize,
    /// Lent to a borrower that hands them out itself.
    pub held_blocks: usize,
    /// Spans cut from segments, and huge blocks in use.
    pub spans: usize,
    /// Spans of threads that ended.
    pub orphans: usize,
}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds {
        Ok(())
    } else {
        Err(what())
    }
}

impl Home {
    /// Every span of these pools, by its first address; checks that each covers exactly its own granules.
    fn mapped_spans(self) -> Result<BTreeMap<usize, &'static Span>, String> {
        let mut granules: BTreeMap<usize, &'static Span> = BTreeMap::new();
        MAP.for_each(|granule, span| {
            if self.owns(span) {
                granules.insert(granule << GRANULE_SHIFT, span);
            }
        });
        let mut spans = BTreeMap::new();
        let mut covered = 0;
        let vacant = self.pools.vacant.get().copied();
        let is_vacant = |span: &'static Span| vacant.is_some_and(|vacant| std::ptr::eq(span, vacant));
        for (&address, &span) in granules.iter().filter(|(_, span)| !is_vacant(span)) {
            covered += 1;
            let within = address >= span.base() && address < span.base() + span.granules() * GRANULE;
            require(within, || format!("granule {address:x} maps to the span at {:x}", span.base()))?;
            spans.insert(span.base(), span);
        }
        let expected: usize = spans.values().map(|span| span.granules()).sum();
        require(covered == expected, || format!("{covered} granules are mapped, spans have {expected}"))?;
        Ok(spans)
    }

    fn audit_segments(
        self,
        directory: &Directory,
        spans: &BTreeMap<usize, &'static Span>,
    ) -> Result<usize, String> {
        let (mut empty, mut orphaned, mut reserved) = ((0, 0), (0, 0), 0);
        for (id, segment) in directory.segments() {
            reserved += segment.bytes();
            let mut orphans = 0;
            for granule in 0..segment.granules {
                let address = segment.base + granule * GRANULE;
                let Some(span) = super::span_of(address) else {
                    return Err(format!("granule {address:x} of a segment is not mapped"));
                };
                let vacant = self.pools.vacant.get().is_some_and(|vacant| std::ptr::eq(span, *vacant));
                require(vacant == segment.is_free(granule), || {
                    format!("granule {address:x}: vacant is {vacant}")
                })?;
                if !vacant {
                    require(span.segment.load(Relaxed) == id, || {
                        format!("span {address:x} is of another segment")
                    })?;
                    orphans +=
                        usize::from(span.base() == address && span.state() == crate::meta::span::ORPHAN);
                }
            }
            require(orphans == segment.orphans(), || {
                format!("segment {id} counts {} orphans, not {orphans}", segment.orphans())
            })?;
            let bytes = segment.bytes();
            if segment.is_empty() {
                empty = (empty.0 + 1, empty.1 + bytes);
            }
            if orphans > 0 {
                orphaned = (orphaned.0 + 1, orphaned.1 + bytes);
            }
        }
        let gauges = [&self.pools.segment, &self.pools.orphan].map(|pool| (pool.len(), pool.bytes()));
        require(gauges == [empty, orphaned], || format!("gauges {gauges:?}, found {empty:?} {orphaned:?}"))?;
        for (base, span) in spans {
            let segment = span.segment.load(Relaxed);
            let known = segment == NO_SEGMENT || directory.segments().any(|(id, _)| id == segment);
            require(known, || format!("span {base:x} is in segment {segment}, which is not there"))?;
        }
        let listed: BTreeSet<usize> = directory.orphans().iter().map(|span| span.base()).collect();
        for (base, span) in spans {
            let orphan = span.state() == crate::meta::span::ORPHAN;
            require(listed.contains(base) == orphan, || format!("span {base:x}: orphan is {orphan}"))?;
        }
        Ok(reserved)
    }

    /// Counts everything again. An error says what does not add up.
    pub(crate) fn audit(self) -> Result<Audit, String> {
        let spans = self.mapped_spans()?;
        let mut audit = Audit::default();
        let directory = lock(&self.pools.directory);
        let mut reserved = self.audit_segments(&directory, &spans)?;
        reserved += directory.strays.iter().map(|region| region.bytes).sum::<usize>();
        drop(directory);
        let cached: BTreeSet<usize> = self.pools.huge.all().iter().map(|span| span.base()).collect();
        let mut cached_bytes = 0;
        for (base, span) in &spans {
            let count = span
                .recount()
                .map_err(|what| format!("span {base:x}, blocks of {}: {what}", span.block()))?;
            if span.segment.load(Relaxed) == NO_SEGMENT {
                reserved += span.region_bytes.load(Relaxed);
                let free = span.slots()[0].load(Relaxed) == slot::UNUSED;
                require(free == cached.contains(base), || format!("huge block {base:x}: free is {free}"))?;
                cached_bytes += if free { span.block() } else { 0 };
                if free {
                    continue;
                }
            }
            audit.live_blocks += count.live;
            audit.live_bytes += count.live * span.block();
            audit.usable_bytes += count.usable;
            audit.cached_blocks += count.cached;
            audit.pending_blocks += count.pending;
            audit.quarantined_blocks += count.quarantined;
            audit.remote_blocks += count.remote;
            audit.held_blocks += count.held;
            audit.spans += 1;
            audit.orphans += usize::from(span.state() == crate::meta::span::ORPHAN);
        }
        let huge = (self.pools.huge.len(), self.pools.huge.bytes());
        require(huge == (cached.len(), cached_bytes), || {
            format!("huge pool says {huge:?}, found {} of {cached_bytes} bytes", cached.len())
        })?;
        require(reserved == self.reserved(), || {
            format!("{} bytes reserved, found {reserved}", self.reserved())
        })?;
        Ok(audit)
    }
}
