//! The native half of the magazines in `ts/magazine.ts`: an environment's stacks of free blocks, which it hands out and takes
//! back without a native call.
//!
//! JavaScript maps each span twice: its blocks as one `ArrayBuffer`, the *slab*, and its slot words. Handing a block out is one store
//! of LIVE, taking it back one of HELD, after a check that it was LIVE. A word with any flag besides, set by a launch or by
//! [`promote`], sends JavaScript here.
//!
//! ```text
//! HELD <--> LIVE                        JavaScript, alone
//! free block --refill--> HELD --flush--> free block
//! LIVE --launch--> LIVE|MARKED --free_marked--> pending on its streams, then free
//! LIVE --promote--> LIVE|TRACKED        a block of its own from here on, as `alloc` makes them: shared, scoped, freed later
//! ```
//!
//! Slot words tell everything: whatever JavaScript was doing when it was stopped, [`clean_up`] gives each block where it belongs.

use std::collections::HashMap;
use std::ffi::{c_void, CStr};
use std::panic::AssertUnwindSafe;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use napi::{sys, Result};
use unimalloc::magazine::{self as core, LentSpan, HELD, LIVE};
use unimalloc::{set_last_error, AllocError};

use crate::alloc::{find_account, BUFFERS_BANNED, BUFFER_REFUSED, REFUSED_BY_BACKEND};
use crate::block::{self, Block, Share, GROUP_MAGAZINE};
use crate::buffer::environment_is_ending;
use crate::dispatch::{place, with_backend, Backend, Policy};
use crate::failure::{failure, free_failure};
use crate::holds::{self, Handle, Hold};
use crate::hot::Shared;
use crate::thread_end::end_with_thread;
use crate::thread_number::ThreadNumber;

/// A handle of a block is its span's number and its index in the span; `ts/slabs.ts` has the same.
const INDEX_BITS: u32 = 12;
/// Handles are small integers in JavaScript, signed ones of 32 bits.
const MOST_SPANS: usize = 1 << (31 - INDEX_BITS);

/// The upper byte of a word is its state, the lower one flags.
const STATE: u16 = 0xFF00;
/// Set by the allocator's core: work on a stream was given the block.
const MARKED: u16 = 0x02;
/// Native code keeps the block's books.
const TRACKED: u16 = 0x04;

/// As CUDA libraries expect; `DEFAULT_ALIGNMENT` in `ts/options.ts`.
const ALIGNMENT: usize = 256;

/// What an environment has borrowed. Spans by number; a number is used again once its span was unmapped.
pub struct Magazine {
    spans: Vec<Option<Mapped>>,
    vacant: Vec<u32>,
    by_base: HashMap<usize, u32>,
    /// Holds of promoted blocks by handle; one that has ended finds nothing.
    promoted: HashMap<u32, Handle>,
    trims_seen: u64,
    /// Counts sentinels; the latest is the one that acts.
    sentinels: u64,
    sentinel: sys::napi_ref,
    /// The environment has ended.
    closed: bool,
    /// When the environment ends, no handle can be made any more, and so nothing be asked.
    mute_at_end: bool,
}

impl Default for Magazine {
    fn default() -> Self {
        Self {
            spans: Vec::new(),
            vacant: Vec::new(),
            by_base: HashMap::new(),
            promoted: HashMap::new(),
            trims_seen: 0,
            sentinels: 0,
            sentinel: ptr::null_mut(),
            closed: false,
            mute_at_end: false,
        }
    }
}

struct Mapped {
    span: LentSpan,
    backend: Backend,
    /// Keeps the slab, once there is one, to ask it whether its bytes were taken away.
    slab: sys::napi_ref,
    /// JavaScript is about to detach the slab, with no block of it in use.
    leaving: bool,
    /// Kept for good: its bytes may be in use out of sight.
    forsaken: bool,
}

