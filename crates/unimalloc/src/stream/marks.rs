//! Which streams a block is, or was last, used on.

use std::collections::HashMap;

use crate::meta::slot;
use crate::meta::span::Span;
use crate::sync::{global, lock, AtomicU16, AtomicU64, Mutex, Ordering};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Set in a mark that is only a note: the stream that used these bytes last, in an earlier life of the block.
const NOTE: u64 = 1 << 63;
/// The block is on more than one stream: [`SEVERAL_STREAMS`] has them. No stream has this number.
const SEVERAL: u64 = NOTE - 1;

global! {
    /// By block address, for the few blocks that are on several streams at once.
    static SEVERAL_STREAMS: Mutex<Option<HashMap<usize, Vec<u64>>>> = Mutex::new(None);
}

/// Marks a live block as used on a stream. False if it is not live any more.
///
/// The stream is entered before the word says MARKED, so whoever frees a marked block finds all its streams.
pub(super) fn mark(span: &'static Span, index: usize, word: &'static AtomicU16, stream: u64) -> bool {
    let Some(entry) = span.marks_or_make().word(index) else { return false };
    if entry.load(Acquire) != stream {
        enter(span, index, entry, stream);
    }
    let mut live = word.load(Acquire);
    while slot::is_live(live) {
        if live & slot::MARKED != 0 {
            return true;
        }
        match word.compare_exchange_weak(live, live | slot::MARKED, AcqRel, Acquire) {
            Ok(_) => return true,
            Err(now) => live = now,
        }
    }
    false
}

fn enter(span: &'static Span, index: usize, entry: &AtomicU64, stream: u64) {
    let mut before = entry.load(Acquire);
    while before == 0 || before & NOTE != 0 {
        match entry.compare_exchange_weak(before, stream, AcqRel, Acquire) {
            Ok(_) => return,
            Err(now) => before = now,
        }
    }
    let mut several = lock(&SEVERAL_STREAMS);
    let streams = several.get_or_insert_default().entry(span.address(index as u16)).or_default();
    let before = entry.swap(SEVERAL, AcqRel);
    if before != SEVERAL {
        streams.clear();
        if before & NOTE == 0 && before != 0 {
            streams.push(before);
        }
    }
    if !streams.contains(&stream) {
        streams.push(stream);
    }
}

/// The streams a marked block is on. What stays is a note of the last one.
pub(super) fn take_streams(span: &'static Span, index: usize, mut each: impl FnMut(u64)) {
    let Some(entry) = span.marks().and_then(|marks| marks.word(index)) else { return };
    match entry.load(Acquire) {
        SEVERAL => {
            let streams = lock(&SEVERAL_STREAMS)
                .as_mut()
                .and_then(|several| several.remove(&span.address(index as u16)))
                .unwrap_or_default();
            entry.store(streams.last().copied().unwrap_or(0) | NOTE, Release);
            streams.into_iter().for_each(each);
        }
        0 => {}
        stream if stream & NOTE != 0 => {}
        stream => {
            entry.store(stream | NOTE, Relaxed);
            each(stream);
        }
    }
}

/// Turns the note of a pending block, whose earlier work the stream still has before it, into a mark again.
pub(super) fn renew(span: &'static Span, index: u16, stream: u64) {
    if let Some(entry) = span.marks().and_then(|marks| marks.word(usize::from(index))) {
        entry.store(stream, Release);
    }
}
