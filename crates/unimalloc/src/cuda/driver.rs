//! The NVIDIA driver's library, found and opened at run time, and the table of its entry points.
//!
//! Names and signatures are those of cudarc's bindings, and checked against them when this crate is compiled. But the
//! table is this crate's own, for three reasons: cudarc looks for the unversioned `libcuda.so` first, which a
//! toolkit's stub can be; it panics where a library or a symbol is missing; and its result type is a closed enum, in
//! which a code of a newer driver would be undefined behaviour. Here results are plain `u32`.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUjit_option, CUmemLocation, CUmem_advise, CUmodule, CUoccupancyB2DSize, CUresult, CUstream,
};
use libloading::Library;

use super::device::Device;
use super::error::{self, CudaError};
use crate::backend::fork;
use crate::error::AllocError;
use crate::log::say;

/// The oldest driver that works: CUDA 12.0.
const OLDEST: i32 = 12_000;

/// Declares the table. `needed` entries must be there; `optional` ones came with later drivers; both are checked
/// against cudarc's signatures. `unchecked` ones differ on purpose (an enum that the driver writes, or one it may be
/// given with an unknown value, is a `u32` here) or are newer than the bindings.
macro_rules! entries {
    (
        needed { $( $name:ident($($arg:ty),*); )* }
        needed unchecked { $( $uname:ident($($uarg:ty),*); )* }
        optional { $( $oname:ident($($oarg:ty),*); )* }
        optional unchecked { $( $nname:ident($($narg:ty),*); )* }
    ) => {
        /// The driver's entry points. Calling one is unsafe as the driver's documentation says for it.
        #[allow(non_snake_case)]
        pub(crate) struct Entries {
            $( pub $name: unsafe extern "C" fn($($arg),*) -> u32, )*
            $( pub $uname: unsafe extern "C" fn($($uarg),*) -> u32, )*
            $( pub $oname: Option<unsafe extern "C" fn($($oarg),*) -> u32>, )*
            $( pub $nname: Option<unsafe extern "C" fn($($narg),*) -> u32>, )*
        }

        impl Entries {
            /// The table of a library, or the name of what is missing in it.
            fn of(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: each symbol is the driver function of that name, whose C signature is the one given: checked
                // below against the bindings made from the driver's header, with the result, an enum whose
                // representation is u32, taken as that u32.
                unsafe {
                    Ok(Self {
                        $( $name: *library.get(stringify!($name)).map_err(|_| stringify!($name))?, )*
                        $( $uname: *library.get(stringify!($uname)).map_err(|_| stringify!($uname))?, )*
                        $( $oname: library.get(stringify!($oname)).ok().map(|entry| *entry), )*
                        $( $nname: library.get(stringify!($nname)).ok().map(|entry| *entry), )*
                    })
                }
            }
        }

        const _: () = {
            $( let _: unsafe fn($($arg),*) -> CUresult = sys::$name; )*
            $( let _: unsafe fn($($oarg),*) -> CUresult = sys::$oname; )*
            assert!(size_of::<CUresult>() == size_of::<u32>());
        };
    };
}

// Never a bare name whose version 1 takes 32-bit handles: `cuMemFree` refuses every managed pointer.
entries! {
    needed {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxGetDevice(*mut CUdevice);
        cuCtxSynchronize();
        cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
        cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamQuery(CUstream);
        cuStreamGetCtx(CUstream, *mut CUcontext);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventSynchronize(CUevent);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        cuOccupancyMaxPotentialBlockSize(*mut c_int, *mut c_int, CUfunction, CUoccupancyB2DSize, usize, c_int);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
        );
    }
    needed unchecked {
        cuGetErrorName(u32, *mut *const c_char);
        cuGetErrorString(u32, *mut *const c_char);
        cuStreamIsCapturing(CUstream, *mut u32);
        cuThreadExchangeStreamCaptureMode(*mut u32);
    }
    optional {
        cuMemAdvise(CUdeviceptr, usize, CUmem_advise, CUdevice);
        cuMemAdvise_v2(CUdeviceptr, usize, CUmem_advise, CUmemLocation);
        cuMemPrefetchAsync(CUdeviceptr, usize, CUdevice, CUstream);
        cuMemPrefetchAsync_v2(CUdeviceptr, usize, CUmemLocation, c_uint, CUstream);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    }
    optional unchecked {
        cuMemDiscardAndPrefetchBatchAsync(
            *mut CUdeviceptr, *mut usize, usize, *mut CUmemLocation, *mut usize, usize, c_ulonglong, CUstream
        );
    }
}

/// A started driver and its devices.
pub(crate) struct Driver {
    pub entries: Entries,
    /// The CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub version: i32,
    /// All devices, by CUDA's index. At least one.
    pub devices: Vec<Device>,
}

/// Why there is no usable driver.
#[derive(Debug, Clone)]
pub(crate) struct Unavailable {
    /// What an allocation answers.
    pub error: AllocError,
    /// What is missing, with the next step.
    pub reason: String,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// A failure is looked at again after this long: a module may have been loaded, a container set up.
const RETRY_AFTER: Duration = Duration::from_secs(1);
static FAILURE: Mutex<Option<(Instant, Unavailable)>> = Mutex::new(None);

/// Set when the process begins to exit. The driver may be gone from then on, so that no call reaches it any more.
static EXITING: AtomicBool = AtomicBool::new(false);

/// The driver, started if need be. Creates no context.
pub(crate) fn get() -> Result<&'static Driver, Unavailable> {
    if fork::forked() {
        return Err(Unavailable { error: AllocError::Forked, reason: AllocError::Forked.to_string() });
    }
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    if let Some((when, failure)) = &*FAILURE.lock().unwrap_or_else(PoisonError::into_inner) {
        if when.elapsed() < RETRY_AFTER {
            return Err(failure.clone());
        }
    }
    // No lock here: threads that come at the same time all load, which is idempotent, and the first one's table stays.
    match load() {
        Ok(driver) => Ok(DRIVER.get_or_init(|| {
            say!(Level::Info, "driver version={} devices={}", driver.version, driver.devices.len());
            driver
        })),
        Err(failure) => {
            say!(Level::Info, "no-cuda reason={:?}", failure.reason);
            *FAILURE.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), failure.clone()));
            Err(failure)
        }
    }
}

