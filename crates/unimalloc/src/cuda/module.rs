//! Modules: compiled code, loaded on a device.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_uint, c_void, CString};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUjit_option, CUmodule};

use super::device::{device, Device};
use super::driver::{self, Driver};
use super::error::{self, CudaError, CudaErrorKind};
use super::kernel::Kernel;
use super::nvrtc::{self, Target};
use super::ptx::{self, PtxEntry};

/// How to compile, and for which device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CompileOptions {
    /// Index of the device.
    pub device: u16,
    /// What the compiler's messages call the source; "kernel.cu" when empty.
    pub name: String,
    /// NVRTC's flags, such as `--use_fast_math`. PTX text takes none.
    pub flags: Vec<String>,
}

impl CompileOptions {
    /// For a device, with nothing special.
    pub fn for_device(device: u16) -> Self {
        Self { device, ..Self::default() }
    }

    /// Adds a flag of NVRTC.
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Names the source in messages.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
}

/// Code loaded on a device. A clone is the same module; its kernels keep it loaded.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

struct Inner {
    device: &'static Device,
    handle: CUmodule,
    /// What the text says of its kernels.
    entries: Arc<[PtxEntry]>,
}

// SAFETY: a module's handle may be used from any thread, also by several at once; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// What a compiler made, ready for the driver: text ends with NUL.
struct Image {
    bytes: Vec<u8>,
    entries: Arc<[PtxEntry]>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct ImageKey {
    source: String,
    name: String,
    flags: Vec<String>,
    architecture: u32,
    target: Target,
}

/// Compiled images kept, the newest of them. Sources are small and processes have few; this bounds one that makes them.
const IMAGES_KEPT: usize = 128;

#[derive(Default)]
struct Images {
    images: HashMap<ImageKey, Arc<Image>>,
    order: VecDeque<ImageKey>,
}

static IMAGES: Mutex<Option<Images>> = Mutex::new(None);

impl Module {
    /// Compiles CUDA C++ by NVRTC, or takes PTX text to the driver's own compiler, and loads it. The same source with
    /// the same flags for the same architecture is compiled once.
    ///
    /// An error of the source has [`CudaErrorKind::CompileFailed`] and the compiler's log.
    pub fn compile(source: &str, options: &CompileOptions) -> Result<Self, CudaError> {
        let driver = driver::require()?;
        let device = device(driver, options.device)?;
        if ptx::is_ptx(source) {
            if !options.flags.is_empty() {
                return Err(CudaError::invalid("PTX text takes no compiler flags: leave them out"));
            }
            let entries = ptx::entries(source).into();
            let bytes = c_string(source, "the PTX text")?.into_bytes_with_nul();
            return Self::load(driver, device, &Image { bytes, entries });
        }
        let image = image(driver, device, source, options, Target::Ptx)?;
        match Self::load(driver, device, &image) {
            Err(error) if error.code() == error::UNSUPPORTED_PTX_VERSION => {
                let machine_code = self::image(driver, device, source, options, Target::Cubin)?;
                Self::load(
                    driver,
                    device,
                    &Image { bytes: machine_code.bytes.clone(), entries: image.entries.clone() },
                )
            }
            loaded => loaded,
        }
    }

