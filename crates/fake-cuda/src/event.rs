//! Events: recordings that complete in the order of their stream.

use crate::capture::Capture;
use crate::codes::*;
use crate::context::Context;
use crate::entry::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

/// `CU_EVENT_DISABLE_TIMING`.
pub const DISABLE_TIMING: u32 = 2;
const HANDLES: usize = 0x5800_0000;
const HANDLE_STEP: usize = 0x80;

#[derive(Default)]
struct State {
    recorded: u64,
    completed: u64,
    at: Option<Instant>,
    captured: Option<Arc<Capture>>,
}

/// One event.
pub struct Event {
    pub flags: u32,
    pub context: Weak<Context>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct Events {
    live: BTreeMap<usize, Arc<Event>>,
    spare: Vec<usize>,
    ever: usize,
}

static EVENTS: Mutex<Events> = Mutex::new(Events { live: BTreeMap::new(), spare: Vec::new(), ever: 0 });

impl Event {
    /// Opens a new recording and gives its number.
    pub fn begin_recording(&self) -> u64 {
        let mut state = lock(&self.state);
        state.captured = None;
        state.recorded += 1;
        state.recorded
    }

    /// The latest recording was made on a capturing stream: it has no time and cannot be asked.
    pub fn mark_captured(&self, capture: Arc<Capture>) {
        lock(&self.state).captured = Some(capture);
    }

    /// The capture that the latest recording is part of.
    pub fn captured(&self) -> Option<Arc<Capture>> {
        lock(&self.state).captured.clone()
    }

    /// The latest recording's number; 0 when there is none.
    pub fn recording(&self) -> u64 {
        lock(&self.state).recorded
    }

    /// The stream has reached that recording.
    pub fn complete(&self, recording: u64) {
        let mut state = lock(&self.state);
        state.completed = state.completed.max(recording);
        if recording == state.recorded {
            state.at = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    /// Waits for that recording.
    pub fn wait(&self, recording: u64) {
        let mut state = lock(&self.state);
        while state.completed < recording {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the latest recording is complete; an event that was never recorded is.
    pub fn done(&self) -> bool {
        let state = lock(&self.state);
        state.completed >= state.recorded
    }

    /// When the latest recording completed.
    pub fn time(&self) -> Outcome<Instant> {
        let state = lock(&self.state);
        match state.at {
            _ if state.captured.is_some() => Err(ERROR_CAPTURED_EVENT),
            _ if self.flags & DISABLE_TIMING != 0 || state.recorded == 0 => Err(ERROR_INVALID_HANDLE),
            Some(at) if state.completed >= state.recorded => Ok(at),
            _ => Err(ERROR_NOT_READY),
        }
    }
}

/// `cuEventCreate`.
pub fn create(context: &Arc<Context>, flags: u32) -> usize {
    let event = Arc::new(Event {
        flags,
        context: Arc::downgrade(context),
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let mut events = lock(&EVENTS);
    let handle = events.spare.pop().unwrap_or(HANDLES + events.ever * HANDLE_STEP);
    if handle == HANDLES + events.ever * HANDLE_STEP {
        events.ever += 1;
    }
    events.live.insert(handle, event);
    handle
}

/// `cuEventDestroy`: a recording that is under way still completes.
pub fn destroy(handle: usize) -> Outcome {
    let mut events = lock(&EVENTS);
    events.live.remove(&handle).ok_or(ERROR_INVALID_HANDLE)?;
    events.spare.push(handle);
    Ok(())
}

/// The event of a handle.
pub fn resolve(handle: usize) -> Outcome<Arc<Event>> {
    lock(&EVENTS).live.get(&handle).cloned().ok_or(ERROR_INVALID_HANDLE)
}

/// Events that exist.
pub fn live() -> u64 {
    lock(&EVENTS).live.len() as u64
}
