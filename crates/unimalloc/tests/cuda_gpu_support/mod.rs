//! What the tests on a real GPU share.
#![allow(dead_code, missing_docs)] // each binary uses a part

use std::ffi::{c_int, c_void, CStr};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use unimalloc::cuda::{CompileOptions, Kernel, KernelArg, LaunchConfig, Module, Stream};
use unimalloc::{
    alloc_with, last_error, pending_stats, take_up_pending, thread_free, AllocOptions, AllocPolicy,
    CudaUnifiedBackend, FreeError, Place, Placement, StandardPolicy,
};

pub type B = CudaUnifiedBackend;
pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// The most managed memory that a test may hold: asking for more than a card has free can hang it.
pub const LIMIT: u64 = 512 << 20;

const SOURCE: &str = r#"
typedef unsigned long long u64;
extern "C" __global__ void fill(unsigned* p, u64 words, unsigned value) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) p[i] = value;
}
extern "C" __global__ void twice_plus_one(unsigned* p, u64 words) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) p[i] = p[i] * 2 + 1;
}
// Waits, then writes every word.
extern "C" __global__ void late_fill(unsigned* p, u64 words, unsigned value, long long cycles) {
    long long end = clock64() + cycles;
    while (clock64() < end) {}
    for (u64 i = 0; i < words; ++i) p[i] = value;
}
// Counts words that are not what they should be, and writes the next value.
extern "C" __global__ void check_and_set(unsigned* p, u64 words, unsigned before, unsigned after, unsigned* wrong) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    if (p[i] != before) atomicAdd(wrong, 1);
    p[i] = after;
}
extern "C" __global__ void write_at(unsigned char* p, u64 offset, unsigned char value) { p[offset] = value; }
extern "C" __global__ void fault() { *(volatile int*)16 = 1; }
"#;

/// Cycles of about a millisecond at the 1,980 MHz of an H200; slower chips wait longer.
pub const MS: i64 = 1_980_000;

pub struct Gpu {
    module: Module,
    pub stream: Stream,
    _alone: Alone,
}

/// Tests look at numbers of the whole process, and have the ceiling in common.
pub struct Alone(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Alone {
    pub fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        CudaUnifiedBackend::set_limit(Some(LIMIT));
        Self(alone)
    }
}

impl Gpu {
    pub fn new() -> Self {
        let alone = Alone::new();
        let module = Module::compile(SOURCE, &CompileOptions::for_device(0).name("tests.cu")).unwrap();
        Self { module, stream: Stream::new(0).unwrap(), _alone: alone }
    }

    pub fn kernel(&self, name: &str) -> Kernel {
        self.module.kernel(name).unwrap()
    }

    pub fn run(&self, name: &str, stream: &Stream, threads: usize, args: &[KernelArg]) {
        let config = LaunchConfig::for_threads(threads as u64, 256).unwrap();
        // SAFETY: each test passes what the kernel takes, and frees blocks through the allocator only.
        unsafe { self.kernel(name).launch(&config, stream, args) }.unwrap();
    }

    pub fn fill(&self, stream: &Stream, block: *mut u8, bytes: usize, value: u32) {
        self.run("fill", stream, bytes / 4, &[at(block), words(bytes), KernelArg::U32(value)]);
    }

    /// Writes the block after `ms`, as a long kernel would.
    pub fn late_fill(&self, stream: &Stream, block: KernelArg, bytes: usize, value: u32, ms: i64) {
        let args = [block, words(bytes), KernelArg::U32(value), KernelArg::I64(ms * MS)];
        self.run("late_fill", stream, 1, &args);
    }
}

/// A pointer as the allocator likes it: the launch marks the block.
pub fn at(block: *mut u8) -> KernelArg<'static> {
    KernelArg::Pointer(block as u64)
}

/// The same address as a plain number, which marks nothing.
pub fn unmarked(block: *mut u8) -> KernelArg<'static> {
    KernelArg::U64(block as u64)
}

pub fn words(bytes: usize) -> KernelArg<'static> {
    KernelArg::U64((bytes / 4) as u64)
}

pub fn place(placement: Placement) -> AllocOptions {
    AllocOptions { place: Place { device: 0, placement }, ..AllocOptions::default() }
}

pub fn alloc_as<P: AllocPolicy>(size: usize, placement: Placement) -> *mut u8 {
    let block = alloc_with::<P, B>(size, 256, &place(placement));
    assert!(!block.is_null(), "{size} bytes: {:?}", last_error());
    block
}

pub fn alloc(size: usize) -> *mut u8 {
    alloc_as::<StandardPolicy>(size, Placement::Auto)
}

pub fn try_free(block: *mut u8) -> Result<(), FreeError> {
    // SAFETY: tests hand in blocks they own, or addresses that must be refused.
    unsafe { thread_free::<StandardPolicy, B>(block) }
}

pub fn free(block: *mut u8) {
    try_free(block).unwrap();
}

/// The block's words, read by the CPU.
pub fn read(block: *mut u8, bytes: usize) -> &'static [u32] {
    // SAFETY: a live block of so many bytes; the test looks while no kernel writes it.
    unsafe { std::slice::from_raw_parts(block.cast(), bytes / 4) }
}

/// Writes all words by the CPU.
pub fn write(block: *mut u8, bytes: usize, value: u32) {
    // SAFETY: a live block of so many bytes, of which no other reference is used meanwhile.
    unsafe { std::slice::from_raw_parts_mut(block.cast(), bytes / 4) }.fill(value);
}

/// Takes up pending frees until none is left.
pub fn take_up() {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pending_stats().blocks > 0 {
        assert!(Instant::now() < deadline, "{:?}", pending_stats());
        take_up_pending(true);
    }
}

/// The driver's own entry point, for what other code in the process does.
///
/// # Safety
/// `F` is the type of a pointer to the C function of that name.
pub unsafe fn entry<F: Copy>(name: &CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the library is loaded; the caller says the type.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let entry = libc::dlsym(library, name.as_ptr());
        assert!(!entry.is_null(), "{name:?}");
        std::mem::transmute_copy(&entry)
    }
}

/// Whether pages of the range are present in this process's page table, and how many there are.
pub fn present(block: *mut u8, bytes: usize) -> (usize, usize) {
    use std::os::unix::fs::FileExt;
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let (first, last) = (block as usize / 4096, (block as usize + bytes - 1) / 4096);
    let mut entries = vec![0_u8; (last - first + 1) * 8];
    pagemap.read_exact_at(&mut entries, first as u64 * 8).unwrap();
    let present = entries.chunks_exact(8).filter(|entry| entry[7] & 0x80 != 0).count();
    (present, last - first + 1)
}

/// Runs the ignored test `name` in a process of its own; its output is part of a failure.
pub fn in_child(name: &str, body: impl FnOnce()) {
    const CHILD: &str = "UNIMALLOC_GPU_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        return body();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture"])
        .env(CHILD, name)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}:\n{text}", output.status);
}

pub type Handle = *mut c_void;
pub type Set = unsafe extern "C" fn(Handle) -> u32;
pub type Get = unsafe extern "C" fn(*mut Handle) -> u32;
pub type Retain = unsafe extern "C" fn(*mut Handle, c_int) -> u32;
