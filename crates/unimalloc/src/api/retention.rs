//! How much free memory stays cached, and for how long.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::free_functions::give_back_caches;
use crate::backend::fork;
use crate::cuda::concurrent_managed_access;
use crate::error::{set_last_error, AllocError};
use crate::pool::{Audit, HasSegmentPool, Home, Urgency};
use crate::stream::pending_stats;
use crate::thread::slots::ThreadSlots;

/// Keeps at most this many bytes of free memory of a backend, and gives back what is above it now; returns the bytes given
/// back. `usize::MAX`, where a process begins, keeps all until [`trim`](crate::trim), [`decay`] or a refusal of the
/// backend.
///
/// The limit concerns whole free segments and huge blocks. It is enforced when a huge block is freed and by this call,
/// never at a thread's end, where the backend must not be called. A free that goes beyond it may wait for the device.
pub fn set_retention<B: ThreadSlots>(bytes: usize) -> usize {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return 0;
    }
    give_back_caches::<B>(Urgency::Look);
    Home::of::<B>().set_retention(bytes)
}

/// Gives back half, and at least one region, of the memory of a backend that has been free ever since the previous call;
/// returns the bytes given back. Called at an interval it lets idle memory fade away while memory in use stays: nothing
/// is given back that was used since the previous call. May wait for the device.
///
/// Nothing calls it unless you do, or [`DecayThread`].
pub fn decay<B: ThreadSlots>() -> usize {
    if fork::forked() {
        set_last_error(AllocError::Forked);
        return 0;
    }
    fade::<B>(true)
}

fn fade<B: ThreadSlots>(takes_up_pending: bool) -> usize {
    B::shared().give_back_caches();
    Home::of::<B>().decay(takes_up_pending)
}

/// A thread that calls [`decay`] at an interval until this handle is dropped.
///
/// Where the CPU may not touch managed memory while the device works, it leaves frees that wait for the GPU to the program's own
/// threads: taking them up may have the device poison them, at a moment that no other thread could know of.
#[derive(Debug)]
pub struct DecayThread {
    /// Dropped to stop the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl DecayThread {
    /// Starts the thread.
    pub fn start<B: ThreadSlots>(interval: Duration) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = thread::Builder::new().name("unimalloc-decay".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                // Asked only where there are any: a program without CUDA needs no driver.
                fade::<B>(pending_stats().blocks > 0 && concurrent_managed_access());
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for DecayThread {
    /// Stops the thread and waits for it: no backend call of it comes after this.
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            if !fork::forked() {
                let _ = thread.join();
            }
        }
    }
}

/// Counts every block and region of a backend again and compares that with its books; an error says what does not add up.
/// For tests: no other thread may use the backend meanwhile. Slow.
pub fn audit<B: HasSegmentPool>() -> Result<Audit, String> {
    if fork::forked() {
        return Err(AllocError::Forked.to_string());
    }
    Home::of::<B>().audit()
}
