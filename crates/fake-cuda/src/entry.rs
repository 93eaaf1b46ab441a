//! What happens before an entry point acts: it is counted, and may be delayed, refused or made to fail.

use crate::codes::*;
use crate::config::{Config, Failure};
use crate::context::{self, Context};
use std::cell::Cell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A lock whose poison is ignored: every critical section here leaves its data whole.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often one entry point was called.
pub struct Counter {
    name: &'static str,
    count: AtomicU64,
    listed: AtomicBool,
}

impl Counter {
    /// For the exported `name`.
    pub const fn new(name: &'static str) -> Self {
        Self { name, count: AtomicU64::new(0), listed: AtomicBool::new(false) }
    }

    fn add(&'static self) -> u64 {
        if !self.listed.swap(true, Relaxed) {
            lock(&COUNTERS).push(self);
        }
        self.count.fetch_add(1, Relaxed) + 1
    }
}

static COUNTERS: Mutex<Vec<&'static Counter>> = Mutex::new(Vec::new());

/// Everything that is not a table of handles.
pub struct Runtime {
    pub config: Config,
    complaint: Option<String>,
    pub calls: AtomicU64,
    pub calls_at_exit: AtomicU64,
    /// Process that initialised the driver; 0 before. A child after `fork` has another one.
    init_pid: AtomicU32,
    pub deinitialized: AtomicBool,
    exiting: AtomicBool,
    pub lose_at_call: AtomicU64,
    pub deinit_at_call: AtomicU64,
    pub delay_us: AtomicU64,
    pub misalign: AtomicU64,
    /// Negative: computed from what is live.
    pub free_bytes: AtomicI64,
    /// Lets the usual call, with nothing injected, skip the lock.
    failing: AtomicBool,
    failures: Mutex<Vec<Failure>>,
}

/// The process's one runtime, made at the first call into the library.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let variables =
            std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        let (config, complaint) = match Config::parse(variables) {
            Ok(config) => (config, None),
            Err(complaint) => (Config::default(), Some(complaint)),
        };
        let everywhere =
            config.delays.iter().filter(|delay| delay.entry.is_none()).map(|delay| delay.micros).sum();
        Runtime {
            calls: AtomicU64::new(0),
            calls_at_exit: AtomicU64::new(0),
            init_pid: AtomicU32::new(0),
            deinitialized: AtomicBool::new(false),
            exiting: AtomicBool::new(false),
            lose_at_call: AtomicU64::new(config.lose_at_call),
            deinit_at_call: AtomicU64::new(config.deinit_at_call),
            delay_us: AtomicU64::new(everywhere),
            misalign: AtomicU64::new(config.misalign),
            free_bytes: AtomicI64::new(config.free_bytes.map_or(-1, |bytes| bytes as i64)),
            failing: AtomicBool::new(!config.failures.is_empty()),
            failures: Mutex::new(config.failures.clone()),
            config,
            complaint,
        }
    })
}

impl Runtime {
    /// `cuInit`.
    pub fn initialize(&self) -> Outcome {
        if self.forked() {
            return Err(ERROR_NOT_INITIALIZED);
        }
        if let Some(complaint) = &self.complaint {
            eprintln!("{complaint}");
            return Err(ERROR_UNKNOWN);
        }
        if self.config.init_error != 0 {
            return Err(self.config.init_error);
        }
        if self.config.devices == 0 {
            return Err(ERROR_NO_DEVICE);
        }
        if self.init_pid.compare_exchange(0, std::process::id(), AcqRel, Acquire).is_ok() {
            pin_library();
            // SAFETY: `at_exit` is a plain function of this library, and the library was just pinned, so it is
            // still mapped when the process ends.
            unsafe { libc::atexit(at_exit) };
        }
        Ok(())
    }

    fn forked(&self) -> bool {
        let pid = self.init_pid.load(Acquire);
        pid != 0 && pid != std::process::id()
    }

    /// Calls of one exported name, if it was ever called.
    pub fn count(&self, name: &str) -> Option<u64> {
        lock(&COUNTERS).iter().find(|counter| counter.name == name).map(|counter| counter.count.load(Relaxed))
    }

    /// From now on, fail the `nth` next call of `entry` (every one from it when `onwards`); 0 takes it back.
    pub fn fail(&self, entry: &str, code: CUresult, nth: u64, onwards: bool) {
        let done = self.count(entry).unwrap_or(0);
        let mut failures = lock(&self.failures);
        failures.retain(|failure| failure.entry != entry);
        if nth > 0 {
            failures.push(Failure { entry: entry.into(), from: done + nth, onwards, code });
        }
        self.failing.store(!failures.is_empty(), Release);
    }

    fn injected(&self, name: &str, call: u64) -> Outcome {
        if self.failing.load(Acquire) {
            let failures = lock(&self.failures);
            let hit = |f: &&Failure| f.entry == name && (f.from == call || f.onwards && call > f.from);
            if let Some(failure) = failures.iter().find(hit) {
                return Err(failure.code);
            }
        }
        Ok(())
    }

    fn delay(&self, name: &str) {
        let own = |d: &&crate::config::Delay| d.entry.as_deref() == Some(name);
        let micros = self.delay_us.load(Relaxed)
            + self.config.delays.iter().filter(own).map(|d| d.micros).sum::<u64>();
        if micros > 0 {
            std::thread::sleep(Duration::from_micros(micros));
        }
    }
}

