//! Makes the engine's garbage collector look for arrays that nothing refers to. The engine counts their bytes as those of any buffer, and sees no
//! need before some 64 MiB; a ceiling may be lower.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use napi::bindgen_prelude::Env;
use napi::{sys, Result};
use napi_derive::napi;

use crate::account::Account;

/// More than any heap may have: for an engine that counts memory outside its heap, a reason to collect at once.
const PRESSURE: i64 = 1 << 40;

/// Between looks at what the whole process uses, which walks its segments: this part of the ceiling.
const LOOK_EVERY: f64 = 1.0 / 32.0;
/// From this part of the ceiling on there is one in every turn: a collection also finishes the one before it.
const URGENT: f64 = 0.7;
/// After so many collections of no use on end each one waits twice as long as the one before.
const FUTILE: u32 = 4;
const MOST_PATIENCE: Duration = Duration::from_secs(2);

/// What this thread knows of its collector.
struct Collector {
    /// Allocated since the latest look at the process.
    unseen: f64,
    /// At which `unseen` it looks again.
    look_at: f64,
    /// When the next collection is allowed.
    next: Option<Instant>,
    /// Collections on end that were of no use.
    futile: u32,
    /// A collection from which at least that much must come to be of use.
    expected: f64,
}

thread_local! {
    static COLLECTOR: RefCell<Collector> = const {
        RefCell::new(Collector { unseen: 0.0, look_at: 1024.0 * 1024.0, next: None, futile: 0, expected: 0.0 })
    };
    /// Bytes that finalizers gave back since the latest collection.
    static FINALIZED: Cell<f64> = const { Cell::new(0.0) };
}

/// A finalizer of this thread gave back so much.
pub fn note_finalized(bytes: usize) {
    FINALIZED.set(FINALIZED.get() + bytes as f64);
}

/// Whether an account or the process has come so close to its ceiling, by an allocation of `bytes`, that dropped arrays should be looked for.
pub fn is_wanted(account: &Account, bytes: usize) -> bool {
    COLLECTOR.with_borrow_mut(|collector| {
        collector.unseen += bytes as f64;
        let (used, limit) = account.load();
        let is_high = used * 2.0 >= limit;
        let (used, limit) = if is_high || collector.unseen < collector.look_at {
            (used, limit)
        } else {
            let stats = account.backend.stats();
            // Not looked at yet, or none.
            let limit = if stats.limit_bytes == 0 { f64::INFINITY } else { stats.limit_bytes as f64 };
            (collector.unseen, collector.look_at) = (0.0, (limit * LOOK_EVERY).max(64.0 * 1024.0));
            (stats.reserved_bytes.saturating_sub(stats.cached_bytes) as f64, limit)
        };
        let is_urgent = used >= limit * URGENT && collector.futile < FUTILE;
        let is_early = || collector.next.is_some_and(|next| Instant::now() < next);
        if used * 2.0 < limit || !is_urgent && is_early() {
            return false;
        }
        collector.expected = (limit / 32.0).min((limit - used) / 4.0);
        true
    })
}

/// Collects garbage, where the engine lets itself be told. What is found is finalized in the next turns of the event loop.
#[napi(catch_unwind)]
pub fn collect_garbage(env: &Env) -> Result<()> {
    let start = Instant::now();
    let mut total = 0;
    // SAFETY: the current environment, on its own thread. What is added is taken off again at once.
    unsafe {
        if sys::napi_adjust_external_memory(env.raw(), PRESSURE, &mut total) == sys::Status::napi_ok {
            sys::napi_adjust_external_memory(env.raw(), -PRESSURE, &mut total);
        }
    }
    let took = start.elapsed();
    let found = FINALIZED.replace(0.0);
    COLLECTOR.with_borrow_mut(|collector| {
        // What the one before has found says whether it is worth while: arrays may all be in use, or be freed by hand. Once does not say so: the
        // engine frees what it finds on a thread of its own, in its own time.
        collector.futile = if found >= collector.expected { 0 } else { collector.futile + 1 };
        let patience = took * (1 << collector.futile.saturating_sub(FUTILE).min(16));
        collector.next = Some(Instant::now() + patience.min(MOST_PATIENCE.max(took)));
    });
    Ok(())
}
