//! Ordinary memory from the operating system: for machines without a GPU, and for tests.

use super::budget::Budget;
use super::registry::{Entry, Registry};
use super::{fork, system_memory, valid_size, BackendCounters, MemoryBackend};
use crate::error::{set_last_error, AllocError};
use crate::log::say;

#[cfg(unix)]
#[path = "host_unix.rs"]
mod os;
#[cfg(windows)]
#[path = "host_windows.rs"]
mod os;

/// Bases of regions of at least this size are aligned to it, so that segments need no padding and the system can
/// back them with huge pages.
const LARGE: usize = 2 << 20;
/// The part of the available memory that this process may hold unless a limit is configured.
const SHARE: f64 = 0.8;

static REGISTRY: Registry = Registry::new();
static BUDGET: Budget = Budget::new();

/// Ordinary host memory, by `mmap` or `VirtualAlloc`.
///
/// It holds at most 80 % of the memory that is available within the process's control groups, looked at again as it
/// grows, or what `UNIMALLOC_MAX_BYTES` or [`set_limit`](Self::set_limit) says. It works in no child of a `fork`.
pub struct HostBackend;

impl HostBackend {
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
        let _ = BUDGET.ceiling(SHARE, system_memory::look);
        BUDGET.counters()
    }

    /// Bytes of memory that this process could use at most: a limit in per cent is of these.
    pub fn total_bytes() -> Option<u64> {
        system_memory::look().map(|seen| seen.total)
    }
}

fn allocate(size: usize) -> Result<*mut u8, AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    if !valid_size(size) {
        return Err(AllocError::InvalidSize);
    }
    fork::watch();
    let grant = BUDGET.grant(size as u64, BUDGET.ceiling(SHARE, system_memory::look)?)?;
    let align = if size >= LARGE { LARGE } else { os::page_size() };
    let base = os::map(size, align).ok_or(AllocError::OutOfMemory)?;
    if let Err(error) = REGISTRY.insert(base.as_ptr() as usize, Entry { size, device: 0, kind: 0 }) {
        // SAFETY: this thread just made the region and told nobody.
        unsafe { os::unmap(base.as_ptr(), size) };
        return Err(error);
    }
    grant.confirm();
    say!(Level::Debug, "allocate backend=host bytes={size} address={base:p}");
    Ok(base.as_ptr())
}

/// # Safety
/// Nobody uses the region at `ptr` any more, if one is registered there.
unsafe fn deallocate(ptr: *mut u8, size: usize) -> Result<(), AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    let entry = REGISTRY.begin_release(ptr as usize, size)?;
    // SAFETY: the registry says that the region is ours and live, and took it out, so that no other thread releases
    // it; the caller says that nobody uses it.
    let released = unsafe { os::unmap(ptr, size) };
    REGISTRY.finish_release(ptr as usize, entry, released);
    if !released {
        return Err(AllocError::OutOfMemory);
    }
    BUDGET.record_free(size as u64);
    say!(Level::Debug, "free backend=host bytes={size} address={ptr:p}");
    Ok(())
}

/// Whether the range is whole pages of one live region.
fn check_range(ptr: *mut u8, size: usize) -> Result<(), AllocError> {
    if fork::forked() {
        return Err(AllocError::Forked);
    }
    let page = os::page_size();
    if size == 0 || !size.is_multiple_of(page) || !(ptr as usize).is_multiple_of(page) {
        return Err(AllocError::InvalidRange);
    }
    REGISTRY.containing(ptr as usize, size).map(drop).ok_or(AllocError::InvalidRange)
}

/// Turns a result into the trait's answer, and keeps the reason.
fn done(result: Result<(), AllocError>) -> bool {
    result.map_err(set_last_error).is_ok()
}

// SAFETY: regions come fresh and page-aligned from the operating system, disjoint from everything else in the
// process, and stay mapped until `deallocate` unmapped them. Nothing here panics: locks ignore poison, arithmetic is
// checked, tables reserve their memory first.
unsafe impl MemoryBackend for HostBackend {
    const SUPPORTS_PAGE_RESET: bool = true;
    const SUPPORTS_MAKE_GUARD: bool = true;
    const SUPPORTS_DECOMMIT: bool = true;
    const ZEROED_ON_ALLOCATE: bool = true;

