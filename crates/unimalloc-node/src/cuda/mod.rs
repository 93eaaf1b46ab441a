//! The `cuda` namespace: devices, streams, events, modules and kernels.

pub mod host_access;
mod kernel;
mod stream;
mod wait;

use std::sync::Arc;

use napi::Result;
use napi_derive::napi;
use unimalloc::cuda::{self, CudaError, CudaErrorKind};
use unimalloc::{pending_stats, take_up_pending, CudaUnifiedBackend};

use crate::block::Block;
use crate::dispatch::Backend;
use crate::failure::{cuda_failure, failure};
use crate::holds::{self, Handle};

/// The typed error behind one of the driver layer's.
pub fn to_failure(error: &CudaError) -> napi::Error {
    let code = match error.kind() {
        CudaErrorKind::Unavailable => "CUDA_UNAVAILABLE",
        CudaErrorKind::InvalidArgument => "INVALID_ARGUMENT",
        CudaErrorKind::CompileFailed => "COMPILE_FAILED",
        CudaErrorKind::OutOfMemory => "OUT_OF_MEMORY",
        CudaErrorKind::ContextLost => "CONTEXT_LOST",
        CudaErrorKind::Forked => "FORKED",
        _ => "CUDA_ERROR",
    };
    cuda_failure(code, &error.to_string(), error.name(), error.code(), error.log())
}

/// A range of a held block that a device can reach.
struct DeviceRange {
    block: Arc<Block>,
    start: *mut u8,
    len: usize,
}

/// Finds the range again that the face has computed from a view. Checked once more here, because a device does not.
fn device_range(what: &str, handle: f64, offset: f64, len: f64) -> Result<DeviceRange> {
    let block = held_block(what, handle)?;
    if block.account().backend != Backend::Cuda {
        return Err(failure(
            "INVALID_ARGUMENT",
            format!("{what}: the array is on the host backend, which the GPU cannot reach; allocate it with backend 'cuda-unified'"),
        ));
    }
    let (start, len) = range_in(what, &block, offset, len)?;
    block.note_gpu_use();
    Ok(DeviceRange { block, start, len })
}

fn held_block(what: &str, handle: f64) -> Result<Arc<Block>> {
    holds::block(Handle::from_number(handle))
        .ok_or_else(|| failure("INVALID_ARGUMENT", format!("{what}: the array was freed")))
}

fn range_in(what: &str, block: &Block, offset: f64, len: f64) -> Result<(*mut u8, usize)> {
    let (offset, len) = (offset as usize, len as usize);
    if offset.checked_add(len).is_none_or(|end| end > block.requested()) {
        return Err(failure("INVALID_ARGUMENT", format!("{what}: the range ends beyond its array")));
    }
    Ok(((block.address() + offset) as *mut u8, len))
}

/// Takes up freed blocks whose streams have passed. A small batch is closed only when it is looked at for a second time.
pub fn take_up_passed() {
    if pending_stats().blocks > 0 && !take_up_pending(false) {
        take_up_pending(false);
    }
}

/// Waits for what pending blocks wait for. False when nothing was pending.
#[napi(catch_unwind)]
pub fn drain_pending() -> Result<bool> {
    Ok(pending_stats().blocks > 0 && take_up_pending(true))
}

/// What is missing for CUDA, with the next step; null when it is usable. Creates no context.
#[napi(catch_unwind)]
pub fn cuda_unavailable_reason() -> Result<Option<String>> {
    Ok(cuda::unavailable_reason())
}

/// A CUDA device.
#[napi(object)]
pub struct CudaDevice {
    /// Index in CUDA's enumeration.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Bytes of device memory.
    pub total_bytes: f64,
    /// Bytes of it that are free now.
    pub free_bytes: f64,
    /// Major compute capability.
    pub major: u32,
    /// Minor compute capability.
    pub minor: u32,
    /// Whether the CPU may touch managed memory while a kernel runs.
    pub concurrent_managed_access: bool,
    /// Whether kernels can read ordinary memory.
    pub pageable_memory_access: bool,
    /// Whether more managed memory than the device has can be used.
    pub can_oversubscribe: bool,
    /// The CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub driver_version: u32,
}

/// All devices, by index.
#[napi(catch_unwind)]
pub fn cuda_devices() -> Result<Vec<CudaDevice>> {
    let devices = cuda::devices().map_err(|error| to_failure(&error))?;
    Ok(devices
        .into_iter()
        .map(|device| CudaDevice {
            index: u32::from(device.index),
            name: device.name,
            total_bytes: device.total_bytes as f64,
            free_bytes: device.free_bytes as f64,
            major: device.compute_capability.0,
            minor: device.compute_capability.1,
            concurrent_managed_access: device.concurrent_managed_access,
            pageable_memory_access: device.pageable_memory_access,
            can_oversubscribe: device.can_oversubscribe,
            driver_version: device.driver_version,
        })
        .collect())
}

/// Bytes of memory of each device, by index. Creates no context.
#[napi(catch_unwind)]
pub fn cuda_total_bytes() -> Result<Vec<f64>> {
    Ok((0..=u16::MAX)
        .map_while(|device| CudaUnifiedBackend::total_bytes(device).map(|bytes| bytes as f64))
        .collect())
}

/// A device's index as the face passes it.
fn device_index(device: u32) -> Result<u16> {
    u16::try_from(device).map_err(|_| failure("INVALID_ARGUMENT", format!("there is no device {device}")))
}

/// The name of a driver's result code.
#[napi(catch_unwind)]
pub fn cuda_error_name(code: u32) -> Result<String> {
    Ok(cuda::error_name(code))
}
