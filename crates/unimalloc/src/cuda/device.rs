//! A device: what it can do, and its primary context, in which everything here happens.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUctx_st, CUdevice, CUdevice_attribute as Attribute};

use super::driver::{self, Driver, Entries};
use super::error::{self, CudaError, SUCCESS};
use super::stream::Stream;
use crate::log::say;

/// A device as [`devices`](super::devices) describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Index in CUDA's enumeration, after `CUDA_VISIBLE_DEVICES`.
    pub index: u16,
    /// Product name.
    pub name: String,
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// Bytes of it that are free now; 0 when the device refuses a context (in use exclusively, or faulted).
    pub free_bytes: u64,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Whether the CPU may touch managed memory while a kernel runs.
    pub concurrent_managed_access: bool,
    /// Whether kernels can read ordinary `malloc` memory.
    pub pageable_memory_access: bool,
    /// Whether more managed memory than the device has can be used: pages move on demand.
    pub can_oversubscribe: bool,
    /// The CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub driver_version: u32,
}

/// What a launch may ask for at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub threads_per_block: u32,
    pub block: [u32; 3],
    pub grid: [u32; 3],
    /// Bytes of shared memory of a block: without asking, and after asking for more.
    pub shared: u32,
    pub shared_opt_in: u32,
}

pub(crate) struct Device {
    pub index: u16,
    pub name: String,
    pub total_bytes: u64,
    pub compute_capability: (u32, u32),
    pub managed_memory: bool,
    pub concurrent_managed_access: bool,
    pub pageable_memory_access: bool,
    pub limits: Limits,
    raw: CUdevice,
    /// The retained primary context, or null before its first use. Never released: the process's end does that, and
    /// memory of it may be in use until then.
    context: AtomicPtr<CUctx_st>,
    /// The sticky error that destroyed the context, or 0.
    lost: AtomicU32,
    default_stream: OnceLock<Stream>,
    private_stream: OnceLock<Stream>,
}

impl Device {
    /// All devices, by index.
    pub(crate) fn all(entries: &Entries) -> Result<Vec<Self>, u32> {
        let mut count = 0;
        // SAFETY: the driver is started and writes one int.
        check(unsafe { (entries.cuDeviceGetCount)(&mut count) })?;
        (0..u16::try_from(count).unwrap_or(0)).map(|index| Self::describe(entries, index)).collect()
    }

