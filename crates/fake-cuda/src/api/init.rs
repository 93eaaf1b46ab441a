//! Initialisation, versions, error texts, and entry points by name.

use crate::codes::*;
use crate::entry::{self, entries, put, put_if_wanted};
use crate::versions::introduced;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::ptr;

const FOUND: c_int = 0;
const NOT_FOUND: c_int = 1;
const VERSION_NOT_SUFFICIENT: c_int = 2;

entries! {
    fn cuInit[Nothing runtime](flags: u32) {
        if flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        runtime.initialize()
    }

    fn cuDriverGetVersion[Nothing runtime](version: *mut c_int) {
        put(version, runtime.config.driver_version as c_int)
    }

    fn cuGetErrorName[Nothing _r](error: CUresult, text: *mut *const c_char) {
        let found = describe(error);
        put(text, found.map_or(ptr::null(), |(name, _)| name.as_ptr().cast()))?;
        found.map(drop).ok_or(ERROR_INVALID_VALUE)
    }

    fn cuGetErrorString[Nothing _r](error: CUresult, text: *mut *const c_char) {
        let found = describe(error);
        put(text, found.map_or(ptr::null(), |(_, sentence)| sentence.as_ptr().cast()))?;
        found.map(drop).ok_or(ERROR_INVALID_VALUE)
    }

    fn cuGetProcAddress_v2[Nothing runtime](
        symbol: *const c_char, function: *mut *mut c_void, version: c_int, _flags: u64, status: *mut c_int,
    ) {
        if symbol.is_null() || function.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        let name = CStr::from_ptr(symbol).to_str().map_err(|_| ERROR_NOT_FOUND)?;
        let (address, found) = by_base_name(name, version.max(0) as u32, runtime.config.driver_version);
        put(function, address)?;
        put_if_wanted(status, found);
        // Who asks for the status is told by it alone.
        if address.is_null() && status.is_null() {
            Err(ERROR_NOT_FOUND)
        } else {
            Ok(())
        }
    }
}

/// The newest version of `name` that a program built for CUDA `wanted` may use. Entry points that this copy of the
/// library does not export are not found either.
fn by_base_name(name: &str, wanted: u32, driver: u32) -> (*mut c_void, c_int) {
    let mut status = NOT_FOUND;
    for suffix in ["_v4", "_v3", "_v2", ""] {
        let exported = format!("{name}{suffix}");
        let address = exported_address(&exported);
        if address.is_null() || introduced(&exported) > driver {
            continue;
        }
        if introduced(&exported) > wanted {
            status = VERSION_NOT_SUFFICIENT;
            continue;
        }
        return (address, FOUND);
    }
    (ptr::null_mut(), status)
}

fn exported_address(name: &str) -> *mut c_void {
    let (Some(path), Ok(name)) = (entry::own_path(), CString::new(name)) else { return ptr::null_mut() };
    // SAFETY: both strings end in zero. RTLD_NOLOAD finds this library, which is loaded while its code runs, so closing
    // the handle again cannot unload it.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return ptr::null_mut();
        }
        let address = libc::dlsym(library, name.as_ptr());
        libc::dlclose(library);
        address
    }
}

/// Whether this copy of the library exports `name`.
pub fn exports(name: &str) -> bool {
    !exported_address(name).is_null()
}
