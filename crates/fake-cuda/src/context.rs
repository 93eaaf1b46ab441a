//! Contexts, the context stack of each thread, and what is lost or destroyed with a context.

use crate::codes::*;
use crate::entry::lock;
use crate::stream::Stream;
use crate::{memory, module, stream};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex, OnceLock};

const PRIMARY_HANDLES: usize = 0x6000_0000;
const CREATED_HANDLES: usize = 0x6100_0000;
const HANDLE_STEP: usize = 0x1000;

/// A live context.
pub struct Context {
    pub handle: usize,
    pub id: u64,
    pub device: i32,
    pub primary: bool,
    pub flags: u32,
    /// The code that every later call answers; 0 while the context is well.
    lost: AtomicU32,
    /// Every stream with work that may still run, the default ones and destroyed ones included.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    legacy: OnceLock<Arc<Stream>>,
}

#[derive(Default)]
struct Primary {
    references: u32,
    flags: u32,
    /// The fault that a reset found: the device is lost to this process for good.
    fault: CUresult,
}

#[derive(Default)]
struct Contexts {
    live: BTreeMap<usize, Arc<Context>>,
    primaries: BTreeMap<i32, Primary>,
    creations: u64,
}

static CONTEXTS: OnceLock<Mutex<Contexts>> = OnceLock::new();

