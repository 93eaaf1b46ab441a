//! From the numbers that JavaScript passes to the types that the allocator is generic over.

use std::sync::Arc;

use unimalloc::cuda::Stream;
use unimalloc::{AllocOptions, BackendStats, FreeError, Freed, MemoryBackend, Notify, Place, Placement};

use crate::account::{Account, Settlement};

/// Which backend; the discriminants are the numbers in `ts/native.ts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    Cuda = 0,
    Host = 1,
}

/// Which policy; the discriminants are the numbers in `ts/native.ts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Standard = 0,
    Secure = 1,
    Hardened = 2,
}

impl From<u32> for Backend {
    fn from(number: u32) -> Self {
        if number == 0 {
            Self::Cuda
        } else {
            Self::Host
        }
    }
}

impl From<u32> for Policy {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::Standard,
            1 => Self::Secure,
            _ => Self::Hardened,
        }
    }
}

/// Placement by its number in `ts/native.ts`.
pub fn placement(number: u32) -> Placement {
    match number {
        1 => Placement::Host,
        2 => Placement::Device,
        3 => Placement::ReadMostly,
        _ => Placement::Auto,
    }
}

/// Runs the body with `$B` naming the backend's type.
macro_rules! with_backend {
    ($backend:expr, $B:ident => $body:expr) => {
        match $backend {
            $crate::dispatch::Backend::Cuda => {
                type $B = unimalloc::CudaUnifiedBackend;
                $body
            }
            $crate::dispatch::Backend::Host => {
                type $B = unimalloc::HostBackend;
                $body
            }
        }
    };
}

/// Runs the body with `$P` naming the policy's type.
macro_rules! with_policy {
    ($policy:expr, $P:ident => $body:expr) => {
        match $policy {
            $crate::dispatch::Policy::Standard => {
                type $P = unimalloc::StandardPolicy;
                $body
            }
            $crate::dispatch::Policy::Secure => {
                type $P = unimalloc::SecurePolicy;
                $body
            }
            $crate::dispatch::Policy::Hardened => {
                type $P = unimalloc::HardenedPolicy;
                $body
            }
        }
    };
}

pub(crate) use {with_backend, with_policy};

impl Backend {
    /// A block, or null with the reason in `unimalloc::last_error()`. With a stream, one that later work on it may use.
    pub fn alloc(
        self,
        policy: Policy,
        size: usize,
        align: usize,
        options: &AllocOptions,
        stream: Option<&Stream>,
    ) -> *mut u8 {
        with_backend!(self, B => with_policy!(policy, P => match stream {
            Some(stream) => unimalloc::alloc_on_stream::<P, B>(size, align, options, stream),
            None => unimalloc::alloc_with::<P, B>(size, align, options),
        }))
    }

    /// Gives a block back, and settles with its account once no stream uses it any more.
    ///
    /// # Safety
    /// Nobody uses the block any more, but for work queued on streams.
    pub unsafe fn free(self, ptr: *mut u8, account: &Arc<Account>, usable: u64) -> Result<(), FreeError> {
        let settlement = Settlement::new(account, usable);
        let notify = Notify { call: Settlement::notify, tag: settlement.tag() };
        // SAFETY: the caller's promise, passed on.
        match with_backend!(self, B => unsafe { unimalloc::free_notify::<B>(ptr, notify) }) {
            // Whoever takes the block up settles: the tag is theirs now.
            Ok(Freed::Pending) => {}
            Ok(Freed::Now) => settlement.settle(),
            Err(error) => {
                settlement.forget();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back a block that no stream was given.
    ///
    /// # Safety
    /// Nobody uses the block any more.
    pub unsafe fn free_now(self, policy: Policy, ptr: *mut u8) -> Result<(), FreeError> {
        // SAFETY: the caller's promise, passed on.
        with_backend!(self, B => with_policy!(policy, P => unsafe { unimalloc::thread_free::<P, B>(ptr) }))
    }

    /// Moves a block to a new size.
    ///
    /// # Safety
    /// Nobody else uses the block, and nobody uses its old address afterwards.
    pub unsafe fn realloc(self, policy: Policy, ptr: *mut u8, size: usize, align: usize) -> *mut u8 {
        // SAFETY: the caller's promise, passed on.
        with_backend!(self, B => with_policy!(policy, P => unsafe {
            unimalloc::thread_realloc::<P, B>(ptr, size, align)
        }))
    }

    /// Bytes usable behind the start of a live block; 0 for any other pointer.
    pub fn usable_size(self, ptr: *const u8) -> usize {
        with_backend!(self, B => unimalloc::usable_size::<B>(ptr))
    }

    /// Releases free memory beyond `keep_bytes`; answers the bytes given back.
    pub fn trim(self, keep_bytes: usize) -> usize {
        with_backend!(self, B => unimalloc::trim::<B>(keep_bytes))
    }

    /// The backend's figures, shared by all allocators.
    pub fn stats(self) -> BackendStats {
        with_backend!(self, B => unimalloc::stats::<B>())
    }

    /// Copies between two blocks, complete when it returns, on the side where the bytes live.
    ///
    /// # Safety
    /// Both ranges lie inside blocks of this backend that the caller owns, and do not overlap.
    pub unsafe fn copy(self, to: *mut u8, from: *const u8, len: usize) -> bool {
        // SAFETY: the caller's promise, passed on.
        with_backend!(self, B => unsafe { B::copy(to, from, len) })
    }
}

/// A place from the numbers JavaScript passes.
pub fn place(device: u16, placement_number: u32) -> Place {
    Place { device, placement: placement(placement_number) }
}
