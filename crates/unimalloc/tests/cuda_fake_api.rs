//! Streams, events, modules and kernels against the stand-in driver. Each test is a process of its own.
#![cfg(target_os = "linux")]

use std::time::{Duration, Instant};

use fake_cuda::{Build, Loaded, OLD_VERSION};
use unimalloc::cuda::{
    self, CompileOptions, CudaErrorKind, Hint, KernelArg, LaunchConfig, Module, PrefetchTo, Stream,
};
use unimalloc::{is_cuda_available, CudaUnifiedBackend, MemoryBackend, Place, Placement};

const MIB: usize = 1 << 20;

const KERNELS: &str = "
.version 8.0
.target sm_52
.address_size 64
.visible .entry fill_f32(.param .u64 p, .param .u32 n, .param .f32 v) { ret; }
.visible .entry _Z5scalePfjf(.param .u64 p, .param .u32 n, .param .f32 f) { ret; }
.visible .entry vector_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) { ret; }
.visible .entry spin(.param .u32 ms) { ret; }
.visible .entry fault() { ret; }
";

fn fake() -> Loaded {
    assert!(is_cuda_available());
    Loaded::find().expect("the stand-in is loaded")
}

/// Floats in managed memory.
struct Floats(*mut f32);

impl Floats {
    const COUNT: usize = MIB / 4;

    fn new() -> Self {
        Self::at(Place::DEFAULT)
    }
    fn at(place: Place) -> Self {
        // SAFETY: any size may be asked for.
        let base = unsafe { CudaUnifiedBackend::allocate_at(MIB, place) };
        assert!(!base.is_null());
        Self(base.cast())
    }
    fn arg(&self) -> KernelArg<'static> {
        KernelArg::Pointer(self.0 as u64)
    }
    fn bytes(&self) -> *mut u8 {
        self.0.cast()
    }
    /// After the device is done.
    fn all(&self, value: f32) -> bool {
        // SAFETY: the region is live, and no kernel is running.
        unsafe { std::slice::from_raw_parts(self.0, Self::COUNT) }.iter().all(|&found| found == value)
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        // SAFETY: nobody uses the region any more.
        assert!(unsafe { CudaUnifiedBackend::deallocate(self.0.cast(), MIB) });
    }
}

fn module() -> Module {
    Module::compile(KERNELS, &CompileOptions::default()).unwrap()
}

fn launch(module: &Module, name: &str, stream: &Stream, args: &[KernelArg]) -> Result<(), cuda::CudaError> {
    let config = LaunchConfig::for_threads(Floats::COUNT as u64, 256).unwrap();
    // SAFETY: the stand-in's kernels take these arguments, which each test keeps alive.
    unsafe { module.kernel(name)?.launch(&config, stream, args) }
}

fn spin(module: &Module, stream: &Stream, ms: u32) {
    launch(module, "spin", stream, &[KernelArg::U32(ms)]).unwrap();
}

const COUNT: KernelArg = KernelArg::U32(Floats::COUNT as u32);

macro_rules! in_child {
    ($name:ident, $build:expr, [$($variable:literal = $value:literal),*], $body:block) => {
        #[test]
        fn $name() {
            $build.in_child(stringify!($name), &[$(($variable, $value)),*], || $body);
        }
    };
}

in_child!(
    devices_are_described,
    Build::new(),
    ["FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_TOTAL_BYTES" = "8GiB", "FAKE_CUDA_FREE_BYTES" = "6GiB"],
    {
        let devices = cuda::devices().unwrap();
        assert_eq!(devices.len(), 2);
        let device = &devices[1];
        assert_eq!((device.index, device.name.as_str()), (1, "Fake CUDA device"));
        assert_eq!((device.total_bytes, device.free_bytes), (8 << 30, 6 << 30));
        assert_eq!((device.compute_capability, device.driver_version), ((9, 0), 13_000));
        assert!(
            device.concurrent_managed_access && device.can_oversubscribe && !device.pageable_memory_access
        );
        let error = Stream::new(2).unwrap_err();
        assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
        assert!(error.to_string().contains("devices 0 to 1"), "{error}");
    }
);

