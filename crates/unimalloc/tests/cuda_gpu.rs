//! The CUDA layer on a real GPU: what a stand-in cannot show. Run with `--ignored --test-threads=1`.
//!
//! Managed memory in use stays below 256 MiB: asking for more than a card has free can hang it.
#![cfg(target_os = "linux")]

use std::process::Command;
use std::time::{Duration, Instant};

use unimalloc::cuda::{
    self, CompileOptions, CudaErrorKind, Hint, KernelArg, LaunchConfig, Module, PrefetchTo, Stream,
};
use unimalloc::{last_error, AllocError, CudaUnifiedBackend, MemoryBackend, Place, Placement};

const MIB: usize = 1 << 20;
const LIMIT: u64 = 256 << 20;

const SOURCE: &str = r#"
struct Pair { double a; int b; };
extern "C" __global__ void fill_f32(float* p, unsigned n, float v) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v;
}
__global__ void add_pair(float* p, unsigned n, Pair pair) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += (float)pair.a + pair.b;
}
extern "C" __global__ void reverse(float* p) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void spin(long long cycles) {
    long long end = clock64() + cycles;
    while (clock64() < end) {}
}
extern "C" __global__ void fault() { *(volatile int*)16 = 1; }
"#;

struct Region(*mut u8, usize);

impl Region {
    fn at(size: usize, placement: Placement) -> Self {
        CudaUnifiedBackend::set_limit(Some(LIMIT));
        // SAFETY: any size and place may be asked for.
        let base = unsafe { CudaUnifiedBackend::allocate_at(size, Place { device: 0, placement }) };
        assert!(!base.is_null(), "{:?}", last_error());
        Self(base, size)
    }
    fn arg(&self) -> KernelArg<'static> {
        KernelArg::Pointer(self.0 as u64)
    }
    fn count(&self) -> KernelArg<'static> {
        KernelArg::U32((self.1 / 4) as u32)
    }
    fn floats(&self) -> &[f32] {
        // SAFETY: the region is live, and tests wait for their kernels before they look.
        unsafe { std::slice::from_raw_parts(self.0.cast(), self.1 / 4) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: nobody uses the region any more.
        assert!(unsafe { CudaUnifiedBackend::deallocate(self.0, self.1) }, "{:?}", last_error());
    }
}

fn module() -> Module {
    Module::compile(SOURCE, &CompileOptions::for_device(0).name("tests.cu")).unwrap()
}

fn launch(
    kernel: &cuda::Kernel,
    stream: &Stream,
    threads: usize,
    args: &[KernelArg],
) -> Result<(), cuda::CudaError> {
    let config = LaunchConfig::for_threads(threads as u64, kernel.suggested_block(0)?).unwrap();
    // SAFETY: each test passes what the kernel takes, and keeps it alive.
    unsafe { kernel.launch(&config, stream, args) }
}

