//! Accounts, arrays and statistics: the calls behind `Allocator`.

use std::sync::Arc;

use napi::bindgen_prelude::{Env, External, Float64ArraySlice, JsValue, Unknown};
use napi::{sys, Result};
use napi_derive::napi;
use unimalloc::cuda::Stream;
use unimalloc::last_error;
use unimalloc::log::{self, Level};

use crate::account::{self, Account, FIGURES};
use crate::block::{self, Block, Refusal, Share, Wanted};
use crate::buffer::{self, BufferError};
use crate::cuda::{host_access, take_up_passed, to_failure};
use crate::dispatch::{Backend, Policy};
use crate::failure::{failure, free_failure, reason_name};
use crate::holds::{self, Handle};
use crate::{collector, magazine, out};

/// Why an allocation came to nothing; `REFUSED` in `ts/native.ts` has the same.
const REFUSED_BY_LIMIT: f64 = -1.0;
pub const REFUSED_BY_BACKEND: f64 = -2.0;
pub const BUFFERS_BANNED: f64 = -3.0;
pub const BUFFER_REFUSED: f64 = -4.0;

/// `how` of an allocation: the placement's number, and these bits; `ts/allocator.ts` has the same.
const PLACEMENT: u32 = 3;
const ZEROED: u32 = 4;
const POOLED: u32 = 8;

/// Opens an account. `limit` is in bytes and may be infinite.
#[napi(catch_unwind)]
pub fn open_account(backend: u32, policy: u32, device: u32, limit: f64) -> Result<u32> {
    let device = u16::try_from(device).map_err(|_| failure("INVALID_ARGUMENT", "no such device"))?;
    Ok(account::open(Account::new(Backend::from(backend), Policy::from(policy), device, limit)))
}

/// Forgets an account's number; its blocks go on settling with it.
#[napi(catch_unwind)]
pub fn close_account(number: u32) -> Result<()> {
    account::close(number);
    Ok(())
}

/// The account of that number, or the error for one that was closed.
pub fn find_account(number: u32) -> Result<Arc<Account>> {
    account::find(number).ok_or_else(|| failure("DISPOSED", "the allocator was disposed: make a new one"))
}

/// A buffer over an account's cells; null where the runtime forbids such buffers. The account lives as long as the buffer.
#[napi(catch_unwind, ts_return_type = "ArrayBuffer | null")]
pub fn account_cells(env: &Env, number: u32) -> Result<Option<Unknown<'_>>> {
    let account = find_account(number)?;
    // SAFETY: napi-rs calls this on the environment's thread.
    let value = unsafe { buffer::over_cells(env.raw(), account) };
    // SAFETY: the value was made in this environment by the call above.
    Ok(value.map(|value| unsafe { Unknown::from_raw_unchecked(env.raw(), value) }))
}

/// What an allocation is asked with.
pub struct AllocateArguments<'a> {
    pub account: &'a Arc<Account>,
    pub bytes: f64,
    pub align: f64,
    pub how: u32,
    pub stream: Option<&'a Stream>,
}

/// Numbers that an allocation answers beside the buffer: handle, address, usable bytes, and 1 where dropped arrays should be looked for.
pub const RESULTS: usize = 4;

/// A buffer over a fresh block with its numbers, or none and, as the first number, why.
///
/// # Safety
/// `env` is the current environment, on its own thread.
pub unsafe fn allocate_into(
    env: sys::napi_env,
    arguments: &AllocateArguments<'_>,
) -> Result<(Option<sys::napi_value>, [f64; RESULTS])> {
    let account = arguments.account;
    let how = arguments.how;
    // All but the arrays of `allocUnsafe` are written to by the CPU, now or as soon as they are handed out.
    if how & POOLED == 0 {
        check_host_access(account.backend)?;
    }
    let wanted = Wanted {
        bytes: arguments.bytes as usize,
        align: arguments.align as usize,
        placement: how & PLACEMENT,
        zeroed: how & ZEROED != 0,
        pooled: how & POOLED != 0,
        stream: arguments.stream,
    };
    let refused = |reason| Ok((None, [reason, 0.0, 0.0, 0.0]));
    let block = match Block::allocate(account, &wanted) {
        Ok(block) => block,
        Err(Refusal::Limit) => return refused(REFUSED_BY_LIMIT),
        Err(Refusal::Backend) => return refused(REFUSED_BY_BACKEND),
    };
    let (address, usable) = (block.address() as f64, block.usable() as f64);
    // SAFETY: the caller's environment, and the block is new.
    match unsafe { buffer::create(env, Share::Sole(block)) } {
        Ok((value, handle)) => {
            let collect = f64::from(u8::from(collector::is_wanted(account, usable as usize)));
            Ok((Some(value), [handle.to_number(), address, usable, collect]))
        }
        Err(BufferError::Banned) => refused(BUFFERS_BANNED),
        Err(BufferError::Refused) => refused(BUFFER_REFUSED),
    }
}

