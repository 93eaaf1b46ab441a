//! Blocks that the GPU uses: marks, pending batches, the turn, waiting and farewells, over modelled streams.

use super::*;
use crate::cuda::fence::{is_done, launch, reset, synchronize};
use crate::cuda::Stream;
use crate::pool::Urgency;
use crate::stream::{farewell, mark_block, pending_stats, reuse_on};

thread_local! {
    /// The latest work on each block that was launched on since it was handed out: stream and number.
    static USES: RefCell<BTreeMap<usize, Vec<(u64, u64)>>> = const { RefCell::new(BTreeMap::new()) };
}

fn begin_gpu(limit: usize, captures: bool) -> Home {
    reset(captures);
    USES.with_borrow_mut(BTreeMap::clear);
    begin(limit, false)
}

/// Everything is free again: nothing is pending, nothing was lost.
fn end_gpu(home: Home) {
    while pending_stats().blocks > 0 {
        home.reclaim(Urgency::Wait);
    }
    let pending = pending_stats();
    assert_eq!((pending.blocks, pending.bytes), (0, 0));
    end(home);
}

/// Launches work that uses a block, as a kernel's arguments do.
fn run(home: Home, stream: &Stream, address: usize) {
    mark_block(home, std::ptr::without_provenance(address), stream).unwrap();
    let number = launch(stream);
    USES.with_borrow_mut(|uses| uses.entry(address).or_default().push((stream.id(), number)));
}

/// A block was handed out to somebody who does not wait: the GPU must be done with it.
fn check_unused(address: usize) {
    let uses = USES.with_borrow_mut(|uses| uses.remove(&address)).unwrap_or_default();
    for (stream, number) in uses {
        assert!(is_done(stream, number), "{address:x} was handed out while stream {stream} uses it");
    }
}

fn take_unused(heap: &mut Heap) -> usize {
    let address = take(heap, BLOCK);
    check_unused(address);
    address
}

fn is_pending(address: usize) -> bool {
    let span = span_of(address).expect("the region is held");
    span.slot_at(address).is_some_and(|(_, word)| word.load(Relaxed) == slot::PENDING)
}

/// Whoever waits finds all that was freed before free, whatever other threads have taken out of the queues.
fn waiting() {
    let home = begin_gpu(UNLIMITED, false);
    let streams = [Stream::modelled(true), Stream::modelled(true)];
    let others: Vec<_> = (0..2)
        .map(|other| {
            let streams = streams.clone();
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                let address = take_unused(&mut heap);
                run(home, &streams[other], address);
                give(home, Some(&mut heap), address);
                home.reclaim(if other == 0 { Urgency::Look } else { Urgency::Wait });
                home.reclaim(Urgency::Look);
            })
        })
        .collect();
    let mut heap = Heap::new(home, KEY);
    let mine: Vec<_> = (0..3).map(|_| take_unused(&mut heap)).collect();
    for (turn, &address) in mine.iter().enumerate() {
        run(home, &streams[turn % 2], address);
        if turn == 2 {
            run(home, &streams[1], address); // on both
        }
        give(home, Some(&mut heap), address);
        home.reclaim(Urgency::Look);
    }
    home.reclaim(Urgency::Wait);
    for address in mine {
        assert!(!is_pending(address), "{address:x} is still pending after the wait");
    }
    others.into_iter().for_each(|other| other.join().unwrap());
    drop(heap);
    end_gpu(home);
}

#[test]
fn shuttle_who_waits_for_pending_blocks_gets_them_whoever_took_them_out() {
    model(3000, waiting);
}

/// A foreign stream's last handle goes while others look, wait and free blocks that were used on it.
fn leaving() {
    let home = begin_gpu(UNLIMITED, false);
    let stream = Stream::modelled(false);
    let mut heap = Heap::new(home, KEY);
    let mine: Vec<_> = (0..3).map(|_| take_unused(&mut heap)).collect();
    mine.iter().for_each(|&address| run(home, &stream, address));
    let (freed_by_another, track) = (mine[2], stream.track());
    give(home, Some(&mut heap), mine[0]);
    let looks = thread::spawn(move || {
        home.reclaim(Urgency::Look);
        home.reclaim(Urgency::Wait);
    });
    let frees = thread::spawn(move || {
        give(home, None, freed_by_another);
        home.reclaim(Urgency::Look);
    });
    give(home, Some(&mut heap), mine[1]);
    farewell(track, || {
        synchronize(&stream);
        Ok(true)
    });
    assert!(!is_pending(mine[0]) && !is_pending(mine[1]), "pending on a stream that is gone");
    // The place is another stream's now.
    let next = Stream::modelled(true);
    let again = take_unused(&mut heap);
    run(home, &next, again);
    give(home, Some(&mut heap), again);
    looks.join().unwrap();
    frees.join().unwrap();
    drop(heap);
    drop((stream, next));
    end_gpu(home);
}

#[test]
fn shuttle_a_foreign_stream_leaves_nothing_behind() {
    model(3000, leaving);
}

/// A block that its stream takes back goes to one owner, though others look for it.
fn taking_back() {
    let home = begin_gpu(UNLIMITED, false);
    let stream = Stream::modelled(true);
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let stream = stream.clone();
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                for _ in 0..3 {
                    let address = match reuse_on(&stream, |span| {
                        span.class.load(Relaxed) as usize == class_of(BLOCK)
                    }) {
                        Some((span, index)) => {
                            let address = span.address(index);
                            world(|world| world.hand_out(address, BLOCK));
                            address
                        }
                        None => take_unused(&mut heap),
                    };
                    run(home, &stream, address);
                    give(home, Some(&mut heap), address);
                }
                home.reclaim(Urgency::Look);
            })
        })
        .collect();
    home.reclaim(Urgency::Wait);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    end_gpu(home);
}

#[test]
fn shuttle_a_block_that_its_stream_takes_back_has_one_owner() {
    model(2000, taking_back);
}

/// Everything at once: streams that capture now and then and are dropped while work is pending, blocks on several of them.
fn anything() {
    let home = begin_gpu(UNLIMITED, true);
    let streams: Vec<_> = (0..2).map(|_| Stream::modelled(true)).collect();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let streams = streams.clone();
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                let mut live = Vec::new();
                for _ in 0..12 {
                    match thread_rng().gen_range(0..6) {
                        0 | 1 => live.push(take_unused(&mut heap)),
                        2 | 3 if !live.is_empty() => {
                            let address = live[thread_rng().gen_range(0..live.len())];
                            run(home, &streams[thread_rng().gen_range(0..2)], address);
                        }
                        4 if !live.is_empty() => {
                            let address = live.swap_remove(thread_rng().gen_range(0..live.len()));
                            give(home, Some(&mut heap), address);
                        }
                        5 => {
                            home.reclaim(if thread_rng().gen_ratio(1, 3) {
                                Urgency::Wait
                            } else {
                                Urgency::Look
                            });
                        }
                        _ => {}
                    }
                }
                live.into_iter().for_each(|address| give(home, Some(&mut heap), address));
            })
        })
        .collect();
    drop(streams);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    end_gpu(home);
}

#[test]
fn shuttle_threads_that_launch_and_free_at_random_share_nothing_with_the_gpu() {
    model(3000, anything);
}
