//! Work on streams that marks the blocks it uses.

use super::marks::mark;
use super::pending::reclaim;
use super::tracks;
use crate::backend::cuda::why_unreachable;
use crate::cuda::driver;
use crate::cuda::{CudaError, Hint, Kernel, KernelArg, LaunchConfig, PrefetchTo, Stream};
use crate::error::FreeError;
use crate::log::say;
use crate::meta::slot;
use crate::pool::{span_of, HasSegmentPool, Home};
use crate::sync::Ordering::Relaxed;
use crate::{CudaUnifiedBackend, HostBackend};

/// Says that foreign code uses the block that `ptr` points into (at its start or inside it) on a stream: when it is
/// freed, it is reused only after the stream has passed that point. For work that was queued through this crate, and for
/// pointers passed as kernel arguments, that is done already; it is needed for pointers inside structures.
///
/// A block of [`HostBackend`] may be used on a stream too, where foreign code has registered it with the driver or the device reads
/// ordinary memory: its free waits just the same.
///
/// An error where `ptr` is in no live block of the backend.
pub fn record_use<B: HasSegmentPool>(ptr: *const u8, stream: &Stream) -> Result<(), FreeError> {
    mark_block(Home::of::<B>(), ptr, stream)
}

pub(crate) fn mark_block(home: Home, ptr: *const u8, stream: &Stream) -> Result<(), FreeError> {
    let span = span_of(ptr as usize).filter(|span| home.owns(span)).ok_or(FreeError::NotOurs)?;
    // Most pointers are to a block's start, which is found without a division.
    let start = span.slot_at(ptr as usize).filter(|(index, _)| *index < usize::from(span.capacity()));
    let (index, word) = start.or_else(|| span.block_around(ptr as usize)).ok_or(FreeError::DoubleFree)?;
    if !slot::is_live(word.load(Relaxed)) {
        return Err(FreeError::DoubleFree);
    }
    home.pools.set_reclaim(reclaim);
    if mark(span, index, word, tracks::number(stream)) {
        Ok(())
    } else {
        Err(FreeError::DoubleFree)
    }
}

/// Marks the block an address lies in; other addresses are none of our business.
fn note(ptr: *const u8, stream: &Stream) {
    let _ = mark_block(Home::of::<CudaUnifiedBackend>(), ptr, stream);
}

/// Why a prefetch of host memory does nothing.
const HOST_MEMORY_STAYS: &str =
    "the memory is the host backend's, which stays on the host: allocate it on the CUDA backend to have it move";

fn told(hint: Hint, len: usize) -> Hint {
    if let Hint::NotApplicable(reason) = hint {
        say!(Level::Debug, "not-prefetched bytes={len} reason={reason:?}");
    }
    hint
}

/// Whether an address lies in memory of the host backend's pools.
fn is_host_block(ptr: *const u8) -> bool {
    span_of(ptr as usize).is_some_and(|span| Home::of::<HostBackend>().owns(span))
}