impl Magazine {
    fn number(&mut self, span: LentSpan, backend: Backend) -> Option<u32> {
        let mapped = Some(Mapped { span, backend, slab: ptr::null_mut(), leaving: false, forsaken: false });
        let number = match self.vacant.pop() {
            Some(number) => {
                self.spans[number as usize] = mapped;
                number
            }
            None if self.spans.len() < MOST_SPANS => {
                self.spans.push(mapped);
                self.spans.len() as u32 - 1
            }
            None => return None,
        };
        self.by_base.insert(span.base, number);
        Some(number)
    }

    fn mapped(&mut self, number: u32) -> Result<&mut Mapped> {
        self.spans.get_mut(number as usize).and_then(Option::as_mut).ok_or_else(unknown)
    }

    /// A block that JavaScript names, with its slot word's present value.
    fn block(&mut self, handle: u32) -> Result<(LentSpan, u16, Backend, u16)> {
        let index = (handle & ((1 << INDEX_BITS) - 1)) as u16;
        let mapped = self.mapped(handle >> INDEX_BITS)?;
        let (span, backend) = (mapped.span, mapped.backend);
        if usize::from(index) >= span.capacity {
            return Err(unknown());
        }
        // SAFETY: only looked at.
        let word = unsafe { span.words() }[usize::from(index)].load(Ordering::Acquire);
        Ok((span, index, backend, word))
    }
}

fn unknown() -> napi::Error {
    failure("NOT_OURS", "the block is not one of this thread's magazine")
}

fn busy() -> napi::Error {
    failure("CORRUPTED", "the magazine is in use by a call below this one: report this as a bug")
}

fn address(span: LentSpan, index: u16) -> usize {
    span.base + usize::from(index) * span.block
}

/// How often any thread has given memory back: the others then drop their empty slabs when they come by.
static TRIMS: AtomicU64 = AtomicU64::new(0);

/// Tells all threads that memory is wanted back.
pub fn note_trim() {
    TRIMS.fetch_add(1, Ordering::Relaxed);
}

/// Borrows up to `count` blocks of `size` bytes. Answers how many came, or why none did, and whether empty slabs are wanted
/// back; their handles are in the shared array.
pub fn refill(shared: &Shared, [backend, device, placement, size, count]: [f64; 5]) -> Result<()> {
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    if magazine.closed {
        return Err(failure("DISPOSED", "the environment has ended"));
    }
    let backend = Backend::from(backend as u32);
    let place = place(device as u16, placement as u32);
    let count = (count as usize).min(shared.handles());
    let mut lent = 0;
    let mut last: Option<(LentSpan, u32)> = None;
    // Of spans that another environment of this thread maps, or when there are no numbers left.
    let mut unwanted: Vec<(LentSpan, u16, bool)> = Vec::new();
    let outcome = with_backend!(backend, B => core::borrow::<B>(
        size as usize, ALIGNMENT, place, GROUP_MAGAZINE, count,
        |span, index, fresh| {
            let number = match last {
                Some((known, number)) if known == span => Some(number),
                _ if fresh => magazine.number(span, backend),
                _ => magazine.by_base.get(&span.base).copied(),
            };
            let Some(number) = number else { return unwanted.push((span, index, fresh)) };
            last = Some((span, number));
            shared.set_handle(lent, number << INDEX_BITS | u32::from(index));
            lent += 1;
        }
    ));
    for (span, index, _) in &unwanted {
        with_backend!(backend, B => core::give_back::<B>(*span, *index));
    }
    for (span, _, _) in unwanted.iter().filter(|(_, _, fresh)| *fresh) {
        with_backend!(backend, B => core::unpin::<B>(*span));
    }
    let trims = TRIMS.load(Ordering::Relaxed);
    let trimmed = std::mem::replace(&mut magazine.trims_seen, trims) != trims;
    let first = match outcome {
        Ok(_) | Err(AllocError::InvalidSize | AllocError::Reentrant) => lent as f64,
        Err(error) => {
            set_last_error(error);
            REFUSED_BY_BACKEND
        }
    };
    shared.answer(&[first, f64::from(u8::from(trimmed))]);
    Ok(())
}

