//! The driver's result codes: the numbers, their names and their sentences.

/// What every entry point returns: `CUresult` as a plain number.
pub type CUresult = u32;
/// What the inside of an entry point returns.
pub type Outcome<T = ()> = Result<T, CUresult>;

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(
            #[doc = $text]
            #[allow(dead_code, reason = "some codes are only injected, by number, and still need their names")]
            pub const $name: CUresult = $value;
        )*
        /// Code, name with its terminating zero, sentence with its terminating zero.
        const TABLE: &[(CUresult, &str, &str)] =
            &[$(($value, concat!("CUDA_", stringify!($name), "\0"), concat!($text, "\0")),)*];
    };
}

codes! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_DEINITIALIZED = 4, "driver shutting down";
    ERROR_STUB_LIBRARY = 34, "CUDA driver is a stub library";
    ERROR_DEVICE_UNAVAILABLE = 46, "CUDA-capable device(s) is/are busy or unavailable";
    ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_IMAGE = 200, "device kernel image is invalid";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_NO_BINARY_FOR_GPU = 209, "no kernel image is available for execution on the device";
    ERROR_INVALID_PTX = 218, "a PTX JIT compilation failed";
    ERROR_JIT_COMPILER_NOT_FOUND = 221, "PTX JIT compiler library not found";
    ERROR_UNSUPPORTED_PTX_VERSION = 222, "the provided PTX was compiled with an unsupported toolchain.";
    ERROR_FILE_NOT_FOUND = 301, "file not found";
    ERROR_OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    ERROR_LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    ERROR_PRIMARY_CONTEXT_ACTIVE = 708, "cannot set while device is active in this process";
    ERROR_CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ERROR_ASSERT = 710, "device-side assert triggered";
    ERROR_MISALIGNED_ADDRESS = 716, "misaligned address";
    ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    ERROR_NOT_PERMITTED = 800, "operation not permitted";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
    ERROR_SYSTEM_NOT_READY = 802, "system not yet initialized";
    ERROR_SYSTEM_DRIVER_MISMATCH = 803, "system has unsupported display driver / cuda driver combination";
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    ERROR_STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    ERROR_STREAM_CAPTURE_UNMATCHED = 903, "capture was not initiated in this stream";
    ERROR_STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    ERROR_STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    ERROR_CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    ERROR_STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    ERROR_UNKNOWN = 999, "unknown error";
}

/// Name and sentence of a code, both with a terminating zero.
pub fn describe(code: CUresult) -> Option<(&'static str, &'static str)> {
    TABLE.iter().find(|(value, ..)| *value == code).map(|(_, name, text)| (*name, *text))
}
