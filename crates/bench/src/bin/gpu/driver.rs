//! The driver's own allocators, called as a program without this crate would.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::ptr;

type Handle = *mut c_void;

/// The calls that are measured, and what they need.
pub struct Driver {
    mem_alloc_managed: unsafe extern "C" fn(*mut u64, usize, c_uint) -> u32,
    mem_free: unsafe extern "C" fn(u64) -> u32,
    mem_alloc_async: unsafe extern "C" fn(*mut u64, usize, Handle) -> u32,
    mem_alloc_from_pool: unsafe extern "C" fn(*mut u64, usize, Handle, Handle) -> u32,
    mem_free_async: unsafe extern "C" fn(u64, Handle) -> u32,
    pool_create: unsafe extern "C" fn(*mut Handle, *const PoolProperties) -> u32,
    pool_destroy: unsafe extern "C" fn(Handle) -> u32,
    pool_set: unsafe extern "C" fn(Handle, c_uint, *mut c_void) -> u32,
    pool_get: unsafe extern "C" fn(Handle, c_uint, *mut c_void) -> u32,
    stream_synchronize: unsafe extern "C" fn(Handle) -> u32,
    context_set: unsafe extern "C" fn(Handle) -> u32,
    context: Handle,
}

// SAFETY: the driver's calls and a context's handle may be used from any thread.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

/// `CUmemPoolProps` of CUDA 12 and 13.
#[repr(C)]
struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: *mut c_void,
    max_bytes: usize,
    usage: u16,
    reserved: [u8; 54],
}

const MANAGED: c_int = 2;
const RELEASE_THRESHOLD: c_uint = 4;
const RESERVED_HIGH: c_uint = 6;
const ATTACH_GLOBAL: c_uint = 1;

/// A pool of managed memory of CUDA 13.
pub struct ManagedPool<'d> {
    driver: &'d Driver,
    pool: Handle,
}

// SAFETY: a pool's handle may be used from any thread.
unsafe impl Sync for ManagedPool<'_> {}

/// The entry point of a name.
///
/// # Safety
/// `F` is the type of a pointer to the C function of that name.
unsafe fn entry<F: Copy>(library: Handle, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<Handle>()) };
    // SAFETY: the library is open, and the name ends with NUL.
    let entry = unsafe { libc::dlsym(library, name.as_ptr()) };
    if entry.is_null() {
        return Err(format!(
            "libcuda.so.1 has no {}: the benchmark needs a driver of CUDA 12.0 or newer",
            name.to_string_lossy()
        ));
    }
    // SAFETY: a function of the type that the caller says, and of the size of a pointer.
    Ok(unsafe { std::mem::transmute_copy(&entry) })
}

fn check(code: u32, what: &str) -> Result<(), String> {
    if code == 0 {
        Ok(())
    } else {
        Err(format!("{what}: CUDA error {code}"))
    }
}

impl Driver {
    /// Opens the driver and makes device 0's primary context current on this thread.
    pub fn open() -> Result<Self, String> {
        type Retain = unsafe extern "C" fn(*mut Handle, c_int) -> u32;
        type Init = unsafe extern "C" fn(c_uint) -> u32;
        const LIBRARY: *const c_char = c"libcuda.so.1".as_ptr();
        // SAFETY: the driver's initialisers may run on any thread.
        let library = unsafe { libc::dlopen(LIBRARY, libc::RTLD_NOW) };
        if library.is_null() {
            return Err("libcuda.so.1 was not found".into());
        }
        // SAFETY: each symbol is the driver function of that name, with the C signature of its field.
        let mut driver = unsafe {
            let init: Init = entry(library, c"cuInit")?;
            let retain: Retain = entry(library, c"cuDevicePrimaryCtxRetain")?;
            check(init(0), "starting the driver")?;
            let mut context = ptr::null_mut();
            check(retain(&mut context, 0), "making a context")?;
            Self {
                mem_alloc_managed: entry(library, c"cuMemAllocManaged")?,
                mem_free: entry(library, c"cuMemFree_v2")?,
                mem_alloc_async: entry(library, c"cuMemAllocAsync")?,
                mem_alloc_from_pool: entry(library, c"cuMemAllocFromPoolAsync")?,
                mem_free_async: entry(library, c"cuMemFreeAsync")?,
                pool_create: entry(library, c"cuMemPoolCreate")?,
                pool_destroy: entry(library, c"cuMemPoolDestroy")?,
                pool_set: entry(library, c"cuMemPoolSetAttribute")?,
                pool_get: entry(library, c"cuMemPoolGetAttribute")?,
                stream_synchronize: entry(library, c"cuStreamSynchronize")?,
                context_set: entry(library, c"cuCtxSetCurrent")?,
                context,
            }
        };
        driver.context = context_or(driver.context)?;
        driver.enter();
        driver.keep_default_pool(library)?;
        Ok(driver)
    }

