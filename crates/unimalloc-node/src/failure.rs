//! Errors on their way to JavaScript.
//!
//! A native error has one string. Its fields are joined by U+001F, and `ts/errors.ts` takes them apart again: a form
//! that works for a synchronous throw and for a rejected promise alike.

use unimalloc::{AllocError, FreeError};

const SEPARATOR: &str = "\u{1f}";

/// An error with one of the public codes.
pub fn failure(code: &str, message: impl AsRef<str>) -> napi::Error {
    napi::Error::from_reason(format!("{code}{SEPARATOR}{}", message.as_ref()))
}

/// An error of the driver or the compiler: name and value of the result, and the compiler's log.
pub fn cuda_failure(code: &str, message: &str, name: &str, value: u32, log: Option<&str>) -> napi::Error {
    let log = log.unwrap_or_default();
    napi::Error::from_reason([code, message, name, &value.to_string(), log].join(SEPARATOR))
}

/// The public code of a failed free.
pub fn free_failure(error: FreeError) -> napi::Error {
    let code = match error {
        FreeError::NotOurs => "NOT_OURS",
        FreeError::Interior => "INTERIOR",
        FreeError::DoubleFree => "DOUBLE_FREE",
        FreeError::Forked => "FORKED",
        _ => "CORRUPTED",
    };
    failure(code, error.to_string())
}

/// A name for `lastError().code`.
pub fn reason_name(error: AllocError) -> &'static str {
    match error {
        AllocError::InvalidSize => "INVALID_SIZE",
        AllocError::InvalidAlignment => "INVALID_ALIGNMENT",
        AllocError::ModeMismatch => "MODE_MISMATCH",
        AllocError::NoDriver => "NO_DRIVER",
        AllocError::NoDevice => "NO_DEVICE",
        AllocError::Unsupported => "UNSUPPORTED",
        AllocError::Driver(_) => "DRIVER",
        AllocError::ContextLost => "CONTEXT_LOST",
        AllocError::RegistryFull => "REGISTRY_FULL",
        AllocError::Budget => "BUDGET",
        AllocError::OutOfMemory => "OUT_OF_MEMORY",
        AllocError::NotRegistered => "NOT_REGISTERED",
        AllocError::Forked => "FORKED",
        AllocError::Reentrant => "REENTRANT",
        AllocError::InvalidRange => "INVALID_RANGE",
        _ => "UNKNOWN",
    }
}
