//! Advice and prefetch, in the form for a device number and in the form for a location, and their batches.

use crate::capture;
use crate::codes::*;
use crate::entry::{entries, runtime};
use crate::memory::{keep_mapped, memory, Kind, Note, NoteKind, Place};
use crate::stream::{self, Stream};
use std::ffi::c_int;
use std::sync::Arc;

const CPU: c_int = -1;
const DEVICE: c_int = 1;
const HOST: c_int = 2;
const HOST_NUMA: c_int = 3;
const HOST_NUMA_CURRENT: c_int = 4;
/// What discarded pages read as: anything but what they were.
const DISCARDED: u8 = 0xDB;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

fn by_number(device: c_int) -> Location {
    match device {
        CPU => Location { kind: HOST, id: 0 },
        id => Location { kind: DEVICE, id },
    }
}

/// A place that memory can be at. A device without concurrent access is none, and neither is the host from there.
fn place(location: Location) -> Outcome<Place> {
    match location.kind {
        DEVICE if !(0..runtime().config.devices).contains(&location.id) => Err(ERROR_INVALID_DEVICE),
        DEVICE | HOST | HOST_NUMA | HOST_NUMA_CURRENT if !runtime().config.concurrent => {
            Err(ERROR_INVALID_DEVICE)
        }
        DEVICE => Ok((DEVICE, location.id)),
        HOST => Ok((HOST, 0)),
        HOST_NUMA if location.id == 0 => Ok((HOST_NUMA, 0)),
        HOST_NUMA_CURRENT => Ok((HOST_NUMA, 0)),
        _ => Err(ERROR_INVALID_VALUE),
    }
}

fn check_range(address: usize, bytes: usize) -> Outcome {
    let memory = memory();
    let found = memory.find_range(address, bytes).filter(|_| bytes > 0).ok_or(ERROR_INVALID_VALUE)?;
    match found.kind {
        Kind::Managed { .. } => Ok(()),
        _ => Err(ERROR_INVALID_VALUE),
    }
}

fn note(address: usize, bytes: usize, kind: NoteKind) {
    if let Some(found) = memory().find_range_mut(address, bytes) {
        found.note(Note { start: address, end: address + bytes, kind });
    }
}

fn advise(address: usize, bytes: usize, advice: c_int, location: Location) -> Outcome {
    check_range(address, bytes)?;
    capture::forbid_unsafe_call()?;
    let kind = match advice {
        1 | 2 => NoteKind::ReadMostly(advice == 1),
        3 => NoteKind::Preferred(Some(place(location)?)),
        4 => NoteKind::Preferred(None),
        5 | 6 => NoteKind::AccessedBy(place(location)?, advice == 5),
        _ => return Err(ERROR_INVALID_VALUE),
    };
    note(address, bytes, kind);
    Ok(())
}

fn prefetch(stream: &Arc<Stream>, ranges: Vec<(usize, usize, Place)>, discard: bool) -> Outcome {
    // A prefetch cannot be captured.
    capture::forbid_on(stream)?;
    stream::run(stream, move || {
        for &(address, bytes, place) in &ranges {
            if discard {
                let _mapped = keep_mapped();
                let view = memory().device_view(address, bytes).ok_or(ERROR_ILLEGAL_ADDRESS)?;
                // SAFETY: the range lies in live memory, which `_mapped` keeps mapped; its bytes are the device's to
                // destroy, since the program discarded them.
                unsafe { std::ptr::write_bytes(view as *mut u8, DISCARDED, bytes) };
            }
            note(address, bytes, NoteKind::Prefetched(place));
        }
        Ok(())
    })
}

/// The arguments that the batch calls share.
struct Batch {
    addresses: *const usize,
    sizes: *const usize,
    count: usize,
    locations: *const Location,
    indices: *const usize,
    location_count: usize,
    flags: u64,
}

impl Batch {
    /// # Safety
    /// The arrays are null or as long as their counts say.
    unsafe fn ranges(&self) -> Outcome<Vec<(usize, usize, Place)>> {
        let nothing = self.addresses.is_null()
            || self.sizes.is_null()
            || self.locations.is_null()
            || self.indices.is_null();
        if nothing
            || self.count == 0
            || self.location_count == 0
            || self.location_count > self.count
            || self.flags != 0
        {
            return Err(ERROR_INVALID_VALUE);
        }
        let mut current = 0;
        let mut ranges = Vec::with_capacity(self.count);
        for index in 0..self.count {
            // SAFETY: not null, and as long as their counts by this function's contract; `current` stays below
            // `location_count`.
            let (address, bytes, location) = unsafe {
                if self.indices.read() != 0 {
                    return Err(ERROR_INVALID_VALUE);
                }
                if current + 1 < self.location_count && self.indices.add(current + 1).read() == index {
                    current += 1;
                }
                (
                    self.addresses.add(index).read(),
                    self.sizes.add(index).read(),
                    self.locations.add(current).read(),
                )
            };
            check_range(address, bytes)?;
            ranges.push((address, bytes, place(location)?));
        }
        Ok(ranges)
    }
}

entries! {
    fn cuMemAdvise[Ctx _c](address: usize, bytes: usize, advice: c_int, device: c_int) {
        advise(address, bytes, advice, by_number(device))
    }

    fn cuMemAdvise_v2[Ctx _c](address: usize, bytes: usize, advice: c_int, location: Location) {
        advise(address, bytes, advice, location)
    }

    fn cuMemPrefetchAsync[Handle context](address: usize, bytes: usize, device: c_int, stream: usize) {
        check_range(address, bytes)?;
        prefetch(&stream::resolve(&context, stream)?, vec![(address, bytes, place(by_number(device))?)], false)
    }

    fn cuMemPrefetchAsync_v2[Handle context](address: usize, bytes: usize, location: Location, flags: u32, stream: usize) {
        if flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        check_range(address, bytes)?;
        prefetch(&stream::resolve(&context, stream)?, vec![(address, bytes, place(location)?)], false)
    }

    fn cuMemPrefetchBatchAsync[Handle context](
        addresses: *const usize, sizes: *const usize, count: usize, locations: *const Location,
        indices: *const usize, location_count: usize, flags: u64, stream: usize,
    ) {
        let batch = Batch { addresses, sizes, count, locations, indices, location_count, flags };
        // The batches refuse the default stream.
        if stream <= 1 {
            return Err(ERROR_INVALID_VALUE);
        }
        prefetch(&stream::resolve(&context, stream)?, batch.ranges()?, false)
    }

    fn cuMemDiscardAndPrefetchBatchAsync[Handle context](
        addresses: *const usize, sizes: *const usize, count: usize, locations: *const Location,
        indices: *const usize, location_count: usize, flags: u64, stream: usize,
    ) {
        let batch = Batch { addresses, sizes, count, locations, indices, location_count, flags };
        if stream <= 1 {
            return Err(ERROR_INVALID_VALUE);
        }
        prefetch(&stream::resolve(&context, stream)?, batch.ranges()?, true)
    }
}
