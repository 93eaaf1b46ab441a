//! `ThreadAllocator` in JavaScript: hand-made ones, and those that `withAllocator` lends to a callback.
//!
//! No Rust borrow of an allocator is held while JavaScript runs. A guarded call keeps the allocator's address, and each method
//! borrows through it for its own duration; an unguarded call looks the slot up again for every method.

use std::cell::RefCell;

use napi::bindgen_prelude::{FnArgs, Function, Unknown};
use napi::Result;
use napi_derive::napi;
use unimalloc::{
    set_last_error, AllocError, CudaUnifiedBackend, FreeError, HostBackend, LocalAllocatorSelector,
    PolicySlotSelection, ThreadAllocator,
};

use crate::contract::Way;
use crate::dispatch::{with_backend, with_policy, Backend, Policy};
use crate::failure::{failure, free_failure};

/// A hand-made allocator. It lives in its thread's table, since it may not leave its thread.
enum HandMade {
    Cuda(ThreadAllocator<CudaUnifiedBackend>),
    Host(ThreadAllocator<HostBackend>),
}

/// An allocator that a guarded call on this thread has lent to the callback that is running.
struct Lent {
    number: u32,
    backend: Backend,
    /// A `ThreadAllocator` of `backend`'s type, borrowed by the call further up this thread's stack.
    allocator: *mut (),
}

#[derive(Default)]
struct Allocators {
    hand_made: Vec<Option<HandMade>>,
    lent: Vec<Lent>,
    /// Numbers of lent allocators are never used again, so that one kept past its call finds nothing.
    next_lent: u32,
}

thread_local! {
    static ALLOCATORS: RefCell<Allocators> = RefCell::default();
}

fn with_allocators<R>(f: impl FnOnce(&mut Allocators) -> R) -> Result<R> {
    ALLOCATORS
        .try_with(|allocators| f(&mut allocators.borrow_mut()))
        .map_err(|_| failure("DISPOSED", "this thread is ending: its allocators are gone"))
}

fn gone() -> napi::Error {
    failure(
        "DISPOSED",
        "the allocator is gone: it was disposed, belongs to another thread, or was kept after withAllocator returned",
    )
}

/// How JavaScript reaches an allocator: a place in the thread's table, a running guarded call, or a slot.
const HAND_MADE: u32 = 0;
const LENT: u32 = 1;

/// Runs the body on the allocator of a table entry or of a guarded call.
macro_rules! with_thread_allocator {
    ($kind:expr, $number:expr, $allocator:ident => $body:expr) => {
        with_allocators(|allocators| match $kind {
            HAND_MADE => match allocators.hand_made.get_mut($number as usize) {
                Some(Some(HandMade::Cuda($allocator))) => Ok($body),
                Some(Some(HandMade::Host($allocator))) => Ok($body),
                _ => Err(gone()),
            },
            LENT => match allocators.lent.iter().find(|lent| lent.number == $number) {
                Some(lent) => with_backend!(lent.backend, B => {
                    // SAFETY: the call that lent the allocator is still running further up this thread's stack and does not use its
                    // borrow meanwhile; entries are taken off before it returns. No JavaScript runs during this borrow.
                    let $allocator = unsafe { &mut *lent.allocator.cast::<ThreadAllocator<B>>() };
                    Ok($body)
                }),
                None => Err(gone()),
            },
            _ => Err(gone()),
        })
        .and_then(|result| result)
    };
}

/// Makes an allocator on this thread and answers its number.
#[napi(catch_unwind)]
pub fn make_allocator(backend: u32, encrypted: bool) -> Result<u32> {
    let made = match (Backend::from(backend), encrypted) {
        (Backend::Cuda, false) => HandMade::Cuda(ThreadAllocator::new()),
        (Backend::Cuda, true) => HandMade::Cuda(ThreadAllocator::new_encrypted()),
        (Backend::Host, false) => HandMade::Host(ThreadAllocator::new()),
        (Backend::Host, true) => HandMade::Host(ThreadAllocator::new_encrypted()),
    };
    with_allocators(|allocators| {
        allocators.hand_made.push(Some(made));
        (allocators.hand_made.len() - 1) as u32
    })
}

/// Drops a hand-made allocator; its live blocks stay valid.
#[napi(catch_unwind)]
pub fn drop_allocator(number: u32) -> Result<()> {
    // Taken out first, so that nothing is borrowed while the allocator unregisters itself.
    let taken =
        with_allocators(|allocators| allocators.hand_made.get_mut(number as usize).and_then(Option::take))?;
    drop(taken);
    Ok(())
}

/// The allocator's heap.
#[napi(catch_unwind)]
pub fn allocator_pointer(kind: u32, number: u32) -> Result<f64> {
    with_thread_allocator!(kind, number, allocator => allocator.as_ptr() as usize as f64)
}

/// A block from the allocator, or 0 with the reason in `lastReason`.
#[napi(catch_unwind)]
pub fn allocator_alloc(kind: u32, number: u32, policy: u32, bytes: f64, align: f64) -> Result<f64> {
    let (bytes, align) = (bytes as usize, align as usize);
    with_thread_allocator!(kind, number, allocator => {
        with_policy!(Policy::from(policy), P => allocator.alloc::<P>(bytes, align) as usize as f64)
    })
}

