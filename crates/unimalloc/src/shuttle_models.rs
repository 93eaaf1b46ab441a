//! Longer models of what threads do to each other, run on the real code under schedules drawn at random:
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test -p unimalloc --release --lib shuttle
//! ```
//!
//! Each model runs under a scheduler that picks any thread at each step, and under probabilistic concurrency testing
//! (Burckhardt and others, ASPLOS 2010) with up to five switches of priority. A failure names its seed, and
//! `SHUTTLE_RANDOM_SEED` repeats it. `SHUTTLE_SCHEDULES` runs that many schedules of each kind instead.
//!
//! Memory accesses are sequentially consistent here: what weaker orders allow is for the models under loom.

mod streams;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use shuttle::rand::{thread_rng, Rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::mpsc;
use shuttle::{thread, Config, FailurePersistence, Runner};

use crate::api::blocks::release;
use crate::backend::{BackendOps, MemoryBackend};
use crate::error::{set_last_error, AllocError, FreeError};
use crate::meta::geometry::{class_of, class_size, GRANULE, MAX_ALIGN};
use crate::meta::slot;
use crate::meta::span::Remote;
use crate::policy::Policy;
use crate::pool::{span_of, Audit, BackendPools, Home, SpanRequest};
use crate::sync::{lock, Mutex, Ordering::Relaxed};
use crate::thread::heap::{BinKey, Heap};

/// Eight to a span, four spans to a segment; a heap caches two.
const BLOCK: usize = 64 << 10;
const PER_SPAN: usize = 8;
/// Eight to a span; a heap caches sixteen, and takes a span up again when two came back.
const SMALL: usize = 8 << 10;
/// One to a span, two to a segment.
const LARGE: usize = 1 << 20;
const SEGMENT: usize = MAX_ALIGN;
/// What the address map covers under this model checker.
const SPACE: usize = 1 << 26;

const KEY: BinKey = BinKey::of(Policy::Standard);
const UNLIMITED: usize = usize::MAX;

// ---- the world: memory that nobody touches, and who has which block ----

/// What the backend gave out, and what its blocks are used for. No step of the scheduler happens in here.
struct World {
    regions: BTreeMap<usize, usize>,
    /// The backend refuses to hold more.
    limit: usize,
    /// Whether the backend may refuse to take regions back.
    stubborn: bool,
    /// Blocks that are handed out: address and size.
    blocks: BTreeMap<usize, usize>,
}

thread_local! {
    /// A model's threads all run on the one that runs the model.
    static WORLD: RefCell<World> = const {
        RefCell::new(World { regions: BTreeMap::new(), limit: 0, stubborn: false, blocks: BTreeMap::new() })
    };
}

fn world<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

impl World {
    fn held(&self) -> usize {
        self.regions.values().sum()
    }

    /// The lowest address that fits, so that addresses come back as soon as they can.
    fn map(&mut self, bytes: usize) -> Option<usize> {
        if self.held() + bytes > self.limit {
            return None;
        }
        let mut at = MAX_ALIGN;
        for (&region, &length) in &self.regions {
            if at + bytes <= region {
                break;
            }
            at = region + length;
        }
        assert!(at + bytes <= SPACE, "the models need less than this");
        self.regions.insert(at, bytes);
        Some(at)
    }

    fn unmap(&mut self, address: usize, bytes: usize) {
        assert_eq!(self.regions.remove(&address), Some(bytes), "given back as it came, once");
        let used = self.blocks.range(address..address + bytes).next();
        assert_eq!(used, None, "a region with a live block was given back");
    }

    fn hand_out(&mut self, address: usize, size: usize) {
        let before = self.blocks.range(..address + size).next_back();
        let free = before.is_none_or(|(&other, &length)| other + length <= address);
        assert!(free, "{address:x} was handed out, and {before:x?} is live");
        let region = self.regions.range(..=address).next_back();
        let inside = region.is_some_and(|(&start, &bytes)| address + size <= start + bytes);
        assert!(inside, "{address:x} lies in no region");
        self.blocks.insert(address, size);
    }

