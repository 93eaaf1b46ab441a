//! The table of holds by itself: the addon's other parts need an engine around them.

#[allow(dead_code)] // what only the addon calls
#[path = "../src/table.rs"]
mod table;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use table::{Handle, Own, Table, GENERATIONS};

fn leaked<T>() -> &'static Table<T> {
    Box::leak(Box::new(Table::new()))
}

#[test]
fn a_handle_finds_its_value_until_that_is_taken_out_and_nothing_ever_after() {
    let table = leaked();
    let own = Own::new();
    own.enter();
    let mut seen = HashSet::new();
    for round in 0..10_000_u32 {
        let handle = table.insert(&own, 7, round).unwrap();
        assert!(seen.insert(handle), "a handle came twice");
        assert_ne!(handle.to_number(), 0.0);
        assert_eq!(Handle::from_number(handle.to_number()), handle);
        assert_eq!(Handle::from_word(handle.to_word()), handle);
        table.with(handle, |value| *value += 1);
        assert_eq!(table.take(&own, handle), Some(round + 1));
        assert_eq!(table.take(&own, handle), None);
        assert_eq!(table.with(handle, |_| ()), None);
    }
    for old in seen {
        assert_eq!(table.take(&own, old), None);
    }
}

#[test]
fn numbers_that_are_no_handles_find_nothing() {
    let table = leaked();
    let own = Own::new();
    own.enter();
    let handle = table.insert(&own, 0, "here").unwrap();
    let word = handle.to_word();
    for number in [
        0,
        1,
        u64::MAX,
        u64::MAX >> 12,
        word | 1 << 30,
        word + (1 << 32),
        word | 1 << 62,
        word + 1,
        word ^ (1 << 32),
    ] {
        assert_eq!(table.take(&own, Handle::from_word(number)), None, "{number:x}");
    }
    for number in [f64::NAN, f64::INFINITY, -1.0, 0.5, 9e15] {
        assert_eq!(table.take(&own, Handle::from_number(number)), None, "{number}");
    }
    assert_eq!(table.take(&own, handle), Some("here"));
}

#[test]
fn a_place_whose_generations_are_used_up_is_given_up() {
    let table = leaked();
    let own = Own::new();
    own.enter();
    let first = table.insert(&own, 0, 0_u32).unwrap();
    table.take(&own, first);
    let mut latest = first;
    let mut lives = 1;
    loop {
        let handle = table.insert(&own, 0, lives).unwrap();
        let is_elsewhere = handle.to_word() as u32 != first.to_word() as u32;
        assert_eq!(table.take(&own, handle), Some(lives));
        if is_elsewhere {
            break;
        }
        latest = handle;
        lives += 1;
    }
    assert_eq!(lives, GENERATIONS - 1);
    assert!(latest.to_number() < 2_f64.powi(53));
    assert_eq!(table.take(&own, first), None);
}

#[test]
fn places_of_a_thread_that_leaves_are_used_by_others() {
    let table = leaked();
    for _ in 0..100 {
        thread::spawn(|| {
            let own = Own::new();
            own.enter();
            let handles: Vec<Handle> = (0..500).map(|value| table.insert(&own, 1, value).unwrap()).collect();
            for handle in handles {
                table.take(&own, handle).unwrap();
            }
            table.leave(&own);
        })
        .join()
        .unwrap();
    }
    // One that never enters keeps nothing, and finds what is there.
    let own = Own::new();
    let handles: Vec<Handle> = (0..500).map(|value| table.insert(&own, 2, value).unwrap()).collect();
    let most = handles.iter().map(|handle| handle.to_word() as u32).max().unwrap();
    assert!(most < 512, "{most} places for 500 values at a time");
    let found: HashSet<Handle> = table.find(2).collect();
    assert_eq!(found, handles.into_iter().collect());
    assert_eq!(table.find(1).count(), 0);
}

/// Counts itself, and knows whether somebody else has it at the same time.
struct Counted {
    alive: Arc<AtomicUsize>,
    looks: u64,
}

impl Counted {
    fn new(alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Relaxed);
        Self { alive: Arc::clone(alive), looks: 0 }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Relaxed);
    }
}

#[test]
fn of_threads_that_take_the_same_value_one_gets_it_and_no_look_is_lost() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 300;
    const VALUES: usize = 50;
    let table = leaked();
    let alive = Arc::new(AtomicUsize::new(0));
    let handles = Mutex::new(Vec::new());
    let (taken, looks, counted) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (handles, taken, looks, counted, barrier, alive) =
                (&handles, &taken, &looks, &counted, &barrier, &alive);
            scope.spawn(move || {
                let own = Own::new();
                // One thread in two has no use of its own, as those on which some engines run finalizers.
                if thread % 2 == 0 {
                    own.enter();
                }
                for round in 0..ROUNDS {
                    if round % THREADS == thread {
                        let fresh =
                            (0..VALUES).map(|_| table.insert(&own, 3, Counted::new(alive)).ok().unwrap());
                        *handles.lock().unwrap() = fresh.collect();
                    }
                    barrier.wait();
                    let mine = handles.lock().unwrap().clone();
                    // All look at all values and take them, each beginning elsewhere.
                    for at in 0..VALUES {
                        let handle = mine[(at + thread * VALUES / THREADS) % VALUES];
                        for _ in 0..3 {
                            if table.with(handle, |value: &mut Counted| value.looks += 1).is_some() {
                                looks.fetch_add(1, Relaxed);
                            }
                        }
                        if let Some(value) = table.take(&own, handle) {
                            taken.fetch_add(1, Relaxed);
                            counted.fetch_add(value.looks as usize, Relaxed);
                        }
                    }
                    barrier.wait();
                }
                table.leave(&own);
            });
        }
    });
    assert_eq!(taken.into_inner(), ROUNDS * VALUES);
    assert_eq!(looks.into_inner(), counted.into_inner());
    assert_eq!(alive.load(Relaxed), 0);
    assert_eq!(table.find(3).count(), 0);
}

#[test]
fn a_panic_in_a_look_leaves_the_value_where_it_is() {
    let table = leaked();
    let own = Own::new();
    own.enter();
    let handle = table.insert(&own, 0, String::from("here")).unwrap();
    let outcome = std::panic::catch_unwind(|| table.with(handle, |_| panic!("on purpose")));
    assert!(outcome.is_err());
    assert_eq!(table.take(&own, handle).as_deref(), Some("here"));
}
