//! Events.

use crate::codes::*;
use crate::entry::{entries, lock, put};
use crate::event;
use crate::stream::{self, Operation};
use crate::{capture, context::Context};
use std::sync::Arc;

const KNOWN_FLAGS: u32 = 7;

fn record(context: &Arc<Context>, handle: usize, stream: usize) -> Outcome {
    let event = event::resolve(handle)?;
    let stream = stream::resolve_any(context, stream)?;
    let owner = event.context.upgrade().ok_or(ERROR_CONTEXT_IS_DESTROYED)?;
    if owner.handle != stream.context()?.handle {
        return Err(ERROR_INVALID_HANDLE);
    }
    let captured = lock(&stream.capture).clone();
    let recording = event.begin_recording();
    if let Some(capture) = captured {
        event.mark_captured(capture);
    }
    stream::submit(&stream, vec![Operation::Record(event, recording)])
}

unsafe fn elapsed(out: *mut f32, start: usize, end: usize) -> Outcome {
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

    fn cuEventDestroy_v2[Ctx _c](handle: usize) {
        event::destroy(handle)
    }

    fn cuEventRecord[Ctx context](handle: usize, stream: usize) {
        record(&context, handle, stream)
    }

    fn cuEventRecordWithFlags[Ctx context](handle: usize, stream: usize, flags: u32) {
        if flags > 1 {
            return Err(ERROR_INVALID_VALUE);
        }
        record(&context, handle, stream)
    }

    fn cuEventQuery[Ctx context](handle: usize) {
        let event = event::resolve(handle)?;
        if event.captured().is_some() {
            return Err(ERROR_CAPTURED_EVENT);
        }
        capture::forbid_unsafe_call()?;
        if !event.done() {
            return Err(ERROR_NOT_READY);
        }
        stream::settle();
        context.check_lost()
    }

    fn cuEventSynchronize[Ctx context](handle: usize) {
        let event = event::resolve(handle)?;
        if event.captured().is_some() {
            return Err(ERROR_CAPTURED_EVENT);
        }
        capture::forbid_unsafe_call()?;
        event.wait(event.recording());
        stream::settle();
        context.check_lost()
    }

    fn cuEventElapsedTime[Ctx _c](out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }

    fn cuEventElapsedTime_v2[Ctx _c](out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }
}
