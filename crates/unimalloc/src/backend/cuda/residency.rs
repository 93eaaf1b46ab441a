//! Which side a block's pages are on, and moving dead pages to the device.
//!
//! The host's touches are invisible to an allocator, but not to the system: a managed page that the CPU can reach without
//! a fault is present in the process's page table, and one that went to the device is not. A few pages of a block are
//! looked up there (`/proc/self/pagemap`, some hundred nanoseconds each); elsewhere the last launch decides.

use crate::cuda::{Device, PrefetchTo, Stream};

/// Smaller blocks are not looked at: a kernel's faults on them cost no more than the look and the move.
const WORTH_A_LOOK: usize = 256 << 10;
/// Moves are of whole driver pages, so that no neighbour's bytes are discarded.
const DRIVER_PAGE: usize = 64 << 10;
/// Pages looked at: the first, and one in the middle. What the host fills in part begins at the start as a rule.
const SAMPLES: usize = 2;

/// Backs the pages of an uninitialised block on the device, if the host used them last. Ordered on `stream`, or complete
/// when this returns.
///
/// # Safety
/// The block is the caller's and nobody needs its contents.
pub(super) unsafe fn settle(
    device: &'static Device,
    block: *mut u8,
    len: usize,
    used_by_device: bool,
    stream: Option<&Stream>,
) {
    if len < WORTH_A_LOOK || !device.concurrent_managed_access {
        return;
    }
    // What the GPU used last, as far as is known, is looked at in one place.
    let samples = if used_by_device { 1 } else { SAMPLES };
    if !host_used_last(block as usize, len, samples).unwrap_or(!used_by_device) {
        return;
    }
    let start = (block as usize).next_multiple_of(DRIVER_PAGE);
    let end = (block as usize + len) & !(DRIVER_PAGE - 1);
    let Some(len) = end.checked_sub(start).filter(|len| *len > 0) else { return };
    let start = block.wrapping_add(start - block as usize);
    let Some(queue) = stream.or_else(|| device.private_stream().ok()) else { return };
    // SAFETY: whole pages inside the caller's block, whose contents nobody needs. A failure leaves the pages where they
    // are: the block works, slower.
    let moved = unsafe { queue.enqueue_discard_and_prefetch(start, len, PrefetchTo::Device) };
    if stream.is_none() && moved.is_ok() {
        let _ = queue.synchronize();
    }
}

/// Whether pages of the range are present on the host; `None` where that cannot be seen.
#[cfg(target_os = "linux")]
fn host_used_last(address: usize, len: usize, samples: usize) -> Option<bool> {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::OnceLock;

    static PAGEMAP: OnceLock<Option<File>> = OnceLock::new();
    const PAGE: usize = 4096;
    const PRESENT: u64 = 1 << 63;

    let pagemap = PAGEMAP.get_or_init(|| File::open("/proc/self/pagemap").ok()).as_ref()?;
    for sample in 0..samples {
        let page = (address + len / samples * sample) / PAGE;
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, page as u64 * 8).ok()?;
        if u64::from_le_bytes(entry) & PRESENT != 0 {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(not(target_os = "linux"))]
fn host_used_last(_address: usize, _len: usize, _samples: usize) -> Option<bool> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_seen_and_untouched_ones_are_not() {
        let len = 8 << 20;
        // SAFETY: an anonymous mapping of our own.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        if let Some(seen) = host_used_last(base as usize, len, SAMPLES) {
            assert!(!seen);
            // SAFETY: inside the mapping.
            unsafe { base.cast::<u8>().write(1) };
            assert_eq!(host_used_last(base as usize, len, 1), Some(true));
        }
        // SAFETY: the whole mapping, used by nobody.
        unsafe { libc::munmap(base, len) };
    }
}
