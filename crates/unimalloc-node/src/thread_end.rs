//! The end of a worker: what becomes of the blocks behind its `ArrayBuffer`s.
//!
//! Node then detaches every external buffer and calls its finalizer, the latest first. A finalizer cannot tell whether the bytes were moved
//! before, by `transfer()`, to a buffer that another thread goes on using: its own buffer is detached either way. So the latest
//! external buffer is a *sentinel*, whose finalizer comes before Node touches any other. It finds every buffer as the program left
//! it: one that is still attached dies with its thread; the bytes of one that somebody has detached are kept for good.
//!
//! ```text
//! JavaScript stops -> immediates: finalizers of bytes that are gone -> requests end -> sentinel -> finalizers of all other buffers -> hooks
//! ```
//!
//! What could still write to an attached buffer has ended when the sentinel is asked: Node ends the thread's own workers, then cancels its requests or
//! waits for them, those of the thread pool too, and closes its handles (`FreeEnvironment`, `Environment::RunCleanup`, `CleanupHandles`).
//!
//! A sentinel costs as much as a buffer. So one is posted when buffers of [`MOST_UNCOVERED_BYTES`] or [`MOST_UNCOVERED`] buffers have none behind
//! them, else at the end of the turn. A finalizer that comes before the sentinel's says of a buffer older than it that the bytes are gone, and of a
//! younger one nothing. So two things are kept that need not: the last few small blocks of a thread that is stopped in the middle of a turn, and
//! those whose buffers the engine has collected but not yet finalized; a thread that ends by itself waits for the latter
//! ([`are_finalizers_due`]).
//!
//! Only in workers of Node: the main thread's end is the process's, and other runtimes have another order.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;

use napi::bindgen_prelude::{Env, JsValue, Unknown};
use napi::{sys, Result};
use napi_derive::napi;

use crate::block;
use crate::failure::failure;
use crate::holds::{self, Handle, Hold};
use crate::thread_number::ThreadNumber;

const MOST_UNCOVERED: u64 = 16;
/// A buffer of that size gets its sentinel at once; `ts/thread-end.ts` has the same.
const MOST_UNCOVERED_BYTES: usize = 256 * 1024;

struct Ending {
    /// Where JavaScript notes the hold whose buffer it is detaching itself.
    leaving: *const f64,
    /// Buffers that were watched so far.
    watched: u64,
    /// How many of them the latest sentinel covers.
    covered: u64,
    uncovered_bytes: usize,
    /// Keeps the latest sentinel. Not dropped with the thread, when the environment is gone.
    sentinel: Option<ManuallyDrop<Reference>>,
}

thread_local! {
    /// None where the thread's end is not looked after.
    static ENDING: RefCell<Option<Ending>> = const { RefCell::new(None) };
    /// Names the latest sentinel.
    static SENTINELS: Cell<usize> = const { Cell::new(0) };
}

/// Looks after this thread's end. In the number that `leaving` has room for, JavaScript notes the handle of a hold before it
/// detaches the buffer: the thread may be stopped before it ends the hold.
#[napi(catch_unwind, ts_args_type = "leaving: ArrayBuffer")]
pub fn watch_thread_end(env: &Env, leaving: Unknown<'_>) -> Result<()> {
    let (mut data, mut len, mut keep_alive) = (ptr::null_mut(), 0, ptr::null_mut());
    // SAFETY: the value comes from this environment, and the engine checks what it is. The reference is never deleted: it ends with the
    // environment.
    let is_kept = unsafe {
        sys::napi_get_arraybuffer_info(env.raw(), leaving.raw(), &mut data, &mut len) == sys::Status::napi_ok
            && len >= size_of::<f64>()
            && sys::napi_create_reference(env.raw(), leaving.raw(), 1, &mut keep_alive)
                == sys::Status::napi_ok
    };
    if !is_kept {
        return Err(failure(
            "INVALID_ARGUMENT",
            "watchThreadEnd takes an ArrayBuffer with room for a number",
        ));
    }
    let leaving = data.cast_const().cast();
    ENDING.set(Some(Ending { leaving, watched: 0, covered: 0, uncovered_bytes: 0, sentinel: None }));
    Ok(())
}

