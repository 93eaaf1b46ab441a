//! The calls that arrays make all the time, written against Node-API itself.
//!
//! A generated wrapper with arguments costs 80 to 150 ns, most of it bookkeeping for borrows that these calls do not have; a bare
//! callback costs 20. Results go through an array that JavaScript and native code share, since a call returns one value.

use std::cell::RefCell;
use std::ffi::{c_void, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::sync::Arc;

use napi::bindgen_prelude::{Env, JsValue, Unknown};
use napi::{sys, Result};
use napi_derive::napi;

use crate::account::Account;
use crate::alloc::{allocate_into, find_account, release_handle, AllocateArguments, RESULTS};
use crate::buffer;
use crate::failure::failure;
use crate::holds;
use crate::magazine::{self, Magazine};

/// Bytes of the array's first part, doubles; the rest are block handles of a magazine, 32 bits each.
const NUMBERS: usize = 64;
/// In the second half of the numbers are those that a call is asked with: the engine takes longer to hand them over.
const ASKED: usize = NUMBERS / size_of::<f64>() / 2;
const _: () = assert!(RESULTS <= ASKED);

/// What the callbacks of one environment share.
pub struct Shared {
    /// The bytes of an `ArrayBuffer` that `keep_alive` holds and that nobody detaches: JavaScript's side of it is private.
    bytes: *mut u8,
    len: usize,
    pub env: sys::napi_env,
    pub magazine: RefCell<Magazine>,
    /// Of the latest allocation: most programs have one allocator.
    account: RefCell<Option<(u32, Arc<Account>)>>,
}

impl Shared {
    /// Does something with an account, which stays where it is meanwhile: no reference is counted.
    fn with_account<T>(&self, number: u32, what: impl FnOnce(&Arc<Account>) -> Result<T>) -> Result<T> {
        if let Ok(latest) = self.account.try_borrow() {
            match &*latest {
                Some((known, account)) if *known == number => return what(account),
                _ => {}
            }
        }
        let account = find_account(number)?;
        if let Ok(mut latest) = self.account.try_borrow_mut() {
            *latest = Some((number, Arc::clone(&account)));
        }
        what(&account)
    }

    /// Writes what a call answers beside its value.
    pub fn answer(&self, numbers: &[f64]) {
        debug_assert!(size_of_val(numbers) <= NUMBERS);
        for (at, number) in numbers.iter().enumerate() {
            // SAFETY: the array is at least `NUMBERS` bytes long and aligned by the engine; only this thread touches it.
            unsafe { self.bytes.cast::<f64>().add(at).write(*number) };
        }
    }

    /// What JavaScript asks a call with.
    fn asked<const N: usize>(&self) -> [f64; N] {
        const { assert!(N <= ASKED) };
        // SAFETY: inside the array, see `answer`.
        std::array::from_fn(|at| unsafe { self.bytes.cast::<f64>().add(ASKED + at).read() })
    }

    /// How many block handles there is room for.
    pub fn handles(&self) -> usize {
        (self.len - NUMBERS) / size_of::<u32>()
    }

    /// A block handle that JavaScript wrote.
    pub fn handle(&self, at: usize) -> u32 {
        assert!(at < self.handles());
        // SAFETY: inside the array, see `answer`.
        unsafe { self.bytes.add(NUMBERS).cast::<u32>().add(at).read() }
    }

    pub fn set_handle(&self, at: usize, handle: u32) {
        assert!(at < self.handles());
        // SAFETY: inside the array, see `answer`.
        unsafe { self.bytes.add(NUMBERS).cast::<u32>().add(at).write(handle) };
    }
}

/// Makes this environment's callbacks, in the order of `Hot` in `ts/hot.ts`. `results` gets what they answer beside their value.
#[napi(
    catch_unwind,
    ts_args_type = "results: ArrayBuffer",
    ts_return_type = "Array<(...args: number[]) => any>"
)]
pub fn hot_functions<'env>(env: &'env Env, results: Unknown<'env>) -> Result<Vec<Unknown<'env>>> {
    let raw = env.raw();
    let (mut data, mut len) = (ptr::null_mut(), 0);
    // SAFETY: the value comes from this environment; the engine checks what it is.
    let status = unsafe { sys::napi_get_arraybuffer_info(raw, results.raw(), &mut data, &mut len) };
    if status != sys::Status::napi_ok || len < NUMBERS || data.is_null() {
        return Err(failure(
            "INVALID_ARGUMENT",
            "hotFunctions takes an ArrayBuffer with room for the results",
        ));
    }
    let mut keep_alive = ptr::null_mut();
    // SAFETY: as above. The reference is never deleted: it ends with the environment, as the callbacks do.
    let status = unsafe { sys::napi_create_reference(raw, results.raw(), 1, &mut keep_alive) };
    if status != sys::Status::napi_ok {
        return Err(failure("INVALID_ARGUMENT", "the results cannot be kept"));
    }
    // Lives as long as the callbacks, which the engine may call until the environment is gone: a few bytes for each.
    let shared: *mut Shared = Box::into_raw(Box::new(Shared {
        bytes: data.cast(),
        len,
        env: raw,
        magazine: RefCell::new(Magazine::default()),
        account: RefCell::new(None),
    }));
    // SAFETY: the current environment; `shared` is never freed.
    if !unsafe { magazine::add_hook(raw, shared) } {
        return Err(failure("INVALID_ARGUMENT", "the environment is ending"));
    }
    holds::enter_thread();
    let callbacks: [(&CStr, sys::napi_callback); 11] = [
        (c"allocate", Some(allocate)),
        (c"release", Some(release)),
        (c"refill", Some(refill)),
        (c"flush", Some(flush)),
        (c"map", Some(map)),
        (c"setLeaving", Some(set_leaving)),
        (c"unmap", Some(unmap)),
        (c"forsake", Some(forsake)),
        (c"promote", Some(promote)),
        (c"freeMarked", Some(free_marked)),
        (c"detach", Some(detach)),
    ];
    callbacks
        .into_iter()
        .map(|(name, callback)| {
            let mut function = ptr::null_mut();
            // SAFETY: the name is a C string of that length, the callback has the right signature, and `shared` is never freed.
            let status = unsafe {
                sys::napi_create_function(
                    raw,
                    name.as_ptr(),
                    name.count_bytes() as isize,
                    callback,
                    shared.cast(),
                    &mut function,
                )
            };
            if status != sys::Status::napi_ok {
                return Err(failure("INVALID_ARGUMENT", "the engine made no function"));
            }
            // SAFETY: made in this environment by the call above.
            Ok(unsafe { Unknown::from_raw_unchecked(raw, function) })
        })
        .collect()
}