in_child!(a_kernel_writes_what_the_cpu_reads, Build::new(), [], {
    let (module, stream, data) = (module(), Stream::new(0).unwrap(), Floats::new());
    launch(&module, "fill_f32", &stream, &[data.arg(), COUNT, KernelArg::F32(2.0)]).unwrap();
    // A C++ name that nothing else overloads.
    launch(&module, "scale", &stream, &[data.arg(), COUNT, KernelArg::F32(1.5)]).unwrap();
    stream.synchronize().unwrap();
    assert!(data.all(3.0));
    launch(&module, "vector_add", &stream, &[data.arg(), data.arg(), data.arg(), COUNT]).unwrap();
    cuda::synchronize(0).unwrap();
    assert!(data.all(6.0));
    assert_eq!(fake().counter("kernels"), 3);
});

in_child!(streams_are_in_order_and_beside_each_other, Build::new(), [], {
    let (module, one, two) = (module(), Stream::new(0).unwrap(), Stream::new(0).unwrap());
    assert!(two.id() > one.id());
    assert_ne!(one.handle(), two.handle());
    assert_eq!(Stream::default_for(0).unwrap().id(), Stream::default_for(0).unwrap().id());
    let started = Instant::now();
    let before = one.record().unwrap();
    spin(&module, &one, 300);
    let after = one.record().unwrap();
    assert!(!one.query().unwrap() && !after.done().unwrap());
    assert!(two.query().unwrap(), "the other stream has nothing to do");
    assert!(started.elapsed() < Duration::from_millis(250), "nothing waited");
    assert_eq!(after.elapsed_ms(&before).unwrap_err().kind(), CudaErrorKind::InvalidArgument);
    after.synchronize().unwrap();
    assert!(started.elapsed() >= Duration::from_millis(300));
    one.synchronize().unwrap(); // a query may say "not done" for a moment after its last event is
    assert!(one.query().unwrap() && after.done().unwrap());
    assert!(after.elapsed_ms(&before).unwrap() >= 299.0);
});

in_child!(an_event_orders_two_streams, Build::new(), [], {
    let (module, one, two, data) =
        (module(), Stream::new(0).unwrap(), Stream::new(0).unwrap(), Floats::new());
    spin(&module, &one, 100);
    launch(&module, "fill_f32", &one, &[data.arg(), COUNT, KernelArg::F32(1.0)]).unwrap();
    two.wait(&one.record().unwrap()).unwrap();
    launch(&module, "scale", &two, &[data.arg(), COUNT, KernelArg::F32(4.0)]).unwrap();
    two.synchronize().unwrap();
    assert!(data.all(4.0));
});

in_child!(everything_is_given_back_in_any_order, Build::new(), [], {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    let kernel = module.kernel("spin").unwrap();
    spin(&module, &stream, 50);
    let event = stream.record().unwrap();
    drop((stream, module));
    assert_eq!(
        (fake().counter("live_streams"), fake().counter("live_modules")),
        (1, 1),
        "still used by others"
    );
    event.synchronize().unwrap();
    drop(event);
    drop(kernel);
    let fake = fake();
    for kind in ["live_streams", "live_events", "live_modules"] {
        assert_eq!(fake.counter(kind), 0, "{kind}");
    }
    assert_eq!(fake.counter("cuCtxPushCurrent_v2"), fake.counter("cuCtxPopCurrent_v2"));
});

