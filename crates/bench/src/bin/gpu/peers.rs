//! The allocators that are compared, and the cap on what they hold.

use unimalloc::cuda::Stream;
use unimalloc::{
    alloc_with, last_error, stats, thread_alloc, thread_free, trim, AllocOptions, CudaUnifiedBackend, Place,
    Placement, StandardPolicy,
};

use crate::driver::Driver;

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

type B = CudaUnifiedBackend;
type P = StandardPolicy;

/// The most that this crate may hold alone, and beside blocks of the driver's.
pub const ALONE: usize = 1024 * MIB;
pub const BESIDE_OTHERS: usize = 640 * MIB;

pub fn limit(bytes: usize) {
    CudaUnifiedBackend::set_limit(Some(bytes as u64));
}

/// The driver and a stream of this crate's.
pub struct Gpu {
    pub driver: Driver,
    pub stream: Stream,
}

impl Gpu {
    pub fn new() -> Result<Self, String> {
        let stream = Stream::new(0).map_err(|error| error.to_string())?;
        Ok(Self { driver: Driver::open()?, stream })
    }
}

#[inline(always)]
pub fn alloc(size: usize) -> *mut u8 {
    found(thread_alloc::<P, B>(size, 256))
}

pub fn options(placement: Placement) -> AllocOptions {
    AllocOptions { place: Place { device: 0, placement }, ..AllocOptions::default() }
}

#[inline(always)]
pub fn alloc_in(size: usize, placement: Placement) -> *mut u8 {
    found(alloc_with::<P, B>(size, 256, &options(placement)))
}

pub fn alloc_on(size: usize, placement: Placement, stream: &Stream) -> *mut u8 {
    found(unimalloc::alloc_on_stream::<P, B>(size, 256, &options(placement), stream))
}

#[inline(always)]
fn found(block: *mut u8) -> *mut u8 {
    if block.is_null() {
        panic!("no block: {:?}", last_error());
    }
    block
}

#[inline(always)]
pub fn free(block: *mut u8) {
    // SAFETY: from one of the functions above, and freed once.
    if let Err(error) = unsafe { thread_free::<P, B>(block) } {
        panic!("a free was refused: {error}");
    }
}

/// Bytes held from the driver.
pub fn reserved() -> usize {
    stats::<B>().reserved_bytes
}

pub fn give_all_back() {
    trim::<B>(0);
}
