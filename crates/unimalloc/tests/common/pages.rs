//! Pages from the operating system, and what may be done with them.

#[cfg(unix)]
use unix as os;
#[cfg(windows)]
use windows as os;

pub use os::{is_readable, reserve, thread_id, unmap, writable};

#[cfg(unix)]
mod unix {
    fn map(size: usize, protection: libc::c_int) -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the system's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return std::ptr::null_mut();
        }
        start.cast()
    }

    /// Zeroed pages, or null.
    pub fn writable(size: usize) -> *mut u8 {
        map(size, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Addresses, or null: a read or write faults.
    pub fn reserve(size: usize) -> *mut u8 {
        map(size, libc::PROT_NONE)
    }

    /// # Safety
    /// One whole region of this module, which nobody uses.
    pub unsafe fn unmap(start: *mut u8, size: usize) -> bool {
        // SAFETY: as the caller says.
        unsafe { libc::munmap(start.cast(), size) == 0 }
    }

    /// Whether a byte can be read: the system refuses to copy from pages that may not be.
    pub fn is_readable(address: *const u8) -> bool {
        let mut pipe = [0; 2];
        // SAFETY: a pipe of our own; the system checks the address and touches nothing of ours.
        unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let written = libc::write(pipe[1], address.cast(), 1);
            libc::close(pipe[0]);
            libc::close(pipe[1]);
            written == 1
        }
    }

    /// The system's name for this thread, which another may have after its end.
    pub fn thread_id() -> usize {
        // SAFETY: reads this thread's id.
        unsafe { libc::pthread_self() as usize }
    }
}

#[cfg(windows)]
mod windows {
    use windows_sys::Win32::System::Memory::{
        VirtualAlloc, VirtualFree, VirtualQuery, MEMORY_BASIC_INFORMATION, MEM_COMMIT, MEM_RELEASE,
        MEM_RESERVE, PAGE_NOACCESS, PAGE_READWRITE,
    };

    /// Zeroed pages, or null.
    pub fn writable(size: usize) -> *mut u8 {
        // SAFETY: a new region at an address of the system's choice.
        unsafe { VirtualAlloc(std::ptr::null(), size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE).cast() }
    }

    /// Addresses, or null: a read or write faults.
    pub fn reserve(size: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe { VirtualAlloc(std::ptr::null(), size, MEM_RESERVE, PAGE_NOACCESS).cast() }
    }

    /// # Safety
    /// One whole region of this module, which nobody uses.
    pub unsafe fn unmap(start: *mut u8, _size: usize) -> bool {
        // SAFETY: as the caller says.
        unsafe { VirtualFree(start.cast(), 0, MEM_RELEASE) != 0 }
    }

    /// Whether a byte can be read, by the system's own account of its page.
    pub fn is_readable(address: *const u8) -> bool {
        let mut page = MEMORY_BASIC_INFORMATION::default();
        // SAFETY: the structure is ours to be written; the address is only looked up.
        let written = unsafe { VirtualQuery(address.cast(), &mut page, size_of_val(&page)) };
        assert_ne!(written, 0);
        page.State == MEM_COMMIT && page.Protect != PAGE_NOACCESS
    }

    /// Where this thread keeps what is its own: a name that another has after its end, which numbers of threads need not be.
    pub fn thread_id() -> usize {
        std::thread_local! {
            static OWN: u8 = const { 0 };
        }
        OWN.with(|own| std::ptr::from_ref(own) as usize)
    }
}