in_child!(a_foreign_stream_is_used_and_not_destroyed, Build::new(), ["FAKE_CUDA_DEVICES" = "2"], {
    let own = Stream::new(1).unwrap();
    // SAFETY: the stream outlives its second face.
    let foreign = unsafe { Stream::from_raw(own.handle()) }.unwrap();
    assert_eq!((foreign.device(), foreign.handle()), (1, own.handle()));
    assert_ne!(foreign.id(), own.id());
    foreign.record().unwrap().synchronize().unwrap();
    foreign.synchronize().unwrap();
    drop(foreign);
    assert!(own.query().unwrap());
    // SAFETY: the legacy default stream always exists.
    let legacy = unsafe { Stream::from_raw(0) }.unwrap();
    legacy.record().unwrap().synchronize().unwrap();
    legacy.synchronize().unwrap();
    assert!(legacy.query().unwrap());
});

in_child!(copies_and_fills_follow_the_stream, Build::new(), [], {
    let (module, stream, one, two) = (module(), Stream::new(0).unwrap(), Floats::new(), Floats::new());
    spin(&module, &stream, 50);
    launch(&module, "fill_f32", &stream, &[one.arg(), COUNT, KernelArg::F32(7.0)]).unwrap();
    // SAFETY: the regions are live until the stream was waited for.
    unsafe {
        stream.copy(two.bytes(), one.bytes(), MIB).unwrap();
        stream.fill(one.bytes(), 0, MIB).unwrap();
        stream.fill(one.bytes(), 0, 0).unwrap();
    }
    stream.synchronize().unwrap();
    assert!(one.all(0.0) && two.all(7.0));
});

fn prefetch(stream: &Stream, data: &Floats, to: PrefetchTo) -> Hint {
    // SAFETY: the region is live.
    unsafe { stream.prefetch(data.bytes(), MIB, to) }.unwrap()
}

in_child!(prefetches_reach_the_driver, Build::new(), [], {
    let (stream, data) = (Stream::new(0).unwrap(), Floats::new());
    assert_eq!(prefetch(&stream, &data, PrefetchTo::Device), Hint::Applied);
    assert_eq!(prefetch(&stream, &data, PrefetchTo::Host), Hint::Applied);
    // SAFETY: the region is live and its contents are not needed.
    let discarded = unsafe { stream.discard_and_prefetch(data.bytes(), MIB, PrefetchTo::Device) }.unwrap();
    assert_eq!(discarded, Hint::Applied);
    let fake = fake();
    assert_eq!(fake.counter("cuMemPrefetchAsync_v2"), 2);
    assert_eq!(fake.counter("cuMemDiscardAndPrefetchBatchAsync"), 1);
    // SAFETY: the address is not touched, only named.
    let error = unsafe { stream.prefetch(std::ptr::without_provenance(1 << 20), MIB, PrefetchTo::Device) };
    assert_eq!(error.unwrap_err().name(), "CUDA_ERROR_INVALID_VALUE");
});

in_child!(prefetches_of_an_older_driver, Build::new().driver(OLD_VERSION), [], {
    let (stream, data) = (Stream::new(0).unwrap(), Floats::new());
    assert_eq!(prefetch(&stream, &data, PrefetchTo::Device), Hint::Applied);
    assert_eq!(prefetch(&stream, &data, PrefetchTo::Host), Hint::Applied);
    // SAFETY: the region is live and its contents are not needed.
    unsafe { stream.discard_and_prefetch(data.bytes(), MIB, PrefetchTo::Device) }.unwrap();
    assert_eq!(fake().counter("cuMemPrefetchAsync"), 3);
});

in_child!(a_prefetch_that_cannot_apply_says_why, Build::new(), ["FAKE_CUDA_CONCURRENT" = "0"], {
    let (stream, data) = (Stream::new(0).unwrap(), Floats::new());
    let Hint::NotApplicable(reason) = prefetch(&stream, &data, PrefetchTo::Device) else { panic!("applied") };
    assert!(reason.contains("concurrent"), "{reason}");
    assert_eq!(fake().counter("cuMemPrefetchAsync_v2"), 0);
});