/// Gives the first `count` blocks of the shared array back. A block whose word does not say HELD stays where it is.
pub fn flush(shared: &Shared, count: usize) -> Result<()> {
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    for at in 0..count.min(shared.handles()) {
        let (span, index, backend, _) = magazine.block(shared.handle(at))?;
        with_backend!(backend, B => core::give_back::<B>(span, index));
    }
    Ok(())
}

/// An array of the span's slab and of a buffer over its slot words; null with the reason where the engine refuses. Answers
/// the address, the block size and the number of blocks.
///
/// # Safety
/// `env` is the current environment, and `shared` what its callbacks share, which is never freed.
pub unsafe fn map(env: sys::napi_env, shared: *const Shared, number: u32) -> Result<Option<sys::napi_value>> {
    // SAFETY: the caller's promise.
    let shared = unsafe { &*shared };
    let span = shared.magazine.try_borrow_mut().map_err(|_| busy())?.mapped(number)?.span;
    // SAFETY: the face writes to words of lent blocks alone: HELD on those in its stacks, LIVE on those it hands out.
    let words = unsafe { span.words() }.as_ptr().cast_mut().cast::<c_void>();
    let mut pair = ptr::null_mut();
    let mut reference = ptr::null_mut();
    // SAFETY: the caller's environment. The slab's bytes are there until the span is unpinned, for which JavaScript detaches the slab first;
    // slot words are never unmapped.
    let status = unsafe {
        external(env, span.base as *mut c_void, span.block * span.capacity)
            .and_then(|slab| Ok((slab, external(env, words, size_of::<u16>() * span.capacity)?)))
            .and_then(|(slab, words)| {
                check(sys::napi_create_array_with_length(env, 2, &mut pair))?;
                check(sys::napi_set_element(env, pair, 0, slab))?;
                check(sys::napi_set_element(env, pair, 1, words))?;
                check(sys::napi_create_reference(env, slab, 1, &mut reference))
            })
            .and_then(|()| post_sentinel(env, shared))
    };
    if let Err(status) = status {
        // SAFETY: as above. What the engine threw is replaced by a typed error.
        unsafe {
            clear_exception(env);
            delete_reference(env, reference);
        }
        let banned = status == sys::Status::napi_no_external_buffers_allowed;
        shared.answer(&[if banned { BUFFERS_BANNED } else { BUFFER_REFUSED }]);
        return Ok(None);
    }
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    let mapped = magazine.mapped(number)?;
    (mapped.slab, mapped.leaving) = (reference, false);
    shared.answer(&[span.base as f64, span.block as f64, span.capacity as f64]);
    Ok(Some(pair))
}

fn check(status: sys::napi_status) -> std::result::Result<(), sys::napi_status> {
    if status == sys::Status::napi_ok {
        Ok(())
    } else {
        Err(status)
    }
}

/// # Safety
/// `env` is the current environment; the memory stays until the buffer is detached or the environment ends.
unsafe fn external(
    env: sys::napi_env,
    data: *mut c_void,
    len: usize,
) -> std::result::Result<sys::napi_value, sys::napi_status> {
    let mut buffer = ptr::null_mut();
    // SAFETY: the caller's promise.
    check(unsafe {
        sys::napi_create_external_arraybuffer(env, data, len, None, ptr::null_mut(), &mut buffer)
    })?;
    Ok(buffer)
}

/// # Safety
/// `env` is the current environment.
unsafe fn clear_exception(env: sys::napi_env) {
    let (mut thrown, mut exception) = (false, ptr::null_mut());
    // SAFETY: the caller's promise.
    unsafe {
        if sys::napi_is_exception_pending(env, &mut thrown) == sys::Status::napi_ok && thrown {
            sys::napi_get_and_clear_last_exception(env, &mut exception);
        }
    }
}

/// Says whether JavaScript is about to detach a slab itself, so that it is not taken for one that the program took away if the thread is
/// stopped right then.
pub fn set_leaving(shared: &Shared, number: u32, leaving: bool) -> Result<()> {
    shared.magazine.try_borrow_mut().map_err(|_| busy())?.mapped(number)?.leaving = leaving;
    Ok(())
}

