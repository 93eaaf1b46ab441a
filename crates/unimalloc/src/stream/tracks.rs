//! The table of streams that blocks were marked with.
//!
//! A mark is a number: the place of the stream's [`Track`] in the table, and the generation of that place. So a free finds
//! its track with two loads and no lock, and a mark with a stream that is gone finds another generation, or none: that
//! stream has passed. (A generation comes round after 2³¹ streams in one place; a mark that old then waits for the wrong
//! stream, which delays a reuse and harms nothing.)

use std::sync::OnceLock;

use super::queue::Track;
use crate::cuda::{Stream, WeakStream};
use crate::sync::{global, lock, AtomicU32, Mutex, Ordering};

use Ordering::{Acquire, Relaxed, Release};

/// A stream made here is kept until nothing is pending on it. A foreign one belongs to other code: it says farewell.
pub(super) enum Hold {
    Own(Stream),
    Foreign(WeakStream),
}

impl Hold {
    pub(super) fn stream(&self) -> Option<Stream> {
        match self {
            Self::Own(stream) => Some(stream.clone()),
            Self::Foreign(stream) => stream.upgrade(),
        }
    }
}

/// Tracks in the first chunk of the table; each further one is twice as large.
const FIRST: u64 = 64;
type Chunks = [OnceLock<Box<[Track]>>; 26];

global! {
    static CHUNKS: Chunks = [const { OnceLock::new() }; 26];
}
global! {
    /// Places that were ever used.
    static USED: AtomicU32 = AtomicU32::new(0);
}
global! {
    static VACANT: Mutex<Vec<u32>> = Mutex::new(Vec::new());
}

fn chunk_of(place: u32) -> (usize, usize) {
    let number = u64::from(place) + FIRST;
    let chunk = number.ilog2() - FIRST.ilog2();
    (chunk as usize, (number - (FIRST << chunk)) as usize)
}

/// The track at a place.
pub(super) fn at(place: u32) -> Option<&'static Track> {
    let (chunk, index) = chunk_of(place);
    CHUNKS.get(chunk)?.get()?.get(index)
}

fn place(mark: u64) -> u32 {
    mark as u32
}

/// The track that a mark names. Its queue tells whether it is still that of the mark's stream.
pub(super) fn find(mark: u64) -> Option<&'static Track> {
    at(place(mark))
}

/// All tracks that were ever used.
pub(super) fn all() -> impl Iterator<Item = &'static Track> {
    (0..USED.load(Acquire)).filter_map(at)
}

/// The number to mark blocks with; the stream gets a track if it has none.
pub(super) fn number(stream: &Stream) -> u64 {
    let known = stream.track();
    if known != 0 {
        return known;
    }
    let mut vacant = lock(&VACANT);
    if stream.track() != 0 {
        return stream.track();
    }
    let place = vacant.pop().unwrap_or_else(|| {
        let place = USED.load(Relaxed);
        let (chunk, _) = chunk_of(place);
        CHUNKS[chunk].get_or_init(|| (0..FIRST << chunk).map(|_| Track::default()).collect());
        USED.store(place + 1, Release);
        place
    });
    let Some(track) = at(place) else { return 0 };
    let mut queue = lock(&track.queue);
    queue.generation = queue.generation % (u32::MAX >> 1) + 1;
    queue.mark = u64::from(queue.generation) << 32 | u64::from(place);
    queue.stream =
        Some(if stream.is_owned() { Hold::Own(stream.clone()) } else { Hold::Foreign(stream.downgrade()) });
    stream.set_track(queue.mark);
    queue.mark
}

/// Gives a place back whose queue was vacated.
pub(super) fn give_back(mark: u64) {
    lock(&VACANT).push(place(mark));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_numbered_through_the_chunks() {
        let mut expected = (0, 0);
        for place in 0..1000 {
            assert_eq!(chunk_of(place), expected, "{place}");
            expected.1 += 1;
            if expected.1 == (FIRST as usize) << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        let (chunk, index) = chunk_of(u32::MAX);
        assert!(chunk == CHUNKS.len() && index < FIRST as usize, "the last 64 places are not used");
    }
}
