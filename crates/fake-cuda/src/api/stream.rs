//! Streams.

use crate::capture;
use crate::codes::*;
use crate::entry::{as_host_function, entries, lock, put, put_if_wanted};
use crate::event;
use crate::stream::{self, Operation, NON_BLOCKING};
use std::ffi::{c_int, c_void};
use std::ptr;

/// A host function and its argument, which go to the stream's thread.
struct HostFunction {
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

// SAFETY: the driver's contract makes the program promise that the pair may be used from a thread of the driver.
unsafe impl Send for HostFunction {}
// SAFETY: as above; one stream runs it at a time.
unsafe impl Sync for HostFunction {}

impl HostFunction {
    fn call(&self) {
        // SAFETY: the program gave both for exactly this call (`cuLaunchHostFunc`).
        as_host_function(|| unsafe { (self.function)(self.data) });
    }
}

entries! {
    fn cuStreamCreate[Ctx context](out: *mut usize, flags: u32) {
        if out.is_null() || flags > NON_BLOCKING {
            return Err(ERROR_INVALID_VALUE);
        }
        put(out, stream::create(&context, flags, 0))
    }

    fn cuStreamCreateWithPriority[Ctx context](out: *mut usize, flags: u32, priority: c_int) {
        if out.is_null() || flags > NON_BLOCKING {
            return Err(ERROR_INVALID_VALUE);
        }
        put(out, stream::create(&context, flags, priority.clamp(-5, 0)))
    }

    fn cuStreamDestroy_v2[Handle _c](handle: usize) {
        stream::destroy(handle)
    }

    fn cuStreamGetFlags[Handle context](handle: usize, flags: *mut u32) {
        put(flags, stream::resolve(&context, handle)?.flags)
    }

    fn cuStreamGetPriority[Handle context](handle: usize, priority: *mut c_int) {
        put(priority, stream::resolve(&context, handle)?.priority)
    }

    fn cuStreamGetId[Handle context](handle: usize, id: *mut u64) {
        put(id, stream::resolve(&context, handle)?.id)
    }

    fn cuStreamGetCtx[Handle context](handle: usize, out: *mut usize) {
        put(out, stream::resolve(&context, handle)?.context()?.handle)
    }

    fn cuStreamQuery[Handle context](handle: usize) {
        let stream = stream::resolve(&context, handle)?;
        capture::forbid_on(&stream)?;
        capture::forbid_unsafe_call()?;
        if !stream.idle() {
            return Err(ERROR_NOT_READY);
        }
        stream.synchronize()
    }

    fn cuStreamSynchronize[Handle context](handle: usize) {
        let stream = stream::resolve(&context, handle)?;
        capture::forbid_on(&stream)?;
        capture::forbid_unsafe_call()?;
        stream.synchronize()
    }

    fn cuStreamWaitEvent[Handle context](handle: usize, event: usize, _flags: u32) {
        let stream = stream::resolve(&context, handle)?;
        let event = event::resolve(event)?;
        if let Some(captured) = event.captured() {
            let mut own = lock(&stream.capture);
            match own.as_ref() {
                Some(same) if same.id == captured.id => {}
                Some(_) => return Err(ERROR_STREAM_CAPTURE_UNSUPPORTED),
                None => *own = Some(captured),
            }
            return Ok(());
        }
        match event.recording() {
            0 => Ok(()),
            recording => stream::submit(&stream, vec![Operation::AwaitEvent(event, recording)]),
        }
    }

    fn cuLaunchHostFunc[Handle context](handle: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let stream = stream::resolve(&context, handle)?;
        let host = HostFunction { function: function.ok_or(ERROR_INVALID_VALUE)?, data };
        stream::run(&stream, move || {
            host.call();
            Ok(())
        })
    }

    fn cuStreamBeginCapture_v2[Handle context](handle: usize, mode: u32) {
        capture::begin(&stream::resolve(&context, handle)?, mode)
    }

    fn cuStreamEndCapture[Handle context](handle: usize, graph: *mut usize) {
        if graph.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        put(graph, 0)?;
        put(graph, capture::end(&stream::resolve(&context, handle)?)?)
    }

    fn cuStreamIsCapturing[Handle context](handle: usize, status: *mut u32) {
        let stream = stream::resolve(&context, handle)?;
        let own = lock(&stream.capture);
        put(status, own.as_ref().map_or(0, |capture| capture.status()))
    }

    fn cuStreamGetCaptureInfo_v2[Handle context](
        handle: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize, count: *mut usize,
    ) {
        let stream = stream::resolve(&context, handle)?;
        let own = lock(&stream.capture);
        put(status, own.as_ref().map_or(0, |capture| capture.status()))?;
        put_if_wanted(id, own.as_ref().map_or(0, |capture| capture.id));
        put_if_wanted(graph, 0);
        put_if_wanted(dependencies, ptr::null());
        put_if_wanted(count, 0);
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v3[Handle context](
        handle: usize, status: *mut u32, id: *mut u64, graph: *mut usize, dependencies: *mut *const usize,
        edges: *mut *const c_void, count: *mut usize,
    ) {
        let stream = stream::resolve(&context, handle)?;
        let own = lock(&stream.capture);
        put(status, own.as_ref().map_or(0, |capture| capture.status()))?;
        put_if_wanted(id, own.as_ref().map_or(0, |capture| capture.id));
        put_if_wanted(graph, 0);
        put_if_wanted(dependencies, ptr::null());
        put_if_wanted(edges, ptr::null());
        put_if_wanted(count, 0);
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode[Init _r](mode: *mut u32) {
        if mode.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        put(mode, capture::exchange_mode(mode.read())?)
    }
}