/// Lets a span go whose slab was detached by JavaScript, or never made. Answers 1 if it went.
///
/// # Safety
/// `env` is the current environment.
pub unsafe fn unmap(env: sys::napi_env, shared: &Shared, number: u32) -> Result<()> {
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    let &mut Mapped { span, backend, slab, forsaken, .. } = magazine.mapped(number)?;
    let gone = !forsaken && with_backend!(backend, B => core::unpin::<B>(span));
    if gone {
        // SAFETY: the caller's environment, in which the reference was made.
        unsafe { delete_reference(env, slab) };
        magazine.spans[number as usize] = None;
        magazine.by_base.remove(&span.base);
        magazine.vacant.push(number);
    }
    shared.answer(&[f64::from(u8::from(gone))]);
    Ok(())
}

/// Keeps a span for good whose slab somebody else has detached: its bytes live on in another buffer.
///
/// # Safety
/// `env` is the current environment.
pub unsafe fn forsake(env: sys::napi_env, shared: &Shared, number: u32) -> Result<()> {
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    let mapped = magazine.mapped(number)?;
    keep_for_good(mapped);
    // SAFETY: the caller's environment, in which the reference was made.
    unsafe { delete_reference(env, std::mem::replace(&mut mapped.slab, ptr::null_mut())) };
    Ok(())
}

fn keep_for_good(mapped: &mut Mapped) {
    let Mapped { span, backend, .. } = *mapped;
    if !mapped.forsaken && with_backend!(backend, B => core::forsake::<B>(span)) {
        mapped.forsaken = true;
        block::count_quarantined(span.capacity, span.capacity * span.block);
    }
}

/// # Safety
/// `env` is the environment in which the reference was made.
unsafe fn delete_reference(env: sys::napi_env, reference: sys::napi_ref) {
    if !reference.is_null() {
        // SAFETY: the caller's promise; nobody else knows the reference.
        unsafe { sys::napi_delete_reference(env, reference) };
    }
}

/// Native code takes over a live block: from here on it can be shared, and freed from elsewhere. Answers the hold's handle.
pub fn promote(shared: &Shared, handle: u32, account: u32, requested: usize) -> Result<()> {
    let mut magazine = shared.magazine.try_borrow_mut().map_err(|_| busy())?;
    let (span, index, _, _) = magazine.block(handle)?;
    let account = find_account(account)?;
    // Another thread may flag the word meanwhile, or by mistake free the block: then it is no longer ours to take over.
    // SAFETY: a live block keeps its state, and gets a flag.
    let word = unsafe { span.words() }[usize::from(index)]
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            (word & STATE == LIVE && word & TRACKED == 0).then_some(word | TRACKED)
        })
        .map_err(|_| free_failure(unimalloc::FreeError::DoubleFree))?;
    let block = Block::take_over(&account, address(span, index), span.block, requested, word & MARKED != 0);
    let hold = holds::insert(Hold::new(Share::Sole(block))).map_err(|hold| {
        let _ = block::release(hold.block);
        failure("INVALID_ARGUMENT", "this thread holds too many blocks: free some")
    })?;
    magazine.promoted.insert(handle, hold);
    shared.answer(&[hold.to_number()]);
    Ok(())
}

/// Frees a block that work on a stream was given, and that nobody but this thread knows of.
pub fn free_marked(shared: &Shared, handle: u32, account: u32, requested: usize) -> Result<()> {
    let (span, index, backend, word) = shared.magazine.try_borrow_mut().map_err(|_| busy())?.block(handle)?;
    if word & STATE != LIVE || word & TRACKED != 0 {
        return Err(free_failure(unimalloc::FreeError::DoubleFree));
    }
    let account = find_account(account)?;
    let usable = span.block as u64;
    account.take_over(usable, requested as u64);
    account.let_go(usable, requested as u64);
    // SAFETY: JavaScript has given the block up, and only work on streams still uses it.
    unsafe { backend.free(address(span, index) as *mut u8, &account, usable) }.map_err(free_failure)
}

