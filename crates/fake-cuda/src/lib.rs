//! A stand-in `libcuda.so.1` and `libnvrtc.so.12` for tests without a GPU. Linux only; elsewhere the crate is empty.
//!
//! The library exports the driver's entry points under their real names and answers as the driver does: over `mmap`,
//! with a context stack per thread, streams that run in order beside the host, and kernels from PTX text. A product under
//! test finds it through the ordinary library search path, by the ordinary names, and cannot tell. Faults are injected by
//! environment variable or, while it is loaded, by the test.
//!
//! # Using it from a Rust test
//! Name `fake-cuda` as a dev-dependency: cargo then builds the library along with the tests. A test that needs it runs its
//! body in a process of its own, since a process loads one driver and reads the environment once:
//! ```ignore
//! use fake_cuda::{Build, Calls, Loaded};
//!
//! #[test]
//! fn third_allocation_fails() {
//!     Build::new().in_child("third_allocation_fails", &[("FAKE_CUDA_FAIL", "cuMemAllocManaged@3=2")], || {
//!         // ... use the product ...
//!         let fake = Loaded::find().expect("the product has loaded the driver by now");
//!         let before = fake.calls();
//!         // ... a warmed-up loop ...
//!         assert_eq!(fake.calls(), before);
//!         assert_eq!(fake.counter("live_managed"), 1);
//!         fake.fail("cuMemFree_v2", Calls::Nth(1), 999);
//!     });
//! }
//! ```
//! The name given to `in_child` is the test's full name as libtest prints it (`module::test` inside a module).
//! `child_output` gives the child's `Output` instead, for a child that is meant to end by a signal. `library_dir()` and
//! `Build::dir()` give the directory itself, `Build::search_path()` a value for `LD_LIBRARY_PATH`.
//!
//! [`Build`] chooses the installation: `Build::new()` is a CUDA 13.0 driver with NVRTC, `.driver(12010)` one of 12.1, which lacks
//! what came later (for `dlsym` and for `cuGetProcAddress`) and says that version, `.without("cuFuncGetParamInfo")` lacks one
//! more entry point, `.without_compiler()` has no NVRTC.
//!
//! # Using it from anything else
//! `cargo run -q -p fake-cuda --bin fake-cuda-dir [DRIVER_VERSION] [--without ENTRY]... [--no-nvrtc]` makes a directory, prints its
//! path, and the caller puts that on `LD_LIBRARY_PATH`. Addons reach `fake_cuda_control` and `fake_cuda_counter` with `dlsym`.
//!
//! # Environment variables
//! Read once, at the first call into the library. One that is misspelt or not understood makes `cuInit` answer 999 and
//! says on standard error what it takes.
//!
//! | variable `FAKE_CUDA_…` | takes | default | effect |
//! | --- | --- | --- | --- |
//! | `DRIVER_VERSION` | 13000 | the build's | what `cuDriverGetVersion` says and what `cuGetProcAddress` finds; for missing symbols use [`Build::driver`] |
//! | `INIT_ERROR` | code | 0 | `cuInit` answers it, always |
//! | `DEVICES` | 0–64 | 1 | number of devices; with 0 `cuInit` answers 100, as the driver does |
//! | `MANAGED` | 0, 1 | 1 | attribute `MANAGED_MEMORY`; with 0 `cuMemAllocManaged` answers 801 |
//! | `CONCURRENT` | 0, 1 | 1 | attribute `CONCURRENT_MANAGED_ACCESS`; with 0 see below |
//! | `PAGEABLE` | 0, 1 | 0 | attribute `PAGEABLE_MEMORY_ACCESS` (the attribute alone) |
//! | `COMPUTE` | 50–129 | 90 | compute capability; PTX for a later one is refused with 218 |
//! | `NAME` | text | Fake CUDA device | the device's name |
//! | `TOTAL_BYTES` | bytes, `16GiB` | 16GiB | the device's memory |
//! | `FREE_BYTES` | bytes | total − live | what `cuMemGetInfo` says is free |
//! | `MISALIGN` | `4KiB`, `64KiB` | 0 | managed addresses lie that far above the alignment that the driver gives |
//! | `FAIL` | `entry@nth=code`, `entry@nth+=code`, by commas | | the nth call of that entry point (with `+` every one from it) answers the code and does nothing |
//! | `DELAY_US` | µs, `entry=µs`, by commas | 0 | sleeps before every call, or before those of one entry point |
//! | `LAG_US` | µs | 0 | a stream sleeps that long before each thing it was given, and again before it counts as done: a busy machine |
//! | `LOSE_AT_CALL` | n | never | at the nth driver call of the process all live contexts are lost with 700 |
//! | `DEINIT_AT_CALL` | n | never | from the nth driver call on all answer 4 |
//! | `ABORT_ON_EXIT_CALLS` | 0, 1 | 0 | a driver call while the process exits (after the library's `atexit` handler) is named on standard error and aborts |
//!
//! Entry points are named as exported: `cuMemFree_v2`, `cuMemAllocManaged`. Codes are numbers: 2 is out of memory, 999 unknown.
//!
//! # Controls at run time
//! [`Loaded::control`], or `fake_cuda_control(key, value)` of the library, which gives 0, or -1 for what it does not understand.
//!
//! | key | value |
//! | --- | --- |
//! | `fail ENTRY CODE` | n: the nth call from now fails; -n: every one from it; 0: none any more ([`Loaded::fail`]) |
//! | `free_bytes` | what is reported free; -1: total − live again |
//! | `misalign` | bytes, a multiple of 4096 |
//! | `delay_us` | before every call |
//! | `lose_context` | code: all live contexts are lost with it at once |
//! | `lose_at_call`, `deinit_at_call` | n calls from now; 0: never |
//! | `deinitialized` | 1: every call answers 4; 0: no more |
//! | `reset_peak` | any: `peak_managed_bytes` starts from what is live |
//!
//! # Counters
//! [`Loaded::counter`], or `fake_cuda_counter(name)`, which gives `u64::MAX` for an unknown name.
//!
//! `calls` (all driver calls), any exported name (its calls, also those that failed), `calls_at_exit`, `live_managed`,
//! `live_managed_bytes`, `peak_managed_bytes`, `live_device`, `live_device_bytes`, `live_pinned`, `context_creations`, `live_contexts`,
//! `live_streams`, `live_events`, `live_modules`, `kernels` (kernels run).
//!
//! # What it does
//! `tests/observed.rs` makes some 350 observations of a driver: what it answers to good and bad arguments, before `cuInit`, without
//! a context, during a capture, after a fault, a release, a reset and a fork. `tests/observed/` has those of a real one (H200, driver
//! 580.159), and the stand-in answers the same to each. Some of them surprise:
//! - Only what has no handle to go by needs a current context: allocation, creation of streams and events, module loading,
//!   `cuMemAdvise`, the default stream, `cuMemGetInfo`, `cuCtxSynchronize` (201 without one). A bare thread may free, launch, record,
//!   query, prefetch and destroy.
//! - After a fault every call on that context answers its code, destroying things too. Nothing in the process brings the device
//!   back: after a reset, `cuDevicePrimaryCtxRetain` still answers 700. `cuPointerGetAttribute` and the context stack go on.
//! - Under a capture in global mode a thread that is not in relaxed mode may not allocate, free, advise, unload a module, nor query
//!   or wait for *any* stream or event: 900, and the capture is broken. `cuCtxSynchronize` breaks one in every mode. A prefetch
//!   cannot be captured.
//! - `cuMemFree_v2(0)` succeeds. `cuGetProcAddress` with a status pointer succeeds also when it finds nothing: look at the status.
//!
//! The rest:
//! - **Memory.** An address is aligned to the size rounded up to a power of two, up to 32 MiB, and usually comes again after a
//!   free. Sizes beyond the device's memory are served for managed memory and refused for device memory. A free of a wild
//!   or interior pointer answers 1; a good one waits until the device is idle. The bare `cuMemFree` answers 201 for every
//!   pointer. Device memory is not accessible to the host and faults. No memory pools.
//! - **Contexts.** A primary context ends with its last release, and what it owns with it. Its handle comes again. A thread that has
//!   an ended one current is answered 709.
//! - **Streams.** One thread each; the default stream is ordered with the blocking ones. Handles of destroyed streams and events
//!   are given out again, latest first.
//! - **Kernels** are found by the name of the `.entry`, plain or mangled, and run one thread an element: a launch with too few
//!   threads leaves the rest as it was. Parameter sizes are those of the PTX. A range that is not inside one live
//!   allocation loses the context with 700, a misaligned float pointer with 716.
//!
//!   | entry | does |
//!   | --- | --- |
//!   | `fill_f32(p, n, value)` | `p[i] = value` |
//!   | `scale(p, n, factor)` | `p[i] *= factor` |
//!   | `vector_add(a, b, c, n)` | `c[i] = a[i] + b[i]` |
//!   | `write_u8(p, n, value)` | bytes; the thread count is a ceiling here too |
//!   | `spin(ms)` | keeps its stream busy for that long; an integer or a float |
//!   | `fault()` | loses the context with 700 |
//!   | `nothing()` | nothing |
//!
//!   Any other kernel loads and can be asked about; launching it answers 801.
//! - **Modules** are PTX text, checked as far as `.version`, `.target`, brackets and parameter lists; the error log goes where
//!   `cuModuleLoadDataEx` was told. No cubins (200).
//! - **Capture.** The three modes, the calls they forbid, joining by an event, and graphs that replay what was captured.
//!   Unjoined streams are not noticed.
//! - **Advice and prefetch** are remembered for `cuMemRangeGetAttribute` and move nothing. Discarded pages are overwritten with
//!   0xDB.
//! - **Without concurrent access** managed memory is inaccessible to the host from any submission of device work until a
//!   synchronisation, or a query that says "done", finds the device without work: a touch in between is a segmentation fault, as
//!   on the real thing. Events that are still to be recorded or waited for are no work. Memory allocated meanwhile is inaccessible too, memory attached to the host is not. Prefetch, and advice
//!   that names a place, answer 101.
//! - **Fork and exit.** In a child after `fork` every call answers 3. The driver is gone when the process exits: calls from later
//!   exit handlers answer 4 and are counted.
//! - **NVRTC.** Understands declarations of `__global__` functions and gives PTX with their parameters; names are mangled unless they
//!   are `extern "C"`. Source with unbalanced brackets, an `#error` line or an unknown parameter type is a compile error with
//!   a log. Bodies are not compiled: what a kernel does is decided by its name.
#![cfg(target_os = "linux")]
// The exported names are the driver's.
#![allow(non_snake_case)]

mod api;
mod capture;
mod codes;
mod config;
mod context;
mod control;
mod elf;
mod entry;
mod event;
mod harness;
mod kernels;
mod memory;
mod module;
mod nvrtc;
mod ptx;
mod stream;
mod versions;

pub use harness::{library_dir, Build, Calls, Loaded};
pub use versions::{DEFAULT_VERSION, OLD_VERSION};
