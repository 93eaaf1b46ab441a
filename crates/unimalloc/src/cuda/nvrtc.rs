//! NVRTC, NVIDIA's run-time compiler: no part of the driver, found when it is first needed.

use std::ffi::{c_char, c_int, CStr, CString};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

use super::driver::Driver;
use super::error::CudaError;

macro_rules! entries {
    (needed { $( $name:ident($($arg:ty),*); )* } optional { $( $oname:ident($($oarg:ty),*); )* } needed unchecked { $( $uname:ident($($uarg:ty),*) -> $ures:ty; )* }) => {
        /// The compiler's entry points, checked against cudarc's bindings, with results as plain integers.
        #[allow(non_snake_case)]
        struct Entries {
            $( $name: unsafe extern "C" fn($($arg),*) -> u32, )*
            $( $oname: Option<unsafe extern "C" fn($($oarg),*) -> u32>, )*
            $( $uname: unsafe extern "C" fn($($uarg),*) -> $ures, )*
        }

        impl Entries {
            fn of(library: &Library) -> Option<Self> {
                // SAFETY: each symbol is the function of that name, whose C signature is the one given, the result an
                // enum whose representation is u32.
                unsafe {
                    Some(Self {
                        $( $name: *library.get(stringify!($name)).ok()?, )*
                        $( $oname: library.get(stringify!($oname)).ok().map(|entry| *entry), )*
                        $( $uname: *library.get(stringify!($uname)).ok()?, )*
                    })
                }
            }
        }

        const _: () = {
            $( let _: unsafe fn($($arg),*) -> nvrtcResult = sys::$name; )*
            $( let _: unsafe fn($($oarg),*) -> nvrtcResult = sys::$oname; )*
            assert!(size_of::<nvrtcResult>() == size_of::<u32>());
        };
    };
}

entries! {
    needed {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcGetNumSupportedArchs(*mut c_int);
        nvrtcGetSupportedArchs(*mut c_int);
        nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        nvrtcDestroyProgram(*mut nvrtcProgram);
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        nvrtcGetPTX(nvrtcProgram, *mut c_char);
    }
    optional {
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    }
    needed unchecked {
        nvrtcGetErrorString(u32) -> *const c_char;
    }
}

/// What to compile to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// Text for the driver's own compiler: works with later devices.
    Ptx,
    /// Machine code of one architecture: for a driver older than this compiler, which refuses its PTX.
    Cubin,
}

/// A loaded compiler.
pub(super) struct Nvrtc {
    entries: Entries,
    version: (i32, i32),
    /// Architectures that it can compile for, such as 90, in ascending order.
    architectures: Vec<u32>,
}

const COMPILATION_FAILED: u32 = 6;

