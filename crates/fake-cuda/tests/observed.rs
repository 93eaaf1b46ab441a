//! One series of observations, made of this stand-in and of a real driver.
//!
//! `tests/observed/*.txt` is what a real driver answered; the stand-in must answer the same. To record another driver, run
//! this test's binary on a machine with a GPU: `observed --ignored --nocapture --exact record`.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use fake_cuda::Build;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::fmt::Write;
use std::ptr;

const PTX: &str = ".version 8.0
.target sm_80
.address_size 64
.visible .entry fill_f32(.param .u64 p, .param .u32 n, .param .f32 value) { ret; }
.visible .entry packed(.param .u8 a, .param .align 8 .b8 b[24], .param .u16 c) { ret; }
.visible .entry spin(.param .u32 ms) {
  .reg .pred %p; .reg .u32 %r; .reg .u64 %a, %b, %c;
  ld.param.u32 %r, [ms]; cvt.u64.u32 %c, %r; mul.lo.u64 %c, %c, 1000000;
  mov.u64 %a, %globaltimer;
again: mov.u64 %b, %globaltimer; sub.u64 %b, %b, %a; setp.lt.u64 %p, %b, %c; @%p bra again;
  ret;
}
.visible .entry fault() {
  .reg .u32 %r; .reg .u64 %a;
  mov.u32 %r, 0; mov.u64 %a, 8; st.global.u32 [%a], %r;
  ret;
}
";

/// Collects `what: answer` lines.
#[derive(Default)]
struct Notes(String);

impl Notes {
    fn note(&mut self, what: &str, answer: impl std::fmt::Debug) {
        let line = format!("{what}: {answer:?}");
        // Aloud as well: a driver may end the process at any call.
        println!("{line}");
        self.0.push_str(&line);
        self.0.push('\n');
    }
}

fn pointer_attribute(which: c_int, address: usize) -> (u32, u64) {
    let mut value = 0u64;
    let out = ptr::from_mut(&mut value).cast::<c_void>();
    (cu!(cuPointerGetAttribute(out => *mut c_void, which => c_int, address => usize)), value)
}

fn range_attribute(which: c_int, address: usize, bytes: usize) -> (u32, c_int) {
    let mut value: c_int = 99;
    let out = ptr::from_mut(&mut value).cast::<c_void>();
    let code = cu!(cuMemRangeGetAttribute(
        out => *mut c_void, 4 => usize, which => c_int, address => usize, bytes => usize,
    ));
    (code, value)
}

fn managed_with(bytes: usize, flags: u32) -> u32 {
    let mut address = 0usize;
    let code = cu!(cuMemAllocManaged(&mut address => *mut usize, bytes => usize, flags => u32));
    if code == 0 {
        free(address);
    }
    code
}

fn current() -> (u32, bool) {
    let mut handle = 0usize;
    (cu!(cuCtxGetCurrent(&mut handle => *mut usize)), handle != 0)
}

fn module_code(text: &str) -> u32 {
    let (code, handle) = module(text);
    if code == 0 {
        cu!(cuModuleUnload(handle => usize));
    }
    code
}

fn before_init(n: &mut Notes) {
    let mut number: c_int = 0;
    n.note("before cuInit: cuDeviceGetCount", cu!(cuDeviceGetCount(&mut number => *mut c_int)));
    n.note("before cuInit: cuDriverGetVersion", cu!(cuDriverGetVersion(&mut number => *mut c_int)));
    n.note("before cuInit: cuMemAllocManaged", managed_with(4096, 1));
    n.note("before cuInit: cuCtxGetCurrent", current());
    n.note("cuInit(1)", cu!(cuInit(1 => u32)));
    n.note("cuInit(0)", cu!(cuInit(0 => u32)));
    n.note("cuInit(0) again", cu!(cuInit(0 => u32)));
}

fn without_context(n: &mut Notes) {
    let mut number: c_int = 0;
    let (mut a, mut b) = (0usize, 0usize);
    n.note("no context: cuMemAllocManaged", managed_with(4096, 1));
    n.note("no context: cuMemFree_v2 wild", free(0x1000));
    n.note("no context: cuCtxGetCurrent", current());
    n.note("no context: cuCtxGetDevice", cu!(cuCtxGetDevice(&mut number => *mut c_int)));
    n.note("no context: cuCtxPopCurrent_v2", cu!(cuCtxPopCurrent_v2(&mut a => *mut usize)));
    n.note("no context: cuCtxSynchronize", cu!(cuCtxSynchronize()));
    n.note("no context: cuStreamCreate", cu!(cuStreamCreate(&mut a => *mut usize, 0 => u32)));
    n.note("no context: cuEventCreate", cu!(cuEventCreate(&mut a => *mut usize, 0 => u32)));
    n.note("no context: cuMemGetInfo_v2", cu!(cuMemGetInfo_v2(&mut a => *mut usize, &mut b => *mut usize)));
    n.note("no context: cuPointerGetAttribute", pointer_attribute(8, 0x1000).0);
    n.note("cuDeviceGet(99)", cu!(cuDeviceGet(&mut number => *mut c_int, 99 => c_int)));
    n.note("cuDeviceGet(-1)", cu!(cuDeviceGet(&mut number => *mut c_int, -1 => c_int)));
    n.note(
        "cuDeviceGetAttribute 0",
        cu!(cuDeviceGetAttribute(&mut number => *mut c_int, 0 => c_int, 0 => c_int)),
    );
    n.note(
        "cuDeviceGetAttribute 9999",
        cu!(cuDeviceGetAttribute(&mut number => *mut c_int, 9999 => c_int, 0 => c_int)),
    );
    n.note(
        "cuDeviceGetAttribute null",
        cu!(cuDeviceGetAttribute(ptr::null_mut() => *mut c_int, 1 => c_int, 0 => c_int)),
    );
    let mut flags = 0u32;
    let state =
        cu!(cuDevicePrimaryCtxGetState(0 => c_int, &mut flags => *mut u32, &mut number => *mut c_int));
    n.note("primary context before retain", (state, flags, number));
    n.note("cuDevicePrimaryCtxRelease_v2 unretained", cu!(cuDevicePrimaryCtxRelease_v2(0 => c_int)));
}