fn contexts() -> &'static Mutex<Contexts> {
    CONTEXTS.get_or_init(Mutex::default)
}

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    /// The sticky error, if a kernel has lost this context.
    pub fn check_lost(&self) -> Outcome {
        match self.lost.load(Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Makes every later call in this context answer `code`.
    pub fn lose(&self, code: CUresult) {
        let _ = self.lost.compare_exchange(0, code, AcqRel, Acquire);
    }

    /// The default stream (handles 0 and 1).
    pub fn legacy_stream(self: &Arc<Self>) -> Arc<Stream> {
        self.legacy.get_or_init(|| Stream::new_default(self)).clone()
    }

    /// The default stream, if anything ever used it.
    pub fn legacy_if_used(&self) -> Option<Arc<Stream>> {
        self.legacy.get().cloned()
    }

    /// Waits until all work submitted so far is done.
    pub fn synchronize(&self) -> Outcome {
        let tickets: Vec<_> =
            lock(&self.streams).iter().map(|stream| (stream.clone(), stream.submitted())).collect();
        for (stream, ticket) in tickets {
            stream.wait(ticket);
        }
        self.check_lost()
    }

    /// Whether work that was submitted is not done. Events that are still to be recorded are none: they keep no memory from
    /// the host.
    pub fn at_work(&self) -> bool {
        lock(&self.streams).iter().any(|stream| stream.at_work())
    }
}

fn create(table: &mut Contexts, device: i32, primary: bool, flags: u32) -> Arc<Context> {
    table.creations += 1;
    let handle = if primary {
        PRIMARY_HANDLES + device as usize * HANDLE_STEP
    } else {
        CREATED_HANDLES + table.creations as usize * HANDLE_STEP
    };
    let context = Arc::new(Context {
        handle,
        id: table.creations,
        device,
        primary,
        flags,
        lost: AtomicU32::new(0),
        streams: Mutex::default(),
        legacy: OnceLock::new(),
    });
    table.live.insert(handle, context.clone());
    context
}

/// Ends a context and everything in it. Work that runs is waited for, since its memory goes.
fn destroy(context: &Arc<Context>) {
    let _ = context.synchronize();
    stream::drop_of_context(context);
    module::drop_of_context(context.handle);
    memory::drop_of_context(context.handle);
}

/// The live context of a handle.
pub fn find(handle: usize) -> Option<Arc<Context>> {
    lock(contexts()).live.get(&handle).cloned()
}

/// Every live context.
pub fn all() -> Vec<Arc<Context>> {
    lock(contexts()).live.values().cloned().collect()
}

/// Makes every live context answer `code` from now on.
pub fn lose_all(code: CUresult) {
    for context in all() {
        context.lose(code);
    }
}

/// (contexts ever made, contexts live)
pub fn counts() -> (u64, u64) {
    let table = lock(contexts());
    (table.creations, table.live.len() as u64)
}

/// Handle of this thread's current context; 0 when it has none.
pub fn current_handle() -> usize {
    STACK.try_with(|stack| stack.borrow().last().copied().unwrap_or(0)).unwrap_or(0)
}

/// This thread's current context.
pub fn current() -> Outcome<Arc<Context>> {
    match current_handle() {
        0 => Err(ERROR_INVALID_CONTEXT),
        handle => find(handle).ok_or(ERROR_CONTEXT_IS_DESTROYED),
    }
}

/// A handle that can be made current. A primary context's handle stays one when the context has ended.
fn check_handle(handle: usize) -> Outcome {
    let table = lock(contexts());
    let primary = |device: &i32| PRIMARY_HANDLES + *device as usize * HANDLE_STEP == handle;
    if table.live.contains_key(&handle) || table.primaries.keys().any(primary) {
        Ok(())
    } else {
        Err(ERROR_INVALID_CONTEXT)
    }
}

/// `cuCtxPushCurrent`.
pub fn push(handle: usize) -> Outcome {
    if handle == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    check_handle(handle)?;
    STACK.try_with(|stack| stack.borrow_mut().push(handle)).map_err(|_| ERROR_INVALID_CONTEXT)
}

/// `cuCtxPopCurrent`.
pub fn pop() -> Outcome<usize> {
    STACK.try_with(|stack| stack.borrow_mut().pop()).ok().flatten().ok_or(ERROR_INVALID_CONTEXT)
}

/// `cuCtxSetCurrent`: replaces the top of the stack; 0 pops it.
pub fn set(handle: usize) -> Outcome {
    if handle != 0 {
        check_handle(handle)?;
    }
    STACK
        .try_with(|stack| {
            let mut stack = stack.borrow_mut();
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        })
        .map_err(|_| ERROR_INVALID_CONTEXT)
}

/// `cuDevicePrimaryCtxRetain`.
pub fn retain_primary(device: i32) -> Outcome<usize> {
    let mut table = lock(contexts());
    let primary = table.primaries.entry(device).or_default();
    if primary.fault != 0 {
        return Err(primary.fault);
    }
    primary.references += 1;
    let flags = primary.flags;
    let handle = PRIMARY_HANDLES + device as usize * HANDLE_STEP;
    if !table.live.contains_key(&handle) {
        create(&mut table, device, true, flags);
    }
    Ok(handle)
}

/// `cuDevicePrimaryCtxRelease`.
pub fn release_primary(device: i32) -> Outcome {
    let ended = {
        let mut table = lock(contexts());
        let primary = table
            .primaries
            .get_mut(&device)
            .filter(|primary| primary.references > 0)
            .ok_or(ERROR_INVALID_CONTEXT)?;
        primary.references -= 1;
        match primary.references {
            0 => table.live.remove(&(PRIMARY_HANDLES + device as usize * HANDLE_STEP)),
            _ => None,
        }
    };
    if let Some(context) = ended {
        destroy(&context);
    }
    Ok(())
}

/// `cuDevicePrimaryCtxReset`: everything in it goes, references stay. After a fault nothing brings the device back.
pub fn reset_primary(device: i32) {
    let ended = {
        let mut table = lock(contexts());
        let ended = table.live.remove(&(PRIMARY_HANDLES + device as usize * HANDLE_STEP));
        if let Some(Err(fault)) = ended.as_ref().map(|context| context.check_lost()) {
            table.primaries.entry(device).or_default().fault = fault;
        }
        ended
    };
    if let Some(context) = ended {
        destroy(&context);
    }
}

/// `cuDevicePrimaryCtxGetState`.
pub fn primary_state(device: i32) -> (u32, bool) {
    let table = lock(contexts());
    table.primaries.get(&device).map_or((0, false), |primary| (primary.flags, primary.references > 0))
}

/// `cuDevicePrimaryCtxSetFlags`.
pub fn set_primary_flags(device: i32, flags: u32) {
    lock(contexts()).primaries.entry(device).or_default().flags = flags;
}

/// `cuCtxCreate`: the new context becomes current.
pub fn create_current(device: i32, flags: u32) -> usize {
    let handle = create(&mut lock(contexts()), device, false, flags).handle;
    let _ = push(handle);
    handle
}

/// `cuCtxDestroy`: also leaves the calling thread's stack if it is on top.
pub fn destroy_created(handle: usize) -> Outcome {
    let context = find(handle).filter(|context| !context.primary).ok_or(ERROR_INVALID_CONTEXT)?;
    lock(contexts()).live.remove(&handle);
    if current_handle() == handle {
        let _ = pop();
    }
    destroy(&context);
    Ok(())
}
