//! The stand-in run-time compiler, and that its output runs.
#![cfg(target_os = "linux")]

mod common;

use common::*;
use fake_cuda::Build;
use std::ffi::{c_char, c_int, CStr, CString};
use std::ptr;

macro_rules! rtc {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        let address = symbol("libnvrtc.so.12", stringify!($name));
        assert!(!address.is_null(), concat!("no ", stringify!($name)));
        // SAFETY: the types written at the call are those of the compiler's documentation.
        #[allow(clippy::macro_metavars_in_unsafe, reason = "every call of this macro is a call into C")]
        unsafe {
            let function: unsafe extern "C" fn($($ty),*) -> c_int = std::mem::transmute(address);
            function($($value),*)
        }
    }};
}

fn text(program: usize, log: bool) -> String {
    let mut size = 0usize;
    let mut buffer = vec![0u8; 65_536];
    let out = buffer.as_mut_ptr().cast::<c_char>();
    if log {
        assert_eq!(rtc!(nvrtcGetProgramLogSize(program => usize, &mut size => *mut usize)), 0);
        assert_eq!(rtc!(nvrtcGetProgramLog(program => usize, out => *mut c_char)), 0);
    } else {
        assert_eq!(rtc!(nvrtcGetPTXSize(program => usize, &mut size => *mut usize)), 0);
        assert_eq!(rtc!(nvrtcGetPTX(program => usize, out => *mut c_char)), 0);
    }
    let text = CStr::from_bytes_until_nul(&buffer).unwrap().to_str().unwrap().to_owned();
    assert_eq!(size, text.len() + 1);
    text
}

fn compile(source: &str, options: &[&CStr]) -> (c_int, usize) {
    let source = CString::new(source).unwrap();
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = 0usize;
    assert_eq!(
        rtc!(nvrtcCreateProgram(
            &mut program => *mut usize, source.as_ptr() => *const c_char, c"test.cu".as_ptr() => *const c_char, 0 => c_int,
            ptr::null() => *const *const c_char, ptr::null() => *const *const c_char,
        )),
        0
    );
    let code = rtc!(nvrtcCompileProgram(
        program => usize, options.len() as c_int => c_int, options.as_ptr() => *const *const c_char,
    ));
    (code, program)
}

#[test]
fn source_to_result() {
    Build::new().in_child("source_to_result", &[], || {
        start();
        let source = "__global__ void fill_f32(float *p, unsigned n, float value) { if (n) p[0] = value; }";
        let (code, mut program) = compile(source, &[c"--gpu-architecture=compute_90"]);
        assert_eq!(code, 0);
        let (code, module) = module(&text(program, false));
        assert_eq!(code, 0);
        assert_eq!(rtc!(nvrtcDestroyProgram(&mut program => *mut usize)), 0);
        assert_eq!((program, rtc!(nvrtcDestroyProgram(&mut program => *mut usize))), (0, 4));
        let ((_, address), count, value) = (managed(4096), 8u32, 2.5f32);
        let params =
            [ptr::from_ref(&address).cast(), ptr::from_ref(&count).cast(), ptr::from_ref(&value).cast()];
        let stream = stream();
        assert_eq!(launch(function(module, "_Z8fill_f32Pfjf"), 1, 8, stream, &params), 0);
        assert_eq!(synchronize(stream), 0);
        // SAFETY: the block is live and the stream is idle.
        assert_eq!(unsafe { std::slice::from_raw_parts(address as *const f32, 9) }[7..], [2.5, 0.0]);
    });
}

#[test]
fn a_compile_error_has_a_log() {
    Build::new().in_child("a_compile_error_has_a_log", &[], || {
        let (code, program) = compile("__global__ void k(float *p) {\n  p[0] = 1;\n", &[]);
        assert_eq!(code, 6);
        let log = text(program, true);
        assert!(
            log.contains("test.cu(3): error: expected a \"}\"") && log.contains("1 error detected"),
            "{log}"
        );
        let mut size = 0usize;
        assert_eq!(rtc!(nvrtcGetPTXSize(program => usize, &mut size => *mut usize)), 4);
        assert_eq!(compile("", &[c"--gpu-architecture=banana"]).0, 5);
    });
}

#[test]
fn an_older_compiler_beside_an_older_driver() {
    Build::new().driver(12_010).in_child("an_older_compiler_beside_an_older_driver", &[], || {
        let (mut major, mut minor) = (0, 0);
        assert_eq!(rtc!(nvrtcVersion(&mut major => *mut c_int, &mut minor => *mut c_int)), 0);
        assert_eq!((major, minor), (12, 1));
        let (code, program) = compile("", &[]);
        assert_eq!(code, 0);
        assert!(text(program, false).starts_with(".version 8.1\n"));
    });
}

#[test]
fn it_can_be_left_out() {
    Build::new().without_compiler().in_child("it_can_be_left_out", &[], || {
        for name in [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so.11.2", c"libnvrtc.so"] {
            // SAFETY: the name ends in zero.
            let found = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            assert!(found.is_null(), "{name:?} was found, here or elsewhere on the machine");
        }
    });
}