fn contexts(n: &mut Notes) {
    let (mut first, mut second, mut out) = (0usize, 0usize, 0usize);
    n.note("retain", cu!(cuDevicePrimaryCtxRetain(&mut first => *mut usize, 0 => c_int)));
    n.note(
        "retain again",
        (cu!(cuDevicePrimaryCtxRetain(&mut second => *mut usize, 0 => c_int)), first == second),
    );
    n.note("push null", cu!(cuCtxPushCurrent_v2(0 => usize)));
    n.note("push", cu!(cuCtxPushCurrent_v2(first => usize)));
    n.note("push twice", cu!(cuCtxPushCurrent_v2(first => usize)));
    n.note("pop into null", cu!(cuCtxPopCurrent_v2(ptr::null_mut() => *mut usize)));
    n.note("set null", (cu!(cuCtxSetCurrent(0 => usize)), current()));
    n.note("set", (cu!(cuCtxSetCurrent(first => usize)), current()));
    n.note("pop", (cu!(cuCtxPopCurrent_v2(&mut out => *mut usize)), out == first, current()));
    n.note("push for the rest", cu!(cuCtxPushCurrent_v2(first => usize)));
}

fn memory(n: &mut Notes) {
    n.note("cuMemAllocManaged(0)", managed_with(0, 1));
    for flags in [0, 2, 3, 4, 8] {
        n.note(&format!("cuMemAllocManaged flags {flags}"), managed_with(4096, flags));
    }
    n.note(
        "cuMemAllocManaged null",
        cu!(cuMemAllocManaged(ptr::null_mut() => *mut usize, 4096 => usize, 1 => u32)),
    );
    for bytes in [4096usize, 65_536, 3 << 20, 32 << 20] {
        let (code, address) = managed(bytes);
        let aligned = address % bytes.next_power_of_two() == 0;
        n.note(&format!("managed {bytes}"), (code, aligned));
        n.note("  free", free(address));
    }
    let (_, address) = managed(2 << 20);
    n.note("cuMemFree_v2(0)", free(0));
    n.note("cuMemFree_v2 wild", free(0x1000));
    n.note("cuMemFree_v2 interior", free(address + 4096));
    n.note("cuMemFree_v2 interior by one", free(address + 1));
    n.note("cuMemFree", cu!(cuMemFree(address as u32 => u32)));
    n.note("pointer: managed", pointer_attribute(8, address));
    n.note("pointer: type", pointer_attribute(2, address));
    n.note("pointer: device", pointer_attribute(9, address));
    n.note("pointer: interior start", {
        let (code, start) = pointer_attribute(11, address + 4097);
        (code, start == address as u64)
    });
    n.note("pointer: size", pointer_attribute(12, address + 4097));
    n.note("pointer: past the end", pointer_attribute(8, address + (2 << 20)).0);
    let own = 0u64;
    let own_address = ptr::from_ref(&own) as usize;
    n.note("pointer: own memory", pointer_attribute(8, own_address).0);
    let (mut kind, mut is_managed) = (7u32, 7u32);
    let outs = [ptr::from_mut(&mut kind).cast::<c_void>(), ptr::from_mut(&mut is_managed).cast::<c_void>()];
    let which: [c_int; 2] = [2, 8];
    let code = cu!(cuPointerGetAttributes(
        2 => u32, which.as_ptr() => *const c_int, outs.as_ptr() => *const *mut c_void, own_address => usize,
    ));
    n.note("pointers: own memory", (code, kind, is_managed));
    n.note(
        "cuMemsetD8_v2 past the end",
        cu!(cuMemsetD8_v2(address => usize, 0 => u8, (2 << 20) + 1 => usize)),
    );
    n.note("cuMemsetD8_v2 of nothing", cu!(cuMemsetD8_v2(address => usize, 0 => u8, 0 => usize)));
    n.note("cuMemsetD32_v2 misaligned", cu!(cuMemsetD32_v2(address + 1 => usize, 0 => u32, 4 => usize)));
    n.note("cuMemcpy of nothing", cu!(cuMemcpy(address => usize, address + 4096 => usize, 0 => usize)));
    n.note(
        "cuMemcpy past the end",
        cu!(cuMemcpy(address + 4096 => usize, address => usize, 2 << 20 => usize)),
    );
    let mut base = 0usize;
    let range = |base: &mut usize, at: usize| cu!(cuMemGetAddressRange_v2(base => *mut usize, ptr::null_mut() => *mut usize, at => usize));
    n.note("range of an interior pointer", (range(&mut base, address + 100), base == address));
    n.note("range of a wild pointer", range(&mut base, 0x1000));
    n.note("free", free(address));
    n.note("free twice", free(address));
    let mut host = 0usize;
    n.note("cuMemHostAlloc", cu!(cuMemHostAlloc(&mut host => *mut usize, 4096 => usize, 3 => u32)));
    n.note("pointer: pinned type", pointer_attribute(2, host));
    n.note("cuMemFree_v2 of pinned", free(host));
    n.note("cuMemFreeHost", cu!(cuMemFreeHost(host => usize)));
    n.note("cuMemFreeHost twice", cu!(cuMemFreeHost(host => usize)));
}