/// A buffer that exists to be finalized: when an environment ends, the engine detaches its external buffers one after the
/// other, the latest first, before it runs any hook. Made after each slab, the latest sentinel still finds all slabs as the program
/// left them: what is detached then was taken by the program, and may be in use in another thread.
struct Sentinel {
    shared: *const Shared,
    number: u64,
    /// Of the environment, whose magazine no other thread touches.
    thread: ThreadNumber,
}

/// # Safety
/// `env` is the current environment, and `shared` what its callbacks share, which is never freed. No borrow of the magazine is held.
unsafe fn post_sentinel(env: sys::napi_env, shared: &Shared) -> std::result::Result<(), sys::napi_status> {
    let Ok(number) = shared.magazine.try_borrow_mut().map(|magazine| magazine.sentinels + 1) else {
        return Err(sys::Status::napi_generic_failure);
    };
    let sentinel = Sentinel { shared, number, thread: ThreadNumber::current() };
    let data = Box::into_raw(Box::new(sentinel)).cast::<c_void>();
    let (mut buffer, mut reference) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the caller's environment; the sentinel is there until its finalizer frees it. One that could not be made is not freed: whether the
    // engine has run its finalizer cannot be known.
    unsafe {
        check(sys::napi_create_external_arraybuffer(env, data, 1, Some(sentinel_ends), data, &mut buffer))?;
        check(sys::napi_create_reference(env, buffer, 1, &mut reference))?;
    }
    let Ok(mut magazine) = shared.magazine.try_borrow_mut() else {
        return Err(sys::Status::napi_generic_failure);
    };
    magazine.sentinels = number;
    let old = std::mem::replace(&mut magazine.sentinel, reference);
    // Some engines run finalizers inside the call below.
    drop(magazine);
    // SAFETY: the caller's environment, in which the reference was made.
    unsafe { delete_reference(env, old) };
    Ok(())
}

unsafe extern "C" fn sentinel_ends(env: sys::napi_env, _data: *mut c_void, hint: *mut c_void) {
    // SAFETY: the hint is what `post_sentinel` boxed, and the engine calls this once.
    let sentinel = unsafe { Box::from_raw(hint.cast::<Sentinel>()) };
    // Some engines finalize what they have collected on a thread of their own, while the environment's goes on. What ends with the
    // environment there, the hook sees to.
    if sentinel.thread != ThreadNumber::current() {
        return;
    }
    // SAFETY: what the callbacks share is never freed.
    let shared = unsafe { &*sentinel.shared };
    // A panic must not cross into the engine.
    let _ = std::panic::catch_unwind(AssertUnwindSafe(|| {
        if let Ok(mut magazine) = shared.magazine.try_borrow_mut() {
            // SAFETY: the environment's own thread.
            if sentinel.number == magazine.sentinels && unsafe { environment_is_ending(env) } {
                // SAFETY: the environment ends, on its own thread.
                unsafe { clean_up(env, &mut magazine) };
            }
        }
    }));
}

/// Sees to it that nothing is kept that the sentinel did not see to: where there is none yet, and on engines that do without the above.
/// These find every slab detached by then, and so keep it.
///
/// # Safety
/// `env` is the current environment, and `shared` what its callbacks share, which is never freed.
pub unsafe fn add_hook(env: sys::napi_env, shared: *const Shared) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if let Ok(mut magazine) = (*shared).magazine.try_borrow_mut() {
            magazine.mute_at_end = is_deno(env);
        }
    }
    // SAFETY: the caller's promise.
    let status =
        unsafe { sys::napi_add_env_cleanup_hook(env, Some(hook), shared.cast_mut().cast::<c_void>()) };
    status == sys::Status::napi_ok
}

/// Deno runs hooks outside of any handle scope and opens none when it is asked to: a handle that is made there ends the process.
///
/// # Safety
/// `env` is the current environment.
unsafe fn is_deno(env: sys::napi_env) -> bool {
    let mut version = ptr::null();
    // SAFETY: the caller's promise; the engine's answer is a static structure with a terminated name.
    unsafe {
        sys::napi_get_node_version(env, &mut version) == sys::Status::napi_ok
            && CStr::from_ptr((*version).release).to_bytes().eq_ignore_ascii_case(b"deno")
    }
}

