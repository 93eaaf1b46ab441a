//! The least that an array over native memory can cost: an external `ArrayBuffer` over memory that is never freed, with a finalizer
//! that does nothing.

// Built as a test, which only linters do, `#[napi]` registers nothing.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::c_void;
use std::ptr;

use napi::bindgen_prelude::{Env, JsValue, Unknown};
use napi::{sys, Error, Result};
use napi_derive::napi;

/// Never handed back, so that a buffer may be used for as long as it lives.
static MEMORY: Memory = Memory(std::cell::UnsafeCell::new([0; SIZE]));
const SIZE: usize = 16 << 20;

#[repr(align(4096))]
struct Memory(std::cell::UnsafeCell<[u8; SIZE]>);

// SAFETY: Rust code touches no byte of it.
unsafe impl Sync for Memory {}

unsafe extern "C" fn finalize(_env: sys::napi_env, _data: *mut c_void, _hint: *mut c_void) {}

unsafe extern "C" fn external(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    let (mut count, mut argument, mut bytes) = (1, ptr::null_mut(), 0.0);
    let mut buffer = ptr::null_mut();
    // SAFETY: the engine calls this with its own arguments; the memory is there for good. An engine that refuses leaves null.
    unsafe {
        sys::napi_get_cb_info(env, info, &mut count, &mut argument, ptr::null_mut(), ptr::null_mut());
        sys::napi_get_value_double(env, argument, &mut bytes);
        let (data, len) = (MEMORY.0.get().cast(), (bytes as usize).min(SIZE));
        sys::napi_create_external_arraybuffer(env, data, len, Some(finalize), ptr::null_mut(), &mut buffer);
    }
    buffer
}

/// A function that makes a buffer of so many bytes, up to 16 MiB.
#[napi(ts_return_type = "(bytes: number) => ArrayBuffer")]
pub fn external_function(env: &Env) -> Result<Unknown<'_>> {
    let mut function = ptr::null_mut();
    let name = c"external";
    // SAFETY: the name is a C string of that length, and the callback has the right signature.
    let status = unsafe {
        sys::napi_create_function(
            env.raw(),
            name.as_ptr(),
            name.count_bytes() as isize,
            Some(external),
            ptr::null_mut(),
            &mut function,
        )
    };
    if status != sys::Status::napi_ok {
        return Err(Error::from_reason("the engine made no function"));
    }
    // SAFETY: made in this environment by the call above.
    Ok(unsafe { Unknown::from_raw_unchecked(env.raw(), function) })
}

/// Takes the bytes from a buffer, for engines without `ArrayBuffer.prototype.transfer`.
#[napi(ts_args_type = "buffer: ArrayBuffer")]
pub fn detach(env: &Env, buffer: Unknown<'_>) {
    // SAFETY: both come from the environment of this call; the engine checks the value.
    unsafe { sys::napi_detach_arraybuffer(env.raw(), buffer.raw()) };
}
