//! Streams and events.

use std::sync::Arc;

use napi::bindgen_prelude::{AsyncTask, BigInt, External};
use napi::Result;
use napi_derive::napi;
use unimalloc::cuda::{Event, Hint, PrefetchTo, Stream};
use unimalloc::MemoryBackend;

use super::wait::Wait;
use super::{device_index, device_range, held_block, range_in, take_up_passed, to_failure};
use crate::dispatch::{place, with_backend, Backend};
use crate::failure::{failure, free_failure};

/// A new stream.
#[napi(catch_unwind)]
pub fn stream_create(device: u32) -> Result<External<Stream>> {
    Stream::new(device_index(device)?).map(External::new).map_err(|error| to_failure(&error))
}

/// The stream that launches without one use.
#[napi(catch_unwind)]
pub fn stream_default(device: u32) -> Result<External<Stream>> {
    Stream::default_for(device_index(device)?).map(External::new).map_err(|error| to_failure(&error))
}

/// A stream that other code made.
#[napi(catch_unwind)]
pub fn stream_from(handle: BigInt) -> Result<External<Stream>> {
    let (negative, handle, lossless) = handle.get_u64();
    if negative || !lossless {
        return Err(failure(
            "INVALID_ARGUMENT",
            "Stream.from: the handle is no CUstream: pass its address as a bigint",
        ));
    }
    // SAFETY: that the handle is a live stream is the program's word; the documentation of `Stream.from` asks for it.
    unsafe { Stream::from_raw(handle) }.map(External::new).map_err(|error| to_failure(&error))
}

/// The stream's `CUstream`.
#[napi(catch_unwind)]
pub fn stream_handle(stream: &External<Stream>) -> Result<BigInt> {
    Ok(BigInt::from(stream.handle()))
}

/// Index of the stream's device.
#[napi(catch_unwind)]
pub fn stream_device(stream: &External<Stream>) -> Result<u32> {
    Ok(u32::from(stream.device()))
}

/// Waits for the stream on a thread of the runtime's pool.
#[napi(ts_return_type = "Promise<void>")]
pub fn stream_wait(stream: &External<Stream>) -> AsyncTask<Wait> {
    Wait::for_stream(Stream::clone(stream))
}

/// Waits for the stream, and blocks the thread.
#[napi(catch_unwind)]
pub fn stream_synchronize(stream: &External<Stream>) -> Result<()> {
    stream.synchronize().map_err(|error| to_failure(&error))?;
    take_up_passed();
    Ok(())
}

/// An event that is done when all that the stream was given so far is.
#[napi(catch_unwind)]
pub fn stream_record(stream: &External<Stream>) -> Result<External<Arc<Event>>> {
    stream.record().map(|event| External::new(Arc::new(event))).map_err(|error| to_failure(&error))
}

/// Lets what the stream is given from now on wait for an event.
#[napi(catch_unwind)]
pub fn stream_wait_event(stream: &External<Stream>, event: &External<Arc<Event>>) -> Result<()> {
    stream.wait(event).map_err(|error| to_failure(&error))
}

/// Moves a range's pages. Answers why it does not apply, or null when it was done.
#[napi(catch_unwind)]
pub fn stream_prefetch(
    stream: &External<Stream>,
    handle: f64,
    offset: f64,
    bytes: f64,
    to_host: bool,
) -> Result<Option<String>> {
    let block = held_block("prefetch", handle)?;
    let (start, len) = range_in("prefetch", &block, offset, bytes)?;
    let to = if to_host { PrefetchTo::Host } else { PrefetchTo::Device };
    // SAFETY: the range lies in one block, which is live as long as it is held here.
    let hint = unsafe { stream.prefetch(start, len, to) }.map_err(|error| to_failure(&error))?;
    if hint == Hint::Applied {
        block.note_gpu_use();
    }
    Ok(why_not(hint))
}

/// Why a hint came to nothing.
fn why_not(hint: Hint) -> Option<String> {
    match hint {
        Hint::Applied => None,
        Hint::NotApplicable(reason) => Some(reason.to_owned()),
    }
}

/// Why a placement does nothing on a backend and device, or null when it has its effect.
#[napi(catch_unwind)]
pub fn placement_hint(backend: u32, device: u32, placement: u32) -> Result<Option<String>> {
    let place = place(device_index(device)?, placement);
    Ok(why_not(with_backend!(Backend::from(backend), B => <B as MemoryBackend>::placement_hint(place))))
}

/// Copies between two ranges by the copy engine.
#[napi(catch_unwind)]
pub fn stream_copy(
    stream: &External<Stream>,
    to_handle: f64,
    to_offset: f64,
    from_handle: f64,
    from_offset: f64,
    bytes: f64,
) -> Result<()> {
    let to = device_range("copy", to_handle, to_offset, bytes)?;
    let from = device_range("copy", from_handle, from_offset, bytes)?;
    // SAFETY: both ranges lie in live blocks of managed memory, which the copy marks with the stream. That nobody touches them meanwhile is
    // the program's word.
    unsafe { stream.copy(to.start, from.start, to.len) }.map_err(|error| to_failure(&error))?;
    Ok(())
}

/// Sets the bytes of a range on the device.
#[napi(catch_unwind)]
pub fn stream_fill(stream: &External<Stream>, handle: f64, offset: f64, bytes: f64, byte: u32) -> Result<()> {
    let range = device_range("fill", handle, offset, bytes)?;
    // SAFETY: as for `stream_copy`.
    unsafe { stream.fill(range.start, byte as u8, range.len) }.map_err(|error| to_failure(&error))?;
    Ok(())
}

/// Notes that foreign code uses a block on the stream.
#[napi(catch_unwind)]
pub fn record_use(stream: &External<Stream>, handle: f64) -> Result<()> {
    let block = held_block("recordUse", handle)?;
    block.note_gpu_use();
    let start = block.address() as *const u8;
    with_backend!(block.account().backend, B => unimalloc::record_use::<B>(start, stream))
        .map_err(free_failure)
}

/// Whether an event is done.
#[napi(catch_unwind)]
pub fn event_done(event: &External<Arc<Event>>) -> Result<bool> {
    event.done().map_err(|error| to_failure(&error))
}

/// Waits for an event on a thread of the runtime's pool.
#[napi(ts_return_type = "Promise<void>")]
pub fn event_wait(event: &External<Arc<Event>>) -> AsyncTask<Wait> {
    Wait::for_event(Arc::clone(event))
}

/// Milliseconds of device time between two events.
#[napi(catch_unwind)]
pub fn event_elapsed(event: &External<Arc<Event>>, start: &External<Arc<Event>>) -> Result<f64> {
    event.elapsed_ms(start).map(f64::from).map_err(|error| to_failure(&error))
}
