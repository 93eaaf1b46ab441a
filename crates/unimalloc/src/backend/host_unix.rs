//! Regions of pages by `mmap`.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a page of this machine: 4 KiB, or up to 64 KiB on ARM.
pub(super) fn page_size() -> usize {
    static PAGE: AtomicUsize = AtomicUsize::new(0);
    match PAGE.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf reads a constant of the system.
            let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
            PAGE.store(page, Ordering::Relaxed);
            page
        }
        page => page,
    }
}

fn map_anywhere(size: usize) -> Option<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private mapping at an address of the system's choice touches nothing that exists.
    let base = unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    NonNull::new(base.cast())
}

/// Zeroed, readable and writable pages whose base is a multiple of `align`, a power of two.
pub(super) fn map(size: usize, align: usize) -> Option<NonNull<u8>> {
    let page = page_size();
    if align <= page {
        return map_anywhere(size);
    }
    let size = size.checked_next_multiple_of(page)?;
    let mapped = size.checked_add(align - page)?;
    let start = map_anywhere(mapped)?.as_ptr();
    let before = (start as usize).wrapping_neg() & (align - 1);
    let after = mapped - before - size;
    // SAFETY: `before + size + after` is exactly what was mapped just now, all three are whole pages, and nobody else
    // knows of them. From the end on, so that what is left on a failure (the system could not split the mapping) is one
    // piece, and nothing that another thread mapped meanwhile.
    unsafe {
        let base = start.add(before);
        if after != 0 && !unmap(base.add(size), after) {
            unmap(start, mapped);
            return None;
        }
        if before != 0 && !unmap(start, before) {
            unmap(start, before + size);
            return None;
        }
        NonNull::new(base)
    }
}

/// # Safety
/// Nobody uses the pages, which belong to the caller.
pub(super) unsafe fn unmap(base: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { libc::munmap(base.cast(), size) == 0 }
}

/// # Safety
/// Whole pages of a region from [`map`] whose contents nobody needs.
pub(super) unsafe fn reset(base: *mut u8, size: usize) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: the caller's contract. On Linux MADV_DONTNEED of private anonymous memory promises zeros at the next
    // read; the range is made accessible again first in case it was a guard.
    unsafe {
        libc::mprotect(base.cast(), size, libc::PROT_READ | libc::PROT_WRITE) == 0
            && libc::madvise(base.cast(), size, libc::MADV_DONTNEED) == 0
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    // SAFETY: the caller's contract. Elsewhere MADV_DONTNEED is only a hint, so fresh pages are mapped over the old ones.
    unsafe {
        remap(base, size, libc::PROT_READ | libc::PROT_WRITE)
    }
}

/// # Safety
/// Whole pages of a region from [`map`] that nobody will touch.
pub(super) unsafe fn protect(base: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { libc::mprotect(base.cast(), size, libc::PROT_NONE) == 0 }
}

/// # Safety
/// Whole pages of a region from [`map`] that nobody will touch.
pub(super) unsafe fn decommit(base: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { remap(base, size, libc::PROT_NONE) }
}

/// Maps fresh pages over a range in one step: at no moment are the addresses free for another mapping to take.
///
/// # Safety
/// Whole pages of a region from [`map`] whose contents nobody needs.
unsafe fn remap(base: *mut u8, size: usize, protection: libc::c_int) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: MAP_FIXED replaces only this range, which belongs to the caller.
    unsafe { libc::mmap(base.cast(), size, protection, flags, -1, 0) != libc::MAP_FAILED }
}
