//! A table that many threads enter values into and take them out of by handle, without a lock.
//!
//! Nearly always one thread enters a value, takes it out, and is asked for it once more in vain. So each place has a word that says what is
//! in it, only who has made it BUSY touches the rest, and empty places are kept by threads.
//!
//! ```text
//! EMPTY --insert--> HELD --claim--> BUSY --+--> HELD
//!                                          +--> EMPTY, one life on
//! ```

use std::alloc::{alloc_zeroed, Layout};
use std::cell::{Cell, RefCell, UnsafeCell};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Names one value, once and for all: a handle whose value was taken out finds nothing, also after its place was used again. Exact as a
/// double: 32 bits of place, 20 of generation. A place whose generations are used up is given up, for an engine may keep a handle
/// for as long as it likes: the finalizers of a million buffers wait for a loop that does not yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(u64);

const PLACE_BITS: u32 = 32;
/// The first generation is 1, so that no handle is 0: that stands for an empty array.
pub const GENERATIONS: u32 = 1 << 20;
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

    /// The word of its place while the value is there; one that no place ever has for a number that is no handle.
    fn held(self) -> u32 {
        match (self.0 >> PLACE_BITS) as u32 {
            0 | GENERATIONS.. => u32::MAX,
            generation => word(generation - 1, HELD),
        }
    }
}

/// A place's word: how many values it has had, and its state below.
const fn word(lives: u32, state: u32) -> u32 {
    lives << STATE_BITS | state
}

const STATE_BITS: u32 = 2;
const EMPTY: u32 = 0;
const HELD: u32 = 1;
const BUSY: u32 = 2;
const STATE: u32 = 3;

/// All zeros: empty, and never used.
struct Place<T> {
    word: AtomicU32,
    /// To be compared without a claim.
    tag: AtomicU64,
    /// There while the word says HELD or BUSY.
    value: UnsafeCell<MaybeUninit<T>>,
}

/// A claim on a place, which ends when this is dropped: nobody else touches its value.
struct Claim<'a, T> {
    place: &'a Place<T>,
    held: u32,
}

impl<T> Claim<'_, T> {
    fn value(&mut self) -> &mut T {
        // SAFETY: the word was HELD when it was made BUSY, so that the value is there, and the one claim is borrowed for the time.
        unsafe { (*self.place.value.get()).assume_init_mut() }
    }

    /// Takes the value out for good.
    fn take(self) -> T {
        let claim = ManuallyDrop::new(self);
        // SAFETY: as in `value`. The word says EMPTY from here on, and so nobody looks at what is left.
        let value = unsafe { (*claim.place.value.get()).assume_init_read() };
        claim.place.word.store(word((claim.held >> STATE_BITS) + 1, EMPTY), Ordering::Release);
        value
    }
}

impl<T> Drop for Claim<'_, T> {
    fn drop(&mut self) {
        self.place.word.store(self.held, Ordering::Release);
    }
}

/// Places in the first chunk; each chunk has twice as many as the one before it.
const FIRST_CHUNK: u32 = 1 << 10;
const CHUNKS: usize = 19;
/// So many places go to or from a thread at once. Chunks are multiples of it.
const BATCH: u32 = 64;

/// A place's chunk, and where in it.
fn position(place: u32) -> (usize, usize) {
    let chunk = (place / FIRST_CHUNK + 1).ilog2();
    (chunk as usize, (place - FIRST_CHUNK * ((1 << chunk) - 1)) as usize)
}

/// The empty places that a thread keeps for itself, while it has use for them.
pub struct Own {
    /// How many users of the table the thread has. One with none keeps no places.
    users: Cell<u32>,
    vacant: RefCell<Vec<u32>>,
}

impl Own {
    pub const fn new() -> Self {
        Self { users: Cell::new(0), vacant: RefCell::new(Vec::new()) }
    }

    /// Somebody on the thread is about to use the table often.
    pub fn enter(&self) {
        self.users.set(self.users.get() + 1);
    }
}

/// The table. Its memory is never given back, and it is never dropped: there is one in a process.
pub struct Table<T> {
    chunks: [AtomicPtr<Place<T>>; CHUNKS],
    /// How many places there are.
    places: AtomicU32,
    /// Empty places that no thread keeps for itself.
    vacant: Mutex<Vec<u32>>,
}

impl<T> Table<T> {
    pub const fn new() -> Self {
        Self {
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            places: AtomicU32::new(0),
            vacant: Mutex::new(Vec::new()),
        }
    }
}