/// Posts a sentinel if buffers have been made since the latest. To be called at the end of a turn in which there were any.
#[napi(catch_unwind)]
pub fn cover_buffers(env: &Env) -> Result<()> {
    // SAFETY: napi-rs calls this on the environment's thread.
    unsafe { post_sentinel(env.raw()) };
    Ok(())
}

/// A reference of Node-API, to be used and dropped on its thread.
#[derive(Debug)]
struct Reference {
    env: sys::napi_env,
    raw: sys::napi_ref,
    thread: ThreadNumber,
}

// SAFETY: the two pointers are used by the thread only that `thread` names.
unsafe impl Send for Reference {}

impl Reference {
    /// # Safety
    /// `env` is the current environment, on its own thread, and `value` one of its values.
    unsafe fn new(env: sys::napi_env, value: sys::napi_value, count: u32) -> Option<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the caller's promise.
        let status = unsafe { sys::napi_create_reference(env, value, count, &mut raw) };
        (status == sys::Status::napi_ok).then(|| Self { env, raw, thread: ThreadNumber::current() })
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if self.thread == ThreadNumber::current() {
            // SAFETY: the environment's own thread. Who keeps one drops it in a call or a finalizer of the environment, or lets it go with it.
            unsafe { sys::napi_delete_reference(self.env, self.raw) };
        }
    }
}

/// Finds out at the end of its thread whether a buffer still has its bytes. Kept by the buffer's hold.
#[derive(Debug)]
pub struct Watch {
    /// Weak.
    buffer: Reference,
    number: u64,
}

impl Watch {
    /// Watches a fresh buffer; none where the thread's end is not looked after, or the engine refuses.
    ///
    /// # Safety
    /// `env` is the current environment, on its own thread, and `buffer` an `ArrayBuffer` in it.
    pub unsafe fn over(env: sys::napi_env, buffer: sys::napi_value, length: usize) -> Option<Self> {
        let number = ENDING.with_borrow_mut(|ending| {
            let ending = ending.as_mut()?;
            ending.watched += 1;
            ending.uncovered_bytes = ending.uncovered_bytes.saturating_add(length);
            let is_due = ending.uncovered_bytes >= MOST_UNCOVERED_BYTES
                || ending.watched - ending.covered >= MOST_UNCOVERED;
            Some((ending.watched, is_due))
        });
        let (number, is_due) = number?;
        // SAFETY: the caller's promise.
        unsafe {
            let buffer = Reference::new(env, buffer, 0)?;
            if is_due {
                post_sentinel(env);
            }
            Some(Self { buffer, number })
        }
    }

    /// Whether the buffer is there and has its bytes.
    ///
    /// # Safety
    /// On the environment's thread, before the environment is gone.
    unsafe fn is_attached(&self) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.state() == State::Attached }
    }

    /// # Safety
    /// As for `is_attached`.
    unsafe fn state(&self) -> State {
        let Reference { env, raw, .. } = self.buffer;
        let (mut scope, mut buffer, mut detached) = (ptr::null_mut(), ptr::null_mut(), true);
        // SAFETY: the caller's promise. None of these calls runs JavaScript, so that they answer also when it cannot run any more.
        unsafe {
            if sys::napi_open_handle_scope(env, &mut scope) != sys::Status::napi_ok {
                return State::Unknown;
            }
            let state = if sys::napi_get_reference_value(env, raw, &mut buffer) != sys::Status::napi_ok {
                State::Unknown
            } else if buffer.is_null() {
                State::Collected
            } else if sys::napi_is_detached_arraybuffer(env, buffer, &mut detached) == sys::Status::napi_ok
                && !detached
            {
                State::Attached
            } else {
                State::Unknown
            };
            sys::napi_close_handle_scope(env, scope);
            state
        }
    }
}

