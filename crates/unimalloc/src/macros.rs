//! [`backend_pools!`](crate::backend_pools): pools and slots for a backend, of this crate or of another.

/// Gives a [`MemoryBackend`](crate::MemoryBackend) its static pools and per-thread slots, so that it can be allocated from.
///
/// ```
/// use unimalloc::{backend_pools, thread_alloc, thread_free, HostBackend, MemoryBackend, StandardPolicy};
///
/// /// Host memory, counted.
/// pub struct Counted;
///
/// // SAFETY: all calls are passed on to a backend that keeps the promises.
/// unsafe impl MemoryBackend for Counted {
///     unsafe fn allocate(size: usize) -> *mut u8 {
///         println!("{size} bytes more");
///         unsafe { HostBackend::allocate(size) }
///     }
///     unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
///         unsafe { HostBackend::deallocate(ptr, size) }
///     }
/// }
/// backend_pools!(Counted);
///
/// let block = thread_alloc::<StandardPolicy, Counted>(100, 16);
/// assert!(!block.is_null());
/// unsafe { thread_free::<StandardPolicy, Counted>(block) }.unwrap();
/// ```
#[macro_export]
macro_rules! backend_pools {
    ($backend:ty) => {
        const _: () = {
            static POOLS: $crate::BackendPools = $crate::BackendPools::new();
            static SHARED: $crate::SharedHeaps = $crate::SharedHeaps::new();

            ::std::thread_local! {
                static SLOTS: $crate::Slots = const { $crate::Slots::new() };
                static SENTINEL: Sentinel = const { Sentinel };
            }

            /// Its destructor runs when the thread ends.
            struct Sentinel;

            impl Drop for Sentinel {
                fn drop(&mut self) {
                    SLOTS.with(|slots| slots.tear_down());
                }
            }

            impl $crate::HasSegmentPool for $backend {
                fn pools() -> &'static $crate::BackendPools {
                    &POOLS
                }
            }

            // SAFETY: `SLOTS` is one thread-local without a destructor, so it lives as long as its thread; the
            // sentinel's destructor tears it down, and `try_with` fails once that has run.
            unsafe impl $crate::ThreadSlots for $backend {
                #[inline(always)]
                fn with_slots<R>(f: impl FnOnce(&$crate::Slots) -> R) -> R {
                    SLOTS.with(f)
                }

                fn arm_sentinel() -> bool {
                    SENTINEL.try_with(|_| ()).is_ok()
                }

                fn shared() -> &'static $crate::SharedHeaps {
                    &SHARED
                }
            }
        };
    };
}

crate::backend_pools!(crate::HostBackend);
crate::backend_pools!(crate::CudaUnifiedBackend);
