//! The atomics and locks the core is built on, so that a model checker can stand in for them: `--cfg loom` for every
//! interleaving of a few steps, `--cfg shuttle` for random ones of many.

#[cfg(loom)]
pub(crate) use loom::sync::{
    atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering},
    Condvar, Mutex, MutexGuard,
};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{
    atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering},
    Condvar, Mutex, MutexGuard,
};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::{
    atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering},
    Condvar, Mutex, MutexGuard,
};

use std::sync::PoisonError;

/// Locks, also after a panic elsewhere: every critical section in this crate leaves its data consistent at each
/// point where it could unwind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, also after a panic elsewhere.
pub(crate) fn wait<'m, T>(condvar: &Condvar, guard: MutexGuard<'m, T>) -> MutexGuard<'m, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Orders a write before it against a read after it, where both are sequentially consistent operations already.
/// Loom does not model sequentially consistent accesses, only fences; the hardware needs nothing here.
#[inline(always)]
pub(crate) fn model_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// A function that is `const`, except under loom, whose atomics and locks cannot be made in one.
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

/// A static. Under a model checker each run has its own, so that no run depends on the ones before it.
macro_rules! global {
    ($(#[$about:meta])* static $name:ident: $type:ty = $value:expr;) => {
        #[cfg(not(any(loom, shuttle)))]
        $(#[$about])*
        static $name: $type = $value;

        #[cfg(loom)]
        loom::lazy_static! {
            $(#[$about])*
            static ref $name: $type = $value;
        }

        #[cfg(shuttle)]
        shuttle::lazy_static! {
            $(#[$about])*
            static ref $name: $type = $value;
        }
    };
}
pub(crate) use global;