    fn describe(entries: &Entries, index: u16) -> Result<Self, u32> {
        let mut raw = 0;
        // SAFETY: the driver is started and writes one handle.
        check(unsafe { (entries.cuDeviceGet)(&mut raw, c_int::from(index)) })?;
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most the 255 bytes that it is told of, and a NUL.
        check(unsafe { (entries.cuDeviceGetName)(name.as_mut_ptr(), 255, raw) })?;
        let name: Vec<u8> = name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        let mut total = 0;
        // SAFETY: the driver writes one size.
        check(unsafe { (entries.cuDeviceTotalMem_v2)(&mut total, raw) })?;
        // An attribute that this driver does not know is one that the device does not have.
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the driver writes one int.
            let code = unsafe { (entries.cuDeviceGetAttribute)(&mut value, attribute, raw) };
            if code == SUCCESS {
                u32::try_from(value).unwrap_or(0)
            } else {
                0
            }
        };
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
        Ok(Self {
            index,
            name: String::from_utf8_lossy(&name).into_owned(),
            total_bytes: total as u64,
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            managed_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) != 0,
            concurrent_managed_access: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)
                != 0,
            pageable_memory_access: attribute(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) != 0,
            limits: Limits {
                threads_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
                block: [
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
                ],
                grid: [
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
                ],
                shared,
                shared_opt_in: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                    .max(shared),
            },
            raw,
            context: AtomicPtr::new(ptr::null_mut()),
            lost: AtomicU32::new(0),
            default_stream: OnceLock::new(),
            private_stream: OnceLock::new(),
        })
    }

    /// A device of no driver, for models.
    #[cfg(all(test, shuttle))]
    pub(crate) fn modelled() -> &'static Self {
        static MODELLED: OnceLock<Device> = OnceLock::new();
        MODELLED.get_or_init(|| Self {
            index: 0,
            name: String::new(),
            total_bytes: 0,
            compute_capability: (0, 0),
            managed_memory: true,
            concurrent_managed_access: true,
            pageable_memory_access: false,
            limits: Limits { threads_per_block: 0, block: [0; 3], grid: [0; 3], shared: 0, shared_opt_in: 0 },
            raw: 0,
            context: AtomicPtr::new(ptr::null_mut()),
            lost: AtomicU32::new(0),
            default_stream: OnceLock::new(),
            private_stream: OnceLock::new(),
        })
    }

    pub(crate) fn raw(&self) -> CUdevice {
        self.raw
    }

    /// The primary context, made at the first call.
    pub(crate) fn context(&self, driver: &Driver) -> Result<CUcontext, u32> {
        let known = self.context.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(known);
        }
        let mut context = ptr::null_mut();
        // SAFETY: the driver is started and writes one handle.
        check(unsafe { (driver.entries.cuDevicePrimaryCtxRetain)(&mut context, self.raw) })?;
        // Threads that come at the same time all retain the one context; all but the first let go again.
        if self
            .context
            .compare_exchange(ptr::null_mut(), context, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: undoes the retain just above; the first thread's keeps the context alive.
            unsafe { (driver.entries.cuDevicePrimaryCtxRelease_v2)(self.raw) };
        } else {
            say!(Level::Info, "context device={} name={:?}", self.index, self.name);
        }
        Ok(context)
    }

    /// Makes the primary context this thread's current one until the result is dropped; then it is as it was.
    pub(crate) fn enter<'d>(&self, driver: &'d Driver) -> Result<Entered<'d>, u32> {
        Entered::into(driver, self.context(driver)?)
    }

    /// As [`enter`](Self::enter), with the thread's stream-capture mode relaxed as well, for calls that a capture
    /// begun elsewhere in this thread would forbid.
    pub(crate) fn enter_relaxed<'d>(&self, driver: &'d Driver) -> Result<Entered<'d>, u32> {
        let mut entered = self.enter(driver)?;
        entered.relax();
        Ok(entered)
    }

    /// Whether the primary context was made by this crate already.
    pub(crate) fn has_context(&self) -> bool {
        !self.context.load(Ordering::Acquire).is_null()
    }

    /// Whether this is the device's primary context.
    pub(crate) fn is_own_context(&self, context: CUcontext) -> bool {
        context == self.context.load(Ordering::Acquire)
    }

    /// The sticky error that destroyed the context, if one did.
    pub(crate) fn lost(&self) -> Option<u32> {
        Some(self.lost.load(Ordering::Relaxed)).filter(|&code| code != 0)
    }

    /// Notes an answer of the driver, which may tell that the context is lost, and passes it on.
    pub(crate) fn note(&self, code: u32) -> u32 {
        if error::is_sticky(code) && self.lost.swap(code, Ordering::Relaxed) == 0 {
            say!(Level::Error, "context-lost device={} code={code}", self.index);
        }
        code
    }

    /// Runs a driver call in the primary context, and turns its answer into an error that says `what` failed.
    pub(crate) fn call(&self, what: &str, call: impl FnOnce(&Entries) -> u32) -> Result<(), CudaError> {
        let driver = driver::require()?;
        let code = match self.enter(driver) {
            Ok(_entered) => call(&driver.entries),
            Err(code) => code,
        };
        self.answer(what, code)
    }

    pub(crate) fn answer(&self, what: &str, code: u32) -> Result<(), CudaError> {
        if self.note(code) == SUCCESS {
            Ok(())
        } else {
            Err(CudaError::driver(code, what))
        }
    }

    /// Bytes of device memory that are free.
    pub(crate) fn free_bytes(&self, driver: &Driver) -> Result<u64, u32> {
        let _entered = self.enter_relaxed(driver)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, and the driver writes two sizes.
        check(self.note(unsafe { (driver.entries.cuMemGetInfo_v2)(&mut free, &mut total) }))?;
        Ok(free as u64)
    }

    /// The stream for launches that name none.
    pub(crate) fn default_stream(&self) -> Result<&Stream, CudaError> {
        self.stream(&self.default_stream)
    }

    /// The stream for the allocator's own fills and copies.
    pub(crate) fn private_stream(&self) -> Result<&Stream, CudaError> {
        self.stream(&self.private_stream)
    }

    fn stream<'s>(&self, cell: &'s OnceLock<Stream>) -> Result<&'s Stream, CudaError> {
        if let Some(stream) = cell.get() {
            return Ok(stream);
        }
        // A second thread's stream is dropped, which destroys it.
        let stream = Stream::new(self.index)?;
        Ok(cell.get_or_init(|| stream))
    }

    pub(crate) fn info(&self, driver: &Driver) -> DeviceInfo {
        DeviceInfo {
            index: self.index,
            name: self.name.clone(),
            total_bytes: self.total_bytes,
            free_bytes: self.free_bytes(driver).unwrap_or(0),
            compute_capability: self.compute_capability,
            concurrent_managed_access: self.concurrent_managed_access,
            pageable_memory_access: self.pageable_memory_access,
            // Pages move on demand exactly where both sides may touch them at any time.
            can_oversubscribe: self.concurrent_managed_access,
            driver_version: driver.version.unsigned_abs(),
        }
    }
}

