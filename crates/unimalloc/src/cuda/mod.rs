//! CUDA devices, streams, events, modules and kernels: what makes unified memory usable from Rust, and no more.
//!
//! Everything works from any thread, happens in the primary context of its device (which the CUDA runtime uses too),
//! and leaves the calling thread's own current context as it was. The driver is found when it is first needed:
//! building takes no toolkit, and a machine without a driver gets a [`CudaError`] that says so.

mod device;
pub(crate) mod driver;
pub(crate) mod error;
mod event;
#[cfg_attr(all(test, shuttle), path = "fence_model.rs")]
pub(crate) mod fence;
mod kernel;
mod module;
mod nvrtc;
mod ptx;
mod stream;

pub use crate::placement::Hint;
pub use device::DeviceInfo;
pub use error::{CudaError, CudaErrorKind};
pub use event::Event;
pub use kernel::{Kernel, KernelArg, LaunchConfig};
pub use module::{CompileOptions, Module};
pub use stream::{PrefetchTo, Stream};

pub(crate) use device::Device;
pub(crate) use fence::{destroy_spares, Fence};
pub(crate) use stream::{device_location, host_location, WeakStream, CPU};

/// All devices, by index. Makes each one's primary context, because only that tells what is free.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let driver = driver::require()?;
    Ok(driver.devices.iter().map(|device| device.info(driver)).collect())
}

/// What is missing for CUDA to be usable, in words and with the next step; `None` when it is usable. Creates no
/// context. An answer other than `None` is looked at again after a second.
pub fn unavailable_reason() -> Option<String> {
    driver::get().err().map(|unavailable| unavailable.reason)
}

/// Whether the CPU may touch managed memory at any time, on every device: nowhere else does a kernel, a fill or a copy of one
/// thread forbid it to all the others. Creates no context. True where CUDA is not usable.
pub fn concurrent_managed_access() -> bool {
    driver::get().map_or(true, |driver| driver.devices.iter().all(|device| device.concurrent_managed_access))
}

/// Waits until a device has done all that it was given. Blocks the thread.
pub fn synchronize(device_index: u16) -> Result<(), CudaError> {
    let device = device::device(driver::require()?, device_index)?;
    // SAFETY: the device's context is current.
    device.call("waiting for the device", |entries| unsafe { (entries.cuCtxSynchronize)() })
}

/// Waits until every device has done all that this process gave it. Blocks the thread. A device that was never used has nothing
/// to do, and gets no context for the answer. An error of one is answered when the others are done.
pub fn synchronize_all() -> Result<(), CudaError> {
    let used = driver::require()?.devices.iter().filter(|device| device.has_context());
    used.map(|device| synchronize(device.index)).fold(Ok(()), Result::and)
}

/// The name of a driver's result code, such as `CUDA_ERROR_INVALID_VALUE`.
pub fn error_name(code: u32) -> String {
    driver::error_name(code)
}
