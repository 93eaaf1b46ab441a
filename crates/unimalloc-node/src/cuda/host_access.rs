//! Devices whose managed memory the CPU may not touch while a kernel runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use unimalloc::cuda::{Event, Stream};

/// Launches on devices where the CPU may not touch managed memory meanwhile, made all the same.
static FORBIDDEN_UNTIL: Mutex<Vec<Event>> = Mutex::new(Vec::new());
static HOST_ACCESS_FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on until the stream is done, this package touches no managed memory by the CPU.
pub fn forbid_until_done(stream: &Stream) {
    // Recorded under the lock: of two threads that launch on one stream, the later event is noted last.
    let mut events = FORBIDDEN_UNTIL.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok(event) = stream.record() else { return };
    // It speaks for the earlier ones of its stream: a program that only launches keeps one for each.
    match events.iter_mut().find(|other| other.stream().id() == stream.id()) {
        Some(latest) => *latest = event,
        None => {
            events.retain(is_pending);
            events.push(event);
        }
    }
    HOST_ACCESS_FORBIDDEN.store(true, Ordering::Release);
}

/// Whether the CPU may touch managed memory.
pub fn is_allowed() -> bool {
    if !HOST_ACCESS_FORBIDDEN.load(Ordering::Acquire) {
        return true;
    }
    let mut events = FORBIDDEN_UNTIL.lock().unwrap_or_else(PoisonError::into_inner);
    events.retain(is_pending);
    HOST_ACCESS_FORBIDDEN.store(!events.is_empty(), Ordering::Release);
    events.is_empty()
}

fn is_pending(event: &Event) -> bool {
    matches!(event.done(), Ok(false))
}