unsafe extern "C" fn hook(data: *mut c_void) {
    // SAFETY: the data is what `add_hook` was given, which is never freed.
    let shared = unsafe { &*data.cast::<Shared>() };
    // A panic must not cross into the engine.
    let _ = std::panic::catch_unwind(AssertUnwindSafe(|| {
        if let Ok(mut magazine) = shared.magazine.try_borrow_mut() {
            // SAFETY: the hook runs on the environment's thread, which is still there.
            unsafe { clean_up(shared.env, &mut magazine) };
        }
        holds::leave_thread();
    }));
}

/// # Safety
/// `env` is the environment that ends, on its own thread.
unsafe fn clean_up(env: sys::napi_env, magazine: &mut Magazine) {
    magazine.closed = true;
    let promoted = std::mem::take(&mut magazine.promoted);
    for (number, mapped) in std::mem::take(&mut magazine.spans).into_iter().enumerate() {
        let Some(mut mapped) = mapped else { continue };
        // SAFETY: the caller's promise. A slab that cannot be asked may have been taken.
        let taken =
            || unsafe { !mapped.slab.is_null() && (magazine.mute_at_end || is_detached(env, mapped.slab)) };
        if mapped.forsaken || !mapped.leaving && taken() {
            keep_for_good(&mut mapped);
            for (_, hold) in promoted.iter().filter(|(handle, _)| **handle >> INDEX_BITS == number as u32) {
                end(*hold); // off its account; the memory is kept all the same
            }
            continue;
        }
        let Mapped { span, backend, .. } = mapped;
        for index in 0..span.capacity as u16 {
            // SAFETY: only looked at.
            let word = unsafe { span.words() }[usize::from(index)].load(Ordering::Acquire);
            let handle = (number as u32) << INDEX_BITS | u32::from(index);
            match word {
                HELD => {
                    with_backend!(backend, B => core::give_back::<B>(span, index));
                }
                LIVE => {
                    // SAFETY: the arrays over it are gone with the environment.
                    with_backend!(backend, B => unsafe { core::free_unflagged::<B>(span, index) });
                }
                _ if word & STATE != LIVE => {}
                _ if word & TRACKED != 0 => {
                    if let Some(hold) = promoted.get(&handle) {
                        end(*hold);
                    }
                }
                _ => {
                    // SAFETY: the arrays over it are gone with the environment; it waits for its streams.
                    let _ = unsafe { backend.free_now(Policy::Standard, address(span, index) as *mut u8) };
                }
            }
        }
        with_backend!(backend, B => core::unpin::<B>(span));
    }
}

/// Ends the hold of a promoted block with its thread.
fn end(hold: Handle) {
    if let Some(hold) = holds::take(hold) {
        end_with_thread(hold, true);
    }
}

/// Whether a slab's bytes were taken away. True where that cannot be said: then they stay.
///
/// # Safety
/// `env` is the environment in which the reference was made, on its own thread.
unsafe fn is_detached(env: sys::napi_env, slab: sys::napi_ref) -> bool {
    if slab.is_null() {
        return false; // never shown to JavaScript
    }
    let (mut scope, mut buffer, mut detached) = (ptr::null_mut(), ptr::null_mut(), true);
    // SAFETY: the caller's promise. None of these calls runs JavaScript.
    unsafe {
        if sys::napi_open_handle_scope(env, &mut scope) != sys::Status::napi_ok {
            return true;
        }
        let known = sys::napi_get_reference_value(env, slab, &mut buffer) == sys::Status::napi_ok
            && !buffer.is_null()
            && sys::napi_is_detached_arraybuffer(env, buffer, &mut detached) == sys::Status::napi_ok;
        sys::napi_close_handle_scope(env, scope);
        !known || detached
    }
}