in_child!(
    memory_of_another_device_is_refused_where_it_is_not_reached,
    Build::new(),
    ["FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_CONCURRENT" = "0"],
    {
        let (module, stream) = (module(), Stream::new(0).unwrap());
        let there = |placement| Floats::at(Place { device: 1, placement });
        let (own, managed, pinned) = (Floats::new(), there(Placement::Auto), there(Placement::Host));
        for (data, index) in [(&managed, 0), (&own, 2)] {
            let args = [data.arg(), own.arg(), managed.arg(), COUNT];
            let error = launch(&module, "vector_add", &stream, &args).unwrap_err();
            assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
            let text = error.to_string();
            assert!(text.starts_with(&format!("argument {index}: ")) && text.contains("device 1"), "{text}");
        }
        // SAFETY: the regions are live until the stream was waited for.
        let filled = unsafe { [&managed, &pinned].map(|data| stream.fill(data.bytes(), 0, MIB).is_ok()) };
        assert_eq!((filled, fake().counter("cuLaunchKernel")), ([false, true], 0));
        launch(&module, "fill_f32", &stream, &[pinned.arg(), COUNT, KernelArg::F32(3.0)]).unwrap();
        cuda::synchronize_all().unwrap();
        assert!(pinned.all(3.0));
        assert_eq!(fake().counter("live_contexts"), 2);
    }
);

fn wrong_arguments() {
    let (module, stream, data) = (module(), Stream::new(0).unwrap(), Floats::new());
    for (args, part) in [
        (vec![data.arg(), COUNT], "2 arguments were passed and it takes 3"),
        (vec![data.arg(), COUNT, KernelArg::F32(0.0), COUNT], "4 arguments were passed and it takes 3"),
        (
            vec![KernelArg::U32(1), COUNT, KernelArg::F32(0.0)],
            "argument 0 is u32 of 4 bytes and the parameter has 8",
        ),
        (vec![data.arg(), KernelArg::U16(1), KernelArg::F32(0.0)], "argument 1 is u16"),
        (vec![data.arg(), COUNT, KernelArg::Bytes(&[0; 3])], "argument 2 is bytes of 3"),
    ] {
        let error = launch(&module, "fill_f32", &stream, &args).unwrap_err();
        assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
        assert!(error.to_string().contains(part) && error.to_string().contains("fill_f32"), "{error}");
    }
    assert_eq!(module.kernel("fill_f32").unwrap().parameter_sizes(), Some(&[8, 4, 4][..]));
    launch(&module, "fill_f32", &stream, &[data.arg(), COUNT, KernelArg::Bytes(&1.0_f32.to_ne_bytes())])
        .unwrap();
    stream.synchronize().unwrap();
    assert!(data.all(1.0));
    assert_eq!(fake().counter("cuLaunchKernel"), 1);
}

in_child!(wrong_arguments_do_not_reach_the_driver, Build::new(), [], { wrong_arguments() });
in_child!(
    wrong_arguments_are_read_from_the_text_for_an_older_driver,
    Build::new().driver(OLD_VERSION),
    [],
    {
        wrong_arguments();
    }
);

in_child!(launches_beyond_the_limits_name_the_limit, Build::new(), ["FAKE_CUDA_DEVICES" = "2"], {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    let kernel = module.kernel("spin").unwrap();
    let refused = |grid, block, shared_bytes, stream: &Stream| {
        let config = LaunchConfig { grid, block, shared_bytes };
        // SAFETY: the kernel takes one integer and touches no memory.
        let error = unsafe { kernel.launch(&config, stream, &[KernelArg::U32(0)]) }.unwrap_err();
        assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
        error.to_string()
    };
    assert!(
        refused([1, 1, 1], [2048, 1, 1], 0, &stream).contains("block.x is 2048 and the device allows 1024")
    );
    assert!(refused([0, 1, 1], [1, 1, 1], 0, &stream).contains("grid.x is 0"));
    assert!(refused([1, 1, 1], [1, 1, 1], 1 << 30, &stream).contains("1073741824 bytes of shared memory"));
    assert!(refused([1, 1, 1], [1, 1, 1], 0, &Stream::new(1).unwrap()).contains("device 1"));
    assert_eq!(fake().counter("cuLaunchKernel"), 0);
    let block = kernel.suggested_block(0).unwrap();
    assert!(block >= 32 && block <= kernel.max_threads(), "{block}");
    let calls = fake().calls();
    assert_eq!(kernel.suggested_block(0).unwrap(), block);
    assert_eq!(fake().calls(), calls, "asked once");
});