impl Kernel {
    /// Queues the kernel on a stream of its device. Size and shape are checked against the device's limits, and the
    /// arguments against the parameters where they are known. Blocks of unified memory that arguments point to are
    /// marked: freed while the kernel runs, they are not reused before it is done.
    ///
    /// On a device without concurrent managed access, where the CPU may touch no managed memory while any kernel runs, it
    /// waits for the kernel; [`launch_concurrent`](Self::launch_concurrent) does not.
    ///
    /// # Safety
    /// The arguments are what the kernel expects; the memory they lead to is valid for the device, and stays so until
    /// the stream has run the kernel or the block was freed; and the kernel stays within it.
    pub unsafe fn launch(
        &self,
        config: &LaunchConfig,
        stream: &Stream,
        args: &[KernelArg<'_>],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise, and the wait below.
        unsafe { self.launch_concurrent(config, stream, args) }?;
        // What a capture takes up does not run now, and waiting would break it.
        if !self.is_concurrent() && !stream.is_capturing()? {
            stream.synchronize()?;
        }
        Ok(())
    }

    /// As [`launch`](Self::launch), and never waits.
    ///
    /// # Safety
    /// As [`launch`](Self::launch). On a device without concurrent managed access the CPU touches no managed memory until the
    /// stream was waited for. This crate does not by itself: there it fills and copies by the device.
    pub unsafe fn launch_concurrent(
        &self,
        config: &LaunchConfig,
        stream: &Stream,
        args: &[KernelArg<'_>],
    ) -> Result<(), CudaError> {
        let pointers = || {
            args.iter().enumerate().filter_map(|(index, arg)| match arg {
                KernelArg::Pointer(address) => Some((index, *address as *const u8)),
                _ => None,
            })
        };
        // Where the stream is of another device, that is what is wrong.
        for (index, pointer) in pointers().filter(|_| stream.device() == self.device()) {
            stream.check_reach(pointer, || format!("argument {index}: "))?;
        }
        for (_, pointer) in pointers() {
            note(pointer, stream);
        }
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(config, stream, args) }
    }
}

impl Stream {
    /// Refuses memory that this stream's device cannot use. `what` says which it is.
    fn check_reach(&self, ptr: *const u8, what: impl FnOnce() -> String) -> Result<(), CudaError> {
        let driver = driver::require()?;
        // With one device all memory is its own, and nothing need be looked up.
        if driver.devices.len() > 1 {
            if let Some(error) = why_unreachable(driver, ptr, self.device_ref()) {
                return Err(error.about(&what()));
            }
        }
        Ok(())
    }

    /// Moves the pages of a range of managed memory, in the stream's order. Answers why where that cannot apply: also for a
    /// block of [`HostBackend`], so that a program need not ask which backend it runs on.
    ///
    /// # Safety
    /// The range lies in one live managed allocation, or in a live block of [`HostBackend`].
    pub unsafe fn prefetch(&self, ptr: *const u8, len: usize, to: PrefetchTo) -> Result<Hint, CudaError> {
        if is_host_block(ptr) {
            return Ok(told(Hint::NotApplicable(HOST_MEMORY_STAYS), len));
        }
        note(ptr, self);
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_prefetch(ptr, len, to) }.map(|hint| told(hint, len))
    }

    /// As [`prefetch`](Self::prefetch) for a range whose contents are not needed any more, which then are undefined:
    /// nothing is copied, where the driver can do that (CUDA 13).
    ///
    /// # Safety
    /// As [`prefetch`](Self::prefetch), and nobody needs what is in the range.
    pub unsafe fn discard_and_prefetch(
        &self,
        ptr: *mut u8,
        len: usize,
        to: PrefetchTo,
    ) -> Result<Hint, CudaError> {
        if is_host_block(ptr) {
            return Ok(told(Hint::NotApplicable(HOST_MEMORY_STAYS), len));
        }
        note(ptr, self);
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_discard_and_prefetch(ptr, len, to) }.map(|hint| told(hint, len))
    }

    /// Copies bytes by the device's copy engine, in the stream's order.
    ///
    /// # Safety
    /// Both ranges are valid for the device and stay so, untouched by others, until the stream has done it or their
    /// blocks were freed.
    pub unsafe fn copy(&self, to: *mut u8, from: *const u8, len: usize) -> Result<(), CudaError> {
        note(to, self);
        note(from, self);
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_copy(to, from, len) }
    }

    /// Sets bytes on the device, in the stream's order.
    ///
    /// # Safety
    /// The range is valid for the device and stays so, untouched by others, until the stream has done it or its block
    /// was freed.
    pub unsafe fn fill(&self, ptr: *mut u8, byte: u8, len: usize) -> Result<(), CudaError> {
        self.check_reach(ptr, String::new)?;
        note(ptr, self);
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_fill(ptr, byte, len) }
    }
}