/// A buffer over a fresh block that a stream uses first, or null. `results` gets handle, address, usable bytes and whether to collect, or the
/// reason for the null. The call without a stream is `hotFunctions`'.
#[napi(catch_unwind, ts_return_type = "ArrayBuffer | null")]
pub fn allocate_for_stream<'env>(
    env: &'env Env,
    account: u32,
    bytes: f64,
    align: f64,
    how: u32,
    mut results: Float64ArraySlice<'_>,
    stream: &External<Stream>,
) -> Result<Option<Unknown<'env>>> {
    let account = find_account(account)?;
    let arguments = AllocateArguments { account: &account, bytes, align, how, stream: Some(stream) };
    // SAFETY: napi-rs calls this on the environment's thread.
    let (value, numbers) = unsafe { allocate_into(env.raw(), &arguments) }?;
    out::write(&mut results, 0, &numbers);
    // SAFETY: the value was made in this environment by the call above.
    Ok(value.map(|value| unsafe { Unknown::from_raw_unchecked(env.raw(), value) }))
}

/// Refuses what would make the CPU touch managed memory while that is forbidden.
fn check_host_access(backend: Backend) -> Result<()> {
    if backend == Backend::Cuda && !host_access::is_allowed() {
        return Err(failure(
            "HOST_ACCESS_WHILE_BUSY",
            "a kernel launched with unsafeConcurrent is running on a device whose managed memory the CPU may not touch \
             meanwhile: wait for its stream first, or use allocUnsafe and touch the array later",
        ));
    }
    Ok(())
}

/// As [`check_host_access`], before JavaScript reads from a held block, or from one of a backend's slabs where there is no hold.
#[napi(catch_unwind)]
pub fn check_readable(handle: f64, backend: u32) -> Result<()> {
    if handle == 0.0 {
        return check_host_access(Backend::from(backend));
    }
    holds::with(Handle::from_number(handle), |hold| hold.block.account().backend)
        .map_or(Ok(()), check_host_access)
}

/// Counts an allocation that was refused for good.
#[napi(catch_unwind)]
pub fn count_refusal(number: u32) -> Result<()> {
    find_account(number)?.count_refusal();
    Ok(())
}

/// Ends the hold of a buffer that has just been detached by us. Nothing happens if the engine's finalizer came first.
pub fn release_handle(handle: f64) -> Result<()> {
    match holds::take(Handle::from_number(handle)) {
        Some(hold) => block::release(hold.block).map_err(free_failure),
        None => Ok(()),
    }
}

/// Frees an array whose buffer somebody else has detached: the bytes may live on in another buffer, so that only the
/// engine can tell when they are no longer used.
#[napi(catch_unwind)]
pub fn release_when_collected(handle: f64) -> Result<()> {
    holds::with(Handle::from_number(handle), |hold| (hold.freed, hold.awaited) = (true, false));
    Ok(())
}

/// Says that something may use a block that the program has let go, until its hold ends.
#[napi(catch_unwind)]
pub fn await_release(handle: f64) -> Result<()> {
    holds::with(Handle::from_number(handle), |hold| hold.awaited = true);
    Ok(())
}

/// Whether a handle's hold has not ended and was not freed.
#[napi(catch_unwind)]
pub fn is_held(handle: f64) -> Result<bool> {
    Ok(holds::is_held(Handle::from_number(handle)))
}

/// Detaches a buffer on engines without `ArrayBuffer.prototype.transfer`. False if the engine refused.
#[napi(catch_unwind, ts_args_type = "buffer: ArrayBuffer")]
pub fn detach(env: &Env, buffer: Unknown<'_>) -> Result<bool> {
    // SAFETY: both come from the environment of this call.
    Ok(unsafe { buffer::detach(env.raw(), buffer.raw()) })
}

