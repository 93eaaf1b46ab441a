//! What one environment holds: blocks behind its `ArrayBuffer`s, by a handle that JavaScript and the finalizer share.
//!
//! Nearly always the same thread enters a hold, ends it, and is told by the finalizer that there is nothing left to end. So the table has no
//! lock: each place has a word that says what is in it, and only who has made it BUSY touches the rest.
//!
//! ```text
//! EMPTY --insert--> HELD --claim--> BUSY --+--> HELD
//!                                          +--> EMPTY, one generation on
//! ```

use std::alloc::{alloc_zeroed, Layout};
use std::cell::{Cell, RefCell, UnsafeCell};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::block::{Block, Share};
use crate::thread_end::Watch;
use crate::thread_number::ThreadNumber;

/// Names one hold, once and for all: a handle whose hold has ended finds nothing, also after its place in the table was taken
/// again. Exact as a double: 32 bits of place, 20 of generation. A place whose generations are used up is
/// given up, for the engine may keep a handle for as long as it likes: the finalizers of a million buffers wait for a loop that
/// does not yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(u64);

const PLACE_BITS: u32 = 32;
/// Generations of a handle; the first is 1, so that no handle is 0: that stands for an empty array.
const GENERATIONS: u32 = 1 << 20;
const MOST_PLACES: u32 = 1 << 28;

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

    fn new(place: u32, lives: u32) -> Self {
        Self(u64::from(place) | (u64::from(lives + 1) << PLACE_BITS))
    }

    fn place(self) -> u32 {
        self.0 as u32
    }

    /// The word of its place while the hold has not ended. One that no place ever has for a number that is no handle.
    fn held(self) -> u32 {
        match (self.0 >> PLACE_BITS) as u32 {
            0 | GENERATIONS.. => u32::MAX,
            generation => word(generation - 1, HELD),
        }
    }
}

/// One environment's hold on a block.
#[derive(Debug)]
pub struct Hold {
    pub block: Share,
    /// The thread of the environment: some engines run finalizers elsewhere, where no Node-API call is allowed.
    pub thread: ThreadNumber,
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
    pub fn new(block: Share) -> Self {
        Self { block, thread: ThreadNumber::current(), freed: false, awaited: false, watch: None }
    }
}

/// Whichever thread ends a hold has it from there on.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Hold>();
};

/// A place's word: how many holds it has had, and its state below.
const fn word(lives: u32, state: u32) -> u32 {
    lives << 2 | state
}

const EMPTY: u32 = 0;
const HELD: u32 = 1;
const BUSY: u32 = 2;

/// All zeros: empty, and never used.
struct Place {
    word: AtomicU32,
    /// The hold's thread, to be compared without a claim.
    thread: AtomicU64,
    /// There while the word says HELD or BUSY.
    hold: UnsafeCell<MaybeUninit<Hold>>,
}

/// A claim on a place, which ends when this is dropped: nobody else touches its hold.
struct Claim<'a> {
    place: &'a Place,
    held: u32,
}

impl Claim<'_> {
    fn hold(&mut self) -> &mut Hold {
        // SAFETY: the word was HELD when it was made BUSY, so that the hold is there, and the one claim is borrowed for the time.
        unsafe { (*self.place.hold.get()).assume_init_mut() }
    }

    /// Takes the hold out for good.
    fn take(self) -> Hold {
        let claim = ManuallyDrop::new(self);
        // SAFETY: as in `hold`. The word says EMPTY from here on, and so nobody looks at what is left.
        let hold = unsafe { (*claim.place.hold.get()).assume_init_read() };
        claim.place.word.store(word((claim.held >> 2) + 1, EMPTY), Ordering::Release);
        hold
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.place.word.store(self.held, Ordering::Release);
    }
}

/// Places in the first chunk; each chunk has twice as many as the one before it, and none is ever given back.
const FIRST_CHUNK: u32 = 1 << 10;
static CHUNKS: [AtomicPtr<Place>; 20] = [const { AtomicPtr::new(ptr::null_mut()) }; 20];
/// How many places were ever handed to a thread.
static PLACES: AtomicU32 = AtomicU32::new(0);

/// A place's chunk, and where in it.
fn position(place: u32) -> (usize, usize) {
    let chunk = (place / FIRST_CHUNK + 1).ilog2();
    (chunk as usize, (place - FIRST_CHUNK * ((1 << chunk) - 1)) as usize)
}

fn at(place: u32) -> Option<&'static Place> {
    if place >= MOST_PLACES {
        return None;
    }
    let (chunk, index) = position(place);
    let chunk = CHUNKS[chunk].load(Ordering::Acquire);
    // SAFETY: a chunk is there for good once it is there, it has room for every place whose position is in it, and zeros are a place.
    (!chunk.is_null()).then(|| unsafe { &*chunk.add(index) })
}

fn claim(handle: Handle) -> Option<Claim<'static>> {
    let place = at(handle.place())?;
    let held = handle.held();
    let busy = word(held >> 2, BUSY);
    loop {
        match place.word.load(Ordering::Relaxed) {
            word if word == held => {
                // Acquire: what the latest claim has done to the hold, or who entered it.
                let won = place.word.compare_exchange(held, busy, Ordering::Acquire, Ordering::Relaxed);
                if won.is_ok() {
                    return Some(Claim { place, held });
                }
            }
            // A finalizer on another thread, or the owner while one looks: for a moment.
            word if word == busy => std::thread::yield_now(),
            _ => return None,
        }
    }
}

