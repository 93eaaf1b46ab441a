//! Advice to the driver about where fresh memory should live.

use cudarc::driver::sys::CUmem_advise as Advice;

use crate::cuda::driver::Driver;
use crate::cuda::{device_location, host_location, Device, PrefetchTo, CPU};
use crate::placement::{Hint, Placement, PAGES_MOVE_AT_A_LAUNCH};

/// What the registry must know of a region: how it is released, and which side it lives on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Managed, without advice or for reading: on whichever side touched it last.
    Managed = 0,
    /// Managed, and kept on the host.
    ManagedHost = 1,
    /// Managed, and backed on the device.
    ManagedDevice = 2,
    /// Pinned host memory that the device maps.
    Pinned = 3,
}

impl Kind {
    /// What to make for a placement. Where the CPU may not touch managed memory during a kernel, host placement is
    /// pinned memory, which it may.
    pub(super) fn of(device: &Device, placement: Placement) -> Self {
        match placement {
            Placement::Host if !device.concurrent_managed_access => Self::Pinned,
            Placement::Host => Self::ManagedHost,
            Placement::Device => Self::ManagedDevice,
            Placement::Auto | Placement::ReadMostly => Self::Managed,
        }
    }

    /// What a placement does on a device.
    pub(super) fn hint(device: &Device, placement: Placement) -> Hint {
        match placement {
            // Without concurrent access: no advice to give, and pinned memory, in this order.
            Placement::Auto | Placement::Host => Hint::Applied,
            _ if device.concurrent_managed_access => Hint::Applied,
            Placement::Device | Placement::ReadMostly => Hint::NotApplicable(PAGES_MOVE_AT_A_LAUNCH),
        }
    }

    pub(super) fn from_u8(kind: u8) -> Self {
        match kind {
            1 => Self::ManagedHost,
            2 => Self::ManagedDevice,
            3 => Self::Pinned,
            _ => Self::Managed,
        }
    }
}

/// A side, in advice.
#[derive(Clone, Copy)]
enum Side {
    Host,
    Device,
}

/// Tells the driver about a fresh region. Advice changes no contents, so what cannot apply or fails is left out: the
/// region works without it.
pub(super) fn advise(driver: &Driver, device: &Device, base: *mut u8, size: usize, placement: Placement) {
    // Elsewhere pages move as a whole at each launch, and the driver refuses advice.
    if !device.concurrent_managed_access {
        return;
    }
    match placement {
        Placement::Auto => {}
        Placement::Host => {
            give(driver, device, base, size, Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Side::Host);
            give(driver, device, base, size, Advice::CU_MEM_ADVISE_SET_ACCESSED_BY, Side::Device);
        }
        Placement::ReadMostly => {
            give(driver, device, base, size, Advice::CU_MEM_ADVISE_SET_READ_MOSTLY, Side::Device);
        }
        Placement::Device => {
            give(driver, device, base, size, Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Side::Device);
            // Fresh pages: 0.3 ms for 64 MiB, where a kernel's first touch would take 7 ms.
            if let Ok(stream) = device.private_stream() {
                // SAFETY: all of one region that was just allocated.
                let _ = unsafe { stream.enqueue_prefetch(base, size, PrefetchTo::Device) };
            }
        }
    }
}

fn give(driver: &Driver, device: &Device, base: *mut u8, size: usize, advice: Advice, side: Side) {
    let Ok(_entered) = device.enter_relaxed(driver) else { return };
    let entries = &driver.entries;
    let code = if let Some(entry) = entries.cuMemAdvise_v2 {
        let location = match side {
            Side::Host => host_location(),
            Side::Device => device_location(device),
        };
        // SAFETY: all of one live managed region; a context is current.
        unsafe { entry(base as u64, size, advice, location) }
    } else if let Some(entry) = entries.cuMemAdvise {
        let place = match side {
            Side::Host => CPU,
            Side::Device => device.raw(),
        };
        // SAFETY: as above.
        unsafe { entry(base as u64, size, advice, place) }
    } else {
        return;
    };
    device.note(code);
}
