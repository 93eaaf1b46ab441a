//! What a test can switch and read while the library is loaded.

use crate::codes::*;
use crate::entry::runtime;
use crate::kernels;
use crate::{context, event, memory, module, stream};
use std::ffi::{c_char, CStr};
use std::panic::catch_unwind;
use std::sync::atomic::Ordering::*;

const DONE: i64 = 0;
const REFUSED: i64 = -1;
const UNKNOWN_COUNTER: u64 = u64::MAX;

/// Switches a fault; see the crate's documentation for the keys. 0 when done, -1 when not understood.
///
/// # Safety
/// `key` is null or a zero-terminated string.
#[no_mangle]
pub unsafe extern "C" fn fake_cuda_control(key: *const c_char, value: i64) -> i64 {
    if key.is_null() {
        return REFUSED;
    }
    // SAFETY: not null, so zero-terminated by this function's contract.
    let Ok(key) = (unsafe { CStr::from_ptr(key) }).to_str() else { return REFUSED };
    catch_unwind(|| control(key, value)).ok().flatten().map_or(REFUSED, |()| DONE)
}

/// Reads a counter; see the crate's documentation for the names. `u64::MAX` when there is no such counter.
///
/// # Safety
/// `name` is null or a zero-terminated string.
#[no_mangle]
pub unsafe extern "C" fn fake_cuda_counter(name: *const c_char) -> u64 {
    if name.is_null() {
        return UNKNOWN_COUNTER;
    }
    // SAFETY: not null, so zero-terminated by this function's contract.
    let Ok(name) = (unsafe { CStr::from_ptr(name) }).to_str() else { return UNKNOWN_COUNTER };
    catch_unwind(|| counter(name)).ok().flatten().unwrap_or(UNKNOWN_COUNTER)
}

fn control(key: &str, value: i64) -> Option<()> {
    let runtime = runtime();
    let unsigned = u64::try_from(value).ok();
    let in_calls = |n: u64| if n == 0 { 0 } else { runtime.calls.load(Relaxed) + n };
    match key {
        "free_bytes" => runtime.free_bytes.store(value, Relaxed),
        "misalign" => runtime.misalign.store(unsigned.filter(|n| n % 4096 == 0 && *n < 32 << 20)?, Relaxed),
        "delay_us" => runtime.delay_us.store(unsigned?, Relaxed),
        "lose_context" => context::lose_all(u32::try_from(value).ok().filter(|code| *code > 0)?),
        "lose_at_call" => runtime.lose_at_call.store(in_calls(unsigned?), Relaxed),
        "deinit_at_call" => runtime.deinit_at_call.store(in_calls(unsigned?), Relaxed),
        "deinitialized" => runtime.deinitialized.store(value != 0, Release),
        "reset_peak" => memory::reset_peak(),
        _ => {
            let mut words = key.split(' ');
            let (Some("fail"), Some(entry), Some(code), None) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                return None;
            };
            let code: CUresult = code.parse().ok().filter(|code| *code > 0)?;
            runtime.fail(entry, code, value.unsigned_abs(), value < 0);
        }
    }
    Some(())
}

fn counter(name: &str) -> Option<u64> {
    let runtime = runtime();
    Some(match name {
        "calls" => runtime.calls.load(Relaxed),
        "calls_at_exit" => runtime.calls_at_exit.load(Relaxed),
        "live_managed" => memory::memory().managed,
        "live_managed_bytes" => memory::memory().managed_bytes,
        "peak_managed_bytes" => memory::memory().peak_managed_bytes,
        "live_device" => memory::memory().device,
        "live_device_bytes" => memory::memory().device_bytes,
        "live_pinned" => memory::memory().pinned,
        "context_creations" => context::counts().0,
        "live_contexts" => context::counts().1,
        "live_streams" => stream::live(),
        "live_events" => event::live(),
        "live_modules" => module::live(),
        "kernels" => kernels::RUN.load(Relaxed),
        name if name.starts_with("cu") => {
            runtime.count(name).or_else(|| crate::api::init::exports(name).then_some(0))?
        }
        _ => return None,
    })
}
