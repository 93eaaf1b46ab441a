//! How much a process may hold of a backend's memory, and what it holds.
//!
//! Managed memory is never refused by the driver, and anonymous memory rarely by the system: without a ceiling the
//! process is swapped to death or killed. So a backend asks here first. Left alone, the ceiling follows the memory
//! that is available, looked at again as the process grows; a configured one replaces it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use crate::error::AllocError;

use super::BackendCounters;

const LIMIT_VARIABLE: &str = "UNIMALLOC_MAX_BYTES";

/// A configured ceiling on the bytes that a process holds of one backend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// Follow the memory that is available.
    Available,
    /// This many bytes; `u64::MAX` is no limit.
    Bytes(u64),
    /// This part of all memory, above 0 and at most 100.
    Percent(f64),
}

/// Reads `'8GiB'`, `'50%'`, `'1048576'` or `'Infinity'`.
pub(crate) fn parse_limit(text: &str) -> Option<Limit> {
    let text = text.trim();
    if text == "Infinity" {
        return Some(Limit::Bytes(u64::MAX));
    }
    let unit_at = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (&text[..unit_at], text[unit_at..].trim_start());
    if unit.is_empty() {
        // Without a unit it is exact, above 2^53 too.
        return number.parse().ok().filter(|&bytes| bytes > 0).map(Limit::Bytes);
    }
    let value: f64 = number.parse().ok().filter(|&value| value > 0.0)?;
    let scale = match unit {
        "%" => return (value <= 100.0).then_some(Limit::Percent(value)),
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let bytes = (value * scale).floor();
    (bytes >= 1.0).then_some(Limit::Bytes(bytes as u64))
}

fn limit_from_environment() -> Result<Limit, AllocError> {
    static READ: OnceLock<Result<Limit, AllocError>> = OnceLock::new();
    *READ.get_or_init(|| match std::env::var(LIMIT_VARIABLE) {
        // Empty is unset: what `NAME=$LIMIT` gives where nobody set LIMIT.
        Ok(text) if text.trim().is_empty() => Ok(Limit::Available),
        Ok(text) => parse_limit(&text).ok_or(AllocError::InvalidConfiguration),
        Err(std::env::VarError::NotPresent) => Ok(Limit::Available),
        Err(std::env::VarError::NotUnicode(_)) => Err(AllocError::InvalidConfiguration),
    })
}

/// Memory as a backend sees it at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Bytes that could be used now without pushing anyone out.
    pub available: u64,
    /// All bytes there are, the base of a limit in per cent.
    pub total: u64,
}

/// The account of one backend.
///
/// `charged` = `live` + requests under way, and no request takes `charged` above the ceiling. `live`, `allocations`
/// and `frees` move only on confirmed results, so `allocations - frees` blocks of `live` bytes exist.
pub(crate) struct Budget {
    charged: AtomicU64,
    live: AtomicU64,
    allocations: AtomicU64,
    frees: AtomicU64,
    failures: AtomicU64,
    /// 0: ask the environment.
    configured: AtomicU64,
    ceiling: AtomicU64,
    /// The most that was seen available, 0 before the first look.
    baseline: AtomicU64,
}

/// Room that was granted and not yet used. Dropping it gives the room back.
#[must_use]
pub(crate) struct Grant<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Budget {
    pub(crate) const fn new() -> Self {
        Self {
            charged: AtomicU64::new(0),
            live: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            configured: AtomicU64::new(0),
            ceiling: AtomicU64::new(0),
            baseline: AtomicU64::new(0),
        }
    }

    /// Replaces the ceiling: bytes, `u64::MAX` for none, or `None` to follow the environment variable or, without it,
    /// what is available. Holds from the next growth on.
    pub(crate) fn set_limit(&self, bytes: Option<u64>) {
        self.configured.store(bytes.map_or(0, |bytes| bytes.max(1)), Ordering::Relaxed);
    }

    /// What is configured: by [`set_limit`](Self::set_limit), else by the environment, else `Available`.
    pub(crate) fn limit(&self) -> Result<Limit, AllocError> {
        match self.configured.load(Ordering::Relaxed) {
            0 => limit_from_environment(),
            bytes => Ok(Limit::Bytes(bytes)),
        }
    }

    /// The ceiling now: `share` of what is available where none is configured. `look` is called only when that or a
    /// limit in per cent depends on it; it answers `None` where it cannot know, which limits nothing.
    pub(crate) fn ceiling(&self, share: f64, look: impl FnOnce() -> Option<Seen>) -> Result<u64, AllocError> {
        let ceiling = match self.limit()? {
            Limit::Bytes(bytes) => bytes,
            Limit::Percent(percent) => look().map_or(u64::MAX, |seen| part(seen.total, percent / 100.0)),
            Limit::Available => look().map_or(u64::MAX, |seen| part(self.usable(seen.available), share)),
        };
        self.ceiling.store(ceiling, Ordering::Relaxed);
        Ok(ceiling)
    }