    /// Makes the context current on this thread.
    pub fn enter(&self) {
        // SAFETY: a primary context that is retained until the process ends.
        unsafe { (self.context_set)(self.context) };
    }

    /// The default pool gives its memory back at each synchronisation unless it is told to keep it, as every framework does.
    fn keep_default_pool(&self, library: Handle) -> Result<(), String> {
        type Default = unsafe extern "C" fn(*mut Handle, c_int) -> u32;
        let mut pool = ptr::null_mut();
        // SAFETY: the driver function of that name and signature; it writes one handle.
        let code = unsafe {
            let default: Default = entry(library, c"cuDeviceGetDefaultMemPool")?;
            default(&mut pool, 0)
        };
        check(code, "asking for the default pool")?;
        self.keep(pool)
    }

    fn keep(&self, pool: Handle) -> Result<(), String> {
        let mut all = u64::MAX;
        // SAFETY: the attribute is a u64.
        check(
            unsafe { (self.pool_set)(pool, RELEASE_THRESHOLD, ptr::from_mut(&mut all).cast()) },
            "setting up a pool",
        )
    }

    pub fn managed(&self, size: usize) -> u64 {
        let mut address = 0;
        // SAFETY: the driver writes one address.
        let code = unsafe { (self.mem_alloc_managed)(&mut address, size, ATTACH_GLOBAL) };
        assert_eq!(code, 0, "cuMemAllocManaged");
        address
    }

    pub fn free(&self, address: u64) {
        // SAFETY: from `managed`, and freed once.
        assert_eq!(unsafe { (self.mem_free)(address) }, 0, "cuMemFree");
    }

    pub fn device_async(&self, size: usize, stream: u64) -> u64 {
        let mut address = 0;
        // SAFETY: the driver writes one address; the stream is alive.
        let code = unsafe { (self.mem_alloc_async)(&mut address, size, stream as Handle) };
        assert_eq!(code, 0, "cuMemAllocAsync");
        address
    }

    pub fn free_async(&self, address: u64, stream: u64) {
        // SAFETY: from a stream-ordered allocation, and freed once; the stream is alive.
        assert_eq!(unsafe { (self.mem_free_async)(address, stream as Handle) }, 0, "cuMemFreeAsync");
    }

    pub fn synchronize(&self, stream: u64) {
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { (self.stream_synchronize)(stream as Handle) }, 0, "cuStreamSynchronize");
    }

    /// A managed pool that keeps at most `max_bytes`; an error where the driver is older than CUDA 13.
    pub fn managed_pool(&self, max_bytes: usize) -> Result<ManagedPool<'_>, String> {
        let mut last = 0;
        // Newer drivers take a limit and no preferred location; others want both left open, or a device.
        for (location_kind, max_bytes) in [(0, max_bytes), (0, 0), (1, max_bytes), (1, 0)] {
            let properties = PoolProperties {
                kind: MANAGED,
                handle_types: 0,
                location_kind,
                location: 0,
                security: ptr::null_mut(),
                max_bytes,
                usage: 0,
                reserved: [0; 54],
            };
            let mut pool = ptr::null_mut();
            // SAFETY: the driver reads the properties and writes one handle.
            last = unsafe { (self.pool_create)(&mut pool, &properties) };
            if last == 0 {
                let pool = ManagedPool { driver: self, pool };
                self.keep(pool.pool)?;
                return Ok(pool);
            }
        }
        Err(format!("no managed pool: CUDA error {last}"))
    }
}

fn context_or(context: Handle) -> Result<Handle, String> {
    if context.is_null() {
        Err("the driver gave no context".into())
    } else {
        Ok(context)
    }
}

impl ManagedPool<'_> {
    pub fn alloc(&self, size: usize, stream: u64) -> u64 {
        let mut address = 0;
        // SAFETY: the driver writes one address; pool and stream are alive.
        let code =
            unsafe { (self.driver.mem_alloc_from_pool)(&mut address, size, self.pool, stream as Handle) };
        assert_eq!(code, 0, "cuMemAllocFromPoolAsync");
        address
    }

    /// The most bytes it has held.
    pub fn reserved_high(&self) -> u64 {
        let mut bytes = 0_u64;
        // SAFETY: the attribute is a u64.
        unsafe { (self.driver.pool_get)(self.pool, RESERVED_HIGH, ptr::from_mut(&mut bytes).cast()) };
        bytes
    }
}

impl Drop for ManagedPool<'_> {
    fn drop(&mut self) {
        // SAFETY: every block was freed and its stream waited for.
        unsafe { (self.driver.pool_destroy)(self.pool) };
    }
}