#[test]
#[ignore = "needs a GPU"]
fn devices_are_there() {
    assert_eq!(cuda::unavailable_reason(), None);
    let devices = cuda::devices().unwrap();
    println!("{devices:#?}");
    assert!(devices[0].total_bytes >= devices[0].free_bytes && devices[0].free_bytes > 0);
    assert!(devices[0].compute_capability.0 >= 5);
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_and_both_sides_see_the_same_bytes_in_every_placement() {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    let (fill, add) = (module.kernel("fill_f32").unwrap(), module.kernel("add_pair").unwrap());
    for placement in [Placement::Auto, Placement::Host, Placement::Device, Placement::ReadMostly] {
        let region = Region::at(8 * MIB, placement);
        let threads = region.1 / 4;
        launch(&fill, &stream, threads, &[region.arg(), region.count(), KernelArg::F32(1.0)]).unwrap();
        let mut pair = [0_u8; 16];
        pair[..8].copy_from_slice(&2.0_f64.to_ne_bytes());
        pair[8..12].copy_from_slice(&3_i32.to_ne_bytes());
        launch(&add, &stream, threads, &[region.arg(), region.count(), KernelArg::Bytes(&pair)]).unwrap();
        stream.synchronize().unwrap();
        assert!(region.floats().iter().all(|&value| value == 6.0), "{placement:?}");
        for len in [1000, 8 * MIB] {
            // SAFETY: the region is live and ours.
            unsafe {
                assert!(CudaUnifiedBackend::fill(region.0, 0xAB, len), "{:?}", last_error());
                assert!(CudaUnifiedBackend::holds(region.0, 0xAB, len));
            }
        }
        let other = Region::at(8 * MIB, placement);
        // SAFETY: both regions are live and ours.
        assert!(unsafe { CudaUnifiedBackend::copy(other.0, region.0, 8 * MIB) });
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(other.0, other.1) }.iter().all(|&byte| byte == 0xAB));
        // SAFETY: as above; nobody needs what is in the region.
        unsafe {
            assert_eq!(stream.prefetch(region.0, region.1, PrefetchTo::Device).unwrap(), Hint::Applied);
            assert_eq!(stream.prefetch(region.0, region.1, PrefetchTo::Host).unwrap(), Hint::Applied);
            assert_eq!(
                stream.discard_and_prefetch(region.0, region.1, PrefetchTo::Device).unwrap(),
                Hint::Applied
            );
        }
        stream.synchronize().unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_knows_the_parameters_and_mistakes_do_not_reach_it() {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    let region = Region::at(MIB, Placement::Auto);
    let fill = module.kernel("fill_f32").unwrap();
    assert_eq!(fill.parameter_sizes(), Some(&[8, 4, 4][..]));
    assert_eq!(module.kernel("add_pair").unwrap().parameter_sizes(), Some(&[8, 4, 16][..]));
    for args in [
        vec![region.arg(), region.count()],
        vec![region.arg(), region.count(), KernelArg::F64(1.0)],
        vec![KernelArg::U32(1), region.count(), KernelArg::F32(1.0)],
    ] {
        let error = launch(&fill, &stream, 1, &args).unwrap_err();
        assert_eq!(error.kind(), CudaErrorKind::InvalidArgument, "{error}");
    }
    let error = module.kernel("nope").unwrap_err();
    assert!(error.to_string().contains("fill_f32"), "{error}");
    let error =
        Module::compile(&SOURCE.replace("+= (float)", "+= (float"), &CompileOptions::default()).unwrap_err();
    assert_eq!(error.kind(), CudaErrorKind::CompileFailed);
    assert!(error.log().unwrap().contains("error"), "{error}");
    println!("{error}");
    let bad_flag = CompileOptions::default().flag("--no-such-flag");
    let error = Module::compile(SOURCE, &bad_flag).unwrap_err();
    println!("{error}");
    assert_eq!(error.kind(), CudaErrorKind::CompileFailed);
    let error = Module::compile(
        ".version 8.0\n.target sm_90\n.address_size 64\n.entry f( {",
        &CompileOptions::default(),
    )
    .unwrap_err();
    println!("{error}");
    assert_eq!(error.kind(), CudaErrorKind::CompileFailed);
    let error = Module::compile(
        ".version 99.9\n.target sm_90\n.address_size 64\n.entry f() { ret; }",
        &CompileOptions::default(),
    )
    .unwrap_err();
    println!("{error}");
    assert_eq!(error.kind(), CudaErrorKind::CompileFailed);
}

#[test]
#[ignore = "needs a GPU"]
fn a_block_may_have_more_shared_memory_than_the_default() {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    let region = Region::at(MIB, Placement::Auto);
    // SAFETY: the region is live and ours.
    let floats = unsafe { std::slice::from_raw_parts_mut(region.0.cast::<f32>(), 256) };
    for (index, value) in floats.iter_mut().enumerate() {
        *value = index as f32;
    }
    let config = |shared_bytes| LaunchConfig { grid: [1, 1, 1], block: [256, 1, 1], shared_bytes };
    let kernel = module.kernel("reverse").unwrap();
    // SAFETY: the kernel touches 256 floats.
    unsafe {
        kernel.launch(&config(64 << 10), &stream, &[region.arg()]).unwrap();
        let error = kernel.launch(&config(1 << 30), &stream, &[region.arg()]).unwrap_err();
        assert!(error.to_string().contains("shared memory"), "{error}");
    }
    stream.synchronize().unwrap();
    assert_eq!((region.floats()[0], region.floats()[255]), (255.0, 0.0));
}

#[test]
#[ignore = "needs a GPU"]
fn streams_events_and_foreign_handles() {
    let (module, one, two) = (module(), Stream::new(0).unwrap(), Stream::new(0).unwrap());
    let spin = module.kernel("spin").unwrap();
    let start = one.record().unwrap();
    let config = LaunchConfig { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0 };
    // SAFETY: the kernel touches no memory.
    unsafe { spin.launch(&config, &one, &[KernelArg::I64(100_000_000)]) }.unwrap();
    let end = one.record().unwrap();
    assert!(!end.done().unwrap() && !one.query().unwrap());
    assert!(two.query().unwrap());
    two.wait(&end).unwrap();
    assert!(!two.query().unwrap());
    assert_eq!(end.elapsed_ms(&start).unwrap_err().kind(), CudaErrorKind::InvalidArgument);
    two.synchronize().unwrap();
    assert!(end.done().unwrap());
    println!("spin: {} ms", end.elapsed_ms(&start).unwrap());
    assert!(end.elapsed_ms(&start).unwrap() > 10.0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // On a thread where no context was ever current.
            // SAFETY: the stream outlives its second face; handle 0 always exists.
            let (foreign, legacy) =
                unsafe { (Stream::from_raw(one.handle()).unwrap(), Stream::from_raw(0).unwrap()) };
            assert_eq!(foreign.device(), 0);
            for stream in [foreign, legacy] {
                launch(&module.kernel("spin").unwrap(), &stream, 1, &[KernelArg::I64(1000)]).unwrap();
                stream.record().unwrap().synchronize().unwrap();
            }
        });
    });
    assert!(!one.is_capturing().unwrap());
}

