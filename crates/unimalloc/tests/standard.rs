//! The Standard policy, over host memory and over memory that cannot be touched.

mod common;

macro_rules! suite {
    ($name:ident, $backend:ty) => {
        mod $name {
            use std::collections::HashSet;
            use std::sync::mpsc;
            use std::thread;

            use unimalloc::{
                last_error, trim, usable_size, AllocError, FreeError, HasSegmentPool, StandardPolicy,
                ThreadAllocator,
            };

            use super::common::{alloc as alloc_any, alone, free as free_any, Random};

            type B = $backend;

            fn alloc(size: usize, align: usize) -> *mut u8 {
                alloc_any::<StandardPolicy, B>(size, align)
            }

            fn free(block: *mut u8) -> Result<(), FreeError> {
                free_any::<StandardPolicy, B>(block)
            }

            #[test]
            fn blocks_are_disjoint_aligned_and_large_enough() {
                let _alone = alone();
                let mut random = Random(1);
                let mut blocks: Vec<(usize, usize)> = Vec::new();
                for round in 0..3000 {
                    let align = 1 << random.below(22);
                    let size = random.size(1 << 22);
                    let block = alloc(size, align);
                    let usable = usable_size::<B>(block);
                    assert!(usable >= size);
                    blocks.push((block as usize, usable));
                    if round % 3 == 0 {
                        let (block, _) = blocks.swap_remove(random.below(blocks.len()));
                        free(block as *mut u8).unwrap();
                    }
                }
                blocks.sort_unstable();
                for pair in blocks.windows(2) {
                    assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
                }
                for (block, _) in blocks {
                    free(block as *mut u8).unwrap();
                }
            }

            #[test]
            fn size_zero_is_a_block_like_any_other() {
                let _alone = alone();
                let (a, b) = (alloc(0, 1), alloc(0, 1));
                assert_ne!(a, b);
                assert!(usable_size::<B>(a) > 0);
                free(a).unwrap();
                free(b).unwrap();
                assert_eq!(free(a), Err(FreeError::DoubleFree));
            }

            #[test]
            fn freeing_null_is_nothing() {
                let _alone = alone();
                assert_eq!(free(std::ptr::null_mut()), Ok(()));
            }

            #[test]
            fn impossible_requests_are_null_with_the_reason() {
                let _alone = alone();
                let null = unimalloc::thread_alloc::<StandardPolicy, B>;
                for (size, align, reason) in [
                    (16, 0, AllocError::InvalidAlignment),
                    (16, 3, AllocError::InvalidAlignment),
                    (16, 4 << 20, AllocError::InvalidAlignment),
                    (16, usize::MAX, AllocError::InvalidAlignment),
                    (usize::MAX, 16, AllocError::InvalidSize),
                    (isize::MAX as usize, 16, AllocError::InvalidSize),
                    (isize::MAX as usize + 1, 2 << 20, AllocError::InvalidSize),
                    (usize::MAX - 4095, 4096, AllocError::InvalidSize),
                ] {
                    assert!(null(size, align).is_null());
                    assert_eq!(last_error(), Some(reason), "{size} {align}");
                }
            }

            /// Sizes of every kind: classes of each span length, large, huge; and alignment beyond a granule.
            const KINDS: [(usize, usize); 8] = [
                (16, 16),
                (1000, 8),
                (20_000, 256),
                (100_000, 16),
                (700_000, 4096),
                (5 << 20, 16),
                (40 << 20, 16),
                (5000, 1 << 20),
            ];

            #[test]
            fn a_double_free_is_found_for_every_kind_of_block() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc(size, align);
                    free(block).unwrap();
                    assert_eq!(free(block), Err(FreeError::DoubleFree), "{size}");
                    assert_eq!(usable_size::<B>(block), 0);
                }
            }

            #[test]
            fn an_interior_free_is_found_for_every_kind_of_block() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc(size, align);
                    for offset in [1, 8, size / 2, size - 1] {
                        let inside = block.wrapping_add(offset);
                        assert_eq!(free(inside), Err(FreeError::Interior), "{size} + {offset}");
                        assert_eq!(usable_size::<B>(inside), 0);
                    }
                    free(block).unwrap();
                }
            }

            #[test]
            fn foreign_pointers_are_not_ours() {
                let _alone = alone();
                let on_stack = 0u8;
                let on_heap = Box::new(0u64);
                for address in [
                    1usize,
                    4096,
                    &raw const on_stack as usize,
                    &raw const *on_heap as usize,
                    1 << 47,
                    usize::MAX,
                    usize::MAX & !0xFFFF,
                ] {
                    assert_eq!(free(address as *mut u8), Err(FreeError::NotOurs), "{address:x}");
                }
            }

            #[test]
            fn the_tail_of_a_span_is_no_block() {
                let _alone = alone();
                // 48 does not divide 64 KiB: the last 16 bytes of the span would be block 1365 if it went on.
                let mut blocks: Vec<_> = (0..5000).map(|_| alloc(48, 16)).collect();
                let spans: HashSet<usize> = blocks.iter().map(|block| *block as usize & !0xFFFF).collect();
                for span in spans {
                    let tail = (span + 1365 * 48) as *mut u8;
                    assert_eq!(free(tail), Err(FreeError::DoubleFree));
                }
                blocks.drain(..).for_each(|block| free(block).unwrap());
            }

            #[test]
            fn a_block_may_be_freed_by_another_thread_and_only_once() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = alloc(size, align) as usize;
                    let results = thread::scope(|scope| {
                        [(); 2].map(|()| scope.spawn(move || free(block as *mut u8)).join().unwrap())
                    });
                    assert_eq!(results, [Ok(()), Err(FreeError::DoubleFree)], "{size}");
                    assert_eq!(free(block as *mut u8), Err(FreeError::DoubleFree), "{size}");
                }
            }

            #[test]
            fn a_block_outlives_its_thread() {
                let _alone = alone();
                for (size, align) in KINDS {
                    let block = thread::spawn(move || alloc(size, align) as usize).join().unwrap();
                    assert!(usable_size::<B>(block as *const u8) >= size);
                    free(block as *mut u8).unwrap();
                    assert_eq!(free(block as *mut u8), Err(FreeError::DoubleFree));
                }
            }

            #[test]
            fn a_consumer_that_frees_all_feeds_the_producer_for_ever() {
                let _alone = alone();
                let mut producer = ThreadAllocator::<B>::new();
                let (send, receive) = mpsc::sync_channel::<usize>(64);
                let consumer = thread::spawn(move || {
                    for block in receive {
                        free(block as *mut u8).unwrap();
                    }
                });
                let mut seen = HashSet::new();
                for _ in 0..200_000 {
                    let block = producer.alloc::<StandardPolicy>(1024, 16);
                    assert!(!block.is_null());
                    seen.insert(block as usize & !0xFFFF);
                    send.send(block as usize).unwrap();
                }
                drop(send);
                consumer.join().unwrap();
                // 200,000 KiB went through; without reuse that would be 3,125 spans.
                assert!(seen.len() < 64, "{} spans", seen.len());
            }

            #[test]
            fn trim_returns_what_is_free() {
                let _alone = alone();
                let block = alloc(64 << 20, 16);
                free(block).unwrap();
                assert!(B::pools().huge.bytes() >= 64 << 20);
                assert!(trim::<B>(0) >= 64 << 20);
            }

            #[test]
            fn spans_of_ended_threads_are_adopted() {
                let _alone = alone();
                let mut segments = HashSet::new();
                let mut kept = Vec::new();
                for _ in 0..300 {
                    kept.extend(thread::spawn(|| [alloc(3000, 16) as usize]).join().unwrap());
                    segments.insert(kept[kept.len() - 1] & !0xFFFF);
                }
                // 21 blocks of 3,072 bytes fit a span, so 300 threads with one block each need 15 spans.
                assert!(segments.len() <= 40, "{}", segments.len());
                kept.into_iter().for_each(|block| free(block as *mut u8).unwrap());
            }
        }
    };
}

suite!(host, unimalloc::HostBackend);
suite!(untouchable, crate::common::prot_none::ProtNone);
