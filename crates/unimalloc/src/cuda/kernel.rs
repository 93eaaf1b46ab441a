//! Kernels and their launch.

use std::ffi::{c_int, c_uint, c_void, CStr};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute as Attribute};

use super::device::{Device, Limits};
use super::driver;
use super::error::{CudaError, INVALID_VALUE, SUCCESS};
use super::module::Module;
use super::stream::Stream;

/// How many threads to launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl LaunchConfig {
    /// Enough blocks of `block` threads for `threads` threads in one dimension; `None` when that is none, or more than
    /// a grid can have.
    pub fn for_threads(threads: u64, block: u32) -> Option<Self> {
        let blocks =
            u32::try_from(threads.div_ceil(u64::from(block.max(1)))).ok().filter(|&blocks| blocks > 0)?;
        (block > 0).then_some(Self { grid: [blocks, 1, 1], block: [block, 1, 1], shared_bytes: 0 })
    }
}

/// An argument of a kernel, of exactly the type that the kernel declares.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant is the type of its name")]
pub enum KernelArg<'a> {
    /// An address that the device can reach.
    Pointer(u64),
    I8(i8),
    U8(u8),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    /// The bits of a half-precision number.
    F16(u16),
    F32(f32),
    F64(f64),
    /// A structure, passed by value.
    Bytes(&'a [u8]),
}