#[derive(PartialEq, Eq)]
enum State {
    Attached,
    Collected,
    /// Detached, most likely.
    Unknown,
}

/// Whether buffers of this thread have been collected and wait for their finalizers.
#[napi(catch_unwind)]
pub fn are_finalizers_due() -> Result<bool> {
    // SAFETY: a hold's watch is asked on its thread, and napi-rs calls this before the environment is gone.
    let is_collected = |watch: &Watch| unsafe { watch.state() == State::Collected };
    Ok(holds::any_of_this_thread(|hold| hold.watch.as_ref().is_some_and(is_collected)))
}

/// Whether the bytes of a watched buffer are gone, whose finalizer comes at the end of its thread and finds a hold: before the sentinel's.
pub fn are_bytes_gone(handle: Handle, watch: &Watch) -> bool {
    ENDING.with_borrow(|ending| match ending {
        Some(ending) => watch.number <= ending.covered || handle == ending.leaving(),
        None => false,
    })
}

impl Ending {
    fn leaving(&self) -> Handle {
        // SAFETY: `watch_thread_end` checked the length; the array is kept by a reference that ends with the environment, and only this thread
        // writes to it.
        Handle::from_number(unsafe { self.leaving.read() })
    }
}

/// # Safety
/// `env` is the current environment, on its own thread.
unsafe fn post_sentinel(env: sys::napi_env) {
    let is_wanted =
        ENDING.with_borrow(|ending| ending.as_ref().is_some_and(|ending| ending.watched > ending.covered));
    if !is_wanted {
        return;
    }
    let name = SENTINELS.get() + 1;
    let mut buffer = ptr::null_mut();
    // A byte of its own: engines have not always borne with two buffers over the same.
    let data = Box::into_raw(Box::new(0_u8)).cast();
    // SAFETY: the caller's promise. The byte is there until the finalizer frees it. If no buffer could be made, it is not freed: whether the engine
    // has run the finalizer cannot be known.
    let made = unsafe {
        let name = ptr::without_provenance_mut(name);
        sys::napi_create_external_arraybuffer(env, data, 1, Some(sentinel_ends), name, &mut buffer)
    };
    if made != sys::Status::napi_ok {
        return; // the next buffer tries again; until then blocks may be kept that need not
    }
    // SAFETY: as above.
    let Some(reference) = (unsafe { Reference::new(env, buffer, 1) }) else { return };
    SENTINELS.set(name);
    let old = ENDING.with_borrow_mut(|ending| {
        let ending = ending.as_mut()?;
        (ending.covered, ending.uncovered_bytes) = (ending.watched, 0);
        ending.sentinel.replace(ManuallyDrop::new(reference))
    });
    drop(old.map(ManuallyDrop::into_inner));
}

unsafe extern "C" fn sentinel_ends(_env: sys::napi_env, data: *mut c_void, name: *mut c_void) {
    // SAFETY: the byte that `post_sentinel` boxed; the engine calls this once.
    drop(unsafe { Box::from_raw(data.cast::<u8>()) });
    // An earlier one was merely collected; the latest is referred to.
    if name.addr() != SENTINELS.get() {
        return;
    }
    // A panic must not cross into the engine.
    let _ = std::panic::catch_unwind(|| {
        let Some(ending) = ENDING.take() else { return };
        let leaving = ending.leaving();
        for handle in holds::watched_by_this_thread() {
            if let Some(hold) = holds::take(handle) {
                // SAFETY: this is a finalizer of the environment, on its thread.
                let is_ours = handle == leaving
                    || hold.watch.as_ref().is_some_and(|watch| unsafe { watch.is_attached() });
                end_with_thread(hold, is_ours);
            }
        }
    });
}

/// Ends a hold with its thread: the block goes back, or is kept if somebody may be using it.
pub fn end_with_thread(hold: Hold, is_unused: bool) {
    if is_unused && !hold.awaited {
        // Nobody waits for the answer: a corrupted block is retired by the allocator.
        let _ = block::release(hold.block);
    } else {
        block::quarantine(hold.block);
    }
}
