//! Regions of pages by `VirtualAlloc`.

use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use windows_sys::Win32::System::Memory::{
    VirtualAlloc, VirtualFree, VirtualProtect, MEM_COMMIT, MEM_DECOMMIT, MEM_RELEASE, MEM_RESERVE,
    PAGE_NOACCESS, PAGE_READWRITE,
};
use windows_sys::Win32::System::SystemInformation::{GetSystemInfo, SYSTEM_INFO};

/// Another thread can take the addresses between the two steps of an aligned reservation.
const ATTEMPTS: usize = 16;

/// Bytes of a page of this machine.
pub(super) fn page_size() -> usize {
    static PAGE: OnceLock<usize> = OnceLock::new();
    *PAGE.get_or_init(|| {
        // SAFETY: a structure of integers and pointers, for which all zeros is a value.
        let mut info: SYSTEM_INFO = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours to be written.
        unsafe { GetSystemInfo(&mut info) };
        info.dwPageSize as usize
    })
}

/// Zeroed, readable and writable pages whose base is a multiple of `align`, a power of two.
pub(super) fn map(size: usize, align: usize) -> Option<NonNull<u8>> {
    let commit = |at: *const u8| {
        // SAFETY: a new region, at an address of the system's choice or at one that is free, touches nothing that exists.
        NonNull::new(
            unsafe { VirtualAlloc(at.cast(), size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) }.cast::<u8>(),
        )
    };
    let base = commit(ptr::null())?;
    if (base.as_ptr() as usize).is_multiple_of(align) {
        return Some(base);
    }
    // SAFETY: made above, told to nobody.
    unsafe { unmap(base.as_ptr(), size) };
    let reserved = size.checked_add(align)?;
    for _ in 0..ATTEMPTS {
        // SAFETY: as above; addresses only, to learn where a free range is.
        let start = unsafe { VirtualAlloc(ptr::null(), reserved, MEM_RESERVE, PAGE_NOACCESS) };
        if start.is_null() {
            return None;
        }
        // A part of a reservation cannot be released, so all of it is, and the aligned part asked for by address.
        // SAFETY: made above, told to nobody.
        unsafe { VirtualFree(start, 0, MEM_RELEASE) };
        let before = (start as usize).wrapping_neg() & (align - 1);
        if let Some(base) = commit(start.cast::<u8>().wrapping_add(before)) {
            return Some(base);
        }
    }
    None
}

/// # Safety
/// Nobody uses the region, which is exactly one that [`map`] returned.
pub(super) unsafe fn unmap(base: *mut u8, _size: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { VirtualFree(base.cast(), 0, MEM_RELEASE) != 0 }
}

/// # Safety
/// Whole pages of a region from [`map`] whose contents nobody needs.
pub(super) unsafe fn reset(base: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's contract. MEM_RESET would not promise zeros; a decommitted page committed again does.
    unsafe {
        VirtualFree(base.cast(), size, MEM_DECOMMIT) != 0
            && !VirtualAlloc(base.cast(), size, MEM_COMMIT, PAGE_READWRITE).is_null()
    }
}

/// # Safety
/// Whole pages of a region from [`map`] that nobody will touch.
pub(super) unsafe fn protect(base: *mut u8, size: usize) -> bool {
    let mut before = 0;
    // SAFETY: the caller's contract.
    unsafe { VirtualProtect(base.cast(), size, PAGE_NOACCESS, &mut before) != 0 }
}

/// # Safety
/// Whole pages of a region from [`map`] that nobody will touch.
pub(super) unsafe fn decommit(base: *mut u8, size: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { VirtualFree(base.cast(), size, MEM_DECOMMIT) != 0 }
}
