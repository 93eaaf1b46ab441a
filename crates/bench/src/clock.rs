//! Processor time of this process, of all its threads.
//!
//! On a machine that others use too, wall time measures the others. What this clock misses is a thread that sleeps while it
//! waits for a lock; no workload is made to wait, and what a peer spends on spinning or on the system counts.

use std::time::Duration;

/// A moment.
#[derive(Clone, Copy)]
pub struct Start(Duration);

impl Start {
    /// Starts to measure.
    pub fn now() -> Self {
        Self(spent())
    }

    /// Processor time that was spent since.
    pub fn elapsed(self) -> Duration {
        spent().saturating_sub(self.0)
    }
}

#[cfg(unix)]
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every system with POSIX timers, and the struct is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Wall time: there is no such clock with a resolution that would do.
#[cfg(not(unix))]
fn spent() -> Duration {
    static FIRST: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    FIRST.get_or_init(std::time::Instant::now).elapsed()
}
