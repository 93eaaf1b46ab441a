//! Blocks lent to a magazine outside the crate.

mod common;

use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use common::{alloc, free};
use unimalloc::magazine::{self, LentSpan, HELD, LIVE};
use unimalloc::{stats, trim, usable_size, AllocError, FreeError, HostBackend, Place, StandardPolicy};

type B = HostBackend;

const GROUP: u8 = 9;

fn borrow(size: usize, count: usize) -> Vec<(LentSpan, u16, bool)> {
    let mut lent = Vec::new();
    let got = magazine::borrow::<B>(size, 256, Place::DEFAULT, GROUP, count, |span, index, fresh| {
        lent.push((span, index, fresh));
    });
    assert_eq!(got, Ok(lent.len()));
    lent
}

fn address(span: LentSpan, index: u16) -> *mut u8 {
    (span.base + usize::from(index) * span.block) as *mut u8
}

fn set(span: LentSpan, index: u16, word: u16) {
    // SAFETY: the tests write to words of blocks that were lent to them.
    let words = unsafe { span.words() };
    words[usize::from(index)].store(word, Relaxed);
}

/// On a thread of its own, so that pins of one test are not those of another.
fn on_a_thread(test: impl FnOnce() + Send + 'static) {
    thread::spawn(test).join().unwrap();
}

#[test]
fn lent_blocks_are_held_and_each_span_is_announced_once() {
    on_a_thread(|| {
        let lent = borrow(1000, 200);
        assert_eq!(lent.len(), 200);
        let mut spans: Vec<LentSpan> = Vec::new();
        for &(span, index, fresh) in &lent {
            assert_eq!(fresh, !spans.contains(&span));
            if fresh {
                spans.push(span);
            }
            // SAFETY: only looked at.
            assert_eq!(unsafe { span.words() }[usize::from(index)].load(Relaxed), HELD);
            assert_eq!(usable_size::<B>(address(span, index)), 0);
            assert_eq!(free::<StandardPolicy, B>(address(span, index)), Err(FreeError::DoubleFree));
        }
        for (span, index, _) in lent {
            assert!(magazine::give_back::<B>(span, index));
            assert!(!magazine::give_back::<B>(span, index), "given back twice");
        }
        assert!(spans.into_iter().all(magazine::unpin::<B>));
    });
}

#[test]
fn a_block_handed_out_by_the_borrower_is_like_any_other() {
    on_a_thread(|| {
        let (span, index, _) = borrow(5000, 1)[0];
        let block = address(span, index);
        set(span, index, LIVE);
        assert_eq!(usable_size::<B>(block), span.block);
        assert_eq!(free::<StandardPolicy, B>(block.wrapping_add(8)), Err(FreeError::Interior));
        let remote = block as usize;
        on_a_thread(move || free::<StandardPolicy, B>(remote as *mut u8).unwrap());
        assert_eq!(free::<StandardPolicy, B>(block), Err(FreeError::DoubleFree));
        assert!(!magazine::give_back::<B>(span, index));
        assert!(magazine::unpin::<B>(span));
    });
}

#[test]
fn a_pinned_span_keeps_its_memory_until_it_is_unpinned() {
    on_a_thread(|| {
        let lent = borrow(300_000, 8);
        let spans: Vec<LentSpan> = lent.iter().filter(|lent| lent.2).map(|lent| lent.0).collect();
        for &(span, index, _) in &lent {
            assert!(!magazine::unpin::<B>(span), "blocks are held");
            assert!(magazine::give_back::<B>(span, index));
        }
        trim::<B>(0);
        for span in &spans {
            // SAFETY: pinned, so the memory is there although every block is free.
            unsafe { (span.base as *mut u8).write(1) };
            assert!(magazine::unpin::<B>(*span));
            assert!(!magazine::unpin::<B>(*span));
        }
    });
}

#[test]
fn a_borrower_that_goes_leaves_only_flagged_blocks() {
    on_a_thread(|| {
        let lent = borrow(2000, 3);
        let [live, flagged, held] = [0, 1, 2].map(|at| (lent[at].0, lent[at].1));
        set(live.0, live.1, LIVE);
        set(flagged.0, flagged.1, LIVE | 1);
        // SAFETY: nobody uses these blocks.
        unsafe {
            assert!(magazine::free_unflagged::<B>(live.0, live.1));
            assert!(!magazine::free_unflagged::<B>(flagged.0, flagged.1));
            assert!(!magazine::free_unflagged::<B>(held.0, held.1));
        }
        assert!(magazine::give_back::<B>(held.0, held.1));
        assert!(magazine::unpin::<B>(live.0));
        assert_eq!(usable_size::<B>(address(flagged.0, flagged.1)), 2048);
        free::<StandardPolicy, B>(address(flagged.0, flagged.1)).unwrap();
    });
}