/// As [`get`], for calls that answer a [`CudaError`].
pub(crate) fn require() -> Result<&'static Driver, CudaError> {
    get().map_err(|failure| match failure.error {
        AllocError::Forked => CudaError::forked(),
        _ => CudaError::unavailable(failure.reason),
    })
}

/// The driver if it was started and may still be called: for destructors, which start nothing.
pub(crate) fn running() -> Option<&'static Driver> {
    if fork::forked() || exiting() {
        return None;
    }
    DRIVER.get()
}

/// Whether the process is exiting.
pub(crate) fn exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}

#[cfg(windows)]
const LIBRARY: &str = "nvcuda.dll";
#[cfg(not(windows))]
const LIBRARY: &str = "libcuda.so.1";

#[cfg(windows)]
fn open() -> Result<Library, libloading::Error> {
    use libloading::os::windows;
    // SAFETY: the driver's initialisers may run on any thread. It is looked for in the system's folder only.
    unsafe { windows::Library::load_with_flags(LIBRARY, windows::LOAD_LIBRARY_SEARCH_SYSTEM32) }
        .map(Library::from)
}

#[cfg(not(windows))]
fn open() -> Result<Library, libloading::Error> {
    // SAFETY: the driver's initialisers may run on any thread.
    unsafe { Library::new(LIBRARY) }
}

fn load() -> Result<Driver, Unavailable> {
    fork::watch();
    let no_driver = |reason: String| Unavailable { error: AllocError::NoDriver, reason };
    // Never closed: code of the driver runs in threads of its own until the process ends.
    let library = Box::leak(Box::new(open().map_err(|error| {
        no_driver(format!(
            "the NVIDIA driver's library {LIBRARY} was not found ({error}): install the NVIDIA driver, or in a \
             container pass the GPU through (docker run --gpus all); the host backend works without it"
        ))
    })?));
    let entries = Entries::of(library).map_err(|missing| {
        no_driver(format!(
            "{LIBRARY} has no entry point {missing}: it is a toolkit's stub or older than CUDA 12; install NVIDIA driver \
             525 or newer"
        ))
    })?;

    // SAFETY: cuInit may be called at any time, from any thread, any number of times.
    let code = unsafe { (entries.cuInit)(0) };
    if code == error::NO_DEVICE {
        return Err(no_device());
    }
    if code != error::SUCCESS {
        return Err(no_driver(format!(
            "the NVIDIA driver did not start: {} ({code}), {}; check that nvidia-smi works here and that the kernel \
             module matches the library's version",
            name_in(&entries, code),
            text_in(&entries, code)
        )));
    }
    let mut version = 0;
    // SAFETY: the driver writes one int.
    let code = unsafe { (entries.cuDriverGetVersion)(&mut version) };
    if code != error::SUCCESS || version < OLDEST {
        return Err(no_driver(format!(
            "the NVIDIA driver supports CUDA {}.{} and 12.0 is needed: install driver 525 or newer",
            version / 1000,
            version % 1000 / 10
        )));
    }
    let devices = Device::all(&entries).map_err(|code| {
        no_driver(format!("the NVIDIA driver cannot list its devices: {}", name_in(&entries, code)))
    })?;
    if devices.is_empty() {
        return Err(no_device());
    }
    if !devices.iter().any(|device| device.managed_memory) {
        return Err(Unavailable {
            error: AllocError::Unsupported,
            reason: "no device here supports managed memory: use the host backend, or, on a virtual GPU, have unified \
                     memory enabled for it"
                .into(),
        });
    }
    watch_exit();
    Ok(Driver { entries, version, devices })
}

fn no_device() -> Unavailable {
    Unavailable {
        error: AllocError::NoDevice,
        reason: "the NVIDIA driver reports no device: check nvidia-smi and CUDA_VISIBLE_DEVICES; the host backend works \
                 without one"
            .into(),
    }
}

/// Handlers run in reverse order, so this one, registered after the driver was loaded, runs before the driver's.
fn watch_exit() {
    extern "C" fn at_exit() {
        EXITING.store(true, Ordering::Relaxed);
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to a static, and this module is never unloaded. Without room for the
        // handler the driver still answers DEINITIALIZED at exit.
        unsafe { libc::atexit(at_exit) };
    });
}

/// The code's name, such as `CUDA_ERROR_INVALID_VALUE`.
pub(crate) fn error_name(code: u32) -> String {
    DRIVER.get().map_or_else(|| format!("CUDA error {code}"), |driver| name_in(&driver.entries, code))
}

/// The driver's own words for the code.
pub(crate) fn error_text(code: u32) -> String {
    DRIVER.get().map_or_else(String::new, |driver| text_in(&driver.entries, code))
}

fn name_in(entries: &Entries, code: u32) -> String {
    words(entries.cuGetErrorName, code).unwrap_or_else(|| format!("CUDA error {code}"))
}

fn text_in(entries: &Entries, code: u32) -> String {
    words(entries.cuGetErrorString, code).unwrap_or_else(|| "which this driver has no words for".into())
}

fn words(entry: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes one pointer: to a static string, or null for a code that it does not know.
    if unsafe { entry(code, &mut text) } != error::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: a NUL-terminated static string of the driver, which stays loaded.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
