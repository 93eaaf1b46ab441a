//! Makes the engine's garbage collector look for buffers that nothing refers to, when it sees no need to by itself.

use napi::bindgen_prelude::Env;
use napi::{sys, Result};
use napi_derive::napi;

/// More than any heap may have: for an engine that counts memory outside its heap, a reason to collect at once.
const PRESSURE: i64 = 1 << 40;

/// Collects garbage, where the engine lets itself be told. What is found is finalized in the next turns of the event loop.
#[napi(catch_unwind)]
pub fn collect_garbage(env: &Env) -> Result<()> {
    let mut total = 0;
    // SAFETY: the current environment, on its own thread. What is added is taken off again at once.
    unsafe {
        if sys::napi_adjust_external_memory(env.raw(), PRESSURE, &mut total) == sys::Status::napi_ok {
            sys::napi_adjust_external_memory(env.raw(), -PRESSURE, &mut total);
        }
    }
    Ok(())
}