    /// Room for `bytes` more below a ceiling, or `Budget`.
    pub(crate) fn grant(&self, bytes: u64, ceiling: u64) -> Result<Grant<'_>, AllocError> {
        self.charged
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |charged| {
                charged.checked_add(bytes).filter(|&charged| charged <= ceiling)
            })
            .map_err(|_| AllocError::Budget)?;
        Ok(Grant { budget: self, bytes })
    }

    /// What would be available if this backend held nothing. Its blocks may be backed by pages or not: what went
    /// missing since most was seen is taken to be theirs, up to all they could fill.
    pub(crate) fn usable(&self, available: u64) -> u64 {
        let baseline = self.baseline.fetch_max(available, Ordering::Relaxed).max(available);
        let ours = self.charged.load(Ordering::Relaxed).min(baseline - available);
        available + ours
    }

    pub(crate) fn record_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// A block of `bytes` was released for certain.
    pub(crate) fn record_free(&self, bytes: u64) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        self.frees.fetch_add(1, Ordering::Relaxed);
        self.charged.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The numbers now. `limit_bytes` is that of the latest growth.
    pub(crate) fn counters(&self) -> BackendCounters {
        BackendCounters {
            allocations: self.allocations.load(Ordering::Relaxed),
            frees: self.frees.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            live_bytes: self.live.load(Ordering::Relaxed),
            limit_bytes: self.ceiling.load(Ordering::Relaxed),
        }
    }
}

impl Grant<'_> {
    /// The memory exists: the room is its own until [`Budget::record_free`].
    pub(crate) fn confirm(self) {
        self.budget.live.fetch_add(self.bytes, Ordering::Relaxed);
        self.budget.allocations.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(self);
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        self.budget.charged.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A part of some bytes, of 0 to 1.
pub(crate) fn part(bytes: u64, share: f64) -> u64 {
    // The product stays below u64::MAX for a share of at most 1; the rounding of f64 is far below a page here.
    (bytes as f64 * share) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn seen(available: u64) -> Option<Seen> {
        Some(Seen { available, total: 1000 * MIB })
    }

    #[test]
    fn limits_are_read_as_documented() {
        for (text, limit) in [
            ("1048576", Limit::Bytes(MIB)),
            ("18446744073709551615", Limit::Bytes(u64::MAX)),
            ("8GiB", Limit::Bytes(8 << 30)),
            (" 1.5 KiB ", Limit::Bytes(1536)),
            ("2TiB", Limit::Bytes(2 << 40)),
            ("7B", Limit::Bytes(7)),
            ("50%", Limit::Percent(50.0)),
            ("100%", Limit::Percent(100.0)),
            ("Infinity", Limit::Bytes(u64::MAX)),
        ] {
            assert_eq!(parse_limit(text), Some(limit), "{text:?}");
        }
        for text in [
            "", "0", "-5%", "-1", "101%", "0%", "8GB", "8gib", "GiB", "1e9", "1.2.3MiB", "NaN", "inf", "0.1B",
        ] {
            assert_eq!(parse_limit(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_grant_counts_at_once_and_only_a_confirmed_one_stays() {
        let budget = Budget::new();
        budget.set_limit(Some(10 * MIB));
        let ceiling = budget.ceiling(1.0, || unreachable!("a limit in bytes needs no look")).unwrap();
        let first = budget.grant(6 * MIB, ceiling).unwrap();
        assert_eq!(budget.grant(6 * MIB, ceiling).err(), Some(AllocError::Budget));
        assert_eq!(budget.counters().live_bytes, 0, "not there yet");
        drop(first);
        budget.grant(6 * MIB, ceiling).unwrap().confirm();
        assert_eq!(budget.counters().live_bytes, 6 * MIB);
        assert_eq!(budget.grant(5 * MIB, ceiling).err(), Some(AllocError::Budget));
        budget.record_free(6 * MIB);
        budget.grant(10 * MIB, ceiling).unwrap().confirm();
        let counters = budget.counters();
        assert_eq!((counters.allocations, counters.frees, counters.live_bytes), (2, 1, 10 * MIB));
        assert_eq!(budget.grant(u64::MAX, u64::MAX).err(), Some(AllocError::Budget), "no wrap-around");
    }

    #[test]
    fn the_ceiling_follows_what_is_available() {
        let budget = Budget::new();
        let grow = |bytes, available| budget.grant(bytes, budget.ceiling(0.8, || seen(available)).unwrap());
        grow(50 * MIB, 100 * MIB).unwrap().confirm();
        // All 50 MiB were touched: 100 would be available without us.
        grow(30 * MIB, 50 * MIB).unwrap().confirm();
        assert_eq!(grow(MIB, 20 * MIB).err(), Some(AllocError::Budget));
        // Others took all but 10: of what went missing at most our 80 count as ours.
        assert_eq!(budget.ceiling(0.8, || seen(10 * MIB)), Ok(72 * MIB));
        // Others gave memory back.
        grow(20 * MIB, 200 * MIB).unwrap().confirm();
        assert_eq!(budget.counters().limit_bytes, 160 * MIB);
    }

    #[test]
    fn what_cannot_be_seen_limits_nothing() {
        assert_eq!(Budget::new().ceiling(0.8, || None), Ok(u64::MAX));
    }

    #[test]
    fn threads_together_stay_below_the_ceiling() {
        let budget = Budget::new();
        let granted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        if let Ok(grant) = budget.grant(1, 100) {
                            grant.confirm();
                            granted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(granted.into_inner(), 100);
        assert_eq!(budget.counters().live_bytes, 100);
    }
}
