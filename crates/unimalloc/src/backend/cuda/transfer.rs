//! Filling and copying blocks, by the side on which it is cheaper.

use super::placement::Kind;
use super::{driver, fork, reason, usable_device, REGISTRY};
use crate::backend::registry::Entry;
use crate::cuda::{CudaError, CudaErrorKind, Device, Stream};
use crate::error::AllocError;

/// Bytes from which the GPU fills memory that lives on the host faster than the CPU does: a fill of the GPU takes some
/// 10 µs and goes over the bus at 50 GB/s, the CPU writes 10 GB/s.
const HOST_RESIDENT: usize = 256 << 10;
/// The same for memory without advice. Where its pages are is unknown: on the GPU the first touch of the CPU costs 32 µs
/// and 4 GB/s, and they are likely there when a block is large; fresh ones cost it 138 µs.
const UNKNOWN: usize = 64 << 10;

/// Whether the device rather than the CPU should touch these bytes. The whole policy is here.
fn by_device(device: &Device, kind: Kind, len: usize) -> bool {
    // Here a touch of the CPU while any kernel runs, of anyone, is a fault; and while the device works, for whatever memory,
    // all threads must keep off what is managed. So it gets no work that need not be its own.
    if !device.concurrent_managed_access {
        return kind != Kind::Pinned;
    }
    match kind {
        Kind::ManagedDevice => true,
        Kind::ManagedHost | Kind::Pinned => len >= HOST_RESIDENT,
        Kind::Managed => len >= UNKNOWN,
    }
}

/// The device that should work on a range of a region, or `None` for the CPU.
fn side(entry: Entry, len: usize) -> Result<Option<&'static Device>, AllocError> {
    let driver = driver::get().map_err(|unavailable| unavailable.error)?;
    let device = usable_device(driver, entry.device)?;
    Ok(by_device(device, Kind::from_u8(entry.kind), len).then_some(device))
}

/// The record of the region that a range lies in.
fn region(ptr: *const u8, len: usize) -> Result<Entry, AllocError> {
    REGISTRY.containing(ptr as usize, len).map(|(_, entry)| entry).ok_or(AllocError::InvalidRange)
}

/// # Safety
/// The range lies inside a block that the caller owns.
pub(super) unsafe fn fill(ptr: *mut u8, byte: u8, len: usize) -> Result<(), AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    if len == 0 {
        return Ok(());
    }
    match side(region(ptr, len)?, len)? {
        // SAFETY: the caller's range, which is used by nobody else until the stream was waited for.
        Some(device) => on_stream(device, |stream| unsafe { stream.enqueue_fill(ptr, byte, len) }),
        None => {
            // SAFETY: the caller's range.
            unsafe { ptr.write_bytes(byte, len) };
            Ok(())
        }
    }
}

/// # Safety
/// Both ranges lie inside blocks that the caller owns, and do not overlap.
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    if len == 0 {
        return Ok(());
    }
    // What is read has pages somewhere, what is written may have none yet: either side's wish for the device wins.
    let device = match side(region(to, len)?, len)? {
        Some(device) => Some(device),
        None => side(region(from, len)?, len)?,
    };
    match device {
        // SAFETY: the caller's ranges, which are used by nobody else until the stream was waited for.
        Some(device) => on_stream(device, |stream| unsafe { stream.enqueue_copy(to, from, len) }),
        None => {
            // SAFETY: the caller's ranges, which are disjoint.
            unsafe { to.copy_from_nonoverlapping(from, len) };
            Ok(())
        }
    }
}

/// # Safety
/// The range lies inside a block that the caller owns.
pub(super) unsafe fn holds(ptr: *const u8, byte: u8, len: usize) -> Result<bool, AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    if len == 0 {
        return Ok(true);
    }
    let Some(device) = side(region(ptr, len)?, len)? else {
        // SAFETY: the caller's range.
        return Ok(unsafe { std::slice::from_raw_parts(ptr, len) }.iter().all(|found| *found == byte));
    };
    // Copied out by the device, a piece at a time, so that no page moves and none is touched during a kernel.
    let mut piece = [0_u8; 4096];
    for start in (0..len).step_by(piece.len()) {
        let piece = &mut piece[..(len - start).min(4096)];
        // SAFETY: a part of the caller's range; the stream is waited for before the piece is read.
        on_stream(device, |stream| unsafe {
            stream.enqueue_copy(piece.as_mut_ptr(), ptr.add(start), piece.len())
        })?;
        if piece.iter().any(|found| *found != byte) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Runs work on the device's private stream and waits for it.
fn on_stream(
    device: &'static Device,
    work: impl FnOnce(&Stream) -> Result<(), CudaError>,
) -> Result<(), AllocError> {
    let driver = driver::get().map_err(|unavailable| unavailable.error)?;
    // A capture begun elsewhere in this thread must neither take up this work nor be broken by it.
    let _entered = device.enter_relaxed(driver).map_err(|code| reason(device, code))?;
    device.private_stream().and_then(|stream| work(stream).and_then(|()| stream.synchronize())).map_err(
        |error| match error.kind() {
            CudaErrorKind::ContextLost => AllocError::ContextLost,
            CudaErrorKind::OutOfMemory => AllocError::OutOfMemory,
            CudaErrorKind::Forked => AllocError::Forked,
            CudaErrorKind::Unavailable => AllocError::NoDriver,
            _ => AllocError::Driver(error.code()),
        },
    )
}