    fn give_up(&mut self, address: usize) {
        assert!(self.blocks.remove(&address).is_some(), "{address:x} is not handed out");
    }
}

struct Nowhere;

// SAFETY: no model uses a byte of a block; regions are disjoint and aligned to 2 MiB.
unsafe impl MemoryBackend for Nowhere {
    unsafe fn allocate(size: usize) -> *mut u8 {
        thread::yield_now(); // a driver takes its time
        let address = world(|world| world.map(size)).unwrap_or_else(|| {
            set_last_error(AllocError::Budget);
            0
        });
        std::ptr::without_provenance_mut(address)
    }
    unsafe fn deallocate(region: *mut u8, size: usize) -> bool {
        thread::yield_now();
        if world(|world| world.stubborn) && thread_rng().gen_ratio(1, 4) {
            return false;
        }
        world(|world| world.unmap(region as usize, size));
        true
    }
    fn segment_bytes() -> usize {
        SEGMENT
    }
}

/// Empty pools over a backend that holds at most `limit` bytes.
fn begin(limit: usize, stubborn: bool) -> Home {
    let fresh =
        World { regions: BTreeMap::new(), limit: UNLIMITED, stubborn: false, blocks: BTreeMap::new() };
    world(|world| *world = fresh);
    let pools: &'static BackendPools = Box::leak(Box::new(BackendPools::new()));
    let home = Home { ops: const { &BackendOps::of::<Nowhere>() }, pools };
    // Once, before there are threads: what free granules map to is made under a lock that the scheduler knows nothing of.
    let key = home.key(KEY.pool_key());
    let span = home.take_span(SpanRequest { key, class: class_of(BLOCK) as u16, lane: 0, group: 0 }).unwrap();
    home.retire(span);
    home.trim(0);
    world(|world| (world.limit, world.stubborn) = (limit, stubborn));
    home
}

/// Recounts; the caller is the only thread left.
fn recount(home: Home) -> Audit {
    let audit = home.audit().unwrap();
    let (blocks, bytes, held) =
        world(|world| (world.blocks.len(), world.blocks.values().sum::<usize>(), world.held()));
    assert_eq!((audit.live_blocks, audit.live_bytes), (blocks, bytes), "every block handed out is live");
    assert_eq!(home.reserved(), held, "what the backend gave is what the pools hold");
    audit
}

/// All blocks are free and all heaps are gone: nothing is left, and everything goes back.
fn end(home: Home) {
    let audit = recount(home);
    assert_eq!((audit.live_blocks, audit.spans, audit.orphans), (0, 0, 0), "{audit:?}");
    assert_eq!(home.pools.corruptions(), 0);
    world(|world| world.stubborn = false);
    home.trim(0);
    recount(home);
    assert_eq!((home.reserved(), home.cached()), (0, (0, 0)));
    for address in (0..SPACE).step_by(GRANULE) {
        assert!(span_of(address).is_none(), "{address:x} went back and is mapped");
    }
}

// ---- what a thread does ----

/// A block of a class, or 0.
fn try_take(heap: &mut Heap, key: BinKey, size: usize) -> usize {
    let class = class_of(size);
    let at = heap.bin_of(key, class);
    let address = heap.alloc(at, 0);
    if address != 0 {
        world(|world| world.hand_out(address, class_size(class)));
    }
    address
}

fn take(heap: &mut Heap, size: usize) -> usize {
    let address = try_take(heap, KEY, size);
    assert_ne!(address, 0);
    address
}

fn take_huge(home: Home, size: usize) -> Option<usize> {
    let (span, _) = home.take_dedicated(KEY.pool_key(), size, 1, Policy::Standard as u8)?;
    let (address, block) = (span.base(), span.block());
    assert!(block >= size);
    world(|world| world.hand_out(address, block));
    Some(address)
}

/// Frees a Standard block as the public calls do: from the heap's hot path, or the long way.
fn give(home: Home, heap: Option<&mut Heap>, address: usize) {
    world(|world| world.give_up(address));
    let mut heap = heap;
    let again = |heap: &mut Heap| span_of(address).is_some_and(|span| heap.free_again(span, address));
    if heap.as_mut().is_some_and(|heap| heap.free_cached(address) || again(heap)) {
        return;
    }
    free(home, heap, address).unwrap();
}

fn free(home: Home, heap: Option<&mut Heap>, address: usize) -> Result<(), FreeError> {
    // SAFETY: nobody uses a byte of the block, which is Standard: the call touches none either.
    unsafe { release(home, std::ptr::without_provenance_mut(address), heap, None) }.map(|_| ())
}

/// Frees an encoded block from a thread that does not keep it. Its contents, which the public calls poison, are nowhere.
fn give_encoded(home: Home, address: usize) {
    world(|world| world.give_up(address));
    let span = span_of(address).expect("a live block is found");
    let (index, _) = span.slot_at(address).unwrap();
    if let Remote::Orphan = span.free_remote(index, slot::LIVE).unwrap() {
        home.visit_orphan(span);
    }
}

// ---- schedules ----

/// Says how to run a failed batch again.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat it, run this test with SHUTTLE_RANDOM_SEED={}", self.0);
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs a model under random schedules, some thousands of each kind.
fn model(schedules: usize, f: fn()) {
    let schedules = number("SHUTTLE_SCHEDULES").map_or(schedules, |count| count as usize);
    let mut config = Config::new();
    config.stack_size = 512 << 10;
    config.failure_persistence = FailurePersistence::None; // the seed says it all
    config.silence_warnings = true;
    let seed = Seed(number("SHUTTLE_RANDOM_SEED").unwrap_or_else(crate::random::seed));
    Runner::new(RandomScheduler::new_from_seed(seed.0, schedules), config.clone()).run(f);
    for switches in [2, 3, 5] {
        Runner::new(PctScheduler::new_from_seed(seed.0, switches, schedules / 3), config.clone()).run(f);
    }
}

// ---- the models ----

/// A thread allocates; two others free one in `sent` of its blocks, and it keeps the rest.
fn crossing(size: usize, blocks: usize, sent: u32) {
    let home = begin(UNLIMITED, false);
    let consumer = || {
        let (send, receive) = mpsc::sync_channel(4);
        let consumer = thread::spawn(move || receive.iter().for_each(|address| give(home, None, address)));
        (send, consumer)
    };
    let (consumers, mut heap) = ([consumer(), consumer()], Heap::new(home, KEY));
    let mut all = Vec::new();
    for at in 0..blocks {
        let address = take(&mut heap, size);
        if thread_rng().gen_ratio(1, sent) {
            consumers[at % 2].0.send(address).unwrap();
        } else {
            all.push(address);
        }
    }
    for (send, consumer) in consumers {
        drop(send);
        consumer.join().unwrap();
    }
    // The keeper was told of every span that has blocks for it: it can hand all of them out. Where few came back to a
    // span it may cut another first.
    let spans = recount(home).spans;
    all.extend((all.len()..spans * PER_SPAN).map(|_| take(&mut heap, size)));
    while size == SMALL && all.len() < recount(home).spans * PER_SPAN && all.len() < (spans + 2) * PER_SPAN {
        all.push(take(&mut heap, size));
    }
    assert_eq!(recount(home).spans * PER_SPAN, all.len(), "a span with free blocks was forgotten");
    all.into_iter().for_each(|address| give(home, Some(&mut heap), address));
    drop(heap);
    end(home);
}

#[test]
fn shuttle_blocks_that_others_free_come_back_to_their_keeper() {
    model(4_500, || crossing(BLOCK, 30, 1));
}

#[test]
fn shuttle_small_blocks_that_others_free_come_back_to_their_keeper() {
    model(4_500, || crossing(SMALL, 40, 1));
}

#[test]
fn shuttle_a_lone_free_while_the_keeper_parks_the_span_is_not_missed() {
    // Others in the same span would tell the keeper of this one too.
    model(4_500, || crossing(BLOCK, 24, 4));
    model(4_500, || crossing(SMALL, 24, 4));
}

/// What the program does is wrong, and the pools must not be the worse for it: whoever is told that the free succeeded, the
/// block is free once.
#[test]
fn shuttle_blocks_that_their_keeper_and_another_free_at_once_are_freed_once() {
    model(4_500, || {
        let home = begin(UNLIMITED, false);
        let mut heap = Heap::new(home, KEY);
        let blocks: Vec<_> = (0..2 * PER_SPAN).map(|_| take(&mut heap, SMALL)).collect();
        blocks.iter().for_each(|&address| world(|world| world.give_up(address)));
        let twice = blocks.clone();
        let other = thread::spawn(move || {
            twice.into_iter().filter(|&address| free(home, None, address).is_ok()).count()
        });
        let own = blocks
            .iter()
            .filter(|&&address| heap.free_cached(address) || free(home, Some(&mut heap), address).is_ok());
        let succeeded = own.count() + other.join().unwrap();
        assert!((blocks.len()..=2 * blocks.len()).contains(&succeeded));
        recount(home);
        // The world watches that none of them is handed out twice.
        let again: Vec<_> = (0..3 * PER_SPAN).map(|_| take(&mut heap, SMALL)).collect();
        assert!(blocks.iter().all(|address| again.contains(address)), "a block was lost");
        again.into_iter().for_each(|address| give(home, Some(&mut heap), address));
        drop(heap);
        end(home);
    });
}

#[test]
fn shuttle_threads_that_end_leave_their_blocks_to_those_that_stay() {
    model(4_500, || {
        let home = begin(UNLIMITED, false);
        let (to_freer, freed) = mpsc::channel();
        let (to_heir, inherited) = mpsc::channel();
        let ending = || {
            let ways = [to_freer.clone(), to_heir.clone()];
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                (0..11).for_each(|at| ways[at % 2].send(take(&mut heap, BLOCK)).unwrap());
            })
        };
        let ending = [ending(), ending()];
        drop((to_freer, to_heir));
        let freer = thread::spawn(move || freed.iter().for_each(|address| give(home, None, address)));
        let heir = thread::spawn(move || {
            let mut heap = Heap::new(home, KEY);
            let mut own = Vec::new();
            for address in inherited.iter() {
                own.push(take(&mut heap, BLOCK));
                give(home, Some(&mut heap), address);
            }
            own.into_iter().for_each(|address| give(home, Some(&mut heap), address));
        });
        ending.into_iter().chain([freer, heir]).for_each(|thread| thread.join().unwrap());
        end(home);
    });
}

