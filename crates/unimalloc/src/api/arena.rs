//! [`Arena`]: allocation with fixed options, also for collections.

use std::alloc::Layout;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use allocator_api2::alloc::{AllocError as Failed, Allocator};

use super::free_functions::{
    alloc_on_stream, alloc_with, realloc_with, thread_free, usable_size, AllocOptions,
};
use crate::cuda::Stream;
use crate::error::FreeError;
use crate::placement::Placement;
use crate::policy::{AllocPolicy, StandardPolicy};
use crate::thread::slots::ThreadSlots;
use crate::CudaUnifiedBackend;

/// Allocates blocks of one kind: where they live, on which device, and whether they start as zeros.
///
/// It holds no memory itself. Blocks come from the calling thread's allocator and go back to it, so copies of an arena are
/// interchangeable, and a block may be freed by any of them or by [`thread_free`].
///
/// As an [`Allocator`] it serves the collections of [`allocator_api2`](crate::allocator_api2) on stable Rust:
///
/// ```
/// use unimalloc::allocator_api2::vec::Vec;
/// use unimalloc::{Arena, HostBackend, Placement, StandardPolicy};
///
/// let arena = Arena::<HostBackend, StandardPolicy>::new().placement(Placement::Host);
/// let mut samples = Vec::new_in(arena);
/// samples.extend((0..1000).map(|i| i as f32));
/// assert_eq!(samples[999], 999.0);
/// ```
///
/// A collection that cannot have its memory ends the process, as those of `std` do, and an arena over [`CudaUnifiedBackend`] has none without a
/// GPU. Ask [`is_cuda_available`](crate::is_cuda_available) first, or grow by `try_reserve`.
pub struct Arena<B = CudaUnifiedBackend, P = StandardPolicy> {
    options: AllocOptions,
    kind: PhantomData<fn() -> (B, P)>,
}

impl<B, P> Clone for Arena<B, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B, P> Copy for Arena<B, P> {}

impl<B, P> std::fmt::Debug for Arena<B, P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("options", &self.options).finish()
    }
}

impl<B, P> Default for Arena<B, P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B, P> Arena<B, P> {
    /// Device 0, no placement, group 0, contents as they come unless the policy zeroes.
    pub const fn new() -> Self {
        Self::with_options(AllocOptions { place: crate::placement::Place::DEFAULT, zeroed: false, group: 0 })
    }

    /// An arena with these options.
    pub const fn with_options(options: AllocOptions) -> Self {
        Self { options, kind: PhantomData }
    }

    /// Who touches the blocks most.
    #[must_use]
    pub const fn placement(mut self, placement: Placement) -> Self {
        self.options.place.placement = placement;
        self
    }

    /// Index of the device in CUDA's enumeration.
    #[must_use]
    pub const fn device(mut self, device: u16) -> Self {
        self.options.place.device = device;
        self
    }

    /// Blocks of different groups never share a span.
    #[must_use]
    pub const fn group(mut self, group: u8) -> Self {
        self.options.group = group;
        self
    }

    /// Whether blocks read as zero when they are handed out, and what [`realloc`](Self::realloc) adds to them.
    #[must_use]
    pub const fn zeroed(mut self, zeroed: bool) -> Self {
        self.options.zeroed = zeroed;
        self
    }

    /// The options.
    pub const fn options(&self) -> AllocOptions {
        self.options
    }
}

impl<B: ThreadSlots, P: AllocPolicy> Arena<B, P> {
    /// A block, or null with the reason in [`last_error`](crate::last_error).
    pub fn alloc(&self, size: usize, align: usize) -> *mut u8 {
        alloc_with::<P, B>(size, align, &self.options)
    }

    /// A block for use on `stream`, as [`alloc_on_stream`](crate::alloc_on_stream) gives.
    pub fn alloc_on(&self, stream: &Stream, size: usize, align: usize) -> *mut u8 {
        alloc_on_stream::<P, B>(size, align, &self.options, stream)
    }

    /// Frees a block.
    ///
    /// # Safety
    /// As [`thread_free`].
    pub unsafe fn free(&self, block: *mut u8) -> Result<(), FreeError> {
        // SAFETY: the caller's promise.
        unsafe { thread_free::<P, B>(block) }
    }

    /// Resizes a block, as [`thread_realloc`](crate::thread_realloc) does; in a zeroed arena what is new reads as zero.
    ///
    /// # Safety
    /// As [`thread_realloc`](crate::thread_realloc).
    pub unsafe fn realloc(&self, block: *mut u8, new_size: usize, align: usize) -> *mut u8 {
        if block.is_null() {
            return self.alloc(new_size, align);
        }
        // SAFETY: the caller's promise.
        unsafe { realloc_with::<B>(block, new_size, align, self.options.zeroed) }
    }

    fn block(&self, layout: Layout, options: &AllocOptions) -> Result<NonNull<[u8]>, Failed> {
        if layout.size() == 0 {
            // Collections ask for nothing and give nothing back; the address only has to be aligned.
            let nowhere = NonNull::new(ptr::without_provenance_mut(layout.align())).ok_or(Failed)?;
            return Ok(NonNull::slice_from_raw_parts(nowhere, 0));
        }
        let block = alloc_with::<P, B>(layout.size(), layout.align(), options);
        whole::<B>(block)
    }

    /// # Safety
    /// As [`Allocator::grow`] or [`Allocator::shrink`].
    unsafe fn resize(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
        zeroed: bool,
    ) -> Result<NonNull<[u8]>, Failed> {
        if old.size() == 0 {
            return self.block(new, &AllocOptions { zeroed, ..self.options });
        }
        if new.size() == 0 {
            // SAFETY: the caller gives the block up.
            unsafe { self.deallocate(block, old) };
            return self.block(new, &self.options);
        }
        // SAFETY: the block is live and the caller's.
        let resized = unsafe { realloc_with::<B>(block.as_ptr(), new.size(), new.align(), zeroed) };
        if zeroed && !resized.is_null() && new.size() > old.size() {
            // The tail of the old block may have been written to beyond its layout: collections use all they are given.
            // SAFETY: the range lies inside the new block.
            if !unsafe { B::fill(resized.add(old.size()), 0, new.size() - old.size()) } {
                return Err(Failed);
            }
        }
        whole::<B>(resized)
    }
}

/// A block with all the bytes that may be used.
fn whole<B: ThreadSlots>(block: *mut u8) -> Result<NonNull<[u8]>, Failed> {
    let block = NonNull::new(block).ok_or(Failed)?;
    Ok(NonNull::slice_from_raw_parts(block, usable_size::<B>(block.as_ptr())))
}

// SAFETY: blocks stay valid until they are freed, whatever becomes of the arena, and every copy of an arena frees the
// blocks of the others: they are the backend's, found by address.
unsafe impl<B: ThreadSlots, P: AllocPolicy> Allocator for Arena<B, P> {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, Failed> {
        self.block(layout, &self.options)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, Failed> {
        self.block(layout, &AllocOptions { zeroed: true, ..self.options })
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() != 0 {
            // There is nobody to tell of an error: it is counted (`BackendStats`), and the block stays as it is.
            // SAFETY: the caller's promise.
            let _ = unsafe { thread_free::<P, B>(block.as_ptr()) };
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, Failed> {
        // SAFETY: the caller's promise.
        unsafe { self.resize(block, old, new, self.options.zeroed) }
    }

    unsafe fn grow_zeroed(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, Failed> {
        // SAFETY: the caller's promise.
        unsafe { self.resize(block, old, new, true) }
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, Failed> {
        // SAFETY: the caller's promise.
        unsafe { self.resize(block, old, new, false) }
    }
}