/// The arguments of a callback, `undefined` where there are fewer.
///
/// # Safety
/// `info` is that of the callback that is running in `env`.
unsafe fn arguments<const N: usize>(
    env: sys::napi_env,
    info: sys::napi_callback_info,
) -> ([sys::napi_value; N], *mut c_void) {
    let mut values = [ptr::null_mut(); N];
    let (mut count, mut data) = (N, ptr::null_mut());
    // SAFETY: there is room for N values, which the engine fills up with `undefined`.
    unsafe { sys::napi_get_cb_info(env, info, &mut count, values.as_mut_ptr(), ptr::null_mut(), &mut data) };
    (values, data)
}

/// A number; 0 for what is none, which no call of the face passes.
///
/// # Safety
/// `value` is one of `env`.
unsafe fn number(env: sys::napi_env, value: sys::napi_value) -> f64 {
    let mut number = 0.0;
    // SAFETY: the caller's promise; the engine checks the type and writes one double.
    unsafe { sys::napi_get_value_double(env, value, &mut number) };
    number
}

/// Defines a callback: its numbers, and what it does with them. The body answers a value, or nothing.
macro_rules! callback {
    ($name:ident, $count:literal, |$env:ident, $shared:ident, $values:ident| $body:expr) => {
        unsafe extern "C" fn $name($env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
            // SAFETY: the engine calls this with its own arguments, and with the data that `hot_functions` gave it, which is never freed.
            unsafe {
                guarded($env, || {
                    let (values, data) = arguments::<$count>($env, info);
                    let $values = values.map(|value| number($env, value));
                    let $shared = &*data.cast::<Shared>();
                    $body
                })
            }
        }
    };
}