#[test]
fn requests_that_no_span_serves_are_refused() {
    let none = |size, align| {
        magazine::borrow::<B>(size, align, Place::DEFAULT, GROUP, 4, |_, _, _| panic!("lent something"))
    };
    assert_eq!(none(600_000, 256), Err(AllocError::InvalidSize));
    assert_eq!(none(16, 3), Err(AllocError::InvalidAlignment));
    assert_eq!(none(usize::MAX, 16), Err(AllocError::InvalidSize));
}

#[test]
fn other_groups_never_share_a_lent_span() {
    on_a_thread(|| {
        let lent = borrow(64, 100);
        let others: Vec<_> = (0..5000).map(|_| alloc::<StandardPolicy, B>(64, 16)).collect();
        for (span, _, _) in &lent {
            let range = span.base..span.base + span.capacity * span.block;
            assert!(others.iter().all(|other| !range.contains(&(*other as usize))));
        }
        others.into_iter().for_each(|other| free::<StandardPolicy, B>(other).unwrap());
        for (span, index, _) in lent {
            assert!(magazine::give_back::<B>(span, index));
        }
        assert!(stats::<B>().reserved_bytes > 0);
    });
}

#[test]
fn a_forsaken_span_serves_nobody_any_more() {
    on_a_thread(|| {
        let lent = borrow(20_000, 8);
        let span = lent[0].0;
        let (kept, index) = (lent[1].1, lent[2].1);
        set(span, kept, LIVE);
        set(span, index, LIVE);
        assert!(magazine::give_back::<B>(span, lent[0].1));
        free::<StandardPolicy, B>(address(span, index)).unwrap();
        assert!(magazine::forsake::<B>(span));
        assert!(!magazine::forsake::<B>(span));
        // Blocks that are freed later, here or elsewhere, do not come back either.
        free::<StandardPolicy, B>(address(span, kept)).unwrap();
        assert_eq!(free::<StandardPolicy, B>(address(span, kept)), Err(FreeError::DoubleFree));
        let others = borrow(20_000, 100);
        assert!(others.iter().all(|(other, _, _)| *other != span));
        for (other, index, _) in others {
            assert!(magazine::give_back::<B>(other, index));
        }
    });
}

#[test]
fn a_forsaken_span_is_not_adopted_when_its_thread_ends() {
    const SIZE: usize = 40_000;
    let base = thread::spawn(|| {
        let (span, _, _) = borrow(SIZE, 1)[0];
        assert!(magazine::forsake::<B>(span));
        span.base
    })
    .join()
    .unwrap();
    on_a_thread(move || {
        let others = borrow(SIZE, 64);
        assert!(others.iter().all(|(other, _, _)| other.base != base));
        for (other, index, _) in others {
            assert!(magazine::give_back::<B>(other, index));
        }
    });
}

#[test]
fn a_forsaken_span_cannot_be_unpinned_back_into_use() {
    on_a_thread(|| {
        let lent = borrow(50_000, 4);
        let span = lent[0].0;
        for &(span, index, _) in &lent {
            assert!(magazine::give_back::<B>(span, index));
        }
        assert!(magazine::forsake::<B>(span));
        assert!(!magazine::unpin::<B>(span));
        let others = borrow(50_000, 20);
        assert!(others.iter().all(|(other, _, _)| *other != span));
        for (other, index, _) in others {
            assert!(magazine::give_back::<B>(other, index));
        }
    });
}

#[test]
fn a_span_that_was_let_go_names_none_that_came_after_it() {
    on_a_thread(|| {
        let (old, index, _) = borrow(140_000, 1)[0];
        assert!(magazine::give_back::<B>(old, index));
        assert!(magazine::unpin::<B>(old));
        trim::<B>(usize::MAX); // the span goes back to its segment, and its descriptor is used again
        let lent = borrow(131_000, 100);
        for index in 0..old.capacity as u16 {
            assert!(!magazine::give_back::<B>(old, index));
            // SAFETY: its span was let go: there is no such block.
            assert!(!unsafe { magazine::free_unflagged::<B>(old, index) });
        }
        assert!(!magazine::unpin::<B>(old));
        assert!(!magazine::forsake::<B>(old));
        for (span, index, _) in lent {
            assert!(magazine::give_back::<B>(span, index));
        }
    });
}

#[test]
fn the_last_free_block_of_a_lent_span_is_lent_before_another_span_is_cut() {
    on_a_thread(|| {
        let span = borrow(300_000, 1)[0].0;
        let rest = borrow(300_000, span.capacity - 1);
        assert!(rest.iter().all(|(other, _, _)| *other == span));
        let index = rest[0].1;
        set(span, index, LIVE);
        let block = address(span, index) as usize;
        on_a_thread(move || free::<StandardPolicy, B>(block as *mut u8).unwrap());
        assert_eq!(borrow(300_000, 1), [(span, index, false)]);
    });
}