/// The device of that index, in words that tell what there is.
pub(crate) fn device(driver: &'static Driver, index: u16) -> Result<&'static Device, CudaError> {
    driver.devices.get(usize::from(index)).ok_or_else(|| {
        CudaError::invalid(format!(
            "there is no device {index}: this driver has devices 0 to {}; pass one of those",
            driver.devices.len() - 1
        ))
    })
}

pub(crate) fn check(code: u32) -> Result<(), u32> {
    if code == SUCCESS {
        Ok(())
    } else {
        Err(code)
    }
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// A context made current on this thread. It is taken off again when this is dropped, also by a panic.
pub(crate) struct Entered<'d> {
    driver: &'d Driver,
    relaxed: Option<RelaxedCapture<'d>>,
    /// Current contexts belong to a thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl<'d> Entered<'d> {
    pub(crate) fn into(driver: &'d Driver, context: CUcontext) -> Result<Self, u32> {
        if driver::exiting() {
            return Err(error::DEINITIALIZED);
        }
        // SAFETY: the context is a primary one that is never released, or that of a stream which its owner keeps.
        check(unsafe { (driver.entries.cuCtxPushCurrent_v2)(context) })?;
        Ok(Self { driver, relaxed: None, _not_send: std::marker::PhantomData })
    }

    /// As [`into`](Self::into), with the thread's stream-capture mode relaxed as well.
    pub(super) fn relaxed(driver: &'d Driver, context: CUcontext) -> Result<Self, u32> {
        let mut entered = Self::into(driver, context)?;
        entered.relax();
        Ok(entered)
    }

    fn relax(&mut self) {
        self.relaxed = RelaxedCapture::begin(self.driver);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.relaxed = None;
        let entries = &self.driver.entries;
        let mut popped = ptr::null_mut();
        // SAFETY: takes off what `into` pushed on this thread; scopes nest, so it is on top.
        unsafe { (entries.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

/// While it lives, this thread's driver calls neither fail for a stream capture begun elsewhere nor break it: event
/// queries, allocations and advice do otherwise.
struct RelaxedCapture<'d> {
    driver: &'d Driver,
    before: u32,
    /// The mode belongs to a thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl<'d> RelaxedCapture<'d> {
    /// `None` where the driver refuses; then the mode is as it was.
    fn begin(driver: &'d Driver) -> Option<Self> {
        let mut before = RELAXED;
        // SAFETY: the driver swaps the thread's mode with the integer's.
        let code = unsafe { (driver.entries.cuThreadExchangeStreamCaptureMode)(&mut before) };
        (code == SUCCESS).then_some(Self { driver, before, _not_send: std::marker::PhantomData })
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        let mut mode = self.before;
        // SAFETY: puts back what `begin` took, on the same thread.
        unsafe { (self.driver.entries.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }
}
