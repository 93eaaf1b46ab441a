//! Which streams a block is, or was last, used on.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::meta::slot;
use crate::meta::span::Span;
use crate::sync::{lock, AtomicU16, Ordering};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The block is on more than one stream: [`SEVERAL_STREAMS`] has them.
const SEVERAL: u64 = u64::MAX;

/// By block address, for the few blocks that are on several streams at once.
static SEVERAL_STREAMS: Mutex<Option<HashMap<usize, Vec<u64>>>> = Mutex::new(None);

/// Marks a live block as used on a stream. False if it is not live any more.
pub(super) fn mark(span: &'static Span, index: usize, word: &'static AtomicU16, stream: u64) -> bool {
    let Some(entry) = span.marks_or_make().word(index) else { return false };
    let live = word.load(Acquire);
    if !slot::is_live(live) {
        return false;
    }
    if live & slot::MARKED == 0 {
        // The word may name the stream of an earlier life of the block.
        entry.store(stream, Relaxed);
        return word.compare_exchange(live, live | slot::MARKED, AcqRel, Relaxed).is_ok() || {
            // Another thread changed its flags: it is marked by now, or freed.
            mark(span, index, word, stream)
        };
    }
    if entry.load(Relaxed) == stream {
        return true;
    }
    let mut several = lock(&SEVERAL_STREAMS);
    let several = several.get_or_insert_default();
    match entry.swap(SEVERAL, AcqRel) {
        before if before == stream => {
            entry.store(stream, Release);
        }
        SEVERAL => {
            let streams = several.entry(span.address(index as u16)).or_default();
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        before => {
            several.insert(span.address(index as u16), vec![before, stream]);
        }
    }
    true
}

/// The streams a marked block is on. Forgets those of a block on several.
pub(super) fn take_streams(span: &'static Span, index: usize, mut each: impl FnMut(u64)) {
    let Some(entry) = span.marks().and_then(|marks| marks.word(index)) else { return };
    match entry.load(Acquire) {
        SEVERAL => {
            let streams = lock(&SEVERAL_STREAMS)
                .as_mut()
                .and_then(|several| several.remove(&span.address(index as u16)))
                .unwrap_or_default();
            entry.store(streams.last().copied().unwrap_or(0), Release);
            streams.into_iter().for_each(each);
        }
        0 => {}
        stream => each(stream),
    }
}
