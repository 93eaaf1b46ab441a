//! What the driver knows about an address.

use crate::codes::*;
use crate::entry::{entries, put};
use crate::memory::{memory, Allocation, Kind, NoteKind, Place};
use std::ffi::{c_int, c_void};

const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;

/// # Safety
/// `out` is null or valid for the type of that attribute.
unsafe fn answer(found: Option<&Allocation>, which: c_int, out: *mut c_void, address: usize) -> Outcome {
    let managed = found.is_some_and(|f| matches!(f.kind, Kind::Managed { .. }));
    let host = found.is_some_and(|f| f.kind != Kind::Device);
    // SAFETY: by this function's contract, `out` is null or valid for the type written in each arm.
    unsafe {
        match which {
            1 => put(out.cast(), found.map_or(0, |f| f.context)),
            2 => {
                let kind = match found.map(|f| f.kind) {
                    Some(Kind::Pinned) => MEMORY_TYPE_HOST,
                    Some(_) => MEMORY_TYPE_DEVICE,
                    None => 0,
                };
                put(out.cast(), kind)
            }
            3 => put(out.cast(), found.map_or(0, |_| address)),
            4 if host => put(out.cast(), address),
            4 if found.is_none() => put(out.cast(), 0usize),
            4 => Err(ERROR_INVALID_VALUE),
            6 => put(out.cast(), 0u32),
            7 => put(out.cast(), found.map_or(0, |f| f.id)),
            8 => put(out.cast(), u32::from(managed)),
            9 => put(out.cast(), found.map_or(-2, |f| f.device)),
            10 | 15 => put(out.cast(), 0u32),
            11 => put(out.cast(), found.map_or(0, |f| f.address)),
            12 => put(out.cast(), found.map_or(0, |f| f.bytes)),
            13 => put(out.cast(), u32::from(found.is_some())),
            14 => put(out.cast(), 0u64),
            16 => put(out.cast(), if found.is_some() { 3u32 } else { 0 }),
            17 => put(out.cast(), 0usize),
            _ => Err(ERROR_INVALID_VALUE),
        }
    }
}

entries! {
    fn cuPointerGetAttribute[Init _r](out: *mut c_void, which: c_int, address: usize) {
        let memory = memory();
        let found = memory.find(address).ok_or(ERROR_INVALID_VALUE)?;
        answer(Some(found), which, out, address)
    }

    // Unlike the single one, it answers for unknown addresses, with null values.
    fn cuPointerGetAttributes[Init _r](count: u32, which: *const c_int, outs: *const *mut c_void, address: usize) {
        if count == 0 || which.is_null() || outs.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        let memory = memory();
        let found = memory.find(address);
        for index in 0..count as usize {
            answer(found, which.add(index).read_unaligned(), outs.add(index).read_unaligned(), address)?;
        }
        Ok(())
    }

    fn cuMemRangeGetAttribute[Ctx _c](out: *mut c_void, size: usize, which: c_int, address: usize, bytes: usize) {
        let memory = memory();
        let found = memory.find_range(address, bytes).ok_or(ERROR_INVALID_VALUE)?;
        if bytes == 0 || !matches!(found.kind, Kind::Managed { .. }) {
            return Err(ERROR_INVALID_VALUE);
        }
        let preferred = || match found.latest(address, bytes, |kind| matches!(kind, NoteKind::Preferred(_))) {
            Some(NoteKind::Preferred(place)) => place,
            _ => None,
        };
        let prefetched = || match found.latest(address, bytes, |kind| matches!(kind, NoteKind::Prefetched(_))) {
            Some(NoteKind::Prefetched(place)) => Some(place),
            _ => None,
        };
        // The one-number form: a device, -1 for the host, -2 for none.
        let number = |place: Option<Place>| match place {
            Some((1, device)) => device,
            Some(_) => -1,
            None => -2,
        };
        match which {
            3 => {
                if size < 4 || !size.is_multiple_of(4) || out.is_null() {
                    return Err(ERROR_INVALID_VALUE);
                }
                let places = found.accessed_by(address, bytes);
                for index in 0..size / 4 {
                    put(out.cast::<c_int>().add(index), number(places.get(index).copied()))?;
                }
                Ok(())
            }
            _ if size != 4 => Err(ERROR_INVALID_VALUE),
            1 => {
                let read_mostly = |kind: &NoteKind| matches!(kind, NoteKind::ReadMostly(_));
                put(out.cast(), c_int::from(found.latest(address, bytes, read_mostly) == Some(NoteKind::ReadMostly(true))))
            }
            2 => put(out.cast(), number(preferred())),
            4 => put(out.cast(), number(prefetched())),
            5 => put(out.cast(), preferred().map_or(0, |(kind, _)| kind)),
            6 => put(out.cast(), preferred().map_or(0, |(_, id)| id)),
            7 => put(out.cast(), prefetched().map_or(0, |(kind, _)| kind)),
            8 => put(out.cast(), prefetched().map_or(0, |(_, id)| id)),
            _ => Err(ERROR_INVALID_VALUE),
        }
    }
}
