//! What can go wrong with a device, in words that name the next step.

use std::fmt;

use super::driver;
use crate::error::AllocError;

/// What kind of failure a [`CudaError`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaErrorKind {
    /// There is no usable driver, device or run-time compiler.
    Unavailable,
    /// The caller passed something that cannot be meant; nothing was done.
    InvalidArgument,
    /// The source or the PTX text does not compile. [`CudaError::log`] has the compiler's words.
    CompileFailed,
    /// The device has no memory for it.
    OutOfMemory,
    /// A kernel fault destroyed the context: nothing on this device works until the process restarts.
    ContextLost,
    /// The process is the child of a `fork`.
    Forked,
    /// Any other answer of the driver.
    Driver,
}

/// A failed CUDA call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError {
    kind: CudaErrorKind,
    code: u32,
    name: String,
    message: String,
    log: Option<String>,
}

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const DEINITIALIZED: u32 = 4;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_PTX: u32 = 218;
pub(crate) const UNSUPPORTED_PTX_VERSION: u32 = 222;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;

/// Whether the code means that the context is gone, whichever call reports it.
pub(crate) fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        // ECC and NVLink errors that were not corrected, a contained GPU fault
        214 | 220 | 226
        // illegal address, launch timeout, context destroyed, device assertion
        | 700 | 702 | 709 | 710
        // stack, instruction, alignment, address space, program counter, launch failed, leaked tensor memory
        | 714..=719 | 721
    )
}

impl CudaError {
    /// What kind of failure it is.
    pub fn kind(&self) -> CudaErrorKind {
        self.kind
    }

    /// The driver's or the compiler's own code; 0 when it was not asked.
    pub fn code(&self) -> u32 {
        self.code
    }

    /// The code's name, such as `CUDA_ERROR_INVALID_VALUE`; empty when the code is 0.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The compiler's log, where one was kept.
    pub fn log(&self) -> Option<&str> {
        self.log.as_deref()
    }

    /// The driver answered `code` to `what`, a phrase such as "creating a stream".
    pub(crate) fn driver(code: u32, what: &str) -> Self {
        let kind = match code {
            OUT_OF_MEMORY => CudaErrorKind::OutOfMemory,
            NO_DEVICE | NOT_INITIALIZED => CudaErrorKind::Unavailable,
            code if is_sticky(code) => CudaErrorKind::ContextLost,
            _ => CudaErrorKind::Driver,
        };
        let name = driver::error_name(code);
        let next = match code {
            INVALID_VALUE => "; check that every pointer and size lies in one live allocation",
            OUT_OF_MEMORY => "; free device memory (nvidia-smi shows who holds it) and try again",
            DEINITIALIZED => "; the process is exiting and CUDA is shut down: stop using it before that",
            400 => "; the stream, event or module was destroyed or belongs to another device",
            701 => "; the block needs more registers or shared memory than there is: launch smaller blocks",
            801 => "; the device or driver cannot do this: update the driver, or do without",
            900..=908 => "; end the stream capture first",
            code if is_sticky(code) => {
                "; a kernel fault destroyed the CUDA context: find the access with compute-sanitizer, fix the kernel, \
                 and restart the process"
            }
            _ => "",
        };
        let message = format!("{what} failed: {name} ({code}), {}{next}", driver::error_text(code));
        Self { kind, code, name, message, log: None }
    }

    /// The same error, after words that say what it is about.
    pub(crate) fn about(mut self, what: &str) -> Self {
        self.message.insert_str(0, what);
        self
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::plain(CudaErrorKind::InvalidArgument, message.into())
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::plain(CudaErrorKind::Unavailable, message.into())
    }

    pub(crate) fn forked() -> Self {
        Self::plain(CudaErrorKind::Forked, AllocError::Forked.to_string())
    }

    /// The compiler, which has codes of its own, or the driver's PTX compiler refused the text.
    pub(crate) fn compile(code: u32, name: String, message: String, log: String) -> Self {
        Self { kind: CudaErrorKind::CompileFailed, code, name, message, log: Some(log) }
    }

    fn plain(kind: CudaErrorKind, message: String) -> Self {
        Self { kind, code: 0, name: String::new(), message, log: None }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match self.log.as_deref().map(str::trim) {
            Some(log) if !log.is_empty() => write!(f, "\n{log}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for CudaError {}
