//! CUDA unified ("managed") memory.

use std::sync::OnceLock;

use super::budget::{Budget, Grant, Limit, Seen};
use super::registry::{Entry, Registry};
use super::{fork, system_memory, valid_size, BackendCounters, MemoryBackend};
use crate::cuda::driver::{self, Driver};
use crate::cuda::{error, CudaError, Device, Stream};
use crate::error::{set_last_error, AllocError};
use crate::log::say;
use crate::placement::{Hint, Place, Placement};

mod placement;
mod residency;
mod transfer;

use placement::Kind;

/// The part of the host's available memory that the process may hold unless a limit is configured. Managed memory
/// that the device has no room for ends up there.
const HOST_SHARE: f64 = 0.8;

const ATTACH_GLOBAL: u32 = 1;
/// Usable in every context, and mapped for the device.
const HOST_PORTABLE_MAPPED: u32 = 1 | 2;

static REGISTRY: Registry = Registry::new();
/// All that the process holds. Its baseline is the host's memory.
static BUDGET: Budget = Budget::new();

/// CUDA unified memory: one address that the CPU and the GPU both use.
///
/// Regions come from `cuMemAllocManaged` in the primary context of their device. Without a driver, a device or managed
/// memory every allocation answers null, with the reason in [`last_error`](crate::last_error): never host memory.
///
/// The process may hold as much as the device has free, and at most 80 % of the host's available memory, looked at
/// again as it grows; `UNIMALLOC_MAX_BYTES` or [`set_limit`](Self::set_limit) replaces both.
pub struct CudaUnifiedBackend;

impl CudaUnifiedBackend {
    /// Replaces the ceiling on what the process holds: bytes, `u64::MAX` for none, or `None` for the automatic one.
    /// Holds from the next growth on; nothing is given back.
    pub fn set_limit(bytes: Option<u64>) {
        BUDGET.set_limit(bytes);
    }

    /// Replaces the number of regions that may be held at once (65,536, or `UNIMALLOC_REGISTRY_CAPACITY`).
    pub fn set_registry_capacity(regions: usize) {
        REGISTRY.set_capacity(regions);
    }

    /// What went through this backend since the process started.
    pub fn counters() -> BackendCounters {
        BUDGET.counters()
    }

    /// Bytes of memory of a device: a limit in per cent is of these.
    pub fn total_bytes(device: u16) -> Option<u64> {
        Some(driver::get().ok()?.devices.get(usize::from(device))?.total_bytes)
    }
}

/// Why work of a device cannot use the memory that an address lies in; `None` where it can, or where the memory is not ours.
pub(crate) fn why_unreachable(driver: &Driver, ptr: *const u8, device: &Device) -> Option<CudaError> {
    let (_, entry) = REGISTRY.containing(ptr as usize, 1)?;
    let owner = driver.devices.get(usize::from(entry.device))?;
    if owner.index == device.index {
        return None;
    }
    let (its, own) = (owner.index, device.index);
    if let Some(code) = owner.lost() {
        let what = format!(
            "using memory of device {its} on device {own}, after its contents went with its context,"
        );
        return Some(CudaError::driver(code, &what));
    }
    // Pinned memory is mapped into every context; other memory moves on demand where both devices can fault on it.
    let moves = owner.concurrent_managed_access && device.concurrent_managed_access;
    if moves || Kind::from_u8(entry.kind) == Kind::Pinned {
        return None;
    }
    Some(CudaError::invalid(format!(
        "the memory was allocated for device {its}, and without concurrent managed access device {own} does not reach it: allocate \
         it for device {own}, or with the placement 'host', or copy it to memory of device {own} with a stream of that device"
    )))
}

/// Whether unified memory can be had here. Creates no CUDA context.
/// [`cuda::unavailable_reason`](crate::cuda::unavailable_reason) has the words for a `false`.
pub fn is_cuda_available() -> bool {
    driver::get().is_ok()
}

