//! Streams: queues of work for a device.

use std::ffi::c_uint;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys::{CUcontext, CUmemLocation, CUmemLocationType, CUstream};

use super::device::{self, device, Device, Entered};
use super::driver::{self, Driver, Entries};
use super::error::{CudaError, INVALID_CONTEXT, NOT_READY, SUCCESS};
use super::event::Event;
use crate::placement::{Hint, PAGES_MOVE_AT_A_LAUNCH};

const NON_BLOCKING: c_uint = 1;
/// Handles that stand for the legacy and the per-thread default stream of whichever context is current.
const SPECIAL_HANDLES: std::ops::RangeInclusive<u64> = 0..=2;
/// `CU_STREAM_LEGACY`: work in it comes after all that the context's blocking streams were given before.
#[cfg_attr(all(test, shuttle), allow(dead_code))]
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`: on each thread it means another stream, a blocking one.
const PER_THREAD: usize = 2;
/// Below this a prefetch cannot exhaust a device, so asking what is free would only cost time.
const CAPPED_FROM: usize = 16 << 20;

/// Where a prefetch moves pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefetchTo {
    /// To the stream's device.
    Device,
    /// To the CPU's memory.
    Host,
}

/// A queue of work for one device, in order. A clone is the same queue.
///
/// Streams made here do not wait for the legacy default stream. Any thread may use one; its own current context is
/// left as it was. When the last clone is dropped, work that was queued still completes.
#[derive(Clone)]
pub struct Stream {
    /// Of a foreign stream: what its last handle does. Dropped before `inner`.
    _farewell: Option<Arc<Farewell>>,
    inner: Arc<Inner>,
}

struct Inner {
    id: u64,
    device: &'static Device,
    /// That of the stream: the device's primary one, or a foreign stream's own.
    context: CUcontext,
    handle: CUstream,
    owned: bool,
    /// The number that blocks are marked with, of the layer that frees wait in; 0 before the first mark.
    track: AtomicU64,
}

/// Shared by the handles of a foreign stream that the program has, not by those of the layer that frees wait in.
struct Farewell(Arc<Inner>);

/// A foreign stream for the layer that frees wait in. Its owner may destroy it once the farewell has returned, so what was
/// upgraded is used only where that layer keeps the farewell waiting.
pub(crate) struct WeakStream(Weak<Inner>);

impl WeakStream {
    pub(crate) fn upgrade(&self) -> Option<Stream> {
        self.0.upgrade().map(|inner| Stream { _farewell: None, inner })
    }
}

// SAFETY: a stream's handle and its context may be used from any thread, also by several at once; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Stream {
    /// A new stream of the device.
    pub fn new(device_index: u16) -> Result<Self, CudaError> {
        let driver = driver::require()?;
        let device = device(driver, device_index)?;
        let context = device.context(driver).map_err(|code| CudaError::driver(code, "making a context"))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device's context is current, and the driver writes one handle.
        device.call("creating a stream", |entries| unsafe {
            (entries.cuStreamCreate)(&mut handle, NON_BLOCKING)
        })?;
        Ok(Self { _farewell: None, inner: Inner::new(device, context, handle, true) })
    }

    /// The stream that launches without one use: a stream of its own per device, which does not wait for the legacy
    /// default stream.
    pub fn default_for(device_index: u16) -> Result<Self, CudaError> {
        device(driver::require()?, device_index)?.default_stream().cloned()
    }

    /// A stream that other code made, as the integer value of its `CUstream` or `cudaStream_t`. 0, 1 and 2 are the
    /// default streams of device 0's primary context.
    ///
    /// # Safety
    /// The handle is one of those, or a stream that is alive and is not destroyed while any clone of the result is
    /// used. The driver does not check it.
    pub unsafe fn from_raw(handle: u64) -> Result<Self, CudaError> {
        let driver = driver::require()?;
        if SPECIAL_HANDLES.contains(&handle) {
            let device = device(driver, 0)?;
            let context =
                device.context(driver).map_err(|code| CudaError::driver(code, "making a context"))?;
            let handle = ptr::without_provenance_mut(handle as usize);
            return Ok(Self::foreign(device, context, handle));
        }
        let foreign = "looking at a foreign stream";
        let handle =
            usize::try_from(handle).map_err(|_| CudaError::invalid("a stream's handle is a pointer"))?;
        let handle: CUstream = ptr::with_exposed_provenance_mut(handle);
        let mut context = ptr::null_mut();
        let mut raw = 0;
        // SAFETY: the caller says that the stream is alive; the driver writes one handle.
        let mut get_context = || unsafe { (driver.entries.cuStreamGetCtx)(handle, &mut context) };
        let mut code = get_context();
        if code == INVALID_CONTEXT {
            // The driver wants some context to be current, whichever.
            let device =
                driver.devices.iter().find(|device| device.has_context()).unwrap_or(&driver.devices[0]);
            code = device.enter(driver).map_or_else(|code| code, |_entered| get_context());
        }
        if code != SUCCESS {
            return Err(CudaError::driver(code, foreign));
        }
        let code = match Entered::into(driver, context) {
            // SAFETY: a context is current, and the driver writes one handle.
            Ok(_entered) => unsafe { (driver.entries.cuCtxGetDevice)(&mut raw) },
            Err(code) => code,
        };
        if code != SUCCESS {
            return Err(CudaError::driver(code, foreign));
        }
        let device =
            driver.devices.iter().find(|device| device.raw() == raw).ok_or_else(|| {
                CudaError::invalid("the stream belongs to no device that this process can see")
            })?;
        Ok(Self::foreign(device, context, handle))
    }

    fn foreign(device: &'static Device, context: CUcontext, handle: CUstream) -> Self {
        let inner = Inner::new(device, context, handle, false);
        Self { _farewell: Some(Arc::new(Farewell(Arc::clone(&inner)))), inner }
    }

    /// A number that no other stream of this process has had, even where the driver uses a handle again.
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// The integer value of the stream's `CUstream`.
    pub fn handle(&self) -> u64 {
        self.inner.handle.expose_provenance() as u64
    }

    /// Index of the stream's device.
    pub fn device(&self) -> u16 {
        self.inner.device.index
    }

    /// Waits until all that was queued is done. Blocks the thread.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive, see `Inner` and `from_raw`.
        self.call("waiting for a stream", |entries| unsafe {
            (entries.cuStreamSynchronize)(self.inner.handle)
        })
    }

    /// Whether all that was queued is done.
    pub fn query(&self) -> Result<bool, CudaError> {
        let driver = driver::require()?;
        // Asking would break a capture begun elsewhere in this thread.
        let code = match Entered::relaxed(driver, self.inner.context) {
            // SAFETY: the stream is alive.
            Ok(_entered) => unsafe { (driver.entries.cuStreamQuery)(self.inner.handle) },
            Err(code) => code,
        };
        if code == NOT_READY {
            return Ok(false);
        }
        self.answer("asking for a stream's state", code).map(|()| true)
    }

    /// Whether the stream's work is being captured into a graph rather than done.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        let mut status = 0;
        self.call("asking for a stream's capture", |entries| {
            // SAFETY: the stream is alive, and the driver writes one integer.
            unsafe { (entries.cuStreamIsCapturing)(self.inner.handle, &mut status) }
        })?;
        Ok(status != 0)
    }

    /// An event that is done when all that has been queued so far is.
    pub fn record(&self) -> Result<Event, CudaError> {
        Event::record(self)
    }

    /// Lets what is queued from now on wait for an event, of this or another stream or device. Does not block.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the stream and the event are alive.
        self.call("waiting for an event", |entries| unsafe {
            (entries.cuStreamWaitEvent)(self.inner.handle, event.raw(), 0)
        })
    }

    /// Moves the pages of a range of managed memory, in the stream's order.
    ///
    /// # Safety
    /// The range lies in one live managed allocation.
    pub(crate) unsafe fn enqueue_prefetch(
        &self,
        ptr: *const u8,
        len: usize,
        to: PrefetchTo,
    ) -> Result<Hint, CudaError> {
        let driver = driver::require()?;
        if let Some(hint) = self.prefetch_applies(driver, len, to) {
            return Ok(hint);
        }
        let (address, handle) = (ptr.expose_provenance() as u64, self.inner.handle);
        let entries = &driver.entries;
        if let Some(entry) = entries.cuMemPrefetchAsync_v2 {
            // SAFETY: the caller's range; the stream is alive.
            self.call("a prefetch", |_| unsafe { entry(address, len, self.location(to), 0, handle) })?;
        } else if let Some(entry) = entries.cuMemPrefetchAsync {
            // SAFETY: as above.
            self.call("a prefetch", |_| unsafe { entry(address, len, self.destination(to), handle) })?;
        } else {
            return Ok(Hint::NotApplicable("this driver has no prefetch"));
        }
        Ok(Hint::Applied)
    }

    /// As [`enqueue_prefetch`](Self::enqueue_prefetch) for a range whose contents are not needed any more.
    ///
    /// # Safety
    /// As there, and nobody needs what is in the range.
    pub(crate) unsafe fn enqueue_discard_and_prefetch(
        &self,
        ptr: *mut u8,
        len: usize,
        to: PrefetchTo,
    ) -> Result<Hint, CudaError> {
        let driver = driver::require()?;
        if let Some(hint) = self.prefetch_applies(driver, len, to) {
            return Ok(hint);
        }
        if let Some(entry) = driver.entries.cuMemDiscardAndPrefetchBatchAsync {
            let (mut address, mut len) = (ptr.expose_provenance() as u64, len);
            let (mut location, mut index) = (self.location(to), 0);
            // SAFETY: one range with one location, which is that of index 0; the driver reads the arrays of one during
            // the call. The stream is alive.
            let moved = self.call("a discard", |_| unsafe {
                entry(&mut address, &mut len, 1, &mut location, &mut index, 1, 0, self.inner.handle)
            });
            if moved.is_ok() || self.inner.device.lost().is_some() {
                return moved.map(|()| Hint::Applied);
            }
        }
        // SAFETY: the caller's range.
        unsafe { self.enqueue_prefetch(ptr, len, to) }
    }

    /// Copies bytes by the device's copy engine, in the stream's order.
    ///
    /// # Safety
    /// Both ranges are valid for the device and stay so, untouched by others, until the stream has done it.
    pub(crate) unsafe fn enqueue_copy(
        &self,
        to: *mut u8,
        from: *const u8,
        len: usize,
    ) -> Result<(), CudaError> {
        if len == 0 {
            return Ok(());
        }
        let (to, from) = (to.expose_provenance() as u64, from.expose_provenance() as u64);
        // SAFETY: the caller's ranges; the stream is alive.
        self.call("a copy", |entries| unsafe { (entries.cuMemcpyAsync)(to, from, len, self.inner.handle) })
    }

    /// Sets bytes on the device, in the stream's order.
    ///
    /// # Safety
    /// The range is valid for the device and stays so, untouched by others, until the stream has done it.
    pub(crate) unsafe fn enqueue_fill(&self, ptr: *mut u8, byte: u8, len: usize) -> Result<(), CudaError> {
        if len == 0 {
            return Ok(());
        }
        let address = ptr.expose_provenance() as u64;
        // SAFETY: the caller's range; the stream is alive.
        self.call("a fill", |entries| unsafe {
            (entries.cuMemsetD8Async)(address, byte, len, self.inner.handle)
        })
    }

    fn prefetch_applies(&self, driver: &Driver, len: usize, to: PrefetchTo) -> Option<Hint> {
        if len == 0 {
            return Some(Hint::NotApplicable("the range is empty"));
        }
        if !self.inner.device.concurrent_managed_access {
            return Some(Hint::NotApplicable(PAGES_MOVE_AT_A_LAUNCH));
        }
        // More than is free would push out what other work needs, and can hang.
        if to == PrefetchTo::Device
            && len >= CAPPED_FROM
            && self.inner.device.free_bytes(driver).is_ok_and(|free| len as u64 > free)
        {
            return Some(Hint::NotApplicable("the device has less memory free than the range is long"));
        }
        None
    }

    fn destination(&self, to: PrefetchTo) -> i32 {
        match to {
            PrefetchTo::Device => self.inner.device.raw(),
            PrefetchTo::Host => CPU,
        }
    }

    fn location(&self, to: PrefetchTo) -> CUmemLocation {
        match to {
            PrefetchTo::Device => device_location(self.inner.device),
            PrefetchTo::Host => host_location(),
        }
    }

    /// Whether it was made here, and so is ours to destroy.
    pub(crate) fn is_owned(&self) -> bool {
        self.inner.owned
    }

    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Arc::downgrade(&self.inner))
    }

    /// How many handles of the stream there are.
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    /// The number that blocks are marked with; 0 before the first mark.
    pub(crate) fn track(&self) -> u64 {
        self.inner.track.load(Ordering::Acquire)
    }

    pub(crate) fn set_track(&self, track: u64) {
        self.inner.track.store(track, Ordering::Release);
    }

    pub(crate) fn device_ref(&self) -> &'static Device {
        self.inner.device
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.inner.handle
    }

    /// Whether the handle means another stream on each thread.
    pub(crate) fn is_per_thread(&self) -> bool {
        self.inner.is_per_thread()
    }

    /// The stream that, on any thread, has passed an event recorded now only when this one has passed its work.
    #[cfg_attr(all(test, shuttle), allow(dead_code))]
    pub(super) fn raw_for_fences(&self) -> CUstream {
        if self.is_per_thread() {
            ptr::without_provenance_mut(LEGACY)
        } else {
            self.raw()
        }
    }

    pub(crate) fn context(&self) -> CUcontext {
        self.inner.context
    }

    /// Runs a driver call in the stream's context.
    pub(crate) fn raw_call(&self, call: impl FnOnce(&Entries) -> u32) -> Result<u32, CudaError> {
        let driver = driver::require()?;
        Ok(match Entered::into(driver, self.inner.context) {
            Ok(_entered) => call(&driver.entries),
            Err(code) => code,
        })
    }

    pub(crate) fn call(&self, what: &str, call: impl FnOnce(&Entries) -> u32) -> Result<(), CudaError> {
        let code = self.raw_call(call)?;
        self.answer(what, code)
    }

    pub(crate) fn answer(&self, what: &str, code: u32) -> Result<(), CudaError> {
        if self.inner.device.is_own_context(self.inner.context) {
            return self.inner.device.answer(what, code);
        }
        // A foreign context that died takes nothing of this crate with it.
        device::check(code).map_err(|code| CudaError::driver(code, what))
    }
}

/// `CU_DEVICE_CPU`, the host in the older form of hints.
pub(crate) const CPU: i32 = -1;

pub(crate) fn device_location(device: &Device) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.raw() }
}

pub(crate) fn host_location() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 }
}

impl Inner {
    fn new(device: &'static Device, context: CUcontext, handle: CUstream, owned: bool) -> Arc<Self> {
        Arc::new(Self { id: next_id(), device, context, handle, owned, track: AtomicU64::new(0) })
    }

    fn is_per_thread(&self) -> bool {
        self.handle.addr() == PER_THREAD
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(driver) = driver::running() else { return };
        if !self.owned {
            return;
        }
        if let Ok(_entered) = Entered::into(driver, self.context) {
            // SAFETY: made by `Stream::new`, and this was its last handle. The driver lets queued work complete.
            unsafe { (driver.entries.cuStreamDestroy_v2)(self.handle) };
        }
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let Some(driver) = driver::running() else { return };
        let inner = &self.0;
        let track = inner.track.load(Ordering::Acquire);
        if track == 0 {
            return;
        }
        // The one call upwards: what waits for this stream cannot ask it later.
        crate::stream::farewell(track, || {
            let code = match Entered::relaxed(driver, inner.context) {
                Ok(_entered) => {
                    let mut capturing = 0;
                    // SAFETY: the stream is alive while its last handle is being dropped, see `from_raw`; the driver
                    // writes one integer.
                    match unsafe { (driver.entries.cuStreamIsCapturing)(inner.handle, &mut capturing) } {
                        // Waiting would spoil the capture, and would not tell when the graph runs.
                        SUCCESS if capturing != 0 => return Ok(false),
                        // SAFETY: a context is current. Which threads' streams were used is not known.
                        SUCCESS if inner.is_per_thread() => unsafe { (driver.entries.cuCtxSynchronize)() },
                        // SAFETY: as for the first call.
                        SUCCESS => unsafe { (driver.entries.cuStreamSynchronize)(inner.handle) },
                        code => code,
                    }
                }
                Err(code) => code,
            };
            device::check(code).map(|()| true).map_err(|code| CudaError::driver(code, "waiting for a stream"))
        });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.id())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, shuttle))]
impl Stream {
    /// A stream of no driver, for models: made here, or foreign. Only its identity is used.
    pub(crate) fn modelled(owned: bool) -> Self {
        let device = Device::modelled();
        Self { _farewell: None, inner: Inner::new(device, ptr::null_mut(), ptr::null_mut(), owned) }
    }
}