fn placement(n: &mut Notes) {
    let stream = stream();
    let bytes = 2usize << 20;
    let (_, address) = managed(bytes);
    n.note(
        "range: read mostly, preferred, prefetched",
        [1, 2, 4].map(|which| range_attribute(which, address, bytes)),
    );
    let advise = |advice: c_int, device: c_int, bytes: usize| cu!(cuMemAdvise(address => usize, bytes => usize, advice => c_int, device => c_int));
    n.note("advise preferred host", (advise(3, -1, bytes), range_attribute(2, address, bytes)));
    n.note("advise preferred device on half", (advise(3, 0, bytes / 2), range_attribute(2, address, bytes)));
    n.note("  first half", range_attribute(2, address, bytes / 2));
    n.note("unset preferred", (advise(4, 0, bytes), range_attribute(2, address, bytes)));
    n.note("advise read mostly", (advise(1, 0, bytes), range_attribute(1, address, bytes)));
    n.note("unset read mostly", (advise(2, 0, bytes), range_attribute(1, address, bytes)));
    n.note("advise unknown", advise(9, 0, bytes));
    n.note("advise device 99", advise(3, 99, bytes));
    n.note("advise nothing", advise(3, 0, 0));
    n.note("advise past the end", advise(3, 0, bytes + 1));
    let prefetch = |bytes: usize, device: c_int| cu!(cuMemPrefetchAsync(address => usize, bytes => usize, device => c_int, stream => usize));
    n.note(
        "prefetch to the device",
        (prefetch(bytes, 0), synchronize(stream), range_attribute(4, address, bytes)),
    );
    n.note(
        "prefetch to the host",
        (prefetch(bytes, -1), synchronize(stream), range_attribute(4, address, bytes)),
    );
    n.note("prefetch nothing", prefetch(0, 0));
    n.note("prefetch past the end", prefetch(bytes + 1, 0));
    n.note("prefetch to device 99", prefetch(bytes, 99));
    let own = [0u8; 64];
    let own_address = own.as_ptr() as usize;
    n.note(
        "prefetch own memory",
        cu!(cuMemPrefetchAsync(own_address => usize, 64 => usize, 0 => c_int, stream => usize)),
    );
    // A location is two numbers in one register: its type, and above it the id.
    let located = |location: u64, flags: u32| {
        cu!(cuMemPrefetchAsync_v2(
            address => usize, bytes => usize, location => u64, flags => u32, stream => usize,
        ))
    };
    n.note("prefetch v2 to the device, to the host", (located(1, 0), located(2, 0)));
    n.note("prefetch v2 to no place, with flags", (located(0, 0), located(1, 1)));
    n.note("after it", synchronize(stream));
    batches(n, address, bytes, stream);
    n.note("free", free(address));
}

fn batches(n: &mut Notes, address: usize, bytes: usize, stream: usize) {
    let batch = |sizes: [usize; 2],
                 count: usize,
                 locations: usize,
                 indices: [usize; 2],
                 flags: u64,
                 stream: usize| {
        let (addresses, places) = ([address, address + bytes / 2], [1u64, 2u64]);
        let call = || {
            cu!(cuMemDiscardAndPrefetchBatchAsync(
                addresses.as_ptr() => *const usize, sizes.as_ptr() => *const usize, count => usize,
                places.as_ptr() => *const u64, indices.as_ptr() => *const usize, locations => usize, flags => u64,
                stream => usize,
            ))
        };
        (call(), synchronize(stream))
    };
    let half = bytes / 2;
    n.note("batch of one", batch([half; 2], 1, 1, [0, 1], 0, stream));
    n.note("batch of two, one place", batch([half; 2], 2, 1, [0, 1], 0, stream));
    n.note("batch of two, two places", batch([half; 2], 2, 2, [0, 1], 0, stream));
    n.note("batch of none", batch([half; 2], 0, 1, [0, 1], 0, stream));
    n.note("batch, first index not 0", batch([half; 2], 2, 1, [1, 1], 0, stream));
    n.note("batch, more places than ranges", batch([half; 2], 1, 2, [0, 1], 0, stream));
    n.note("batch with flags", batch([half; 2], 1, 1, [0, 1], 1, stream));
    n.note("batch past the end", batch([half, half + 1], 2, 1, [0, 1], 0, stream));
    n.note("batch of no bytes", batch([0, half], 1, 1, [0, 1], 0, stream));
    n.note("batch on the default stream", batch([half; 2], 1, 1, [0, 1], 0, 0));
}

