//! Stands in for fences, and for the GPU behind them, in models: streams are numbers that grow.
//!
//! Work is done at any moment between its launch and the first wait for it. Every call is a step of the scheduler, as a
//! driver takes its time.

use std::cell::RefCell;
use std::collections::BTreeMap;

use shuttle::rand::{thread_rng, Rng};
use shuttle::thread;

use super::error::CudaError;
use super::stream::Stream;

#[derive(Clone, Copy, Default)]
struct Work {
    launched: u64,
    done: u64,
}

thread_local! {
    /// By a stream's id. A model's threads all run on the one that runs the model.
    static GPU: RefCell<BTreeMap<u64, Work>> = const { RefCell::new(BTreeMap::new()) };
    /// Whether streams capture now and then.
    static CAPTURES: RefCell<bool> = const { RefCell::new(false) };
}

fn work<R>(stream: u64, f: impl FnOnce(&mut Work) -> R) -> R {
    GPU.with_borrow_mut(|gpu| f(gpu.entry(stream).or_default()))
}

/// Forgets all streams.
pub(crate) fn reset(captures: bool) {
    GPU.with_borrow_mut(BTreeMap::clear);
    CAPTURES.replace(captures);
}

/// Gives a stream work; answers its number.
pub(crate) fn launch(stream: &Stream) -> u64 {
    thread::yield_now();
    work(stream.id(), |work| {
        work.launched += 1;
        work.launched
    })
}

/// Whether a stream has done a piece of work for certain, because somebody has asked.
pub(crate) fn is_done(stream: u64, number: u64) -> bool {
    work(stream, |work| work.done >= number)
}

/// Waits for all work of a stream.
pub(crate) fn synchronize(stream: &Stream) {
    thread::yield_now();
    work(stream.id(), |work| work.done = work.launched);
}

/// A point in a stream.
pub(crate) struct Fence {
    stream: u64,
    at: u64,
}

impl Fence {
    pub(crate) fn after(stream: &Stream) -> Result<Option<Self>, CudaError> {
        thread::yield_now();
        if CAPTURES.with_borrow(|captures| *captures) && thread_rng().gen_ratio(1, 4) {
            return Ok(None);
        }
        let stream = stream.id();
        let at = work(stream, |work| work.launched);
        thread::yield_now();
        Ok(Some(Self { stream, at }))
    }

    pub(crate) fn passed(&self) -> Result<bool, CudaError> {
        thread::yield_now();
        Ok(work(self.stream, |work| {
            if work.done < self.at && thread_rng().gen() {
                work.done = thread_rng().gen_range(work.done..=self.at);
            }
            work.done >= self.at
        }))
    }

    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        thread::yield_now();
        work(self.stream, |work| work.done = work.done.max(self.at));
        thread::yield_now();
        Ok(())
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            thread::yield_now(); // the driver destroys an event: no lock may be held
        }
    }
}

pub(crate) fn destroy_spares() {}