#[test]
fn shuttle_encoded_spans_of_threads_that_end_are_adopted_or_returned() {
    const ENCODED: BinKey = BinKey::of(Policy::Hardened);
    model(3_000, || {
        let home = begin(UNLIMITED, false);
        let (send, receive) = mpsc::channel();
        let ending = thread::spawn(move || {
            let mut heap = Heap::new(home, ENCODED);
            (0..10).for_each(|_| send.send(try_take(&mut heap, ENCODED, BLOCK)).unwrap());
        });
        let freer = thread::spawn(move || receive.iter().for_each(|address| give_encoded(home, address)));
        let heir = thread::spawn(move || {
            let mut heap = Heap::new(home, ENCODED);
            let own: Vec<_> = (0..6).map(|_| try_take(&mut heap, ENCODED, BLOCK)).collect();
            own
        });
        let own = heir.join().unwrap();
        [ending, freer].into_iter().for_each(|thread| thread.join().unwrap());
        own.into_iter().for_each(|address| give_encoded(home, address));
        end(home);
    });
}

#[test]
fn shuttle_visits_of_orphans_race_with_the_release_of_their_segment_and_with_lookups() {
    model(3_000, || {
        let home = begin(UNLIMITED, false);
        let mut heap = Heap::new(home, KEY);
        let kept = take(&mut heap, BLOCK);
        let (send, receive) = mpsc::channel();
        let ending = thread::spawn(move || {
            let mut heap = Heap::new(home, KEY);
            let blocks: Vec<_> = (0..3 * PER_SPAN).map(|_| take(&mut heap, BLOCK)).collect();
            blocks.into_iter().for_each(|address| send.send(address).unwrap());
        });
        let (to_prober, dead) = mpsc::channel();
        let freer = thread::spawn(move || {
            for address in receive.iter() {
                give(home, None, address);
                to_prober.send(address).unwrap();
            }
        });
        let trimmer = thread::spawn(move || (0..3).for_each(|_| _ = home.trim(0)));
        let prober = thread::spawn(move || {
            for address in dead.iter() {
                assert!(
                    free(home, None, address).is_err(),
                    "a second free of {address:x} was taken for a first"
                );
                let span = span_of(kept).expect("a live block is found");
                assert_eq!(span.slot_at(kept).unwrap().1.load(Relaxed), slot::LIVE);
                if let Some(span) = span_of(address + GRANULE / 2) {
                    span.block_around(address + GRANULE / 2); // an answer, whatever the span is by now
                }
            }
        });
        [ending, freer, trimmer, prober].into_iter().for_each(|thread| thread.join().unwrap());
        recount(home);
        give(home, Some(&mut heap), kept);
        drop(heap);
        end(home);
    });
}

