//! `ArrayBuffer`s over blocks, and what happens when the engine is done with one.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use napi::sys;

use crate::account::{Account, CELLS};
use crate::block::{self, Share};
use crate::collector;
use crate::holds::{self, Handle, Hold};
use crate::thread_end::{are_bytes_gone, end_with_thread, Watch};
use crate::thread_number::ThreadNumber;

/// Why a block could not be shown to JavaScript.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferError {
    /// The runtime forbids external buffers, as Electron does. Copying instead would cut the link to the GPU.
    Banned,
    /// The engine refused, most often for the size.
    Refused,
}

/// Shows the first `requested` bytes of a block to JavaScript. The buffer takes over the caller's visible hold; on an error
/// that hold is ended.
///
/// # Safety
/// `env` is the current environment, on its own thread. This environment has no other buffer over the block.
pub unsafe fn create(env: sys::napi_env, block: Share) -> Result<(sys::napi_value, Handle), BufferError> {
    let address = block.address() as *mut c_void;
    let length = block.requested();
    let handle = match holds::insert(Hold::new(block)) {
        Ok(handle) => handle,
        Err(hold) => {
            let _ = block::release(hold.block);
            return Err(BufferError::Refused);
        }
    };
    let mut buffer = ptr::null_mut();
    // SAFETY: the caller vouches for `env`; the bytes stay valid until the hold ends, which the finalizer does last.
    let status = unsafe {
        sys::napi_create_external_arraybuffer(
            env,
            address,
            length,
            Some(finalize),
            handle.to_word() as usize as *mut c_void,
            &mut buffer,
        )
    };
    if status == sys::Status::napi_ok {
        // SAFETY: as above, and the buffer was made in this environment.
        if let Some(watch) = unsafe { Watch::over(env, buffer, length) } {
            holds::with(handle, |hold| hold.watch = Some(watch));
        }
        return Ok((buffer, handle));
    }
    // Some engines run the finalizer on a failure and some do not: whoever comes second finds no hold.
    if let Some(hold) = holds::take(handle) {
        let _ = block::release(hold.block);
    }
    let (mut thrown, mut exception) = (false, ptr::null_mut());
    // SAFETY: `env` as above. The engine's own words are replaced by a typed error that names the limit.
    unsafe {
        if sys::napi_is_exception_pending(env, &mut thrown) == sys::Status::napi_ok && thrown {
            sys::napi_get_and_clear_last_exception(env, &mut exception);
        }
    }
    Err(if status == sys::Status::napi_no_external_buffers_allowed {
        BufferError::Banned
    } else {
        BufferError::Refused
    })
}

/// The engine has no buffer over these bytes any more, or the environment ends.
///
/// At the end of an environment Node finalizes also buffers whose bytes were moved, by `transfer()`, to a buffer in another
/// thread that goes on using them. A watched buffer has been asked before that; of others nothing tells the two apart, so that the block
/// is kept for good.
unsafe extern "C" fn finalize(env: sys::napi_env, _data: *mut c_void, hint: *mut c_void) {
    // A panic must not cross into the engine; nothing below panics unless a lock's invariant is broken.
    let _ = std::panic::catch_unwind(|| {
        let handle = Handle::from_word(hint as usize as u64);
        let Some(hold) = holds::take(handle) else { return };
        let is_own = hold.thread == ThreadNumber::current();
        // SAFETY: the thread is that of the environment, where Node-API may be called.
        if is_own && unsafe { environment_is_ending(env) } {
            let is_unused = hold.watch.as_ref().is_some_and(|watch| are_bytes_gone(handle, watch));
            end_with_thread(hold, is_unused);
        } else {
            if is_own {
                collector::note_finalized(hold.block.usable());
            }
            // Nobody waits for the answer: a corrupted block is retired by the allocator.
            let _ = block::release(hold.block);
        }
    });
}

/// Whether JavaScript can no longer run: a call that may run JavaScript is then refused.
///
/// # Safety
/// Called on the environment's thread.
pub unsafe fn environment_is_ending(env: sys::napi_env) -> bool {
    let mut undefined = ptr::null_mut();
    let mut equal = false;
    // SAFETY: `env` is valid during its own finalizers; both results are only written.
    unsafe {
        sys::napi_get_undefined(env, &mut undefined) != sys::Status::napi_ok
            || sys::napi_strict_equals(env, undefined, undefined, &mut equal) != sys::Status::napi_ok
    }
}

/// A buffer over an account's cells, which keeps the account; none if the engine refuses.
///
/// # Safety
/// `env` is the current environment, on its own thread.
pub unsafe fn over_cells(env: sys::napi_env, account: Arc<Account>) -> Option<sys::napi_value> {
    let cells = account.cells().cast::<c_void>();
    let account = Arc::into_raw(account).cast_mut().cast::<c_void>();
    let mut buffer = ptr::null_mut();
    // SAFETY: the caller vouches for `env`; the cells are there as long as the account, which the finalizer lets go.
    let status = unsafe {
        sys::napi_create_external_arraybuffer(
            env,
            cells,
            CELLS * size_of::<f64>(),
            Some(let_account_go),
            account,
            &mut buffer,
        )
    };
    if status == sys::Status::napi_ok {
        return Some(buffer);
    }
    // The account stays: some engines run the finalizer on a failure and some do not. A few bytes, and no buffer can be made after this one
    // either.
    let (mut thrown, mut exception) = (false, ptr::null_mut());
    // SAFETY: `env` as above.
    unsafe {
        if sys::napi_is_exception_pending(env, &mut thrown) == sys::Status::napi_ok && thrown {
            sys::napi_get_and_clear_last_exception(env, &mut exception);
        }
    }
    None
}

unsafe extern "C" fn let_account_go(_env: sys::napi_env, _data: *mut c_void, hint: *mut c_void) {
    // SAFETY: the hint is what `over_cells` made of an `Arc`, and the engine calls this once.
    drop(unsafe { Arc::from_raw(hint.cast::<Account>()) });
}

/// Detaches a buffer, for engines without `ArrayBuffer.prototype.transfer`. False if the engine refused.
///
/// # Safety
/// `env` is the current environment and `buffer` a value in it.
pub unsafe fn detach(env: sys::napi_env, buffer: sys::napi_value) -> bool {
    // SAFETY: as the caller says.
    unsafe { sys::napi_detach_arraybuffer(env, buffer) == sys::Status::napi_ok }
}