fn modules(n: &mut Notes) {
    n.note("module: no PTX", module_code("hello"));
    n.note("module: empty", module_code(""));
    n.note("module: from the future", module_code(".version 99.0\n.target sm_80\n.address_size 64\n"));
    n.note("module: no target", module_code(".version 8.0\n"));
    n.note(
        "module: for a later device",
        module_code(".version 9.0\n.target sm_120\n.address_size 64\n.visible .entry k() { ret; }\n"),
    );
    n.note(
        "module: open bracket",
        module_code(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k( { ret; }\n"),
    );
    n.note("module: no kernel", module_code(".version 8.0\n.target sm_80\n.address_size 64\n"));
    let mut log = [0xFFu8; 1024];
    let options: [c_int; 2] = [5, 6];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
    let text = c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k( { ret; }\n";
    let mut none = 0usize;
    let code = cu!(cuModuleLoadDataEx(
        &mut none => *mut usize, text.as_ptr() => *const c_char, 2 => u32, options.as_ptr() => *const c_int,
        values.as_mut_ptr() => *mut *mut c_void,
    ));
    let length = log.iter().position(|byte| *byte == 0).unwrap_or(0);
    n.note("module: log", (code, values[1] as usize == length + 1, length > 40));
    let (code, module) = module(PTX);
    n.note("module", code);
    let find = |name: &CStr| {
        let mut function = 0usize;
        let name = name.as_ptr();
        let code =
            cu!(cuModuleGetFunction(&mut function => *mut usize, module => usize, name => *const c_char));
        (code, function)
    };
    n.note("function missing", find(c"missing").0);
    n.note("the same function twice", find(c"spin") == find(c"spin"));
    for (name, count) in [(c"fill_f32", 3), (c"packed", 3), (c"fault", 0)] {
        let function = find(name).1;
        for index in 0..=count {
            let (mut offset, mut size) = (0usize, 0usize);
            let code = cu!(cuFuncGetParamInfo(
                function => usize, index => usize, &mut offset => *mut usize, &mut size => *mut usize,
            ));
            n.note(&format!("{name:?} parameter {index}"), (code, offset, size));
        }
    }
    let fill = find(c"fill_f32").1;
    let (mut grid, mut block, mut attribute) = (0, 0, 0);
    let code = cu!(cuOccupancyMaxPotentialBlockSize(
        &mut grid => *mut c_int, &mut block => *mut c_int, fill => usize, ptr::null() => *const c_void, 0 => usize, 0 => c_int,
    ));
    n.note("occupancy", (code, block));
    let code = cu!(cuFuncGetAttribute(&mut attribute => *mut c_int, 0 => c_int, fill => usize));
    n.note("threads a block", (code, attribute));
    n.note("attribute 99", cu!(cuFuncGetAttribute(&mut attribute => *mut c_int, 99 => c_int, fill => usize)));
    let stream = stream();
    let spin = find(c"spin").1;
    let milliseconds = 1u32;
    let params: [*const c_void; 1] = [ptr::from_ref(&milliseconds).cast()];
    for (blocks, threads) in [(0, 1), (1, 0), (1, 1025), (1, 1024)] {
        n.note(&format!("launch {blocks} x {threads}"), launch(spin, blocks, threads, stream, &params));
    }
    let bare = cu!(cuLaunchKernel(
        spin => usize, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, stream => usize,
        ptr::null_mut() => *mut *mut c_void, ptr::null_mut() => *mut *mut c_void,
    ));
    n.note("launch without parameters", bare);
    n.note("after it", synchronize(stream));
    n.note("cuModuleUnload", cu!(cuModuleUnload(module => usize)));
}

fn streams(n: &mut Notes) {
    let (_, module) = module(PTX);
    let one = stream();
    let mut out = 0usize;
    n.note("cuStreamCreate flags 2", cu!(cuStreamCreate(&mut out => *mut usize, 2 => u32)));
    n.note("cuStreamCreate null", cu!(cuStreamCreate(ptr::null_mut() => *mut usize, 0 => u32)));
    n.note("cuStreamDestroy_v2(0)", cu!(cuStreamDestroy_v2(0 => usize)));
    n.note("query", cu!(cuStreamQuery(one => usize)));
    let (begin, end, timeless) = (event(), event(), {
        let mut event = 0usize;
        n.note("cuEventCreate timeless", cu!(cuEventCreate(&mut event => *mut usize, 2 => u32)));
        event
    });
    let mut elapsed = 0f32;
    n.note("cuEventCreate flags 64", cu!(cuEventCreate(&mut out => *mut usize, 64 => u32)));
    n.note("event never recorded: query", cu!(cuEventQuery(begin => usize)));
    n.note("event never recorded: synchronize", cu!(cuEventSynchronize(begin => usize)));
    n.note("event never recorded: wait", cu!(cuStreamWaitEvent(one => usize, begin => usize, 0 => u32)));
    let mut between =
        |a: usize, b: usize| cu!(cuEventElapsedTime(&mut elapsed => *mut f32, a => usize, b => usize));
    n.note("event never recorded: elapsed", between(begin, end));
    let record = |event: usize| cu!(cuEventRecord(event => usize, one => usize));
    n.note("record", (record(begin), record(timeless)));
    spin(module, one, 500);
    n.note("record behind work", record(end));
    n.note(
        "busy: query stream, query event",
        (cu!(cuStreamQuery(one => usize)), cu!(cuEventQuery(end => usize))),
    );
    n.note("busy: elapsed", between(begin, end));
    n.note("synchronize", (synchronize(one), between(begin, end), between(timeless, end)));
    let mut ids = [0u64; 2];
    n.note("id", cu!(cuStreamGetId(one => usize, &mut ids[0] => *mut u64)));
    spin(module, one, 50);
    n.note("destroy while busy", cu!(cuStreamDestroy_v2(one => usize)));
    n.note("then the context's end", cu!(cuCtxSynchronize()));
    n.note("cuModuleUnload", cu!(cuModuleUnload(module => usize)));
}

fn capture(n: &mut Notes) {
    let (one, two) = (stream(), stream());
    let (bystander, recorded) = (event(), event());
    let (_, address) = managed(2 << 20);
    let mut graph = 0usize;
    let begin = |stream: usize, mode: u32| cu!(cuStreamBeginCapture_v2(stream => usize, mode => u32));
    let mut end = || {
        let code = cu!(cuStreamEndCapture(one => usize, &mut graph => *mut usize));
        if code == 0 {
            cu!(cuGraphDestroy(graph => usize));
        }
        code
    };
    n.note("capture on the default stream", begin(0, 0));
    n.note("capture, mode 3", begin(one, 3));
    n.note("end of no capture", end());
    n.note("record before", (cu!(cuEventRecord(bystander => usize, two => usize)), synchronize(two)));
    n.note("capture", begin(one, 0));
    n.note("capture again", begin(one, 0));
    n.note("end", end());
    let (mut context, spare) = (0usize, module(PTX).1);
    cu!(cuCtxGetCurrent(&mut context => *mut usize));
    let mut try_each = |n: &mut Notes, mode: u32, relaxed: bool| {
        let calls: &[(&str, &dyn Fn() -> u32)] = &[
            ("cuMemAllocManaged", &|| managed_with(4096, 1)),
            ("cuMemFree_v2 wild", &|| free(0x1000)),
            ("cuMemFree_v2(0)", &|| free(0)),
            ("cuEventQuery of a bystander", &|| cu!(cuEventQuery(bystander => usize))),
            ("cuEventSynchronize of a bystander", &|| cu!(cuEventSynchronize(bystander => usize))),
            ("cuStreamQuery of another", &|| cu!(cuStreamQuery(two => usize))),
            ("cuStreamSynchronize of another", &|| synchronize(two)),
            ("cuStreamSynchronize of itself", &|| synchronize(one)),
            ("cuStreamQuery of itself", &|| cu!(cuStreamQuery(one => usize))),
            ("cuCtxSynchronize", &|| cu!(cuCtxSynchronize())),
            ("cuEventRecord on another", &|| cu!(cuEventRecord(bystander => usize, two => usize))),
            ("cuEventRecord on itself", &|| cu!(cuEventRecord(recorded => usize, one => usize))),
            ("cuEventQuery of a captured one", &|| cu!(cuEventQuery(recorded => usize))),
            (
                "cuMemsetD8Async on another",
                &|| cu!(cuMemsetD8Async(address => usize, 0 => u8, 64 => usize, two => usize)),
            ),
            (
                "cuMemsetD8Async on itself",
                &|| cu!(cuMemsetD8Async(address => usize, 0 => u8, 64 => usize, one => usize)),
            ),
            ("cuMemsetD8_v2", &|| cu!(cuMemsetD8_v2(address => usize, 0 => u8, 64 => usize))),
            (
                "cuMemPrefetchAsync on another",
                &|| cu!(cuMemPrefetchAsync(address => usize, 4096 => usize, 0 => c_int, two => usize)),
            ),
            (
                "cuMemPrefetchAsync on itself",
                &|| cu!(cuMemPrefetchAsync(address => usize, 4096 => usize, 0 => c_int, one => usize)),
            ),
            ("cuMemAdvise", &|| cu!(cuMemAdvise(address => usize, 4096 => usize, 1 => c_int, 0 => c_int))),
            ("cuMemGetInfo_v2", &|| {
                let (mut a, mut b) = (0usize, 0usize);
                cu!(cuMemGetInfo_v2(&mut a => *mut usize, &mut b => *mut usize))
            }),
            ("cuPointerGetAttribute", &|| pointer_attribute(8, address).0),
            ("cuModuleLoadDataEx", &|| module(PTX).0),
            ("cuModuleUnload", &|| cu!(cuModuleUnload(spare => usize))),
            ("cuEventQuery of one just captured", &|| {
                cu!(cuEventRecord(recorded => usize, one => usize));
                cu!(cuEventQuery(recorded => usize))
            }),
            ("cuMemAllocManaged on another thread", &|| {
                std::thread::scope(|scope| {
                    scope
                        .spawn(|| {
                            cu!(cuCtxPushCurrent_v2(context => usize));
                            managed_with(4096, 1)
                        })
                        .join()
                        .unwrap()
                })
            }),
            ("cuStreamCreate", &|| {
                let mut out = 0usize;
                let code = cu!(cuStreamCreate(&mut out => *mut usize, 1 => u32));
                cu!(cuStreamDestroy_v2(out => usize));
                code
            }),
            ("cuEventCreate", &|| {
                let mut out = 0usize;
                let code = cu!(cuEventCreate(&mut out => *mut usize, 2 => u32));
                cu!(cuEventDestroy_v2(out => usize));
                code
            }),
        ];
        for (name, call) in calls {
            begin(one, mode);
            let mut own = if relaxed { 2u32 } else { 0 };
            cu!(cuThreadExchangeStreamCaptureMode(&mut own => *mut u32));
            let code = call();
            cu!(cuThreadExchangeStreamCaptureMode(&mut own => *mut u32));
            n.note(&format!("capture mode {mode}, relaxed thread {relaxed}: {name}"), (code, end()));
            synchronize(one);
            synchronize(two);
        }
    };
    try_each(n, 0, false);
    try_each(n, 0, true);
    try_each(n, 2, false);
    n.note("free", free(address));
}

/// What a thread without a current context can do with what another thread made.
fn on_a_bare_thread(n: &mut Notes) {
    let (_, module) = module(PTX);
    let (one, marker) = (stream(), event());
    let (spin, milliseconds) = (function(module, "spin"), 1u32);
    let blocks: Vec<usize> = (0..2).map(|_| managed(65_536).1).collect();
    let address = blocks[0];
    let (mut host, mut out) = (0usize, 0usize);
    assert_eq!(cu!(cuMemHostAlloc(&mut host => *mut usize, 4096 => usize, 3 => u32)), 0);
    let mut bare = |what: &str, call: &(dyn Fn() -> u32 + Sync)| {
        let code = std::thread::scope(|scope| scope.spawn(call).join().unwrap());
        n.note(&format!("bare thread: {what}"), code);
    };
    bare("cuStreamQuery", &|| cu!(cuStreamQuery(one => usize)));
    bare("cuStreamSynchronize", &|| synchronize(one));
    bare("cuEventRecord", &|| cu!(cuEventRecord(marker => usize, one => usize)));
    bare("cuEventSynchronize", &|| cu!(cuEventSynchronize(marker => usize)));
    bare("cuEventQuery", &|| cu!(cuEventQuery(marker => usize)));
    bare("cuStreamWaitEvent", &|| cu!(cuStreamWaitEvent(one => usize, marker => usize, 0 => u32)));
    bare("cuStreamIsCapturing", &|| cu!(cuStreamIsCapturing(one => usize, &mut 0u32 => *mut u32)));
    bare("cuMemsetD8Async", &|| cu!(cuMemsetD8Async(address => usize, 0 => u8, 64 => usize, one => usize)));
    bare(
        "cuMemsetD8Async on the default stream",
        &|| cu!(cuMemsetD8Async(address => usize, 0 => u8, 64 => usize, 0 => usize)),
    );
    bare("cuStreamSynchronize of the default stream", &|| synchronize(0));
    bare(
        "cuMemcpyAsync",
        &|| cu!(cuMemcpyAsync(address => usize, address + 64 => usize, 64 => usize, one => usize)),
    );
    bare("cuMemAdvise", &|| cu!(cuMemAdvise(address => usize, 4096 => usize, 1 => c_int, 0 => c_int)));
    bare(
        "cuMemPrefetchAsync",
        &|| cu!(cuMemPrefetchAsync(address => usize, 4096 => usize, 0 => c_int, one => usize)),
    );
    bare("cuMemRangeGetAttribute", &|| range_attribute(1, address, 4096).0);
    bare("cuLaunchKernel", &|| launch(spin, 1, 1, one, &[ptr::from_ref(&milliseconds).cast()]));
    bare("cuFuncGetAttribute", &|| cu!(cuFuncGetAttribute(&mut 0 => *mut c_int, 0 => c_int, spin => usize)));
    bare("cuModuleGetFunction", &|| {
        let name = c"spin".as_ptr();
        cu!(cuModuleGetFunction(&mut 0usize => *mut usize, module => usize, name => *const c_char))
    });
    bare("cuStreamSynchronize", &|| synchronize(one));
    bare("cuMemFree_v2", &|| free(address));
    bare("cuMemFree_v2 again", &|| free(address));
    bare("cuMemFreeHost", &|| cu!(cuMemFreeHost(host => usize)));
    bare("cuEventDestroy_v2", &|| cu!(cuEventDestroy_v2(marker => usize)));
    bare("cuModuleUnload", &|| cu!(cuModuleUnload(module => usize)));
    bare("cuStreamDestroy_v2", &|| cu!(cuStreamDestroy_v2(one => usize)));
    n.note("free", free(blocks[1]));
    n.note("current context", (current(), cu!(cuCtxGetId(0 => usize, &mut out => *mut usize))));
}

fn names(n: &mut Notes) {
    for code in
        [0, 1, 2, 3, 4, 100, 201, 209, 218, 222, 400, 500, 600, 700, 709, 719, 800, 801, 900, 907, 999]
    {
        let (mut name, mut text) = (ptr::null(), ptr::null());
        cu!(cuGetErrorName(code => u32, &mut name => *mut *const c_char));
        cu!(cuGetErrorString(code => u32, &mut text => *mut *const c_char));
        // SAFETY: the driver gives static strings, or null.
        let read = |text: *const c_char| (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
        n.note(&code.to_string(), (read(name), read(text)));
    }
    let mut name = c"".as_ptr();
    let code = cu!(cuGetErrorName(12_345 => u32, &mut name => *mut *const c_char));
    n.note("12345", (code, name.is_null()));
    for (name, version, same) in [
        ("cuMemFree", 12_000, "cuMemFree_v2"),
        ("cuMemAdvise", 12_000, "cuMemAdvise"),
        ("cuMemAdvise", 13_000, "cuMemAdvise_v2"),
        ("cuMemPrefetchAsync", 12_090, "cuMemPrefetchAsync_v2"),
        ("cuMemDiscardAndPrefetchBatchAsync", 12_000, "cuMemDiscardAndPrefetchBatchAsync"),
        ("cuMemDiscardAndPrefetchBatchAsync", 13_000, "cuMemDiscardAndPrefetchBatchAsync"),
        ("cuFuncGetParamInfo", 12_000, "cuFuncGetParamInfo"),
        ("cuFuncGetParamInfo", 12_040, "cuFuncGetParamInfo"),
        ("cuNothing", 12_000, "cuNothing"),
    ] {
        let text = CString::new(name).unwrap();
        let (mut address, mut status) = (ptr::null_mut::<c_void>(), -1);
        let code = cu!(cuGetProcAddress_v2(
            text.as_ptr() => *const c_char, &mut address => *mut *mut c_void, version => c_int, 0 => u64,
            &mut status => *mut c_int,
        ));
        let exported = symbol("libcuda.so.1", same);
        n.note(&format!("{name} for {version}"), (code, status, !address.is_null() && address == exported));
    }
}

fn forked(n: &mut Notes) {
    for (name, call) in [
        ("cuInit", (|| cu!(cuInit(0 => u32))) as fn() -> u32),
        ("cuMemAllocManaged", || managed_with(4096, 1)),
        ("cuCtxGetCurrent", || current().0),
        ("cuCtxSynchronize", || cu!(cuCtxSynchronize())),
        ("cuDeviceGetCount", || cu!(cuDeviceGetCount(&mut 0 => *mut c_int))),
        ("cuDriverGetVersion", || cu!(cuDriverGetVersion(&mut 0 => *mut c_int))),
    ] {
        // SAFETY: the child makes one driver call and leaves by _exit.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(5);
                libc::_exit(call().min(255) as c_int);
            }
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            status
        };
        n.note(&format!("after fork: {name}"), (libc::WIFEXITED(status), libc::WEXITSTATUS(status)));
    }
}

fn lost(n: &mut Notes) {
    let (_, module) = module(PTX);
    let (one, marker, (_, address)) = (stream(), event(), managed(4096));
    n.note("fault: launch", launch(function(module, "fault"), 1, 1, one, &[]));
    n.note("fault: synchronize", synchronize(one));
    n.note("fault: cuMemAllocManaged", managed_with(4096, 1));
    n.note("fault: cuMemFree_v2", free(address));
    n.note("fault: cuMemFree_v2 wild", free(0x1000));
    n.note("fault: cuStreamQuery", cu!(cuStreamQuery(one => usize)));
    n.note("fault: cuEventQuery", cu!(cuEventQuery(marker => usize)));
    n.note("fault: cuEventRecord", cu!(cuEventRecord(marker => usize, one => usize)));
    n.note("fault: cuCtxSynchronize", cu!(cuCtxSynchronize()));
    let (mut a, mut b) = (0usize, 0usize);
    n.note("fault: cuMemGetInfo_v2", cu!(cuMemGetInfo_v2(&mut a => *mut usize, &mut b => *mut usize)));
    n.note("fault: cuPointerGetAttribute", pointer_attribute(8, address));
    n.note("fault: cuCtxGetCurrent", current());
    n.note("fault: cuCtxGetDevice", cu!(cuCtxGetDevice(&mut 0 => *mut c_int)));
    n.note(
        "fault: cuDeviceGetAttribute",
        cu!(cuDeviceGetAttribute(&mut 0 => *mut c_int, 1 => c_int, 0 => c_int)),
    );
    n.note("fault: cuStreamCreate", cu!(cuStreamCreate(&mut a => *mut usize, 1 => u32)));
    n.note("fault: cuEventCreate", cu!(cuEventCreate(&mut a => *mut usize, 0 => u32)));
    n.note("fault: cuEventDestroy_v2", cu!(cuEventDestroy_v2(marker => usize)));
    n.note("fault: cuStreamDestroy_v2", cu!(cuStreamDestroy_v2(one => usize)));
    n.note("fault: cuModuleUnload", cu!(cuModuleUnload(module => usize)));
    n.note("fault: cuCtxPopCurrent_v2", cu!(cuCtxPopCurrent_v2(&mut a => *mut usize)));
    n.note("fault: cuCtxPushCurrent_v2", cu!(cuCtxPushCurrent_v2(a => usize)));
    n.note(
        "fault: cuDevicePrimaryCtxRetain",
        cu!(cuDevicePrimaryCtxRetain(&mut b => *mut usize, 0 => c_int)),
    );
    n.note("reset", cu!(cuDevicePrimaryCtxReset_v2(0 => c_int)));
    n.note("reset: cuMemAllocManaged", managed_with(4096, 1));
    n.note(
        "reset: retain, same handle",
        (cu!(cuDevicePrimaryCtxRetain(&mut b => *mut usize, 0 => c_int)), a == b),
    );
    n.note("reset: set current", cu!(cuCtxSetCurrent(b => usize)));
    n.note("reset: cuMemAllocManaged", managed_with(4096, 1));
}

fn reset(n: &mut Notes) {
    let mut context = 0usize;
    let (_, address) = managed(4096);
    n.note("reset", cu!(cuDevicePrimaryCtxReset_v2(0 => c_int)));
    n.note("reset: current", current());
    n.note("reset: free of what was in it", free(address));
    n.note("reset: cuMemAllocManaged", managed_with(4096, 1));
    n.note("reset: retain", cu!(cuDevicePrimaryCtxRetain(&mut context => *mut usize, 0 => c_int)));
    n.note("reset: cuMemAllocManaged", managed_with(4096, 1));
    n.note("reset: set current", cu!(cuCtxSetCurrent(context => usize)));
    n.note("reset: cuMemAllocManaged", managed_with(4096, 1));
}

fn released(n: &mut Notes) {
    let (mut context, mut again) = (0usize, 0usize);
    let (_, address) = managed(4096);
    while cu!(cuDevicePrimaryCtxRelease_v2(0 => c_int)) == 0 {}
    n.note("released: cuMemAllocManaged", managed_with(4096, 1));
    n.note("released: free of what was in it", free(address));
    n.note("released: cuCtxGetCurrent", current());
    n.note("released: cuCtxSynchronize", cu!(cuCtxSynchronize()));
    n.note("retain", cu!(cuDevicePrimaryCtxRetain(&mut context => *mut usize, 0 => c_int)));
    n.note("release", cu!(cuDevicePrimaryCtxRelease_v2(0 => c_int)));
    n.note(
        "retain, same handle",
        (cu!(cuDevicePrimaryCtxRetain(&mut again => *mut usize, 0 => c_int)), context == again),
    );
    n.note("retained: cuMemAllocManaged", managed_with(4096, 1));
    n.note("retained: set current", cu!(cuCtxSetCurrent(again => usize)));
    n.note("retained: cuMemAllocManaged", managed_with(4096, 1));
}

/// Every observation; nothing in it is a figure of time or of one device.
fn observe() -> String {
    let mut n = Notes::default();
    for (name, part) in [
        ("before cuInit", before_init as fn(&mut Notes)),
        ("without a context", without_context),
        ("contexts", contexts),
        ("memory", memory),
        ("placement", placement),
        ("modules", modules),
        ("streams", streams),
        ("capture", capture),
        ("a thread without a context", on_a_bare_thread),
        ("names", names),
        ("fork", forked),
        ("a released context", released),
        ("a reset context", reset),
        ("a lost context", lost),
    ] {
        writeln!(n.0, "# {name}").unwrap();
        part(&mut n);
    }
    n.0
}

#[test]
#[ignore = "for a machine with a GPU: prints what its driver answers"]
fn record() {
    extern "C" fn late() {
        eprintln!("after the driver's exit: {:?}", (managed(4096).0, free(0x1000), current()));
    }
    // SAFETY: a plain function of this program. Registered before the driver's handler, it runs after it.
    unsafe { libc::atexit(late) };
    let text = observe();
    println!("----\n{text}");
}

#[test]
fn answers_as_the_driver_does() {
    Build::new().in_child("answers_as_the_driver_does", &[], || {
        let recorded = include_str!("observed/h200-580.159-cuda13.0.txt");
        let here = observe();
        let differ = recorded.lines().zip(here.lines()).filter(|(real, own)| real != own);
        let differ: Vec<_> =
            differ.map(|(real, own)| format!("the driver: {real}\n  here:     {own}")).collect();
        assert!(differ.is_empty(), "{}", differ.join("\n"));
        assert_eq!(recorded.lines().count(), here.lines().count());
    });
}
