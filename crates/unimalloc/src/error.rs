//! Typed errors, and the reason each thread keeps for its latest null, `false` or refusal.

use std::cell::Cell;
use std::fmt;

/// Why a block could not be freed. The block, if there is one, is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FreeError {
    /// The address lies in no memory this backend holds.
    NotOurs,
    /// The address lies inside a live block but is not its start.
    Interior,
    /// The address is the start of no live block: it was freed before, or never handed out.
    DoubleFree,
    /// The block's bookkeeping, or a redzone around it, does not verify.
    Corrupted,
    /// The process is the child of a `fork`; CUDA memory cannot be used or freed here.
    Forked,
}

impl fmt::Display for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotOurs => {
                "the pointer was not allocated by this backend: free it with the allocator that made it"
            }
            Self::Interior => {
                "the pointer lies inside a live block, not at its start: free the address the allocation returned"
            }
            Self::DoubleFree => "the block is not live: it was freed before; look for a second owner of this pointer",
            Self::Corrupted => {
                "the block's bookkeeping or redzone does not verify: something wrote outside its own block; \
                 look for out-of-bounds writes near it"
            }
            Self::Forked => "this process is the child of a fork: start a fresh process (spawn) to use the allocator",
        })
    }
}

impl std::error::Error for FreeError {}

/// Why an allocation returned null, a release returned `false`, or a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocError {
    /// The size is zero where it may not be, not a multiple of 4,096 where it must be, or above `isize::MAX`.
    InvalidSize,
    /// The alignment is not a power of two, or above 2 MiB.
    InvalidAlignment,
    /// The policy's free-list mode differs from the allocator's.
    ModeMismatch,
    /// libcuda was not found, or is too old to have an entry point that is needed.
    NoDriver,
    /// The driver works but reports no such device.
    NoDevice,
    /// The device, the driver or the operating system cannot do what was asked.
    Unsupported,
    /// The driver answered with this `CUresult`.
    Driver(u32),
    /// A kernel fault destroyed the CUDA context; its memory is gone.
    ContextLost,
    /// The bounded registry of driver allocations is full.
    RegistryFull,
    /// The process-wide or the allocator's own ceiling would be exceeded.
    Budget,
    /// The backend had no more memory.
    OutOfMemory,
    /// The pointer is not a live allocation or allocator of this thread and backend.
    NotRegistered,
    /// The process is the child of a `fork`.
    Forked,
    /// The call came from inside a guarded call on the same thread.
    Reentrant,
    /// The address range is not page-aligned, or not wholly inside one live backend allocation.
    InvalidRange,
    /// `UNIMALLOC_MAX_BYTES` or `UNIMALLOC_REGISTRY_CAPACITY` is not understood.
    InvalidConfiguration,
}

impl AllocError {
    /// Whether memory that comes back may cure it.
    pub(crate) fn is_shortage(self) -> bool {
        matches!(self, Self::Budget | Self::OutOfMemory | Self::RegistryFull | Self::Driver(2))
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidSize => {
                "no block can have this size: ask for less than isize::MAX bytes, and of a backend directly \
                 (MemoryBackend::allocate) for a positive multiple of 4096"
            }
            Self::InvalidAlignment => "invalid alignment: use a power of two up to 2 MiB",
            Self::ModeMismatch => {
                "the policy's free-list mode is not this allocator's: use ThreadAllocator::new_encrypted() with \
                 HardenedPolicy and ThreadAllocator::new() with the others"
            }
            Self::NoDriver => {
                "no usable NVIDIA driver: libcuda.so.1 (nvcuda.dll) was not found or did not start; install the \
                 NVIDIA driver, or use the host backend"
            }
            Self::NoDevice => {
                "the NVIDIA driver reports no such device: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the host backend"
            }
            Self::Unsupported => {
                "not supported by this device, driver or operating system: use the host backend or another placement"
            }
            Self::Driver(code) => {
                return write!(f, "the CUDA driver answered error {code}: look it up under CUresult in the driver API")
            }
            Self::ContextLost => {
                "a kernel fault destroyed the CUDA context: fix the kernel (compute-sanitizer finds the access) and restart"
            }
            Self::RegistryFull => {
                "the registry of driver allocations is full: free memory, call trim, or raise UNIMALLOC_REGISTRY_CAPACITY"
            }
            Self::Budget => {
                "the memory budget is spent: free blocks, call trim, or raise UNIMALLOC_MAX_BYTES or maxBytes"
            }
            Self::OutOfMemory => "the backend has no more memory: free blocks or call trim",
            Self::NotRegistered => {
                "the pointer is not a live allocation or allocator of this thread and backend: pass the pointer as it was returned"
            }
            Self::Forked => "this process is the child of a fork: start a fresh process (spawn) to use the allocator",
            Self::Reentrant => {
                "called from inside a with_allocator closure of this thread: make the call after the closure returns"
            }
            Self::InvalidRange => {
                "the range is not page-aligned or not wholly inside one live allocation: pass a range of whole pages of it"
            }
            Self::InvalidConfiguration => {
                "an environment variable is not understood: UNIMALLOC_MAX_BYTES takes bytes, '8GiB', '50%' or \
                 'Infinity', UNIMALLOC_REGISTRY_CAPACITY a positive whole number"
            }
        })
    }
}

impl std::error::Error for AllocError {}

thread_local! {
    static LAST_ERROR: Cell<Option<AllocError>> = const { Cell::new(None) };
}

/// This thread's reason for its latest null, `false` or refusal; `None` when nothing has failed yet.
/// A later success does not clear it.
pub fn last_error() -> Option<AllocError> {
    LAST_ERROR.with(Cell::get)
}

/// Runs `f` and answers the reason that it recorded, if any. On a success the earlier reason stays in place.
pub(crate) fn reason_of<R>(f: impl FnOnce() -> Option<R>) -> Result<R, Option<AllocError>> {
    let before = LAST_ERROR.with(|last| last.replace(None));
    match f() {
        Some(result) => {
            LAST_ERROR.with(|last| last.set(before));
            Ok(result)
        }
        None => Err(last_error()),
    }
}

/// Records the reason for a null, `false` or refusal that this thread is about to return.
///
/// For implementors of [`MemoryBackend`](crate::MemoryBackend): call it before returning null or `false`.
#[cold]
pub fn set_last_error(error: AllocError) {
    LAST_ERROR.with(|last| last.set(Some(error)));
}