#[test]
#[ignore = "needs a GPU"]
fn what_a_call_costs() {
    fn time(what: &str, rounds: u32, mut f: impl FnMut()) {
        f();
        let start = Instant::now();
        (0..rounds).for_each(|_| f());
        println!("{what}: {:.2} µs", start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
    }
    CudaUnifiedBackend::set_limit(None);
    let pair = || {
        // SAFETY: any size may be asked for; the region is released at once.
        unsafe {
            let base = CudaUnifiedBackend::allocate(2 * MIB);
            assert!(!base.is_null() && CudaUnifiedBackend::deallocate(base, 2 * MIB), "{:?}", last_error());
        }
    };
    time("allocate + deallocate 2 MiB, automatic limit", 500, pair);
    CudaUnifiedBackend::set_limit(Some(LIMIT));
    time("allocate + deallocate 2 MiB, limit in bytes", 500, pair);
    time("segment_bytes, limit in bytes", 500, || assert_eq!(CudaUnifiedBackend::segment_bytes(), 32 * MIB));
    CudaUnifiedBackend::set_limit(None);
    time("segment_bytes, automatic limit", 500, || assert_eq!(CudaUnifiedBackend::segment_bytes(), 32 * MIB));
    let (module, stream) = (module(), Stream::new(0).unwrap());
    time("compile, cached", 20, || drop(self::module()));
    let fill = module.kernel("fill_f32").unwrap();
    let region = Region::at(64 * MIB, Placement::Device);
    time("launch", 1000, || {
        launch(&fill, &stream, 256, &[region.arg(), region.count(), KernelArg::F32(0.0)]).unwrap();
    });
    stream.synchronize().unwrap();
    time("launch + synchronize", 500, || {
        launch(&fill, &stream, 256, &[region.arg(), region.count(), KernelArg::F32(0.0)]).unwrap();
        stream.synchronize().unwrap();
    });
    time("record + query event", 1000, || assert!(stream.record().unwrap().done().is_ok()));
    for kib in [4, 64, 2048, 65536] {
        // SAFETY: the region is live and ours.
        time(&format!("fill {kib} KiB on the device"), 100, || unsafe {
            assert!(CudaUnifiedBackend::fill(region.0, 1, kib << 10));
        });
    }
}

/// Runs the ignored test `name` in a process of its own; its output is part of a failure.
fn in_child(name: &str, body: impl FnOnce()) {
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

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_fault_loses_the_context_and_not_the_process() {
    in_child("a_kernel_fault_loses_the_context_and_not_the_process", || {
        let (module, stream) = (module(), Stream::new(0).unwrap());
        let region = std::mem::ManuallyDrop::new(Region::at(2 * MIB, Placement::Auto));
        // SAFETY: the region is live and ours.
        unsafe { region.0.write_bytes(1, 100) };
        launch(&module.kernel("fault").unwrap(), &stream, 1, &[]).unwrap();
        let error = stream.synchronize().unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), CudaErrorKind::ContextLost);
        // SAFETY: as above; any size may be asked for.
        unsafe {
            assert!(CudaUnifiedBackend::allocate(2 * MIB).is_null());
            assert_eq!(last_error(), Some(AllocError::ContextLost));
            assert!(!CudaUnifiedBackend::deallocate(region.0, region.1));
            assert_eq!(last_error(), Some(AllocError::ContextLost));
        }
        drop((module, stream));
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_process_may_exit_while_everything_is_live() {
    in_child("a_process_may_exit_while_everything_is_live", || {
        let (module, stream) = (module(), Stream::new(0).unwrap());
        let spin = module.kernel("spin").unwrap();
        launch(&spin, &stream, 1, &[KernelArg::I64(200_000_000)]).unwrap();
        std::mem::forget((stream.record().unwrap(), Region::at(2 * MIB, Placement::Device), module, stream));
        std::thread::sleep(Duration::from_millis(1));
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_forked_child_gets_errors_and_the_parent_goes_on() {
    in_child("a_forked_child_gets_errors_and_the_parent_goes_on", || {
        let region = Region::at(2 * MIB, Placement::Auto);
        // SAFETY: the child calls only code that takes no lock there, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: any size may be asked for; the child ends without running exit handlers.
            unsafe {
                let refused = CudaUnifiedBackend::allocate(2 * MIB).is_null();
                libc::_exit(i32::from(!refused || last_error() != Some(AllocError::Forked)));
            }
        }
        let mut status = 1;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        drop(region);
    });
}