/// Copies the first `bytes` of one held block to another, on the side where they live.
#[napi(catch_unwind)]
pub fn copy_block(to: f64, from: f64, bytes: f64) -> Result<bool> {
    let (Some(to), Some(from)) =
        (holds::block(Handle::from_number(to)), holds::block(Handle::from_number(from)))
    else {
        return Ok(false);
    };
    check_host_access(to.account().backend)?;
    from.wait_for_gpu().map_err(|error| to_failure(&error))?;
    to.wait_for_gpu().map_err(|error| to_failure(&error))?;
    let bytes = (bytes as usize).min(to.usable()).min(from.usable());
    if to.address() == from.address() || bytes == 0 {
        return Ok(true);
    }
    let backend = to.account().backend;
    // SAFETY: two different live blocks, which both stay held for the time of the call; `bytes` fits both. Two backends may be
    // involved; managed memory is readable by the host, so either side's copy serves.
    Ok(unsafe { backend.copy(to.address() as *mut u8, from.address() as *const u8, bytes) })
}

/// Writes an account's figures, then those of its backend, into `out`. The order is that of `readStats` in `ts/stats.ts`.
#[napi(catch_unwind)]
pub fn read_stats(number: u32, mut out: Float64ArraySlice<'_>) -> Result<()> {
    let account = find_account(number)?;
    take_up_passed();
    out::write(&mut out, 0, &account.figures());
    out::write(&mut out, FIGURES, &backend_figures(account.backend));
    Ok(())
}

fn backend_figures(backend: Backend) -> [f64; 9] {
    let stats = backend.stats();
    let (blocks, bytes) = block::quarantined();
    // 0 stands for a ceiling that was not looked at yet: that happens when the backend first grows.
    let limit =
        if matches!(stats.limit_bytes, 0 | u64::MAX) { f64::INFINITY } else { stats.limit_bytes as f64 };
    [
        stats.reserved_bytes as f64,
        stats.cached_bytes as f64,
        stats.largest_free_bytes as f64,
        stats.backend_allocations as f64,
        stats.backend_frees as f64,
        stats.backend_failures as f64,
        limit,
        blocks as f64,
        bytes as f64,
    ]
}

/// Starts an account's peaks afresh.
#[napi(catch_unwind)]
pub fn reset_peak(number: u32) -> Result<()> {
    find_account(number)?.reset_peak();
    Ok(())
}

/// Gives free memory beyond `keep_bytes` back to the system or the driver; answers how many bytes went.
#[napi(catch_unwind)]
pub fn trim(backend: u32, keep_bytes: f64) -> Result<f64> {
    magazine::note_trim();
    let keep = if keep_bytes >= usize::MAX as f64 { usize::MAX } else { keep_bytes as usize };
    Ok(Backend::from(backend).trim(keep) as f64)
}

/// Levels by their number in `ts/log.ts`.
const LEVELS: [Level; 4] = [Level::Error, Level::Warn, Level::Info, Level::Debug];

/// Whether lines of a level are written to standard error.
#[napi(catch_unwind)]
pub fn is_logged(level: u32) -> Result<bool> {
    Ok(LEVELS.get(level as usize).is_some_and(|level| log::enabled(*level)))
}

/// Writes a line that the face has put together.
#[napi(catch_unwind)]
pub fn log_line(level: u32, text: String) -> Result<()> {
    if let Some(level) = LEVELS.get(level as usize) {
        log::line(*level, format_args!("{text}"));
    }
    Ok(())
}

/// The reason for this thread's latest null, false or refusal.
#[napi(object)]
pub struct Reason {
    /// A name, as `BUDGET` or `NO_DRIVER`.
    pub code: String,
    /// A sentence that tells the next step.
    pub message: String,
    /// The driver's result, where it was the driver that refused.
    pub driver: Option<u32>,
}

/// This thread's reason for its latest null, false or refusal.
#[napi(catch_unwind)]
pub fn last_reason() -> Result<Option<Reason>> {
    Ok(last_error().map(|error| Reason {
        code: reason_name(error).to_owned(),
        message: error.to_string(),
        driver: match error {
            unimalloc::AllocError::Driver(code) => Some(code),
            _ => None,
        },
    }))
}
