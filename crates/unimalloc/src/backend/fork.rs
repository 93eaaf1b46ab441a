//! Knows whether this process is the child of a `fork`.
//!
//! A CUDA context does not survive a fork, and a lock that another thread held at that moment stays locked for ever
//! in the child. So the backends look here first and take no lock in a child.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether this process is a forked child of one that had called [`watch`].
#[inline]
pub(crate) fn forked() -> bool {
    // Relaxed: the child starts with one thread, and the flag is set on it before `fork` returns.
    FORKED.load(Ordering::Relaxed)
}

/// What the thread that forked must do in the child before `fork` returns.
static CUT_OFF: OnceLock<fn()> = OnceLock::new();

/// As [`watch`], and has `cut_off` run in the child as well: by its only thread, before `fork` returns. It must be
/// async-signal-safe.
pub(crate) fn cut_off_with(cut_off: fn()) {
    CUT_OFF.get_or_init(|| cut_off);
    watch();
}

/// Asks the system to tell of forks from now on. Call it before the first state that a child must not use is made.
#[cfg(unix)]
pub(crate) fn watch() {
    use std::sync::Once;

    static WATCH: Once = Once::new();

    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
        if let Some(cut_off) = CUT_OFF.get() {
            cut_off();
        }
    }

    WATCH.call_once(|| {
        // SAFETY: the handler is async-signal-safe (an atomic store, and what `cut_off_with` was given) and lives as long as this module, which is
        // never unloaded under a live thread. A failure (no memory for the handler) leaves forks unnoticed, as they
        // would be without it.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// There is no fork here.
#[cfg(not(unix))]
pub(crate) fn watch() {}