/// What each device was charged, with what it had free as baseline.
fn device_budget(driver: &'static Driver, device: &Device) -> &'static Budget {
    static BUDGETS: OnceLock<Vec<Budget>> = OnceLock::new();
    &BUDGETS.get_or_init(|| driver.devices.iter().map(|_| Budget::new()).collect())[usize::from(device.index)]
}

/// The ceilings on the process and, where no limit is configured, on the device alone.
fn ceilings(driver: &'static Driver, device: &Device) -> Result<(u64, u64), AllocError> {
    match BUDGET.limit()? {
        Limit::Available => {
            let host = BUDGET.ceiling(HOST_SHARE, system_memory::look)?;
            let free = free_bytes(driver, device)?;
            Ok((host, device_budget(driver, device).usable(free)))
        }
        _ => {
            let all = Seen { available: device.total_bytes, total: device.total_bytes };
            Ok((BUDGET.ceiling(1.0, || Some(all))?, u64::MAX))
        }
    }
}

/// The ceiling on the process before any device is in use.
fn process_ceiling(driver: &'static Driver) -> Result<u64, AllocError> {
    let total = driver.devices.iter().map(|device| device.total_bytes).min().unwrap_or(0);
    Ok(match BUDGET.limit()? {
        Limit::Available => BUDGET.ceiling(HOST_SHARE, system_memory::look)?.min(total),
        _ => BUDGET.ceiling(1.0, || Some(Seen { available: total, total }))?,
    })
}

fn free_bytes(driver: &Driver, device: &Device) -> Result<u64, AllocError> {
    device.free_bytes(driver).map_err(|code| reason(device, code))
}

/// What an allocation that the driver answered with `code` answers.
fn reason(device: &Device, code: u32) -> AllocError {
    match device.note(code) {
        error::OUT_OF_MEMORY => AllocError::OutOfMemory,
        code if error::is_sticky(code) => AllocError::ContextLost,
        code => AllocError::Driver(code),
    }
}

/// The device of an entry or a place, if its context lives.
fn usable_device(driver: &'static Driver, index: u16) -> Result<&'static Device, AllocError> {
    let device = driver.devices.get(usize::from(index)).ok_or(AllocError::NoDevice)?;
    if !device.managed_memory {
        return Err(AllocError::Unsupported);
    }
    if device.lost().is_some() {
        return Err(AllocError::ContextLost);
    }
    Ok(device)
}

fn allocate(size: usize, place: Place) -> Result<*mut u8, AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    if !valid_size(size) {
        return Err(AllocError::InvalidSize);
    }
    let driver = driver::get().map_err(|unavailable| unavailable.error)?;
    let device = usable_device(driver, place.device)?;
    let (ceiling, device_ceiling) = ceilings(driver, device)?;
    let grant = BUDGET.grant(size as u64, ceiling)?;
    let device_grant = device_budget(driver, device).grant(size as u64, device_ceiling)?;

    let kind = Kind::of(device, place.placement);
    let base = from_driver(driver, device, size, kind)?;
    let entry = Entry { size, device: device.index, kind: kind as u8 };
    if let Err(error) = REGISTRY.insert(base as usize, entry) {
        // Nobody else knows of the region, and without a record it could never be released.
        // A failure here leaves it to the process's end; the record is full, so there is no place to keep it.
        let _ = to_driver(driver, device, base, kind);
        return Err(error);
    }
    confirm(grant, device_grant);
    say!(
        Level::Debug,
        "allocate backend=cuda-unified bytes={size} address={base:p} device={} placement={:?} kind={kind:?}",
        device.index,
        place.placement
    );
    placement::advise(driver, device, base, size, place.placement);
    Ok(base)
}

fn confirm(grant: Grant<'_>, device_grant: Grant<'_>) {
    grant.confirm();
    device_grant.confirm();
}

fn from_driver(driver: &Driver, device: &Device, size: usize, kind: Kind) -> Result<*mut u8, AllocError> {
    let entries = &driver.entries;
    let _entered = device.enter_relaxed(driver).map_err(|code| reason(device, code))?;
    let (code, base) = match kind {
        Kind::Pinned => {
            let mut base = std::ptr::null_mut();
            // SAFETY: a context is current, and the driver writes one pointer.
            let code = unsafe { (entries.cuMemHostAlloc)(&mut base, size, HOST_PORTABLE_MAPPED) };
            (code, base.cast::<u8>())
        }
        _ => {
            let mut address = 0;
            // SAFETY: a context is current, and the driver writes one address.
            let code = unsafe { (entries.cuMemAllocManaged)(&mut address, size, ATTACH_GLOBAL) };
            (code, std::ptr::with_exposed_provenance_mut(address as usize))
        }
    };
    if code != error::SUCCESS {
        return Err(reason(device, code));
    }
    if base.is_null() {
        return Err(AllocError::OutOfMemory);
    }
    Ok(base)
}

/// Gives a region back to the driver, and answers the driver's code.
fn to_driver(driver: &Driver, device: &Device, base: *mut u8, kind: Kind) -> u32 {
    let entries = &driver.entries;
    let _entered = match device.enter_relaxed(driver) {
        Ok(entered) => entered,
        Err(code) => return device.note(code),
    };
    let code = match kind {
        // SAFETY: the region came from this call's counterpart, and no other thread releases it: its record was taken
        // out of the registry, or never put in.
        Kind::Pinned => unsafe { (entries.cuMemFreeHost)(base.cast()) },
        // SAFETY: as above.
        _ => unsafe { (entries.cuMemFree_v2)(base as u64) },
    };
    device.note(code)
}

fn deallocate(ptr: *mut u8, size: usize) -> Result<(), AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    let entry = REGISTRY.begin_release(ptr as usize, size)?;
    let result = release(ptr, entry);
    REGISTRY.finish_release(ptr as usize, entry, result.is_ok());
    if let Err(error) = result {
        say!(Level::Warn, "not-freed backend=cuda-unified bytes={size} address={ptr:p} reason={error:?}");
    } else {
        say!(Level::Debug, "free backend=cuda-unified bytes={size} address={ptr:p} device={}", entry.device);
        BUDGET.record_free(size as u64);
        if let Some((driver, device)) = driver::get()
            .ok()
            .and_then(|driver| Some((driver, driver.devices.get(usize::from(entry.device))?)))
        {
            device_budget(driver, device).record_free(size as u64);
        }
    }
    result
}