in_child!(an_unknown_kernel_is_said_with_those_there_are, Build::new(), [], {
    let error = module().kernel("nope").unwrap_err();
    assert_eq!(error.kind(), CudaErrorKind::InvalidArgument);
    let text = error.to_string();
    assert!(text.contains("nope") && text.contains("fill_f32") && text.contains("extern \"C\""), "{text}");
    assert!(module().kernel("a\0b").unwrap_err().to_string().contains("NUL"));
});

in_child!(bad_ptx_has_a_log, Build::new(), [], {
    let broken = KERNELS.replace(".visible .entry fault()", ".visible .entry fault(");
    let newer = KERNELS.replace(".version 8.0", ".version 99.0");
    for source in [broken, newer] {
        let error = Module::compile(&source, &CompileOptions::default()).unwrap_err();
        assert_eq!(error.kind(), CudaErrorKind::CompileFailed, "{error}");
        assert!(error.log().is_some_and(|log| log.contains("ptxas")), "{error:?}");
        assert!(error.name().starts_with("CUDA_ERROR_"), "{error:?}");
    }
    let flags = CompileOptions::default().flag("--use_fast_math");
    assert_eq!(Module::compile(KERNELS, &flags).unwrap_err().kind(), CudaErrorKind::InvalidArgument);
    assert_eq!(fake().counter("live_modules"), 0);
});

in_child!(a_kernel_fault_loses_the_context_and_not_the_process, Build::new(), [], {
    let (module, stream) = (module(), Stream::new(0).unwrap());
    launch(&module, "fault", &stream, &[]).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert_eq!((error.kind(), error.code()), (CudaErrorKind::ContextLost, 700));
    assert_eq!(error.name(), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert!(error.to_string().contains("compute-sanitizer"), "{error}");
    assert_eq!(Stream::new(0).unwrap_err().kind(), CudaErrorKind::ContextLost);
    drop((module, stream));
});

in_child!(cuda_source_without_the_compiler_says_what_to_install, Build::new().without_compiler(), [], {
    let error =
        Module::compile("extern \"C\" __global__ void spin(unsigned ms) {}", &CompileOptions::default())
            .unwrap_err();
    assert_eq!(error.kind(), CudaErrorKind::Unavailable);
    assert!(error.to_string().contains("NVRTC") && error.to_string().contains("PTX"), "{error}");
    module();
});

const SOURCE: &str = "
extern \"C\" __global__ void fill_f32(float* p, unsigned n, float v) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v;
}";

in_child!(cuda_source_is_compiled_once, Build::new(), [], {
    let (stream, data) = (Stream::new(0).unwrap(), Floats::new());
    let options = CompileOptions::for_device(0).name("fill.cu");
    let module = Module::compile(SOURCE, &options).unwrap();
    launch(&module, "fill_f32", &stream, &[data.arg(), COUNT, KernelArg::F32(9.0)]).unwrap();
    stream.synchronize().unwrap();
    assert!(data.all(9.0));
    let started = Instant::now();
    for _ in 0..1000 {
        Module::compile(SOURCE, &options).unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(20));
    let error = Module::compile(&SOURCE.replace("n) p[i]", "n p[i]"), &options).unwrap_err();
    assert_eq!(error.kind(), CudaErrorKind::CompileFailed, "{error}");
    assert!(error.log().is_some_and(|log| log.contains("fill.cu")), "{error:?}");
    assert_eq!(Module::compile("a\0b", &options).unwrap_err().kind(), CudaErrorKind::InvalidArgument);
});
