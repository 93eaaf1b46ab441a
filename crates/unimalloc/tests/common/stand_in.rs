//! A GPU of the stand-in driver, and kernels that it knows.

use fake_cuda::Loaded;
use unimalloc::cuda::{CompileOptions, KernelArg, LaunchConfig, Module, Stream};
use unimalloc::is_cuda_available;

const KERNELS: &str = "
.version 8.0
.target sm_52
.address_size 64
.visible .entry write_u8(.param .u64 p, .param .u32 n, .param .u8 v) { ret; }
.visible .entry spin(.param .u32 ms) { ret; }
.visible .entry fault() { ret; }
";

/// Bytes that [`Gpu::write`] writes.
pub const SIZE: usize = 4096;

pub struct Gpu {
    pub fake: Loaded,
    pub module: Module,
}

impl Gpu {
    pub fn new() -> Self {
        assert!(is_cuda_available());
        let fake = Loaded::find().expect("the stand-in is loaded");
        Self { fake, module: Module::compile(KERNELS, &CompileOptions::default()).unwrap() }
    }

    pub fn launch(&self, name: &str, stream: &Stream, args: &[KernelArg]) {
        let config = LaunchConfig::for_threads(SIZE as u64, 256).unwrap();
        // SAFETY: the stand-in's kernels take these arguments, and blocks are freed through the allocator only.
        unsafe { self.module.kernel(name).unwrap().launch(&config, stream, args) }.unwrap();
    }

    pub fn spin(&self, stream: &Stream, ms: u32) {
        self.launch("spin", stream, &[KernelArg::U32(ms)]);
    }

    pub fn write(&self, stream: &Stream, block: *mut u8, byte: u8) {
        let args = [KernelArg::Pointer(block as u64), KernelArg::U32(SIZE as u32), KernelArg::U8(byte)];
        self.launch("write_u8", stream, &args);
    }
}
