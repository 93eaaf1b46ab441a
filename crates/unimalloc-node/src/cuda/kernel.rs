//! Modules, kernels and launches.

use std::panic::{catch_unwind, AssertUnwindSafe};

use napi::bindgen_prelude::{AsyncTask, External, ToNapiValue, TypeName};
use napi::{sys, Env, Result, Task, ValueType};
use napi_derive::napi;
use unimalloc::cuda::{CompileOptions, Kernel, KernelArg, LaunchConfig, Module, Stream};

use super::{device_index, device_range, host_access, to_failure};
use crate::failure::failure;

fn compile_options(device: u32, name: String, flags: Vec<String>) -> Result<CompileOptions> {
    let options = CompileOptions::for_device(device_index(device)?).name(name);
    Ok(flags.into_iter().fold(options, CompileOptions::flag))
}

/// Compiles CUDA C++, or takes PTX text, and loads it. Blocks the thread meanwhile.
#[napi(catch_unwind)]
pub fn module_compile(
    source: String,
    device: u32,
    name: String,
    flags: Vec<String>,
) -> Result<External<Module>> {
    let options = compile_options(device, name, flags)?;
    Module::compile(&source, &options).map(External::new).map_err(|error| to_failure(&error))
}

/// A compilation on a thread of the runtime's pool.
pub struct Compile {
    source: String,
    options: CompileOptions,
}

impl Task for Compile {
    type Output = Module;
    type JsValue = LoadedModule;

    fn compute(&mut self) -> Result<Module> {
        // A panic on a pool thread would end the process.
        catch_unwind(AssertUnwindSafe(|| Module::compile(&self.source, &self.options)))
            .map_err(|_| {
                failure("CUDA_ERROR", "compiling failed inside the driver layer: report this as a bug")
            })?
            .map_err(|error| to_failure(&error))
    }

    fn resolve(&mut self, _env: Env, module: Module) -> Result<LoadedModule> {
        Ok(LoadedModule(External::new(module)))
    }
}

/// A module as the result of a task, which must name its type.
pub struct LoadedModule(External<Module>);

impl TypeName for LoadedModule {
    fn type_name() -> &'static str {
        "External"
    }

    fn value_type() -> ValueType {
        ValueType::External
    }
}

impl ToNapiValue for LoadedModule {
    unsafe fn to_napi_value(env: sys::napi_env, module: Self) -> Result<sys::napi_value> {
        // SAFETY: the caller's environment, passed on.
        unsafe { ToNapiValue::to_napi_value(env, module.0) }
    }
}

/// As `moduleCompile`, on a thread of the runtime's pool.
#[napi(ts_return_type = "Promise<ExternalObject<Module>>")]
pub fn module_compile_async(
    source: String,
    device: u32,
    name: String,
    flags: Vec<String>,
) -> Result<AsyncTask<Compile>> {
    Ok(AsyncTask::new(Compile { source, options: compile_options(device, name, flags)? }))
}

/// The kernel of that name.
#[napi(catch_unwind)]
pub fn module_kernel(module: &External<Module>, name: String) -> Result<External<Kernel>> {
    module.kernel(&name).map(External::new).map_err(|error| to_failure(&error))
}

/// The block size with which most threads run at once.
#[napi(catch_unwind)]
pub fn kernel_suggested_block(kernel: &External<Kernel>, shared_bytes: u32) -> Result<u32> {
    kernel.suggested_block(shared_bytes).map_err(|error| to_failure(&error))
}

/// Index of the kernel's device.
#[napi(catch_unwind)]
pub fn kernel_device(kernel: &External<Kernel>) -> Result<u32> {
    Ok(u32::from(kernel.device()))
}

/// Takes one value after the other from the bytes that the face has packed: in order, without gaps.
struct Packed<'a>(&'a [u8]);

impl<'a> Packed<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (value, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(value)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// A value by its kind in `ts/cuda/arguments.ts`; kinds from `BYTES` on are structures of that many bytes more.
    fn arg(&mut self, kind: u32) -> Option<KernelArg<'a>> {
        const BYTES: u32 = 16;
        Some(match kind {
            0 => KernelArg::Pointer(u64::from_le_bytes(self.array()?)),
            1 => KernelArg::I8(i8::from_le_bytes(self.array()?)),
            2 => KernelArg::U8(u8::from_le_bytes(self.array()?)),
            3 => KernelArg::I16(i16::from_le_bytes(self.array()?)),
            4 => KernelArg::U16(u16::from_le_bytes(self.array()?)),
            5 => KernelArg::I32(i32::from_le_bytes(self.array()?)),
            6 => KernelArg::U32(u32::from_le_bytes(self.array()?)),
            7 => KernelArg::I64(i64::from_le_bytes(self.array()?)),
            8 => KernelArg::U64(u64::from_le_bytes(self.array()?)),
            9 => KernelArg::F16(u16::from_le_bytes(self.array()?)),
            10 => KernelArg::F32(f32::from_le_bytes(self.array()?)),
            11 => KernelArg::F64(f64::from_le_bytes(self.array()?)),
            kind if kind >= BYTES => KernelArg::Bytes(self.bytes((kind - BYTES) as usize)?),
            _ => return None,
        })
    }
}

/// Queues a kernel. `shape` is grid and block in x, y, z, then bytes of shared memory; `kinds` and `values` are the arguments; `held`
/// are the arrays among them. On a device where the CPU may not touch managed memory meanwhile, waits for the kernel unless
/// `unsafe_concurrent`; answers whether it did.
#[napi(catch_unwind)]
pub fn kernel_launch(
    kernel: &External<Kernel>,
    stream: &External<Stream>,
    shape: &[u32],
    kinds: &[u32],
    values: &[u8],
    held: &[f64],
    unsafe_concurrent: bool,
) -> Result<bool> {
    let &[gx, gy, gz, bx, by, bz, shared_bytes] = shape else {
        return Err(failure("INVALID_ARGUMENT", "a launch has seven numbers for its shape"));
    };
    let config = LaunchConfig { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes };
    let mut packed = Packed(values);
    let args = kinds
        .iter()
        .map(|kind| packed.arg(*kind))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| failure("INVALID_ARGUMENT", "the packed arguments end early"))?;
    let mut blocks = Vec::with_capacity(held.len());
    for handle in held {
        blocks.push(device_range("launch", *handle, 0.0, 0.0)?.block);
    }
    let launched = if unsafe_concurrent {
        // SAFETY: arrays among the arguments are live blocks, held during the call; the launch marks them, so that once
        // freed they are not used again before the kernel is done. Count and sizes are checked against the kernel's
        // parameters where the driver can say. That the kernel stays inside its arrays, and what plain pointers lead to, is
        // the program's word, as with any kernel.
        unsafe { kernel.launch_concurrent(&config, stream, &args) }
    } else {
        // SAFETY: as above.
        unsafe { kernel.launch(&config, stream, &args) }
    };
    launched.map_err(|error| to_failure(&error))?;
    drop(blocks);
    if unsafe_concurrent && !kernel.is_concurrent() {
        host_access::forbid_until_done(stream);
    }
    Ok(!unsafe_concurrent && !kernel.is_concurrent())
}