extern "C" fn at_exit() {
    runtime().exiting.store(true, Release);
    runtime().deinitialized.store(true, Release);
}

/// Keeps this library mapped for good: its worker threads run its code until the process ends.
fn pin_library() {
    if let Some(path) = own_path() {
        // SAFETY: `path` is a zero-terminated string that the dynamic loader itself gave; RTLD_NOLOAD only
        // finds the object that is already there.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

/// The file that this code was loaded from.
pub fn own_path() -> Option<std::ffi::CString> {
    // SAFETY: an all-zero Dl_info is a valid value of that plain C struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function in this library; `info` is a live out-parameter. A non-zero answer
    // means that dli_fname points to the loader's own string, which lives as long as the library.
    unsafe {
        if libc::dladdr(own_path as *const libc::c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(std::ffi::CStr::from_ptr(info.dli_fname).to_owned())
    }
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function of a stream: driver calls inside it are refused, as by the real driver.
pub fn as_host_function(f: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    f();
    IN_HOST_FUNCTION.set(false);
}

/// What an entry point needs before it acts, and what it is given.
pub trait Need {
    /// Handed to the body.
    type Given;
    /// Refuses with the driver's code when the need is not met.
    fn check(runtime: &Runtime) -> Outcome<Self::Given>;
}

/// Callable before `cuInit`.
pub struct Nothing;
/// Needs `cuInit` to have succeeded.
pub struct Init;
/// Needs a current context that lives and is not lost.
pub struct Ctx;

impl Need for Nothing {
    type Given = &'static Runtime;
    fn check(_: &Runtime) -> Outcome<Self::Given> {
        Ok(runtime())
    }
}

impl Need for Init {
    type Given = &'static Runtime;
    fn check(runtime: &Runtime) -> Outcome<Self::Given> {
        if runtime.forked() || runtime.init_pid.load(Acquire) == 0 {
            return Err(ERROR_NOT_INITIALIZED);
        }
        if runtime.deinitialized.load(Acquire) {
            return Err(ERROR_DEINITIALIZED);
        }
        Ok(self::runtime())
    }
}

impl Need for Ctx {
    type Given = Arc<Context>;
    fn check(runtime: &Runtime) -> Outcome<Self::Given> {
        Init::check(runtime)?;
        let context = context::current()?;
        context.check_lost()?;
        Ok(context)
    }
}

/// Needs no current context: the handles that it is given say whose they are. Given the current one, for the default stream.
pub struct Handle;

impl Need for Handle {
    type Given = Outcome<Arc<Context>>;
    fn check(runtime: &Runtime) -> Outcome<Self::Given> {
        Init::check(runtime)?;
        Ok(context::current())
    }
}

/// The frame around every entry point. No panic leaves it.
pub fn enter<N: Need>(counter: &'static Counter, body: impl FnOnce(N::Given) -> Outcome) -> CUresult {
    let frame = || {
        let runtime = runtime();
        // A child after fork may have inherited a lock that was held: answer without taking any.
        if runtime.forked() {
            return body(N::check(runtime)?);
        }
        let call = counter.add();
        let total = runtime.calls.fetch_add(1, Relaxed) + 1;
        if runtime.exiting.load(Acquire) {
            runtime.calls_at_exit.fetch_add(1, Relaxed);
            if runtime.config.abort_on_exit_calls {
                eprintln!("fake-cuda: {} called while the process exits", counter.name);
                std::process::abort();
            }
        }
        runtime.delay(counter.name);
        if total == runtime.lose_at_call.load(Relaxed) {
            context::lose_all(ERROR_ILLEGAL_ADDRESS);
        }
        if total == runtime.deinit_at_call.load(Relaxed) {
            runtime.deinitialized.store(true, Release);
        }
        if IN_HOST_FUNCTION.try_with(Cell::get).unwrap_or(false) {
            return Err(ERROR_NOT_PERMITTED);
        }
        runtime.injected(counter.name, call)?;
        body(N::check(runtime)?)
    };
    match catch_unwind(AssertUnwindSafe(frame)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => ERROR_UNKNOWN,
    }
}

/// Defines exported entry points: `fn NAME[NEED given](arguments) { body }`.
macro_rules! entries {
    ($(fn $name:ident[$need:ident $given:tt]($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As the driver's documentation says: pointers are null or point to what it names.
        #[no_mangle]
        #[allow(unused_unsafe, reason = "some bodies only write safe code")]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::codes::CUresult {
            static CALLS: $crate::entry::Counter = $crate::entry::Counter::new(stringify!($name));
            $crate::entry::enter::<$crate::entry::$need>(&CALLS, |$given| -> $crate::codes::Outcome {
                // SAFETY: the caller keeps the driver's documented contract: every pointer is null or points to what
                // the entry point's documentation names, for as long as it says. Bodies refuse null where it matters.
                unsafe { $body }
            })
        }
    )*};
}
pub(crate) use entries;

/// Writes an out-parameter; null is an invalid value.
///
/// # Safety
/// `out` is null or valid for writing a `T`.
pub unsafe fn put<T>(out: *mut T, value: T) -> Outcome {
    if out.is_null() {
        return Err(ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so valid by this function's contract; unaligned, since C callers promise no more.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes an out-parameter that may be left out.
///
/// # Safety
/// `out` is null or valid for writing a `T`.
pub unsafe fn put_if_wanted<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not null, so valid by this function's contract.
        unsafe { out.write_unaligned(value) };
    }
}