fn release(ptr: *mut u8, entry: Entry) -> Result<(), AllocError> {
    if driver::exiting() {
        // The driver releases everything as the process ends, and may not be called any more.
        return Ok(());
    }
    let driver = driver::get().map_err(|unavailable| unavailable.error)?;
    let device = usable_device(driver, entry.device)?;
    match to_driver(driver, device, ptr, Kind::from_u8(entry.kind)) {
        error::SUCCESS | error::DEINITIALIZED => Ok(()),
        code => Err(reason(device, code)),
    }
}

fn done(result: Result<(), AllocError>) -> bool {
    result.map_err(set_last_error).is_ok()
}

// SAFETY: regions are the driver's, disjoint from everything else in the process, page-aligned, and released only when
// their record could be taken out of the registry, by one thread. Nothing here panics: locks ignore poison, arithmetic
// is checked, tables reserve their memory first, devices are looked up with `get`.
unsafe impl MemoryBackend for CudaUnifiedBackend {
    unsafe fn allocate(size: usize) -> *mut u8 {
        // SAFETY: the same contract.
        unsafe { Self::allocate_at(size, Place::default()) }
    }

    unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
        done(deallocate(ptr, size))
    }

    unsafe fn allocate_at(size: usize, place: Place) -> *mut u8 {
        allocate(size, place).unwrap_or_else(|error| {
            BUDGET.record_failure();
            say!(
                Level::Debug,
                "not-allocated backend=cuda-unified bytes={size} device={} reason={error:?} ceiling={}",
                place.device,
                BUDGET.counters().limit_bytes
            );
            set_last_error(error);
            std::ptr::null_mut()
        })
    }

    fn placement_hint(place: Place) -> Hint {
        match driver::get().map(|driver| usable_device(driver, place.device)) {
            Ok(Ok(device)) => Kind::hint(device, place.placement),
            _ => Hint::NotApplicable("there is no such device that has unified memory: see cuda::devices()"),
        }
    }

    /// Measured (docs/gpu.md): a kernel alone pays 2 µs more for a block on the host, but once the CPU takes part, pages that
    /// wander cost ten times as much, and one neighbour drags the others along.
    const SMALL_AUTO: Placement = Placement::Host;

    unsafe fn settle(ptr: *mut u8, len: usize, place: Place, used_by_device: bool, stream: Option<&Stream>) {
        if place.placement != Placement::Device || fork::forked() {
            return;
        }
        let Ok(driver) = driver::get() else { return };
        let Ok(device) = usable_device(driver, place.device) else { return };
        // SAFETY: the caller's block.
        unsafe { residency::settle(device, ptr, len, used_by_device, stream) };
    }

    unsafe fn fill(ptr: *mut u8, byte: u8, len: usize) -> bool {
        // SAFETY: the caller owns the range.
        done(unsafe { transfer::fill(ptr, byte, len) })
    }

    unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> bool {
        // SAFETY: the caller owns both ranges, and they are disjoint.
        done(unsafe { transfer::copy(to, from, len) })
    }

    unsafe fn holds(ptr: *const u8, byte: u8, len: usize) -> bool {
        // SAFETY: the caller owns the range. What cannot be read answers true, and keeps the reason.
        unsafe { transfer::holds(ptr, byte, len) }.unwrap_or_else(|error| {
            set_last_error(error);
            true
        })
    }

    fn segment_bytes() -> usize {
        let Ok(driver) = driver::get() else { return super::SEGMENT_MAX };
        // Without concurrent access managed memory is not backed on demand but when it is allocated.
        if !driver.devices.iter().all(|device| device.concurrent_managed_access) {
            return super::SEGMENT_MIN;
        }
        // A device that is not in use gets no context for the answer. Near a ceiling smaller segments are tried anyway.
        let used = driver.devices.iter().filter(|device| device.has_context());
        let ceiling = used.filter_map(|device| ceilings(driver, device).ok());
        let least = ceiling.map(|(process, device)| process.min(device)).min();
        super::segment_bytes_for(least.or_else(|| process_ceiling(driver).ok()).unwrap_or(0))
    }

    fn counters() -> BackendCounters {
        Self::counters()
    }
}
