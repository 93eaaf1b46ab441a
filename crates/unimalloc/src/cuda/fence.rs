//! Fences: points in a stream's work, marked by untimed events that are used again and again.
//!
//! Unlike an [`Event`](super::Event) a fence does not keep its stream: a foreign stream may be gone before its fences are.

use std::ptr;

use cudarc::driver::sys::{CUcontext, CUevent};

use super::device::{self, Device, Entered};
use super::driver;
use super::error::{CudaError, NOT_READY, SUCCESS};
use super::stream::Stream;
use crate::sync::{lock, Mutex};

const UNTIMED: u32 = 2;
/// Making and destroying an event costs more than recording it.
const SPARE: usize = 256;

/// An event of a device's primary context that nothing waits for.
struct Spare {
    device: u16,
    handle: CUevent,
}

// SAFETY: an event's handle may be used from any thread.
unsafe impl Send for Spare {}

static SPARES: Mutex<Vec<Spare>> = Mutex::new(Vec::new());

/// A point in a stream: passed when all that the stream was given before it is done.
pub(crate) struct Fence {
    handle: CUevent,
    device: &'static Device,
    context: CUcontext,
}

// SAFETY: an event's handle and its context may be used from any thread, also by several at once; the driver locks.
unsafe impl Send for Fence {}
// SAFETY: as above.
unsafe impl Sync for Fence {}

impl Fence {
    /// A fence after all that the stream was given so far. `None` while its work is captured into a graph: an event would
    /// become part of that.
    pub(crate) fn after(stream: &Stream) -> Result<Option<Self>, CudaError> {
        let what = "recording an event";
        let driver = driver::require()?;
        let entries = &driver.entries;
        // Another stream's capture in this thread would forbid asking and making.
        let _entered = Entered::relaxed(driver, stream.context()).map_err(|code| {
            stream.answer(what, code).err().unwrap_or_else(|| CudaError::driver(code, what))
        })?;
        let (handle, mut capturing) = (stream.raw_for_fences(), 0);
        // SAFETY: the stream is alive, and the driver writes one integer.
        stream.answer(what, unsafe { (entries.cuStreamIsCapturing)(handle, &mut capturing) })?;
        if capturing != 0 {
            return Ok(None);
        }
        let device = stream.device_ref();
        let spare = device.is_own_context(stream.context()).then(|| take_spare(device.index)).flatten();
        let event = match spare {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                // SAFETY: a context is current, and the driver writes one handle.
                stream.answer(what, unsafe { (entries.cuEventCreate)(&mut event, UNTIMED) })?;
                event
            }
        };
        // From here on a failure drops the fence.
        let fence = Self { handle: event, device, context: stream.context() };
        // SAFETY: the event is of the stream's own context, and nothing waits for what it marked before.
        stream.answer(what, unsafe { (entries.cuEventRecord)(event, handle) })?;
        Ok(Some(fence))
    }

    /// Whether the stream has passed it.
    pub(crate) fn passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive until `drop`.
        match self.call(|entries| unsafe { (entries.cuEventQuery)(self.handle) })? {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.error("asking for an event's state", code)),
        }
    }

    /// Waits until the stream has passed it. Blocks the thread.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive until `drop`.
        match self.call(|entries| unsafe { (entries.cuEventSynchronize)(self.handle) })? {
            SUCCESS => Ok(()),
            code => Err(self.error("waiting for an event", code)),
        }
    }

    fn call(&self, call: impl FnOnce(&driver::Entries) -> u32) -> Result<u32, CudaError> {
        let driver = driver::require()?;
        Ok(match Entered::relaxed(driver, self.context) {
            Ok(_entered) => call(&driver.entries),
            Err(code) => code,
        })
    }

    fn error(&self, what: &str, code: u32) -> CudaError {
        if self.device.is_own_context(self.context) {
            self.device.note(code);
        }
        CudaError::driver(code, what)
    }
}

fn take_spare(device: u16) -> Option<CUevent> {
    let mut spares = lock(&SPARES);
    let at = spares.iter().rposition(|spare| spare.device == device)?;
    Some(spares.swap_remove(at).handle)
}

/// Destroys the events that wait to be used again.
pub(crate) fn destroy_spares() {
    let spares = std::mem::take(&mut *lock(&SPARES));
    let Some(driver) = driver::running() else { return };
    for spare in spares {
        let Some(device) = driver.devices.get(usize::from(spare.device)) else { continue };
        if let Ok(_entered) = device.enter_relaxed(driver) {
            // SAFETY: taken out of the list, so this is the only handle.
            unsafe { (driver.entries.cuEventDestroy_v2)(spare.handle) };
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        let Some(driver) = driver::running() else { return };
        if self.device.lost().is_none() && self.device.is_own_context(self.context) {
            let mut spares = lock(&SPARES);
            if spares.len() < SPARE {
                return spares.push(Spare { device: self.device.index, handle: self.handle });
            }
        }
        if let Ok(_entered) = Entered::relaxed(driver, self.context) {
            // SAFETY: made by `after`, and this is its only handle.
            device::check(unsafe { (driver.entries.cuEventDestroy_v2)(self.handle) }).ok();
        }
    }
}