#[test]
fn shuttle_huge_blocks_are_taken_cached_and_released_once() {
    model(4_500, || {
        // Room for eight of the smallest: some requests must release what others cached, and some fail.
        let home = begin(8 * MAX_ALIGN, true);
        let threads = [2, 3, 4].map(|most| {
            thread::spawn(move || {
                let mut own = Vec::new();
                for _ in 0..6 {
                    match thread_rng().gen_range(0..6) {
                        0 => _ = home.trim(thread_rng().gen_range(0..3) * MAX_ALIGN),
                        1 => _ = home.release_cached(MAX_ALIGN),
                        2 => own.drain(..).for_each(|address| give(home, None, address)),
                        _ => own.extend(take_huge(home, thread_rng().gen_range(1..=most) * MAX_ALIGN)),
                    }
                }
                own.into_iter().for_each(|address| give(home, None, address));
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        end(home);
    });
}

#[test]
fn shuttle_racing_frees_of_a_huge_block_have_one_winner() {
    model(1_000, || {
        let home = begin(UNLIMITED, false);
        let block = take_huge(home, MAX_ALIGN).unwrap();
        world(|world| world.give_up(block));
        let racers = [(); 2].map(|()| thread::spawn(move || free(home, None, block).is_ok()));
        let trimmer = thread::spawn(move || home.trim(0));
        let winners = racers.map(|racer| usize::from(racer.join().unwrap())).iter().sum::<usize>();
        trimmer.join().unwrap();
        assert_eq!(winners, 1);
        end(home);
    });
}

#[test]
fn shuttle_decay_and_retention_take_nothing_that_is_used() {
    model(3_000, || {
        let home = begin(UNLIMITED, true);
        let workers = [BLOCK, LARGE].map(|size| {
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                for _ in 0..3 {
                    let own: Vec<_> = (0..5).map(|_| take(&mut heap, size)).collect();
                    let huge = take_huge(home, 2 * MAX_ALIGN).unwrap();
                    own.into_iter().for_each(|address| give(home, Some(&mut heap), address));
                    heap.give_back_caches();
                    give(home, None, huge);
                }
            })
        });
        let decay = thread::spawn(move || (0..5).for_each(|_| _ = home.decay(true)));
        let retention = thread::spawn(move || {
            home.set_retention(MAX_ALIGN);
            home.trim(0);
            home.set_retention(UNLIMITED);
        });
        workers.into_iter().chain([decay, retention]).for_each(|thread| thread.join().unwrap());
        end(home);
    });
}

#[test]
fn shuttle_threads_that_do_everything_at_random_lose_nothing() {
    model(4_500, || {
        let home = begin(16 * MAX_ALIGN, true);
        let shared: Arc<Mutex<Vec<usize>>> = Arc::new(Mutex::new(Vec::new()));
        let threads = [(); 3].map(|()| {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut heap = Heap::new(home, KEY);
                for _ in 0..12 {
                    match thread_rng().gen_range(0..16) {
                        0 => _ = home.trim(0),
                        1 => _ = home.decay(true),
                        2 => heap = Heap::new(home, KEY), // as if another thread came after this one
                        3 => heap.give_back_caches(),
                        4 => lock(&shared).extend(take_huge(home, 3 * MAX_ALIGN)),
                        5..=9 => {
                            let size = [SMALL, BLOCK, LARGE][thread_rng().gen_range(0..3)];
                            let taken = [(); 3].map(|()| try_take(&mut heap, KEY, size));
                            lock(&shared).extend(taken.into_iter().filter(|address| *address != 0));
                        }
                        _ => {
                            let taken = {
                                let mut shared = lock(&shared);
                                let from = shared.len().saturating_sub(2);
                                let start = thread_rng().gen_range(0..=from);
                                let end = shared.len().min(start + 2);
                                shared.drain(start..end).collect::<Vec<_>>()
                            };
                            taken.into_iter().for_each(|address| give(home, Some(&mut heap), address));
                        }
                    }
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        recount(home);
        let rest = std::mem::take(&mut *lock(&shared));
        rest.into_iter().for_each(|address| give(home, None, address));
        end(home);
    });
}