    /// The kernel of that name: one declared `extern "C" __global__`, or a C++ one that no other overloads.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let entries = &self.inner.entries;
        let symbol = match entries.iter().find(|entry| entry.name == name) {
            Some(entry) => entry.name.as_str(),
            None => {
                let prefix = format!("_Z{}{name}", name.len());
                let mut mangled = entries.iter().filter(|entry| entry.name.starts_with(&prefix));
                match (mangled.next(), mangled.next()) {
                    (Some(entry), None) => entry.name.as_str(),
                    (Some(_), Some(_)) => {
                        return Err(CudaError::invalid(format!(
                            "several kernels are called {name:?}: declare them extern \"C\" under different names"
                        )))
                    }
                    (None, _) => name,
                }
            }
        };
        let known = || {
            let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
            if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            }
        };
        let parameters =
            entries.iter().find(|entry| entry.name == symbol).and_then(|entry| entry.parameters.clone());
        match Kernel::find(self, name, &c_string(symbol, "a kernel's name")?, parameters) {
            Err(error) if error.code() == error::NOT_FOUND => Err(CudaError::invalid(format!(
                "the module has no kernel {name:?}; it has: {}. Declare it extern \"C\" __global__",
                known()
            ))),
            found => found,
        }
    }

    /// Index of the device that it is loaded on.
    pub fn device(&self) -> u16 {
        self.inner.device.index
    }

    pub(super) fn device_ref(&self) -> &'static Device {
        self.inner.device
    }

    pub(super) fn raw(&self) -> CUmodule {
        self.inner.handle
    }

    fn load(driver: &Driver, device: &'static Device, image: &Image) -> Result<Self, CudaError> {
        let mut log = vec![0_u8; 16 << 10];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes an integer option in the place of the pointer, and writes the log's length there.
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
        let mut handle = ptr::null_mut();
        let code = match device.enter_relaxed(driver) {
            // SAFETY: the image is text that ends with NUL or a whole object; there are two options with two values, and
            // the log has the length that it is said to have. The driver writes one handle.
            Ok(_entered) => unsafe {
                (driver.entries.cuModuleLoadDataEx)(
                    &mut handle,
                    image.bytes.as_ptr().cast(),
                    options.len() as c_uint,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            },
            Err(code) => code,
        };
        if device.note(code) == error::SUCCESS {
            return Ok(Self { inner: Arc::new(Inner { device, handle, entries: image.entries.clone() }) });
        }
        let error = CudaError::driver(code, "loading a module");
        if error.kind() != CudaErrorKind::Driver {
            return Err(error);
        }
        let log: Vec<u8> = log.into_iter().take_while(|&byte| byte != 0).collect();
        let message = match code {
            error::INVALID_PTX => "the PTX text does not compile: see the log".to_owned(),
            error::UNSUPPORTED_PTX_VERSION => {
                "the PTX text is of a newer version than the driver takes: update the driver, or compile for an older one"
                    .to_owned()
            }
            _ => error.to_string(),
        };
        let log = String::from_utf8_lossy(&log).into_owned();
        Err(CudaError::compile(code, error.name().to_owned(), message, log))
    }
}

/// What the source compiles to, from the cache if it was compiled before.
fn image(
    driver: &Driver,
    device: &Device,
    source: &str,
    options: &CompileOptions,
    target: Target,
) -> Result<Arc<Image>, CudaError> {
    let nvrtc = nvrtc::get(driver)?;
    let architecture = nvrtc.architecture(device.compute_capability)?;
    let key = ImageKey {
        source: source.to_owned(),
        name: if options.name.is_empty() { "kernel.cu".to_owned() } else { options.name.clone() },
        flags: options.flags.clone(),
        architecture,
        target,
    };
    let lock = || IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(image) = lock().as_ref().and_then(|cache| cache.images.get(&key)) {
        return Ok(image.clone());
    }
    // Not under the lock: two threads may compile the same source at once, and then the first one's image stays.
    let flags =
        key.flags.iter().map(|flag| c_string(flag, "a compiler flag")).collect::<Result<Vec<_>, _>>()?;
    let prefix = match target {
        Target::Ptx => "compute",
        Target::Cubin => "sm",
    };
    let bytes = nvrtc.compile(
        &c_string(source, "the source")?,
        &c_string(&key.name, "the source's name")?,
        &format!("--gpu-architecture={prefix}_{architecture}"),
        &flags,
        target,
    )?;
    let entries = match target {
        Target::Ptx => ptx::entries(&String::from_utf8_lossy(&bytes)).into(),
        Target::Cubin => Arc::new([]) as Arc<[PtxEntry]>,
    };
    let image = Arc::new(Image { bytes, entries });
    let mut cache = lock();
    let cache = cache.get_or_insert_default();
    if cache.images.insert(key.clone(), image.clone()).is_none() {
        cache.order.push_back(key);
        if cache.order.len() > IMAGES_KEPT {
            if let Some(oldest) = cache.order.pop_front() {
                cache.images.remove(&oldest);
            }
        }
    }
    Ok(image)
}

fn c_string(text: &str, what: &str) -> Result<CString, CudaError> {
    CString::new(text).map_err(|error| {
        CudaError::invalid(format!("{what} contains a NUL at byte {}: remove it", error.nul_position()))
    })
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(driver) = driver::running() else { return };
        if let Ok(_entered) = self.device.enter_relaxed(driver) {
            // SAFETY: loaded by `load`, unloaded once; every kernel of it holds a clone.
            unsafe { (driver.entries.cuModuleUnload)(self.handle) };
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module")
            .field("device", &self.device())
            .field("kernels", &self.inner.entries.iter().map(|entry| &entry.name).collect::<Vec<_>>())
            .finish()
    }
}
