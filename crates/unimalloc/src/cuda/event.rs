//! Events: moments in a stream.

use std::fmt;
use std::ptr;

use cudarc::driver::sys::CUevent;

use super::device::Entered;
use super::driver;
use super::error::{CudaError, NOT_READY};
use super::stream::Stream;

const TIMED: u32 = 0;

/// A moment in a stream: it is done when all that the stream was given before is.
///
/// Any thread may use it.
pub struct Event {
    handle: CUevent,
    /// Keeps the stream, and with it the context, for as long as the event is used.
    stream: Stream,
}

// SAFETY: an event's handle may be used from any thread, also by several at once; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn record(stream: &Stream) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: a context is current, and the driver writes one handle.
        stream.call("creating an event", |entries| unsafe { (entries.cuEventCreate)(&mut handle, TIMED) })?;
        // From here on a failure drops the event, which destroys it.
        let event = Self { handle, stream: stream.clone() };
        stream.call("recording an event", |entries| {
            // SAFETY: the event was just made in the stream's own context.
            unsafe { (entries.cuEventRecord)(handle, stream.raw()) }
        })?;
        Ok(event)
    }

    /// Whether the moment has come.
    pub fn done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive until `drop`.
        let code = self.stream.raw_call(|entries| unsafe { (entries.cuEventQuery)(self.handle) })?;
        if code == NOT_READY {
            return Ok(false);
        }
        self.stream.answer("asking for an event's state", code).map(|()| true)
    }

    /// Waits until the moment has come. Blocks the thread.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive until `drop`.
        self.stream
            .call("waiting for an event", |entries| unsafe { (entries.cuEventSynchronize)(self.handle) })
    }

    /// Milliseconds of device time since `start`, an event of the same device. Both must be done.
    pub fn elapsed_ms(&self, start: &Event) -> Result<f32, CudaError> {
        if self.stream.context() != start.stream.context() {
            return Err(CudaError::invalid(
                "times of two devices cannot be compared: record both events on one",
            ));
        }
        let mut milliseconds = 0.0;
        let code = self.stream.raw_call(|entries| {
            // SAFETY: both events are alive and of this context; the driver writes one float.
            unsafe { (entries.cuEventElapsedTime)(&mut milliseconds, start.handle, self.handle) }
        })?;
        if code == NOT_READY {
            return Err(CudaError::invalid("the events are not done yet: wait for the later one first"));
        }
        self.stream.answer("measuring time between events", code).map(|()| milliseconds)
    }

    /// The stream that the event was recorded on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn raw(&self) -> CUevent {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Some(driver) = driver::running() else { return };
        if let Ok(_entered) = Entered::into(driver, self.stream.context()) {
            // SAFETY: made by `record`, and this is its only handle. The driver keeps what still waits for it going.
            unsafe { (driver.entries.cuEventDestroy_v2)(self.handle) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("stream", &self.stream.id()).finish_non_exhaustive()
    }
}
