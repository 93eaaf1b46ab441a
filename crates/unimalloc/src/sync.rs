//! The atomics and locks the core is built on, so that a model checker can stand in for them (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::{
    atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering},
    Mutex, MutexGuard,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering},
    Mutex, MutexGuard,
};

use std::sync::PoisonError;

/// Locks, also after a panic elsewhere: every critical section in this crate leaves its data consistent at each
/// point where it could unwind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Orders a write before it against a read after it, where both are sequentially consistent operations already.
/// The model checker does not model sequentially consistent accesses, only fences; the hardware needs nothing here.
#[inline(always)]
pub(crate) fn model_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// A function that is `const`, except under the model checker, whose atomics and locks cannot be made in one.
macro_rules! const_fn {
    ($(#[$about:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block) => {
        $(#[$about])*
        #[cfg(not(loom))]
        $visibility const fn $name($($argument: $type),*) -> $result $body

        $(#[$about])*
        #[cfg(loom)]
        $visibility fn $name($($argument: $type),*) -> $result $body
    };
}
pub(crate) use const_fn;