callback!(allocate, 0, |env, shared, _values| {
    let [account, bytes, align, how] = shared.asked();
    shared.with_account(account as u32, |account| {
        let arguments = AllocateArguments { account, bytes, align, how: how as u32, stream: None };
        let (buffer, results) = allocate_into(env, &arguments)?;
        shared.answer(&results);
        Ok(buffer)
    })
});

callback!(release, 0, |_env, shared, _values| {
    let [handle] = shared.asked();
    release_handle(handle)?;
    Ok(None)
});

callback!(refill, 5, |_env, shared, values| {
    magazine::refill(shared, values)?;
    Ok(None)
});

callback!(flush, 1, |_env, shared, values| {
    magazine::flush(shared, values[0] as usize)?;
    Ok(None)
});

callback!(map, 1, |env, shared, values| magazine::map(env, ptr::from_ref(shared), values[0] as u32));

callback!(set_leaving, 2, |_env, shared, values| {
    magazine::set_leaving(shared, values[0] as u32, values[1] != 0.0)?;
    Ok(None)
});

callback!(unmap, 1, |env, shared, values| {
    magazine::unmap(env, shared, values[0] as u32)?;
    Ok(None)
});

callback!(forsake, 1, |env, shared, values| {
    magazine::forsake(env, shared, values[0] as u32)?;
    Ok(None)
});

callback!(promote, 3, |_env, shared, values| {
    let [handle, account, requested] = values;
    magazine::promote(shared, handle as u32, account as u32, requested as usize)?;
    Ok(None)
});

callback!(free_marked, 3, |_env, shared, values| {
    let [handle, account, requested] = values;
    magazine::free_marked(shared, handle as u32, account as u32, requested as usize)?;
    Ok(None)
});

/// Detaches a buffer and ends its hold. Answers 1, or 0 if the engine does not let the buffer be detached: then nothing has changed.
unsafe extern "C" fn detach(env: sys::napi_env, info: sys::napi_callback_info) -> sys::napi_value {
    // SAFETY: as in `callback`; what is detached is checked by the engine.
    unsafe {
        guarded(env, || {
            let ([buffer], data) = arguments::<1>(env, info);
            let shared = &*data.cast::<Shared>();
            let [handle] = shared.asked();
            let is_detached = buffer::detach(env, buffer);
            shared.answer(&[f64::from(u8::from(is_detached))]);
            if is_detached {
                release_handle(handle)?;
            }
            Ok(None)
        })
    }
}

/// Turns an error or a panic of the body into a JavaScript exception, and nothing into null.
///
/// # Safety
/// `env` is the environment of the callback that is running.
unsafe fn guarded(
    env: sys::napi_env,
    body: impl FnOnce() -> Result<Option<sys::napi_value>>,
) -> sys::napi_value {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(failure("CORRUPTED", "a check inside the allocator failed: report this as a bug"))
    });
    match outcome {
        Ok(Some(value)) => value,
        Ok(None) => {
            let mut null = ptr::null_mut();
            // SAFETY: the caller's environment.
            unsafe { sys::napi_get_null(env, &mut null) };
            null
        }
        Err(error) => {
            let (mut message, mut exception) = (ptr::null_mut(), ptr::null_mut());
            let text = &error.reason;
            // SAFETY: the caller's environment; the text has the length that is said.
            unsafe {
                sys::napi_create_string_utf8(env, text.as_ptr().cast(), text.len() as isize, &mut message);
                sys::napi_create_error(env, ptr::null_mut(), message, &mut exception);
                sys::napi_throw(env, exception);
            }
            ptr::null_mut()
        }
    }
}