#[cfg(not(windows))]
const NAMES: [(i32, &str); 3] = [(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12"), (11, "libnvrtc.so.11.2")];
#[cfg(windows)]
const NAMES: [(i32, &str); 3] =
    [(13, "nvrtc64_130_0.dll"), (12, "nvrtc64_120_0.dll"), (11, "nvrtc64_112_0.dll")];
#[cfg(not(windows))]
const PLAIN_NAME: &str = "libnvrtc.so";
#[cfg(windows)]
const PLAIN_NAME: &str = "nvrtc.dll";

/// The compiler, or what to do to get one. Looked for again at each call until it is found.
pub(super) fn get(driver: &Driver) -> Result<&'static Nvrtc, CudaError> {
    static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
    if let Some(nvrtc) = NVRTC.get() {
        return Ok(nvrtc);
    }
    // One that is not newer than the driver first, for the driver takes what that makes.
    let major = driver.version / 1000;
    let (fitting, newer): (Vec<_>, Vec<_>) = NAMES.iter().partition(|(version, _)| *version <= major);
    let names = fitting.iter().chain(&newer).map(|(_, name)| *name).chain([PLAIN_NAME]);
    for name in names {
        // SAFETY: the compiler's initialisers may run on any thread.
        let Ok(library) = (unsafe { Library::new(name) }) else { continue };
        let Some(entries) = Entries::of(&library) else { continue };
        let Some(nvrtc) = Nvrtc::of(entries) else { continue };
        // Never closed, like the driver.
        std::mem::forget(library);
        return Ok(NVRTC.get_or_init(|| nvrtc));
    }
    Err(CudaError::unavailable(format!(
        "CUDA C++ needs NVRTC, and {} was not found: install it (the CUDA toolkit's libnvrtc, or the pip package \
         nvidia-cuda-nvrtc-cu{major}) and put its folder on the library search path (LD_LIBRARY_PATH; PATH on Windows), \
         or pass PTX text, which needs no compiler",
        fitting.first().map_or(PLAIN_NAME, |(_, name)| name),
    )))
}

impl Nvrtc {
    fn of(entries: Entries) -> Option<Self> {
        let mut version = (0, 0);
        let mut count = 0;
        // SAFETY: the compiler writes two ints, and one.
        let codes = unsafe {
            [
                (entries.nvrtcVersion)(&mut version.0, &mut version.1),
                (entries.nvrtcGetNumSupportedArchs)(&mut count),
            ]
        };
        let mut architectures = vec![0; usize::try_from(count).ok()?];
        // SAFETY: the compiler writes as many ints as it said.
        let code = unsafe { (entries.nvrtcGetSupportedArchs)(architectures.as_mut_ptr()) };
        if codes != [0, 0] || code != 0 {
            return None;
        }
        let mut architectures: Vec<u32> =
            architectures.into_iter().filter_map(|arch| arch.try_into().ok()).collect();
        architectures.sort_unstable();
        Some(Self { entries, version, architectures })
    }

    /// The architecture to compile for: the device's own, or the newest before it that the compiler knows.
    pub(super) fn architecture(&self, (major, minor): (u32, u32)) -> Result<u32, CudaError> {
        let device = major * 10 + minor;
        self.architectures.iter().copied().rfind(|&known| known <= device).ok_or_else(|| {
            CudaError::unavailable(format!(
                "NVRTC {}.{} does not compile for compute capability {major}.{minor} any more: install an older NVRTC, or \
                 pass PTX text",
                self.version.0, self.version.1
            ))
        })
    }

    /// Compiles a program. `options` come after the target's own.
    pub(super) fn compile(
        &self,
        source: &CStr,
        name: &CStr,
        target: &str,
        options: &[CString],
        to: Target,
    ) -> Result<Vec<u8>, CudaError> {
        let target =
            CString::new(target).map_err(|_| CudaError::invalid("a compiler flag contains a NUL"))?;
        let options: Vec<*const c_char> =
            std::iter::once(target.as_ptr()).chain(options.iter().map(|option| option.as_ptr())).collect();
        let count =
            c_int::try_from(options.len()).map_err(|_| CudaError::invalid("too many compiler flags"))?;

        let mut program = Program { nvrtc: self, handle: ptr::null_mut() };
        // SAFETY: both texts end with NUL and are copied; there are no headers; the compiler writes one handle.
        let code = unsafe {
            (self.entries.nvrtcCreateProgram)(
                &mut program.handle,
                source.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        self.check(code, "creating a program", String::new)?;
        // SAFETY: a program of this compiler, and as many options as said, each ending with NUL.
        let code = unsafe { (self.entries.nvrtcCompileProgram)(program.handle, count, options.as_ptr()) };
        self.check(code, "compiling", || program.log())?;
        match to {
            Target::Ptx => program.output(self.entries.nvrtcGetPTXSize, self.entries.nvrtcGetPTX),
            Target::Cubin => match (self.entries.nvrtcGetCUBINSize, self.entries.nvrtcGetCUBIN) {
                (Some(size), Some(text)) => program.output(size, text),
                _ => Err(CudaError::unavailable(format!(
                    "NVRTC {}.{} is newer than the driver and makes no machine code: install the NVRTC of the driver's \
                     version",
                    self.version.0, self.version.1
                ))),
            },
        }
    }

    fn check(&self, code: u32, what: &str, log: impl FnOnce() -> String) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: any code may be asked for; the answer is a static string.
        let text = unsafe { (self.entries.nvrtcGetErrorString)(code) };
        let name = if text.is_null() {
            format!("NVRTC error {code}")
        } else {
            // SAFETY: a static string of the compiler, which stays loaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let message = match code {
            COMPILATION_FAILED => "the source does not compile: see the log".to_owned(),
            5 => format!("{what} failed: {name}; see the log for the flag that NVRTC does not take"),
            _ => format!("{what} failed: {name}"),
        };
        Err(CudaError::compile(code, name, message, log()))
    }
}

/// A program, destroyed when dropped.
struct Program<'n> {
    nvrtc: &'n Nvrtc,
    handle: nvrtcProgram,
}

type SizeEntry = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32;
type TextEntry = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32;

impl Program<'_> {
    fn log(&self) -> String {
        let entries = &self.nvrtc.entries;
        let log = self.output(entries.nvrtcGetProgramLogSize, entries.nvrtcGetProgramLog).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn output(&self, size: SizeEntry, text: TextEntry) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program is alive, and the compiler writes one size.
        let code = unsafe { size(self.handle, &mut len) };
        self.nvrtc.check(code, "reading the compiler's output", String::new)?;
        let mut bytes = vec![0; len];
        // SAFETY: the compiler writes as many bytes as it said.
        let code = unsafe { text(self.handle, bytes.as_mut_ptr().cast()) };
        self.nvrtc.check(code, "reading the compiler's output", String::new)?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by this compiler, destroyed once.
            unsafe { (self.nvrtc.entries.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}