/// Frees a block through the allocator.
#[napi(catch_unwind)]
pub fn allocator_free(kind: u32, number: u32, policy: u32, block: f64) -> Result<()> {
    let block = block as usize as *mut u8;
    let freed: std::result::Result<(), FreeError> = with_thread_allocator!(kind, number, allocator => {
        // SAFETY: the allocator checks the address exactly; that nobody uses the block is the program's word.
        with_policy!(Policy::from(policy), P => unsafe { allocator.free::<P>(block) })
    })?;
    freed.map_err(free_failure)
}

/// Takes the lent allocator off the list also when the callback panics.
struct Lease(u32);

impl Drop for Lease {
    fn drop(&mut self) {
        // At thread teardown the table is gone, and with it the entry.
        let _ = with_allocators(|allocators| allocators.lent.retain(|lent| lent.number != self.0));
    }
}

/// Runs `callback` with the number of this thread's allocator, under the guard. `undefined` in `null`'s place cannot be told from a
/// result, so the answer is whether it ran; the face keeps the result itself.
#[napi(
    catch_unwind,
    ts_args_type = "backend: number, policy: number, way: number, callback: (lent: number) => void"
)]
pub fn with_allocator(
    backend: u32,
    policy: u32,
    way: u32,
    callback: Function<'_, FnArgs<(u32,)>, Unknown<'_>>,
) -> Result<bool> {
    let (backend, policy, way) = (Backend::from(backend), Policy::from(policy), Way::from(way));
    let lend = |allocator: *mut ()| -> Result<()> {
        let number = with_allocators(|allocators| {
            allocators.next_lent = allocators.next_lent.wrapping_add(1);
            let number = allocators.next_lent;
            allocators.lent.push(Lent { number, backend, allocator });
            number
        })?;
        let _lease = Lease(number);
        callback.call(FnArgs::from((number,))).map(|_| ())
    };
    let ran = with_backend!(backend, B => with_policy!(policy, P => {
        let f = |allocator: &mut ThreadAllocator<B>| lend(std::ptr::from_mut(allocator).cast());
        match way {
            Way::Plain => <B as LocalAllocatorSelector<B>>::with_allocator(f),
            Way::ForPolicy => <B as LocalAllocatorSelector<B>>::with_allocator_for_policy::<P, _>(f),
            Way::Selection => <P as PolicySlotSelection<B>>::with_allocator(f),
        }
    }));
    ran.transpose().map(|ran| ran.is_some())
}

/// What an unguarded callback's methods do, each with a borrow of its own.
macro_rules! unguarded {
    ($backend:expr, $policy:expr, $way:expr, $f:expr) => {
        with_backend!(Backend::from($backend), B => with_policy!(Policy::from($policy), P => {
            let f = $f;
            // SAFETY: `f` calls only the allocator and no JavaScript, so it cannot re-enter.
            unsafe {
                match Way::from($way) {
                    Way::Plain => <B as LocalAllocatorSelector<B>>::with_allocator_unguarded(f),
                    Way::ForPolicy => <B as LocalAllocatorSelector<B>>::with_allocator_unguarded_for_policy::<P, _>(f),
                    Way::Selection => <P as PolicySlotSelection<B>>::with_allocator_unguarded(f),
                }
            }
        }))
    };
}

/// The heap of the slot, or 0 when a guarded call is running on this thread.
#[napi(catch_unwind)]
pub fn unguarded_pointer(backend: u32, policy: u32, way: u32) -> Result<f64> {
    Ok(unguarded!(backend, policy, way, |allocator: &mut ThreadAllocator<B>| allocator.as_ptr() as usize
        as f64)
    .unwrap_or(0.0))
}

/// A block from the slot, by a policy of its own.
#[napi(catch_unwind)]
pub fn unguarded_alloc(
    backend: u32,
    policy: u32,
    way: u32,
    block_policy: u32,
    bytes: f64,
    align: f64,
) -> Result<f64> {
    let (bytes, align, block_policy) = (bytes as usize, align as usize, Policy::from(block_policy));
    let block = unguarded!(backend, policy, way, |allocator: &mut ThreadAllocator<B>| {
        with_policy!(block_policy, Q => allocator.alloc::<Q>(bytes, align) as usize as f64)
    });
    Ok(block.unwrap_or_else(|| {
        set_last_error(AllocError::Reentrant);
        0.0
    }))
}

/// Frees a block through the slot.
#[napi(catch_unwind)]
pub fn unguarded_free(backend: u32, policy: u32, way: u32, block_policy: u32, block: f64) -> Result<()> {
    let (block, block_policy) = (block as usize as *mut u8, Policy::from(block_policy));
    let freed = unguarded!(backend, policy, way, |allocator: &mut ThreadAllocator<B>| {
        // SAFETY: the allocator checks the address exactly; that nobody uses the block is the program's word.
        with_policy!(block_policy, Q => unsafe { allocator.free::<Q>(block) })
    });
    match freed {
        Some(result) => result.map_err(free_failure),
        None => Err(failure(
            "INVALID_ARGUMENT",
            "called from inside a guarded withAllocator call: use the allocator that call was given, or threadFree",
        )),
    }
}