/// Whichever thread takes a value out has it from there on.
impl<T: Send> Table<T> {
    /// Enters a value, with a tag by which [`find`](Self::find) finds it; or gives it back when there are 2^28 in the table, or there is no memory
    /// for another.
    pub fn insert(&'static self, own: &Own, tag: u64, value: T) -> Result<Handle, T> {
        let Some((number, place)) = self.vacate(own).and_then(|number| Some((number, self.at(number)?)))
        else {
            return Err(value);
        };
        let lives = place.word.load(Ordering::Relaxed) >> STATE_BITS;
        place.tag.store(tag, Ordering::Relaxed);
        // SAFETY: the place is EMPTY, and nobody but us has its number: who looks at the word goes away again.
        unsafe { (*place.value.get()).write(value) };
        place.word.store(word(lives, HELD), Ordering::Release);
        Ok(Handle::new(number, lives))
    }

    /// Takes a value out; `None` if that was done before.
    pub fn take(&'static self, own: &Own, handle: Handle) -> Option<T> {
        let value = self.claim(handle)?.take();
        if (handle.held() >> STATE_BITS) + 2 < GENERATIONS {
            self.keep(own, handle.place());
        }
        Some(value)
    }

    /// Looks at a value, or changes it; none if it was taken out. `look` does not ask for the same one.
    pub fn with<R>(&'static self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.claim(handle).map(|mut claim| look(claim.value()))
    }

    /// The handles of all values that were entered with a tag. What others enter and take out meanwhile may be among them or not.
    pub fn find(&'static self, tag: u64) -> impl Iterator<Item = Handle> {
        (0..self.places.load(Ordering::Acquire)).filter_map(move |number| {
            let place = self.at(number)?;
            let word = place.word.load(Ordering::Acquire);
            let is_it = word & STATE != EMPTY && place.tag.load(Ordering::Relaxed) == tag;
            is_it.then(|| Handle::new(number, word >> STATE_BITS))
        })
    }

    /// A user of the table on this thread ends; with the last of them its places are anybody's.
    pub fn leave(&'static self, own: &Own) {
        own.users.set(own.users.get().saturating_sub(1));
        if own.users.get() == 0 {
            self.vacant().append(&mut own.vacant.take());
        }
    }

    fn at(&'static self, place: u32) -> Option<&'static Place<T>> {
        if place >= MOST_PLACES {
            return None;
        }
        let (chunk, index) = position(place);
        let chunk = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: a chunk is there for good once it is there, it has room for every place whose position is in it, and zeros are a place. What
        // threads may touch of a place at the same time is atomic.
        (!chunk.is_null()).then(|| unsafe { &*chunk.add(index) })
    }

    fn claim(&'static self, handle: Handle) -> Option<Claim<'static, T>> {
        let place = self.at(handle.place())?;
        let held = handle.held();
        let busy = word(held >> STATE_BITS, BUSY);
        loop {
            match place.word.load(Ordering::Relaxed) {
                word if word == held => {
                    // Acquire: what the latest claim has done to the value, or who entered it.
                    let won = place.word.compare_exchange(held, busy, Ordering::Acquire, Ordering::Relaxed);
                    if won.is_ok() {
                        return Some(Claim { place, held });
                    }
                }
                // Another thread looks at it, for a moment.
                word if word == busy => std::thread::yield_now(),
                _ => return None,
            }
        }
    }

    fn vacant(&self) -> MutexGuard<'_, Vec<u32>> {
        self.vacant.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty place.
    fn vacate(&'static self, own: &Own) -> Option<u32> {
        let mut kept = own.vacant.borrow_mut();
        if let Some(place) = kept.pop() {
            return Some(place);
        }
        let mut vacant = self.vacant();
        if vacant.is_empty() {
            vacant.extend(self.add_places()?.rev());
        }
        if own.users.get() == 0 {
            return vacant.pop();
        }
        let rest = vacant.len().saturating_sub(BATCH as usize);
        kept.extend(vacant.drain(rest..));
        kept.pop()
    }

    /// Makes a batch of places. For who has locked the vacant ones.
    fn add_places(&'static self) -> Option<Range<u32>> {
        let first = self.places.load(Ordering::Relaxed);
        if first >= MOST_PLACES {
            return None;
        }
        let (chunk, index) = position(first);
        if index == 0 {
            let layout = Layout::array::<Place<T>>((FIRST_CHUNK as usize) << chunk).ok()?;
            // SAFETY: a place has a word, so that the layout is not of size 0.
            let places = unsafe { alloc_zeroed(layout) };
            if places.is_null() {
                return None;
            }
            self.chunks.get(chunk)?.store(places.cast(), Ordering::Release);
        }
        self.places.store(first + BATCH, Ordering::Release);
        Some(first..first + BATCH)
    }

    /// Keeps an empty place for the next value of this thread, or of any.
    fn keep(&'static self, own: &Own, place: u32) {
        if own.users.get() == 0 {
            self.vacant().push(place);
            return;
        }
        let mut kept = own.vacant.borrow_mut();
        kept.push(place);
        if kept.len() > 2 * BATCH as usize {
            self.vacant().extend(kept.drain(..BATCH as usize));
        }
    }
}