impl KernelArg<'_> {
    /// Bytes of the value.
    pub fn size(&self) -> usize {
        match self {
            Self::I8(_) | Self::U8(_) => 1,
            Self::I16(_) | Self::U16(_) | Self::F16(_) => 2,
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
            Self::Pointer(_) | Self::I64(_) | Self::U64(_) | Self::F64(_) => 8,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Pointer(_) => "a pointer",
            Self::I8(_) => "i8",
            Self::U8(_) => "u8",
            Self::I16(_) => "i16",
            Self::U16(_) => "u16",
            Self::I32(_) => "i32",
            Self::U32(_) => "u32",
            Self::I64(_) => "i64",
            Self::U64(_) => "u64",
            Self::F16(_) => "f16",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bytes(_) => "bytes",
        }
    }

    /// Where the value lies; the driver only reads it.
    fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(value) | Self::U64(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::I8(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::U8(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::I16(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::U16(value) | Self::F16(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::I32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::I64(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::F64(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::Bytes(bytes) => bytes.as_ptr().cast_mut().cast(),
        }
    }
}

/// A function of a module that a launch runs. A clone is the same kernel.
#[derive(Clone)]
pub struct Kernel {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    /// Keeps the code loaded.
    module: Module,
    function: CUfunction,
    max_threads: u32,
    static_shared: u32,
    /// Bytes of dynamic shared memory that the function was allowed beyond the default, 0 for none.
    allowed_shared: AtomicU32,
    /// Bytes of each parameter, where driver or text can say.
    parameters: Option<Vec<usize>>,
    /// The block size that fills the device best without shared memory; 0 before it was asked for.
    suggested_block: AtomicU32,
}

// SAFETY: a function's handle may be used from any thread, also by several at once; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Kernel {
    pub(super) fn find(
        module: &Module,
        name: &str,
        symbol: &CStr,
        in_text: Option<Vec<usize>>,
    ) -> Result<Self, CudaError> {
        let driver = driver::require()?;
        let device = module.device_ref();
        let mut function = ptr::null_mut();
        device.call(&format!("looking up kernel {name:?}"), |entries| {
            // SAFETY: the module is loaded, the name ends with NUL, and the driver writes one handle.
            unsafe { (entries.cuModuleGetFunction)(&mut function, module.raw(), symbol.as_ptr()) }
        })?;
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: the function is of a loaded module, and the driver writes one int.
            device
                .call("asking for a kernel's needs", |entries| unsafe {
                    (entries.cuFuncGetAttribute)(&mut value, attribute, function)
                })
                .map(|()| u32::try_from(value).unwrap_or(0))
        };
        let max_threads = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let static_shared = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let parameters = match driver.entries.cuFuncGetParamInfo {
            Some(entry) => Some(parameters_of(device, function, entry)?),
            None => in_text,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                module: module.clone(),
                function,
                max_threads: max_threads.min(device.limits.threads_per_block),
                static_shared,
                allowed_shared: AtomicU32::new(0),
                parameters,
                suggested_block: AtomicU32::new(0),
            }),
        })
    }

    /// The name that it was looked up by.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Index of its device.
    pub fn device(&self) -> u16 {
        self.inner.module.device()
    }

    /// Whether the CPU may touch managed memory while it runs.
    pub fn is_concurrent(&self) -> bool {
        self.inner.module.device_ref().concurrent_managed_access
    }

    /// Threads that a block may have at most, given the registers the kernel needs.
    pub fn max_threads(&self) -> u32 {
        self.inner.max_threads
    }

    /// Bytes of each parameter, where the driver (CUDA 12.4) or the PTX text can say.
    pub fn parameter_sizes(&self) -> Option<&[usize]> {
        self.inner.parameters.as_deref()
    }

    /// The block size with which most threads run at once, for this much dynamic shared memory of a block.
    pub fn suggested_block(&self, shared_bytes: u32) -> Result<u32, CudaError> {
        let known = self.inner.suggested_block.load(Ordering::Relaxed);
        if shared_bytes == 0 && known != 0 {
            return Ok(known);
        }
        let (mut grid, mut block) = (0, 0);
        self.inner.module.device_ref().call("asking for a block size", |entries| {
            // SAFETY: the function is of a loaded module, and the driver writes two ints.
            unsafe {
                (entries.cuOccupancyMaxPotentialBlockSize)(
                    &mut grid,
                    &mut block,
                    self.inner.function,
                    None,
                    shared_bytes as usize,
                    0,
                )
            }
        })?;
        let block = u32::try_from(block).unwrap_or(0).clamp(1, self.inner.max_threads.max(1));
        if shared_bytes == 0 {
            self.inner.suggested_block.store(block, Ordering::Relaxed);
        }
        Ok(block)
    }

    /// Checks and queues a launch. [`launch`](Self::launch) marks the blocks first.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(crate) unsafe fn enqueue(
        &self,
        config: &LaunchConfig,
        stream: &Stream,
        args: &[KernelArg<'_>],
    ) -> Result<(), CudaError> {
        let inner = &*self.inner;
        let device = inner.module.device_ref();
        if stream.device() != device.index {
            return Err(CudaError::invalid(format!(
                "kernel {:?} is loaded on device {} and the stream belongs to device {}: compile it for that device, or \
                 use a stream of its own",
                inner.name,
                device.index,
                stream.device()
            )));
        }
        if !device.is_own_context(stream.context()) {
            return Err(CudaError::invalid(
                "the stream belongs to a context of its own, not to the device's primary one: make a Stream here, and let \
                 events order the two",
            ));
        }
        check_shape(config, &device.limits, inner.max_threads).map_err(|message| self.refuse(message))?;
        self.check_args(args)?;
        self.allow_shared(config.shared_bytes)?;

        // Most kernels have few parameters; those need no memory here.
        let (mut few, mut many) = ([ptr::null_mut::<c_void>(); 16], Vec::new());
        let pointers = match few.get_mut(..args.len()) {
            Some(few) => few,
            None => {
                many.resize(args.len(), ptr::null_mut());
                many.as_mut_slice()
            }
        };
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = arg.address();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (config.grid, config.block);
        stream.call("a kernel launch", |entries| {
            // SAFETY: as many pointers as the kernel has parameters, each to a value of the parameter's size, which the
            // driver copies before it returns; function and stream are alive and of the current context. For the rest
            // the caller vouches.
            unsafe {
                (entries.cuLaunchKernel)(
                    inner.function,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    config.shared_bytes as c_uint,
                    stream.raw(),
                    pointers.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
        })
    }

    fn refuse(&self, message: String) -> CudaError {
        CudaError::invalid(format!("kernel {:?}: {message}", self.inner.name))
    }

    fn check_args(&self, args: &[KernelArg<'_>]) -> Result<(), CudaError> {
        let Some(sizes) = &self.inner.parameters else { return Ok(()) };
        if args.len() != sizes.len() {
            return Err(self.refuse(format!(
                "{} arguments were passed and it takes {}: pass one for each parameter",
                args.len(),
                sizes.len()
            )));
        }
        for (index, (arg, &size)) in args.iter().zip(sizes).enumerate() {
            if arg.size() != size {
                return Err(self.refuse(format!(
                    "argument {index} is {} of {} bytes and the parameter has {size}: pass the type that the kernel declares",
                    arg.kind(),
                    arg.size()
                )));
            }
        }
        Ok(())
    }

    /// Lets the function have more dynamic shared memory than the default, where the device can.
    fn allow_shared(&self, shared_bytes: u32) -> Result<(), CudaError> {
        let inner = &*self.inner;
        let device = inner.module.device_ref();
        let limits = &device.limits;
        let needed = u64::from(inner.static_shared) + u64::from(shared_bytes);
        if needed <= u64::from(limits.shared) {
            return Ok(());
        }
        if needed > u64::from(limits.shared_opt_in) {
            return Err(self.refuse(format!(
                "it needs {needed} bytes of shared memory a block ({} of its own) and the device has {}: ask for less",
                inner.static_shared, limits.shared_opt_in
            )));
        }
        if inner.allowed_shared.fetch_max(shared_bytes, Ordering::Relaxed) >= shared_bytes {
            return Ok(());
        }
        let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
        let allowed = device.call("asking for shared memory", |entries| {
            // SAFETY: the function is of a loaded module.
            unsafe {
                (entries.cuFuncSetAttribute)(
                    inner.function,
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    bytes,
                )
            }
        });
        if allowed.is_err() {
            // The next launch asks again.
            inner.allowed_shared.store(0, Ordering::Relaxed);
        }
        allowed
    }
}

type ParamInfo = unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> u32;

/// Bytes of each parameter, as the driver knows them.
fn parameters_of(device: &Device, function: CUfunction, entry: ParamInfo) -> Result<Vec<usize>, CudaError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        let mut code = SUCCESS;
        device.call("asking for a kernel's parameters", |_| {
            // SAFETY: the function is of a loaded module, and the driver writes two sizes.
            code = unsafe { entry(function, sizes.len(), &mut offset, &mut size) };
            // Past the last parameter: how the list ends.
            if code == INVALID_VALUE {
                SUCCESS
            } else {
                code
            }
        })?;
        if code == INVALID_VALUE {
            return Ok(sizes);
        }
        sizes.push(size);
    }
}