    unsafe fn allocate(size: usize) -> *mut u8 {
        allocate(size).unwrap_or_else(|error| {
            BUDGET.record_failure();
            say!(Level::Debug, "not-allocated backend=host bytes={size} reason={error:?}");
            set_last_error(error);
            std::ptr::null_mut()
        })
    }

    unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
        // SAFETY: the caller's contract is the same.
        done(unsafe { deallocate(ptr, size) })
    }

    /// The range is accessible afterwards, also where it was a guard or decommitted before.
    unsafe fn page_reset(ptr: *mut u8, size: usize) -> bool {
        done(check_range(ptr, size).and_then(|()| {
            // SAFETY: whole pages of one live region, whose contents the caller does not need.
            unsafe { os::reset(ptr, size) }.then_some(()).ok_or(AllocError::OutOfMemory)
        }))
    }

    unsafe fn make_guard(ptr: *mut u8, size: usize) -> bool {
        done(check_range(ptr, size).and_then(|()| {
            // SAFETY: whole pages of one live region, which the caller will not touch.
            unsafe { os::protect(ptr, size) }.then_some(()).ok_or(AllocError::OutOfMemory)
        }))
    }

    unsafe fn decommit(ptr: *mut u8, size: usize) -> bool {
        done(check_range(ptr, size).and_then(|()| {
            // SAFETY: whole pages of one live region, which the caller will not touch.
            unsafe { os::decommit(ptr, size) }.then_some(()).ok_or(AllocError::OutOfMemory)
        }))
    }

    fn segment_bytes() -> usize {
        super::segment_bytes_for(BUDGET.ceiling(SHARE, system_memory::look).unwrap_or(0))
    }

    fn counters() -> BackendCounters {
        Self::counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::last_error;

    const PAGE: usize = 4096;
    const SEGMENT: usize = 32 << 20;

    /// A region that goes back when the test ends.
    struct Region(*mut u8, usize);

    impl Region {
        fn new(size: usize) -> Self {
            // SAFETY: any size may be asked for.
            let base = unsafe { HostBackend::allocate(size) };
            assert!(!base.is_null(), "{:?}", last_error());
            Self(base, size)
        }
        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: the region is live, ours, and zeroed by the system; the slice borrows its only handle.
            unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
        }
    }

    impl Drop for Region {
        fn drop(&mut self) {
            // SAFETY: nobody uses the region any more.
            assert!(unsafe { HostBackend::deallocate(self.0, self.1) }, "{:?}", last_error());
        }
    }

    #[test]
    fn regions_are_zeroed_and_large_ones_are_aligned() {
        for size in [PAGE, 3 * PAGE, LARGE - PAGE, LARGE, LARGE + PAGE, SEGMENT] {
            let mut region = Region::new(size);
            assert_eq!(region.0 as usize % PAGE, 0);
            if size >= LARGE {
                assert_eq!(region.0 as usize % LARGE, 0, "{size}");
            }
            let bytes = region.bytes();
            assert!(bytes.iter().step_by(509).all(|&byte| byte == 0));
            (bytes[0], bytes[size - 1]) = (1, 2);
        }
    }

    #[test]
    fn bad_sizes_are_refused_with_a_reason() {
        for size in [0, 1, PAGE - 1, PAGE + 1, usize::MAX, usize::MAX & !(PAGE - 1)] {
            // SAFETY: any size may be asked for.
            assert!(unsafe { HostBackend::allocate(size) }.is_null());
            assert_eq!(last_error(), Some(AllocError::InvalidSize), "{size}");
        }
    }

    #[test]
    fn garbage_is_not_released() {
        let mut region = Region::new(SEGMENT);
        for (ptr, size) in [
            (std::ptr::null_mut(), PAGE),
            (std::ptr::without_provenance_mut(0xdead_b000), PAGE),
            (region.0.wrapping_add(PAGE), SEGMENT - PAGE),
            (region.0, PAGE),
            (region.0, SEGMENT + PAGE),
            (region.0, 0),
        ] {
            // SAFETY: none of these is a registered region, so nothing is touched: what is tested.
            assert!(!unsafe { HostBackend::deallocate(ptr, size) });
            assert_eq!(last_error(), Some(AllocError::NotRegistered), "{ptr:?} {size}");
        }
        region.bytes()[SEGMENT - 1] = 7;
    }

    #[test]
    fn bad_ranges_are_refused_with_a_reason() {
        let mut region = Region::new(4 * PAGE);
        for (ptr, size) in [
            (region.0, 0),
            (region.0, 1),
            (region.0.wrapping_add(1), PAGE),
            (region.0, 5 * PAGE),
            (region.0.wrapping_add(3 * PAGE), 2 * PAGE),
            (std::ptr::null_mut(), PAGE),
            (region.0, usize::MAX & !(PAGE - 1)),
        ] {
            for operation in [HostBackend::page_reset, HostBackend::make_guard, HostBackend::decommit] {
                // SAFETY: nothing of the kind may happen to these ranges: what is tested.
                assert!(!unsafe { operation(ptr, size) });
                assert_eq!(last_error(), Some(AllocError::InvalidRange), "{ptr:?} {size}");
            }
        }
        region.bytes().fill(1);
    }

    #[cfg(target_os = "linux")]
    fn resident(region: &Region) -> usize {
        let mut pages = vec![0_u8; region.1 / os::page_size()];
        // SAFETY: the vector has a byte for each page of the live region.
        assert_eq!(unsafe { libc::mincore(region.0.cast(), region.1, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|&&page| page & 1 != 0).count() * os::page_size()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn reset_and_decommitted_pages_are_given_back() {
        let mut region = Region::new(LARGE);
        region.bytes().fill(0xAA);
        assert_eq!(resident(&region), LARGE);
        // SAFETY: the second half of the region, whose contents are not needed.
        assert!(unsafe { HostBackend::page_reset(region.0.add(LARGE / 2), LARGE / 2) });
        assert!(resident(&region) <= LARGE / 2);
        assert!(region.bytes()[LARGE / 2..].iter().all(|&byte| byte == 0), "reads as zero");
        assert!(region.bytes()[..LARGE / 2].iter().all(|&byte| byte == 0xAA), "the rest is untouched");
        // SAFETY: the first half, not touched before it is reset below.
        assert!(unsafe { HostBackend::decommit(region.0, LARGE / 2) });
        assert!(resident(&region) <= LARGE / 2);
        // SAFETY: as above.
        assert!(unsafe { HostBackend::page_reset(region.0, LARGE / 2) });
        assert!(region.bytes().iter().all(|&byte| byte == 0), "usable again");
    }

    /// Whether the kernel refuses to read a byte here, which it says without a signal.
    #[cfg(target_os = "linux")]
    fn faults(address: *const u8) -> bool {
        let mut pipe = [0; 2];
        // SAFETY: the array is ours; the kernel checks the address that it is told to read.
        unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let written = libc::write(pipe[1], address.cast(), 1);
            let error = std::io::Error::last_os_error().raw_os_error();
            libc::close(pipe[0]);
            libc::close(pipe[1]);
            written == -1 && error == Some(libc::EFAULT)
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn guards_fault_and_their_neighbours_do_not() {
        let region = Region::new(4 * PAGE);
        // SAFETY: pages of the region that are not touched afterwards.
        unsafe {
            assert!(HostBackend::make_guard(region.0.add(PAGE), PAGE));
            assert!(HostBackend::decommit(region.0.add(3 * PAGE), PAGE));
        }
        let fault = [0, 1, 2, 3].map(|page| faults(region.0.wrapping_add(page * PAGE)));
        assert_eq!(fault, [false, true, false, true]);
    }

    #[test]
    fn threads_get_disjoint_regions_and_the_account_balances() {
        let before = HostBackend::counters();
        std::thread::scope(|scope| {
            for thread in 1..=8_u8 {
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mut regions: Vec<_> = (1..=4).map(|pages| Region::new(pages * PAGE)).collect();
                        regions.iter_mut().for_each(|region| region.bytes().fill(thread));
                        assert!(regions
                            .iter_mut()
                            .all(|region| region.bytes().iter().all(|&byte| byte == thread)));
                    }
                });
            }
        });
        let after = HostBackend::counters();
        assert!(after.allocations - before.allocations >= 1600);
        assert!(after.frees - before.frees >= 1600);
    }
}
