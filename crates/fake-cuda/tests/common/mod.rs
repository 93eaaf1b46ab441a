//! The driver's entry points as a C program would find them.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::ffi::{c_char, c_int, c_void, CString};
use std::ptr;

pub const INVALID_VALUE: u32 = 1;
pub const NOT_INITIALIZED: u32 = 3;
pub const DEINITIALIZED: u32 = 4;
pub const INVALID_CONTEXT: u32 = 201;
pub const INVALID_HANDLE: u32 = 400;
pub const NOT_FOUND: u32 = 500;
pub const NOT_READY: u32 = 600;
pub const ILLEGAL_ADDRESS: u32 = 700;

/// Address of an exported function of `library`, loaded by its plain name; null if there is none.
pub fn symbol(library: &str, name: &str) -> *mut c_void {
    let (library, name) = (CString::new(library).unwrap(), CString::new(name).unwrap());
    // SAFETY: both strings end in zero.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null(), "{library:?} is not on the library search path");
        libc::dlsym(handle, name.as_ptr())
    }
}

/// Calls an entry point with arguments of exactly its C types.
#[macro_export]
macro_rules! cu {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        let address = $crate::common::symbol("libcuda.so.1", stringify!($name));
        assert!(!address.is_null(), concat!("no ", stringify!($name)));
        // SAFETY: the types written at the call are those of the driver's documentation.
        #[allow(clippy::macro_metavars_in_unsafe, reason = "every call of this macro is a call into C")]
        unsafe {
            let function: unsafe extern "C" fn($($ty),*) -> u32 = std::mem::transmute(address);
            function($($value),*)
        }
    }};
}

pub fn init() {
    assert_eq!(cu!(cuInit(0 => u32)), 0);
}

/// Initialises and makes the primary context current.
pub fn start() -> usize {
    init();
    let mut context = 0usize;
    assert_eq!(cu!(cuDevicePrimaryCtxRetain(&mut context => *mut usize, 0 => c_int)), 0);
    assert_eq!(cu!(cuCtxPushCurrent_v2(context => usize)), 0);
    context
}

pub fn managed(bytes: usize) -> (u32, usize) {
    let mut address = 0;
    let code = cu!(cuMemAllocManaged(&mut address => *mut usize, bytes => usize, 1 => u32));
    (code, address)
}

pub fn free(address: usize) -> u32 {
    cu!(cuMemFree_v2(address => usize))
}

pub fn stream() -> usize {
    let mut stream = 0;
    assert_eq!(cu!(cuStreamCreate(&mut stream => *mut usize, 1 => u32)), 0);
    stream
}

pub fn synchronize(stream: usize) -> u32 {
    cu!(cuStreamSynchronize(stream => usize))
}

pub fn event() -> usize {
    let mut event = 0;
    assert_eq!(cu!(cuEventCreate(&mut event => *mut usize, 0 => u32)), 0);
    event
}

pub const KERNELS: &str = "\
.version 8.0
.target sm_80
.address_size 64
.visible .entry fill_f32(.param .u64 fill_f32_param_0, .param .u32 fill_f32_param_1, .param .f32 fill_f32_param_2) { ret; }
.visible .entry vector_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) { ret; }
.visible .entry scale(.param .u64 a, .param .u32 n, .param .f32 factor) { ret; }
.visible .entry write_u8(.param .u64 a, .param .u32 n, .param .u8 value) { ret; }
.visible .entry spin(.param .u32 ms) { ret; }
.visible .entry fault() { ret; }
.visible .entry unknown() { ret; }
";

pub fn module(text: &str) -> (u32, usize) {
    let text = CString::new(text).unwrap();
    let mut module = 0;
    let code = cu!(cuModuleLoadDataEx(
        &mut module => *mut usize, text.as_ptr() => *const c_char, 0 => u32,
        ptr::null() => *const c_int, ptr::null_mut() => *mut *mut c_void,
    ));
    (code, module)
}

pub fn function(module: usize, name: &str) -> usize {
    let name = CString::new(name).unwrap();
    let mut function = 0;
    assert_eq!(
        cu!(cuModuleGetFunction(&mut function => *mut usize, module => usize, name.as_ptr() => *const c_char)),
        0
    );
    function
}

/// Launches with the addresses of `params`, as C does.
pub fn launch(function: usize, blocks: u32, threads: u32, stream: usize, params: &[*const c_void]) -> u32 {
    let mut list: Vec<_> = params.iter().map(|param| param.cast_mut()).collect();
    cu!(cuLaunchKernel(
        function => usize, blocks => u32, 1 => u32, 1 => u32, threads => u32, 1 => u32, 1 => u32, 0 => u32,
        stream => usize, list.as_mut_ptr() => *mut *mut c_void, ptr::null_mut() => *mut *mut c_void,
    ))
}

pub fn spin(module: usize, stream: usize, milliseconds: u32) {
    assert_eq!(launch(function(module, "spin"), 1, 1, stream, &[ptr::from_ref(&milliseconds).cast()]), 0);
}
