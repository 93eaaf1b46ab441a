//! What one environment holds: blocks behind its `ArrayBuffer`s, by a handle that JavaScript and the finalizer share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::block::Block;
use crate::thread_end::Watch;

/// Names one hold, once and for all: a handle whose hold has ended finds nothing, also after its place in the table was taken
/// again. Exact as a double: 28 bits of place, 4 of shard, 20 of generation. A place whose generations are used up is
/// given up, for the engine may keep a handle for as long as it likes: the finalizers of a million buffers wait for a loop that
/// does not yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(u64);

const SHARD_BITS: u32 = 4;
const PLACE_BITS: u32 = 28;
const GENERATIONS: u32 = 1 << 20;
/// Not 0, so that no handle is 0: that stands for an empty array.
const FIRST_GENERATION: u32 = 1;

impl Handle {
    pub fn to_number(self) -> f64 {
        self.0 as f64
    }

    pub fn from_number(number: f64) -> Self {
        Self(number as u64)
    }

    /// For the finalizer of an `ArrayBuffer`, which gets one pointer-sized word.
    pub fn to_word(self) -> u64 {
        self.0
    }

    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    fn new(shard: usize, place: usize, generation: u32) -> Self {
        let low = (shard as u64) | ((place as u64) << SHARD_BITS);
        Self(low | (u64::from(generation) << (SHARD_BITS + PLACE_BITS)))
    }

    fn shard(self) -> usize {
        (self.0 & ((1 << SHARD_BITS) - 1)) as usize
    }

    fn place(self) -> usize {
        ((self.0 >> SHARD_BITS) & ((1 << PLACE_BITS) - 1)) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> (SHARD_BITS + PLACE_BITS)) as u32
    }
}

/// One environment's hold on a block.
#[derive(Debug)]
pub struct Hold {
    pub block: Arc<Block>,
    /// The thread of the environment: some engines run finalizers elsewhere, where no Node-API call is allowed.
    pub thread: ThreadId,
    /// JavaScript freed the array, but its buffer had been detached by somebody else, so that the bytes may live on in
    /// another buffer. The engine's finalizer ends the hold.
    pub freed: bool,
    /// JavaScript has let the block go and waits for something that may still use it: `free({ after })`.
    pub awaited: bool,
    /// Asks the buffer at the end of its thread whether it has its bytes.
    pub watch: Option<Watch>,
}

impl Hold {
    /// A hold of this thread on a block.
    pub fn new(block: Arc<Block>) -> Self {
        Self { block, thread: std::thread::current().id(), freed: false, awaited: false, watch: None }
    }
}

#[derive(Default)]
struct Shard {
    entries: Vec<Entry>,
    vacant: Vec<u32>,
}

struct Entry {
    generation: u32,
    hold: Option<Hold>,
}

/// Sharded by thread, so that workers do not wait for each other.
static SHARDS: [Mutex<Shard>; 1 << SHARD_BITS] =
    [const { Mutex::new(Shard { entries: Vec::new(), vacant: Vec::new() }) }; 1 << SHARD_BITS];

fn shard(index: usize) -> MutexGuard<'static, Shard> {
    SHARDS[index].lock().unwrap_or_else(PoisonError::into_inner)
}

fn own_shard() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Relaxed) % SHARDS.len();
    }
    OWN.with(|own| *own)
}

/// Enters a hold, or gives it back when the table is full, at 2^28 places.
pub fn insert(hold: Hold) -> Result<Handle, Hold> {
    let index = own_shard();
    let mut shard = shard(index);
    if let Some(place) = shard.vacant.pop() {
        let entry = &mut shard.entries[place as usize];
        entry.hold = Some(hold);
        return Ok(Handle::new(index, place as usize, entry.generation));
    }
    if shard.entries.len() >= 1 << PLACE_BITS {
        return Err(hold);
    }
    shard.entries.push(Entry { generation: FIRST_GENERATION, hold: Some(hold) });
    Ok(Handle::new(index, shard.entries.len() - 1, FIRST_GENERATION))
}

/// Ends a hold; `None` if it has ended before.
pub fn take(handle: Handle) -> Option<Hold> {
    let mut shard = shard(handle.shard());
    let entry =
        shard.entries.get_mut(handle.place()).filter(|entry| entry.generation == handle.generation())?;
    let hold = entry.hold.take()?;
    if entry.generation + 1 < GENERATIONS {
        entry.generation += 1;
        shard.vacant.push(handle.place() as u32);
    }
    Some(hold)
}

/// The block of a hold that has not ended.
pub fn block(handle: Handle) -> Option<Arc<Block>> {
    let shard = shard(handle.shard());
    let entry = shard.entries.get(handle.place()).filter(|entry| entry.generation == handle.generation())?;
    entry.hold.as_ref().map(|hold| Arc::clone(&hold.block))
}

/// Changes a hold; false if it has ended.
pub fn change(handle: Handle, change: impl FnOnce(&mut Hold)) -> bool {
    let mut shard = shard(handle.shard());
    match shard.entries.get_mut(handle.place()).filter(|entry| entry.generation == handle.generation()) {
        Some(Entry { hold: Some(hold), .. }) => {
            change(hold);
            true
        }
        _ => false,
    }
}

/// Whether one of this thread's holds is such. `is_such` ends no hold.
pub fn any_of_this_thread(is_such: impl Fn(&Hold) -> bool) -> bool {
    let thread = std::thread::current().id();
    let shard = shard(own_shard());
    shard
        .entries
        .iter()
        .filter_map(|entry| entry.hold.as_ref())
        .any(|hold| hold.thread == thread && is_such(hold))
}

/// The watched holds of this thread.
pub fn watched_by_this_thread() -> Vec<Handle> {
    let thread = std::thread::current().id();
    let index = own_shard();
    let shard = shard(index);
    let mine =
        |entry: &&Entry| matches!(&entry.hold, Some(hold) if hold.thread == thread && hold.watch.is_some());
    let places = shard.entries.iter().enumerate().filter(|(_, entry)| mine(entry));
    places.map(|(place, entry)| Handle::new(index, place, entry.generation)).collect()
}

/// Whether a hold has neither ended nor been freed by the program.
pub fn is_held(handle: Handle) -> bool {
    let shard = shard(handle.shard());
    shard
        .entries
        .get(handle.place())
        .filter(|entry| entry.generation == handle.generation())
        .and_then(|entry| entry.hold.as_ref())
        .is_some_and(|hold| !hold.freed)
}
