//! Events.

use crate::codes::*;
use crate::entry::{entries, lock, put};
use crate::event::{self, Event};
use crate::stream::{self, Operation};
use crate::{capture, context::Context};
use std::sync::Arc;

const KNOWN_FLAGS: u32 = 7;

fn record(current: &Outcome<Arc<Context>>, handle: usize, stream: usize) -> Outcome {
    let event = event::resolve(handle)?;
    let stream = stream::resolve(current, stream)?;
    if owner(&event)?.handle != stream.context()?.handle {
        return Err(ERROR_INVALID_HANDLE);
    }
    let captured = lock(&stream.capture).clone();
    let recording = event.begin_recording();
    if let Some(capture) = captured {
        event.mark_captured(capture);
    }
    stream::submit(&stream, vec![Operation::Record(event, recording)])
}

fn owner(event: &Event) -> Outcome<Arc<Context>> {
    event.context.upgrade().ok_or(ERROR_CONTEXT_IS_DESTROYED)
}

/// To ask an event of a capture breaks the capture; one of a capture that is over has nothing to say.
fn refuse_captured(event: &Event) -> Outcome {
    match event.captured() {
        None => Ok(()),
        Some(capture) if capture.over() => Err(ERROR_INVALID_VALUE),
        Some(capture) => {
            capture.invalidate();
            Err(ERROR_CAPTURED_EVENT)
        }
    }
}

unsafe fn elapsed(out: *mut f32, start: usize, end: usize) -> Outcome {
    owner(&*event::resolve(start)?)?.check_lost()?;
    let (start, end) = (event::resolve(start)?.time()?, event::resolve(end)?.time()?);
    let forward = end.saturating_duration_since(start).as_secs_f64();
    let backward = start.saturating_duration_since(end).as_secs_f64();
    // SAFETY: the entry point's contract: null or valid for writing.
    unsafe { put(out, ((forward - backward) * 1000.0) as f32) }
}

entries! {
    fn cuEventCreate[Ctx context](out: *mut usize, flags: u32) {
        if out.is_null() || flags & !KNOWN_FLAGS != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        put(out, event::create(&context, flags))
    }

    fn cuEventDestroy_v2[Handle _c](handle: usize) {
        owner(&*event::resolve(handle)?)?.check_lost()?;
        event::destroy(handle)
    }

    fn cuEventRecord[Handle current](handle: usize, stream: usize) {
        record(&current, handle, stream)
    }

    fn cuEventRecordWithFlags[Handle current](handle: usize, stream: usize, flags: u32) {
        if flags > 1 {
            return Err(ERROR_INVALID_VALUE);
        }
        record(&current, handle, stream)
    }

    fn cuEventQuery[Handle _c](handle: usize) {
        let event = event::resolve(handle)?;
        refuse_captured(&event)?;
        capture::forbid_unsafe_call()?;
        if !event.done() {
            return Err(ERROR_NOT_READY);
        }
        stream::settle();
        owner(&event)?.check_lost()
    }

    fn cuEventSynchronize[Handle _c](handle: usize) {
        let event = event::resolve(handle)?;
        refuse_captured(&event)?;
        capture::forbid_unsafe_call()?;
        event.wait(event.recording());
        stream::settle();
        owner(&event)?.check_lost()
    }

    fn cuEventElapsedTime[Handle _c](out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }

    fn cuEventElapsedTime_v2[Handle _c](out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }
}