/// Empty places that no thread keeps for itself.
static VACANT: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn vacant() -> MutexGuard<'static, Vec<u32>> {
    VACANT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So many places go to or from a thread at once.
const BATCH: usize = 64;

/// What a thread keeps of the table.
struct Own {
    /// How many environments it has. A thread with none, on which some engines run finalizers, keeps no places.
    environments: Cell<u32>,
    /// Empty places for its next holds.
    vacant: RefCell<Vec<u32>>,
}

thread_local! {
    /// Without a destructor: [`leave_thread`] empties it.
    static OWN: ManuallyDrop<Own> =
        const { ManuallyDrop::new(Own { environments: Cell::new(0), vacant: RefCell::new(Vec::new()) }) };
}

/// An environment begins on this thread.
pub fn enter_thread() {
    OWN.with(|own| own.environments.set(own.environments.get() + 1));
}

/// An environment of this thread ends.
pub fn leave_thread() {
    OWN.with(|own| {
        own.environments.set(own.environments.get().saturating_sub(1));
        if own.environments.get() == 0 {
            vacant().append(&mut own.vacant.take());
        }
    });
}

/// An empty place; none when the table is full, at 2^28 places, or there is no memory for it.
fn vacate() -> Option<u32> {
    OWN.with(|own| {
        let mut kept = own.vacant.borrow_mut();
        if let Some(place) = kept.pop() {
            return Some(place);
        }
        let mut vacant = vacant();
        if vacant.is_empty() {
            vacant.extend(add_places()?.rev());
        }
        if own.environments.get() == 0 {
            return vacant.pop();
        }
        let rest = vacant.len().saturating_sub(BATCH);
        kept.extend(vacant.drain(rest..));
        kept.pop()
    })
}

/// Makes a batch of places. Under the lock of the vacant ones.
fn add_places() -> Option<std::ops::Range<u32>> {
    let first = PLACES.load(Ordering::Relaxed);
    if first >= MOST_PLACES {
        return None;
    }
    let (chunk, index) = position(first);
    if index == 0 {
        let layout = Layout::array::<Place>((FIRST_CHUNK as usize) << chunk).ok()?;
        // SAFETY: the layout is not of size 0.
        let places = unsafe { alloc_zeroed(layout) };
        if places.is_null() {
            return None;
        }
        CHUNKS[chunk].store(places.cast(), Ordering::Release);
    }
    // Chunks are multiples of a batch.
    let end = first + BATCH as u32;
    PLACES.store(end, Ordering::Release);
    Some(first..end)
}

/// Keeps an empty place for the next hold of this thread, or of any.
fn keep(place: u32) {
    OWN.with(|own| {
        if own.environments.get() == 0 {
            vacant().push(place);
            return;
        }
        let mut kept = own.vacant.borrow_mut();
        kept.push(place);
        if kept.len() > 2 * BATCH {
            vacant().extend(kept.drain(..BATCH));
        }
    });
}

/// Enters a hold, or gives it back when the table has no place for it.
pub fn insert(hold: Hold) -> Result<Handle, Hold> {
    let Some((number, place)) = vacate().and_then(|number| Some((number, at(number)?))) else {
        return Err(hold);
    };
    let lives = place.word.load(Ordering::Relaxed) >> 2;
    place.thread.store(hold.thread.to_word(), Ordering::Relaxed);
    // SAFETY: the place is EMPTY, and nobody but us has its number: who looks at the word goes away again.
    unsafe { (*place.hold.get()).write(hold) };
    place.word.store(word(lives, HELD), Ordering::Release);
    Ok(Handle::new(number, lives))
}

/// Ends a hold; `None` if it has ended before.
pub fn take(handle: Handle) -> Option<Hold> {
    let hold = claim(handle)?.take();
    if (handle.held() >> 2) + 2 < GENERATIONS {
        keep(handle.place());
    }
    Some(hold)
}

/// Looks at a hold, or changes it; none if it has ended.
pub fn with<T>(handle: Handle, look: impl FnOnce(&mut Hold) -> T) -> Option<T> {
    claim(handle).map(|mut claim| look(claim.hold()))
}

/// The block of a hold that has not ended.
pub fn block(handle: Handle) -> Option<Arc<Block>> {
    with(handle, |hold| hold.block.divide())
}

/// Whether a hold has neither ended nor been freed by the program.
pub fn is_held(handle: Handle) -> bool {
    with(handle, |hold| !hold.freed).unwrap_or(false)
}

/// The holds of this thread that are such.
fn of_this_thread(is_such: impl Fn(&Hold) -> bool) -> impl Iterator<Item = Handle> {
    let thread = ThreadNumber::current().to_word();
    (0..PLACES.load(Ordering::Acquire)).filter_map(move |number| {
        let place = at(number)?;
        let word = place.word.load(Ordering::Acquire);
        if word & (HELD | BUSY) == 0 || place.thread.load(Ordering::Relaxed) != thread {
            return None;
        }
        let handle = Handle::new(number, word >> 2);
        with(handle, |hold| is_such(hold)).unwrap_or(false).then_some(handle)
    })
}

/// Whether one of this thread's holds is such. `is_such` ends no hold.
pub fn any_of_this_thread(is_such: impl Fn(&Hold) -> bool) -> bool {
    of_this_thread(is_such).next().is_some()
}

/// The watched holds of this thread.
pub fn watched_by_this_thread() -> Vec<Handle> {
    of_this_thread(|hold| hold.watch.is_some()).collect()
}
