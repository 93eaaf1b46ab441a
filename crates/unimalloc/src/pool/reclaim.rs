//! Giving memory back to the backend: on request, when it runs short, above a retention limit, and by decay.
//!
//! The largest free regions go first. One that the backend does not take stays cached and is tried again another time.

use super::directory::{Change, Directory, Region, Segment};
use super::{Home, Urgency, MAP};
use crate::log::say;
use crate::meta::span::Span;
use crate::sync::{
    lock, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// A look for memory to release ends when the backend refused this many regions.
const REFUSALS: usize = 16;

/// Waits for other threads' releases in steps of this, and no more than so often: a driver that hangs must not hang all.
const STEP: std::time::Duration = std::time::Duration::from_micros(50);
const STEPS: usize = 200;

/// While it lives, its thread is giving regions back.
struct Releasing(&'static AtomicUsize);

impl Releasing {
    fn begin(home: Home) -> Self {
        home.pools.releasing.fetch_add(1, AcqRel);
        Self(&home.pools.releasing)
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// A free region that was taken out of the pools to be given back.
enum Taken {
    Huge(&'static Span),
    Segment(Box<Segment>),
}

/// What releasing has to reach.
#[derive(Clone, Copy)]
enum Goal {
    /// At least this many bytes given back.
    Release(usize),
    /// At most this many bytes cached.
    Keep(usize),
}

impl Home {
    pub(super) fn age(self) -> usize {
        self.pools.age.load(Relaxed)
    }

    pub(super) fn put_huge(self, span: &'static Span) {
        self.pools.huge.put(self.place_of(span), span, self.age());
        self.pools.returns.fetch_add(1, Relaxed);
    }

    /// Bytes of whole regions that could be given back.
    fn releasable(self) -> usize {
        self.pools.segment.bytes() + self.pools.huge.bytes()
    }

    /// Takes the largest region that has been free since before `before` out of the pools.
    fn take_free(self, before: usize) -> Option<Taken> {
        let segment_bytes = self.segment_bytes();
        if let Some(span) = self.pools.huge.take_largest(segment_bytes, before) {
            return Some(Taken::Huge(span));
        }
        let empty = self.pools.change(|directory| match directory.remove_empty(before) {
            Some((segment, change)) => (Some(segment), change),
            None => (None, Change::default()),
        });
        if let Some(segment) = empty {
            return Some(Taken::Segment(Box::new(segment)));
        }
        self.pools.huge.take_largest(0, before).map(Taken::Huge)
    }

    /// Gives a region back; answers its bytes, or the region where the backend did not take it.
    fn release(self, taken: Taken) -> Result<usize, Taken> {
        let (base, granules, region) = match &taken {
            Taken::Huge(span) => {
                let address = span.region.load(Relaxed);
                (span.base(), span.granules(), Region { address, bytes: span.region_bytes.load(Relaxed) })
            }
            Taken::Segment(segment) => (segment.base, segment.granules, segment.region),
        };
        // Before the region goes: its addresses may come back to another thread at once.
        MAP.set(base, granules, None);
        if !self.give_back(region) {
            let value = if let Taken::Huge(span) = &taken { Some(*span) } else { self.vacant() };
            MAP.set(base, granules, value);
            return Err(taken);
        }
        self.pools.reserved.fetch_sub(region.bytes, Relaxed);
        if let Taken::Huge(span) = taken {
            self.pools.descriptors.recycle(span);
        }
        Ok(region.bytes)
    }

    /// Puts a region back that the backend did not take.
    fn restore(self, taken: Taken) {
        match taken {
            Taken::Huge(span) => self.put_huge(span),
            Taken::Segment(segment) => {
                self.pools.change(|directory| ((), directory.restore(*segment)));
            }
        }
    }

    /// Releases regions free since before `before`, largest first, until the goal is reached or nothing is left.
    fn release_until(self, goal: Goal, before: usize) -> usize {
        let _releasing = Releasing::begin(self);
        let mut released = 0;
        let mut refused = Vec::new();
        loop {
            let reached = match goal {
                Goal::Release(needed) => released >= needed,
                // What was refused is out of the pools for the moment, and still held.
                Goal::Keep(keep) => self.releasable() <= keep,
            };
            if reached || refused.len() == REFUSALS {
                break;
            }
            let Some(taken) = self.take_free(before) else { break };
            match self.release(taken) {
                Ok(bytes) => released += bytes,
                Err(taken) => refused.push(taken),
            }
        }
        refused.into_iter().for_each(|taken| self.restore(taken));
        released
    }

    /// Tries again to give back regions that could never be used.
    fn release_strays(self) -> usize {
        let _releasing = Releasing::begin(self);
        let strays = std::mem::take(&mut lock(&self.pools.directory).strays);
        let mut released = 0;
        for region in strays {
            if self.give_back(region) {
                self.pools.reserved.fetch_sub(region.bytes, Relaxed);
                released += region.bytes;
            } else {
                lock(&self.pools.directory).strays.push(region);
            }
        }
        released
    }

    /// Waits, for some milliseconds at most, until no other thread is giving regions back; once in any case lets others go on.
    /// The calling thread gives none back.
    pub(super) fn wait_for_releases(self) {
        for _ in 0..STEPS {
            // A model checker runs the other threads by itself, and has no clock.
            if cfg!(any(loom, shuttle)) {
                return;
            }
            std::thread::sleep(STEP);
            if self.pools.releasing.load(Acquire) == 0 {
                return;
            }
        }
    }

    /// Releases cached memory until at least `needed` bytes were given back or nothing is left; the largest first.
    /// May wait for the device.
    pub(crate) fn release_cached(self, needed: usize) -> usize {
        self.collect_orphans();
        let strays = self.release_strays();
        strays + self.release_until(Goal::Release(needed.saturating_sub(strays)), usize::MAX)
    }

    /// Releases cached memory down to `keep` bytes.
    pub(crate) fn trim(self, keep: usize) -> usize {
        self.collect_orphans();
        let released = self.release_strays() + self.release_until(Goal::Keep(keep), usize::MAX);
        say!(
            if released > 0 { Level::Info } else { Level::Debug },
            "trim keep={keep} released={released} reserved={}",
            self.reserved()
        );
        released
    }

    /// Sets the most free memory to keep, and releases what is above it.
    pub(crate) fn set_retention(self, bytes: usize) -> usize {
        self.pools.retained.store(bytes, Relaxed);
        self.trim(bytes)
    }

    /// Releases what is above the retention limit. Only calls of the user come here, never a thread's end.
    pub(super) fn enforce_retention(self) {
        let retained = self.pools.retained.load(Relaxed);
        if retained != usize::MAX && self.releasable() > retained {
            let released = self.release_until(Goal::Keep(retained), usize::MAX);
            say!(Level::Info, "retention keep={retained} released={released}");
        }
    }

    /// Releases half of what has been free since before the previous call, at least one region.
    pub(crate) fn decay(self, takes_up_pending: bool) -> usize {
        if takes_up_pending {
            self.reclaim(Urgency::Look);
        }
        self.collect_orphans();
        // What was put away at this age or later has not been idle for a whole interval yet.
        let before = self.pools.age.fetch_add(1, Relaxed);
        let idle = self.pools.huge.idle_bytes(before) + lock(&self.pools.directory).idle_bytes(before);
        let released = self.release_strays() + self.release_until(Goal::Release(idle.div_ceil(2)), before);
        say!(Level::Info, "decay idle={idle} released={released}");
        released
    }

    /// Takes up the remote frees of orphans, so that those without blocks become free memory.
    fn collect_orphans(self) {
        let spans = self.pools.change(Directory::claim_all_orphans);
        for span in spans {
            if !self.drain_claimed(span) {
                self.visit_orphan(span);
            }
        }
    }
}
