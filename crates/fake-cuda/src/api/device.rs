//! Devices and their attributes.

use crate::codes::*;
use crate::context;
use crate::entry::{entries, put, put_if_wanted, Runtime};
use std::ffi::{c_char, c_int};

fn known(runtime: &Runtime, device: c_int) -> Outcome {
    if (0..runtime.config.devices).contains(&device) {
        Ok(())
    } else {
        Err(ERROR_INVALID_DEVICE)
    }
}

/// `CUdevice_attribute`: an H200's figures where the configuration does not say otherwise.
pub fn attribute(runtime: &Runtime, which: c_int, device: c_int) -> Option<c_int> {
    let config = &runtime.config;
    Some(match which {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65_536,
        13 => 1_980_000,
        14 | 30 => 512,
        51 => 32,
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 90 | 95 => 1,
        16 => 132,
        17 | 18 | 20 | 35 => 0,
        33 => 0x10 + device,
        34 | 50 => 0,
        36 => 3_201_000,
        37 => 6144,
        38 => 60 << 20,
        39 => 2048,
        40 => 3,
        75 => (config.compute / 10) as c_int,
        76 => (config.compute % 10) as c_int,
        81 => 228 << 10,
        83 => config.managed.into(),
        84..=86 => 0,
        87 => 2,
        88 => config.pageable.into(),
        89 => (config.managed && config.concurrent).into(),
        91 | 99 => 1,
        97 => 227 << 10,
        // No memory pools, no virtual memory management: the stand-in has neither.
        100..=105 | 115 | 119 => 0,
        106 => 32,
        111 => 1024,
        known if (1..=161).contains(&known) => 0,
        _ => return None,
    })
}

entries! {
    fn cuDeviceGetCount[Init runtime](count: *mut c_int) {
        put(count, runtime.config.devices)
    }

    fn cuDeviceGet[Init runtime](device: *mut c_int, ordinal: c_int) {
        known(runtime, ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetName[Init runtime](name: *mut c_char, length: c_int, device: c_int) {
        known(runtime, device)?;
        if name.is_null() || length <= 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        let text = runtime.config.name.as_bytes();
        let kept = text.len().min(length as usize - 1);
        std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast::<u8>(), kept);
        put(name.add(kept), 0)
    }

    fn cuDeviceGetUuid_v2[Init runtime](uuid: *mut [u8; 16], device: c_int) {
        known(runtime, device)?;
        let mut bytes = *b"fake-cuda device";
        bytes[15] = device as u8;
        put(uuid, bytes)
    }

    fn cuDeviceGetUuid[Init runtime](uuid: *mut [u8; 16], device: c_int) {
        known(runtime, device)?;
        let mut bytes = *b"fake-cuda device";
        bytes[15] = device as u8;
        put(uuid, bytes)
    }

    fn cuDeviceGetPCIBusId[Init runtime](text: *mut c_char, length: c_int, device: c_int) {
        known(runtime, device)?;
        let id = format!("0000:{:02X}:00.0\0", 0x10 + device);
        if text.is_null() || (length as usize) < id.len() {
            return Err(ERROR_INVALID_VALUE);
        }
        std::ptr::copy_nonoverlapping(id.as_ptr(), text.cast::<u8>(), id.len());
        Ok(())
    }

    fn cuDeviceTotalMem_v2[Init runtime](bytes: *mut usize, device: c_int) {
        known(runtime, device)?;
        put(bytes, runtime.config.total_bytes as usize)
    }

    fn cuDeviceGetAttribute[Init runtime](value: *mut c_int, which: c_int, device: c_int) {
        known(runtime, device)?;
        put(value, attribute(runtime, which, device).ok_or(ERROR_INVALID_VALUE)?)
    }

    fn cuDeviceComputeCapability[Init runtime](major: *mut c_int, minor: *mut c_int, device: c_int) {
        known(runtime, device)?;
        put(major, (runtime.config.compute / 10) as c_int)?;
        put(minor, (runtime.config.compute % 10) as c_int)
    }

    fn cuDeviceCanAccessPeer[Init runtime](can: *mut c_int, device: c_int, peer: c_int) {
        known(runtime, device)?;
        known(runtime, peer)?;
        put(can, 0)
    }

    fn cuDevicePrimaryCtxRetain[Init runtime](context: *mut usize, device: c_int) {
        known(runtime, device)?;
        if context.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        put(context, context::retain_primary(device)?)
    }

    fn cuDevicePrimaryCtxRelease_v2[Init runtime](device: c_int) {
        known(runtime, device)?;
        context::release_primary(device)
    }

    fn cuDevicePrimaryCtxReset_v2[Init runtime](device: c_int) {
        known(runtime, device)?;
        context::reset_primary(device);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState[Init runtime](device: c_int, flags: *mut u32, active: *mut c_int) {
        known(runtime, device)?;
        let (own, live) = context::primary_state(device);
        put_if_wanted(flags, own);
        put(active, live.into())
    }

    fn cuDevicePrimaryCtxSetFlags_v2[Init runtime](device: c_int, flags: u32) {
        known(runtime, device)?;
        context::set_primary_flags(device, flags);
        Ok(())
    }

    fn cuMemGetInfo_v2[Ctx _context](free: *mut usize, total: *mut usize) {
        let (available, whole) = crate::memory::info();
        put(free, available as usize)?;
        put(total, whole as usize)
    }
}
