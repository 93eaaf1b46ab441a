//! Waits that do not block the event loop.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use napi::bindgen_prelude::AsyncTask;
use napi::{Env, Result, Task};
use napi_derive::napi;
use unimalloc::cuda::{self, Event, Stream};

use super::{take_up_passed, to_failure};
use crate::failure::failure;

/// What is waited for.
enum Target {
    Stream(Stream),
    Event(Arc<Event>),
    AllDevices,
}

/// A wait on a thread of the runtime's pool.
pub struct Wait(Target);

impl Wait {
    pub fn for_stream(stream: Stream) -> AsyncTask<Self> {
        AsyncTask::new(Self(Target::Stream(stream)))
    }

    pub fn for_event(event: Arc<Event>) -> AsyncTask<Self> {
        AsyncTask::new(Self(Target::Event(event)))
    }
}

impl Task for Wait {
    type Output = ();
    type JsValue = ();

    fn compute(&mut self) -> Result<()> {
        // A panic on a pool thread would end the process.
        catch_unwind(AssertUnwindSafe(|| match &self.0 {
            Target::Stream(stream) => stream.synchronize(),
            Target::Event(event) => event.synchronize(),
            Target::AllDevices => cuda::synchronize_all(),
        }))
        .map_err(|_| {
            failure("CUDA_ERROR", "waiting for the GPU failed inside the driver layer: report this as a bug")
        })?
        .map_err(|error| to_failure(&error))?;
        if cuda::concurrent_managed_access() {
            take_up_passed();
        }
        Ok(())
    }

    fn resolve(&mut self, _env: Env, (): ()) -> Result<()> {
        // What is taken up may be poisoned, there by the device: not while JavaScript runs, which may be touching memory.
        if !cuda::concurrent_managed_access() {
            take_up_passed();
        }
        Ok(())
    }
}

/// Waits until all devices have done all that they were given.
#[napi(ts_return_type = "Promise<void>")]
pub fn cuda_synchronize() -> AsyncTask<Wait> {
    AsyncTask::new(Wait(Target::AllDevices))
}
