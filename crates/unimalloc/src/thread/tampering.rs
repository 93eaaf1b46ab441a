//! What happens when something writes to the bookkeeping of Hardened blocks. Tests, inside the crate because nothing
//! outside can reach slot words.

use std::collections::HashSet;
use std::thread;

use crate::meta::slot;
use crate::meta::span::Span;
use crate::pool::span_of;
use crate::sync::Ordering::Relaxed;
use crate::{
    thread_alloc, thread_free, usable_size, FreeError, HardenedPolicy, HostBackend, MemoryBackend, POISON,
};

/// Backends of their own, so that tests do not see each other's corruptions.
macro_rules! own_backend {
    ($name:ident) => {
        struct $name;

        // SAFETY: all calls are passed on to a backend that keeps the promises.
        unsafe impl MemoryBackend for $name {
            unsafe fn allocate(size: usize) -> *mut u8 {
                // SAFETY: the same contract.
                unsafe { HostBackend::allocate(size) }
            }
            unsafe fn deallocate(ptr: *mut u8, size: usize) -> bool {
                // SAFETY: the same contract.
                unsafe { HostBackend::deallocate(ptr, size) }
            }
        }

        crate::backend_pools!($name);

        impl $name {
            fn alloc() -> *mut u8 {
                let block = thread_alloc::<HardenedPolicy, Self>(3000, 16);
                assert!(!block.is_null());
                block
            }

            fn free(block: *mut u8) -> Result<(), FreeError> {
                // SAFETY: tests free their own blocks, or look for a refusal.
                unsafe { thread_free::<HardenedPolicy, Self>(block) }
            }

            #[allow(dead_code)] // not every test looks
            fn corruptions() -> usize {
                <Self as crate::HasSegmentPool>::pools().corruptions()
            }
        }
    };
}

fn tag_of(span: &'static Span, index: usize) -> &'static crate::sync::AtomicU16 {
    &span.slots()[span.slots().len() / 2 + index]
}

#[test]
fn a_corrupted_free_list_retires_its_span_and_the_process_goes_on() {
    own_backend!(Lists);
    let block = Lists::alloc();
    let span = span_of(block as usize).unwrap();
    let head = usize::from(span.free_head.load(Relaxed));
    span.slots()[head].fetch_xor(0x0004, Relaxed); // the link of the next block to be handed out
    let more: Vec<_> = (0..200).map(|_| Lists::alloc()).collect();
    assert_eq!(Lists::corruptions(), 1, "reported once");
    assert!(more.iter().all(|other| !std::ptr::eq(span_of(*other as usize).unwrap(), span)), "retired");
    assert_eq!(more.iter().collect::<HashSet<_>>().len(), more.len());
    crate::audit::<Lists>().unwrap();
    // Its live block is still valid, and freed once; remotely too.
    assert!(usable_size::<Lists>(block) >= 3000);
    assert_eq!(Lists::free(block), Ok(()));
    assert_eq!(Lists::free(block), Err(FreeError::DoubleFree));
    for other in more {
        assert_eq!(Lists::free(other), Ok(()));
    }
    // The rest goes back; the retired span keeps its segment.
    crate::trim::<Lists>(0);
    assert!(crate::stats::<Lists>().reserved_bytes > 0);
    assert_eq!(crate::audit::<Lists>().unwrap().live_blocks, 0);
}

#[test]
fn a_block_whose_tag_was_written_to_is_corrupted_and_stays() {
    own_backend!(Tags);
    let block = Tags::alloc();
    let span = span_of(block as usize).unwrap();
    let (index, _) = span.slot_at(block as usize).unwrap();
    let tag = tag_of(span, index);
    tag.fetch_xor(1, Relaxed);
    assert_eq!(Tags::free(block), Err(FreeError::Corrupted));
    let address = block as usize;
    let elsewhere = thread::spawn(move || Tags::free(address as *mut u8)).join().unwrap();
    assert_eq!(elsewhere, Err(FreeError::Corrupted));
    assert_eq!(Tags::corruptions(), 2);
    tag.fetch_xor(1, Relaxed);
    assert_eq!(Tags::free(block), Ok(()));
}

#[test]
fn a_resting_block_whose_word_was_written_to_is_never_handed_out_again() {
    own_backend!(Resting);
    let block = Resting::alloc();
    let span = span_of(block as usize).unwrap();
    let (index, word) = span.slot_at(block as usize).unwrap();
    Resting::free(block).unwrap();
    assert_eq!(word.load(Relaxed), slot::QUARANTINED);
    tag_of(span, index).fetch_xor(0x100, Relaxed);
    for _ in 0..2000 {
        let other = Resting::alloc();
        assert_ne!(other, block);
        Resting::free(other).unwrap();
    }
    assert_eq!(Resting::corruptions(), 1);
}

#[test]
fn a_resting_block_reads_as_poison() {
    own_backend!(Poisoned);
    let block = Poisoned::alloc();
    let usable = usable_size::<Poisoned>(block);
    Poisoned::free(block).unwrap();
    // SAFETY: the span's pages stay mapped, and the block is handed to nobody yet.
    assert!((0..usable).all(|at| unsafe { block.add(at).read_volatile() } == POISON));
}