fn check_shape(config: &LaunchConfig, limits: &Limits, max_threads: u32) -> Result<(), String> {
    let dimensions = [("grid", config.grid, limits.grid), ("block", config.block, limits.block)];
    for (what, value, limit) in dimensions {
        for (axis, (&value, limit)) in ["x", "y", "z"].iter().zip(value.iter().zip(limit)) {
            if value == 0 {
                return Err(format!("{what}.{axis} is 0: launch at least 1, or leave the launch out"));
            }
            if value > limit {
                return Err(format!("{what}.{axis} is {value} and the device allows {limit}"));
            }
        }
    }
    let threads = config.block.iter().fold(1_u64, |product, &value| product.saturating_mul(u64::from(value)));
    if threads > u64::from(limits.threads_per_block) {
        return Err(format!(
            "a block of {threads} threads, and the device allows {}",
            limits.threads_per_block
        ));
    }
    if threads > u64::from(max_threads) {
        return Err(format!(
            "a block of {threads} threads, and with the registers that it needs it allows {max_threads}: launch smaller blocks"
        ));
    }
    Ok(())
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.inner.name)
            .field("parameters", &self.inner.parameters)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        threads_per_block: 1024,
        block: [1024, 1024, 64],
        grid: [u32::MAX >> 1, 65_535, 65_535],
        shared: 48 << 10,
        shared_opt_in: 227 << 10,
    };

    fn shape(grid: [u32; 3], block: [u32; 3]) -> Result<(), String> {
        check_shape(&LaunchConfig { grid, block, shared_bytes: 0 }, &LIMITS, 512)
    }

    #[test]
    fn shapes_are_checked_against_each_limit_by_name() {
        shape([1, 1, 1], [512, 1, 1]).unwrap();
        shape([u32::MAX >> 1, 65_535, 65_535], [8, 8, 8]).unwrap();
        for (grid, block, part) in [
            ([0, 1, 1], [1, 1, 1], "grid.x is 0"),
            ([1, 65_536, 1], [1, 1, 1], "grid.y is 65536 and the device allows 65535"),
            ([1, 1, 1], [1, 1, 65], "block.z is 65 and the device allows 64"),
            ([1, 1, 1], [1, 0, 1], "block.y is 0"),
            ([1, 1, 1], [1024, 2, 1], "a block of 2048 threads, and the device allows 1024"),
            ([1, 1, 1], [513, 1, 1], "allows 512"),
            ([1, 1, 1], [1024, 1024, 64], "67108864"),
        ] {
            let message = shape(grid, block).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn threads_are_rounded_up_to_blocks() {
        assert_eq!(LaunchConfig::for_threads(1000, 256).unwrap().grid, [4, 1, 1]);
        assert_eq!(LaunchConfig::for_threads(1024, 256).unwrap().grid, [4, 1, 1]);
        for (threads, block) in [(0, 256), (1, 0), (u64::MAX, 1)] {
            assert_eq!(LaunchConfig::for_threads(threads, block), None);
        }
    }

    #[test]
    fn argument_values_lie_where_they_are_said_to() {
        let bytes = [1_u8, 2, 3];
        for (arg, expected) in [
            (KernelArg::Pointer(0x0102_0304_0506_0708), 0x0102_0304_0506_0708_u64.to_ne_bytes().to_vec()),
            (KernelArg::I8(-1), vec![0xFF]),
            (KernelArg::U16(0x1234), 0x1234_u16.to_ne_bytes().to_vec()),
            (KernelArg::F16(0x3C00), 0x3C00_u16.to_ne_bytes().to_vec()),
            (KernelArg::F32(1.5), 1.5_f32.to_ne_bytes().to_vec()),
            (KernelArg::F64(-2.0), (-2.0_f64).to_ne_bytes().to_vec()),
            (KernelArg::I64(-3), (-3_i64).to_ne_bytes().to_vec()),
            (KernelArg::Bytes(&bytes), bytes.to_vec()),
        ] {
            assert_eq!(arg.size(), expected.len());
            // SAFETY: the argument lives, and has so many bytes.
            let read = unsafe { std::slice::from_raw_parts(arg.address().cast::<u8>(), arg.size()) };
            assert_eq!(read, expected, "{arg:?}");
        }
    }
}
