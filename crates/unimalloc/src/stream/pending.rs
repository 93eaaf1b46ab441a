//! Freed blocks that wait for their streams.
//!
//! Each stream has an open batch of blocks that were freed after use on it. A batch is closed by recording one event,
//! when it is large enough or when somebody needs memory; when the event is done, so is every use that came before the
//! frees in it. A stream that is capturing a graph is never touched: its batch stays open.
//!
//! ```text
//! LIVE|MARKED --free--> PENDING, in the open batch --event--> closed batch --event done--> free, through the span
//! ```
//!
//! Batches are reached through one process-wide table, so that any thread's slow path, `trim`, and the retry after a
//! refusal can take them up, whichever thread freed the blocks. No lock is held across a driver call: batches are taken
//! out, looked at, and what has not passed is put back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::marks::take_streams;
use crate::cuda::{CudaError, CudaErrorKind, Event, Stream, WeakStream};
use crate::meta::slot;
use crate::meta::span::{Remote, Span};
use crate::policy::{redzone, Policy};
use crate::pool::{is_dedicated, Home, Urgency};
use crate::sync::{lock, AtomicUsize, Ordering};

use Ordering::{AcqRel, Relaxed};

/// A batch closes by itself at this many blocks, or this many bytes.
const BATCH_BLOCKS: usize = 64;
const BATCH_BYTES: usize = 8 << 20;
/// Somebody who needs memory closes a batch from this many blocks or bytes on; a smaller one must have been seen twice.
const WORTH_CLOSING: usize = 8;

/// A freed block that waits for one stream, or for one of several.
pub(super) struct Pending {
    home: Home,
    span: &'static Span,
    index: u16,
    /// Streams still to pass, where it waits for several.
    others: Option<Arc<AtomicUsize>>,
    /// Who wants to hear when it has passed.
    notify: Option<Notify>,
}

/// Called with `tag` and the block's bytes when a pending block has passed and is free, on whatever thread took it up;
/// never for one that is lost with its context. It must not block or call the allocator.
#[derive(Debug, Clone, Copy)]
pub struct Notify {
    /// What to call.
    pub call: fn(tag: u64, bytes: usize),
    /// What it is told.
    pub tag: u64,
}

#[derive(Default)]
struct Batch {
    blocks: Vec<Pending>,
    bytes: usize,
    /// Somebody needed memory while this batch was open.
    wanted: bool,
}

struct Closed {
    event: Event,
    batch: Batch,
}

#[derive(Default)]
struct Queue {
    open: Batch,
    closed: Vec<Closed>,
}

/// What is pending on one stream.
struct Track {
    stream: Hold,
    queue: Mutex<Queue>,
}

/// A stream made here is kept until nothing is pending on it. A foreign one belongs to other code: it says farewell.
enum Hold {
    Own(Stream),
    Foreign(WeakStream),
}

static TRACKS: Mutex<Option<HashMap<u64, Arc<Track>>>> = Mutex::new(None);
static PENDING_BLOCKS: AtomicUsize = AtomicUsize::new(0);
static PENDING_BYTES: AtomicUsize = AtomicUsize::new(0);
static LOST_BLOCKS: AtomicUsize = AtomicUsize::new(0);
static LOST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Freed blocks that the GPU may still use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingStats {
    /// Blocks that wait for their streams.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Blocks whose context died before they passed; they are not used again.
    pub lost_blocks: usize,
    /// Their bytes.
    pub lost_bytes: usize,
}

/// What is pending now, over all streams.
pub fn pending_stats() -> PendingStats {
    PendingStats {
        blocks: PENDING_BLOCKS.load(Relaxed),
        bytes: PENDING_BYTES.load(Relaxed),
        lost_blocks: LOST_BLOCKS.load(Relaxed),
        lost_bytes: LOST_BYTES.load(Relaxed),
    }
}

/// Makes sure that frees can wait for the stream, before anything is marked with it.
pub(super) fn track(stream: &Stream, home: Home) {
    home.pools.set_reclaim(reclaim);
    let mut tracks = lock(&TRACKS);
    tracks.get_or_insert_default().entry(stream.id()).or_insert_with(|| {
        let hold =
            if stream.is_owned() { Hold::Own(stream.clone()) } else { Hold::Foreign(stream.downgrade()) };
        stream.note_marked();
        Arc::new(Track { stream: hold, queue: Mutex::default() })
    });
}

fn find(stream: u64) -> Option<Arc<Track>> {
    lock(&TRACKS).as_ref()?.get(&stream).cloned()
}

/// What became of the free of a marked block.
pub(crate) enum Deferred {
    /// It waits for its streams.
    Pending,
    /// Its streams are gone, and passed: free it like any other. Its word is the one given now.
    Passed(u16),
    /// Another thread freed it first.
    DoubleFree,
}

/// Frees a marked block once its streams have passed.
pub(crate) fn defer(
    home: Home,
    span: &'static Span,
    index: usize,
    word: u16,
    notify: Option<Notify>,
) -> Deferred {
    let Some(slot) = span.slots().get(index) else { return Deferred::DoubleFree };
    if slot.compare_exchange(word, slot::PENDING, AcqRel, Relaxed).is_err() {
        return Deferred::DoubleFree;
    }
    let mut tracks = Vec::new();
    take_streams(span, index, |stream| tracks.extend(find(stream)));
    if tracks.is_empty() {
        return Deferred::Passed(slot::PENDING);
    }
    PENDING_BLOCKS.fetch_add(1, Relaxed);
    PENDING_BYTES.fetch_add(span.block(), Relaxed);
    let others = (tracks.len() > 1).then(|| Arc::new(AtomicUsize::new(tracks.len())));
    for track in tracks {
        let full = {
            let mut queue = lock(&track.queue);
            queue.open.blocks.push(Pending {
                home,
                span,
                index: index as u16,
                others: others.clone(),
                notify,
            });
            queue.open.bytes += span.block();
            let full = queue.open.blocks.len() >= BATCH_BLOCKS || queue.open.bytes >= BATCH_BYTES;
            full.then(|| std::mem::take(&mut queue.open))
        };
        if let Some(batch) = full {
            track.close(batch);
        }
    }
    Deferred::Pending
}

/// A pending block that `fits`, freed after use on `stream` alone, for reuse on that stream without waiting: later work
/// on it comes after the earlier. Its slot word becomes live and marked again.
pub(crate) fn reuse_on(
    stream: u64,
    mut fits: impl FnMut(&'static Span) -> bool,
) -> Option<(&'static Span, u16)> {
    /// Blocks to look at, the latest first.
    const LOOK_AT: usize = 256;
    let track = find(stream)?;
    let mut queue = lock(&track.queue);
    let queue = &mut *queue;
    let batches =
        std::iter::once(&mut queue.open).chain(queue.closed.iter_mut().rev().map(|closed| &mut closed.batch));
    let mut looked_at = 0;
    for batch in batches {
        for at in (0..batch.blocks.len()).rev() {
            let block = &batch.blocks[at];
            if block.others.is_none() && fits(block.span) {
                let block = batch.blocks.swap_remove(at);
                batch.bytes -= block.span.block();
                block.uncount();
                block.span.set_state(block.index, slot::LIVE | slot::MARKED);
                return Some((block.span, block.index));
            }
            looked_at += 1;
            if looked_at == LOOK_AT {
                return None;
            }
        }
    }
    None
}

impl Pending {
    fn uncount(&self) {
        PENDING_BLOCKS.fetch_sub(1, Relaxed);
        PENDING_BYTES.fetch_sub(self.span.block(), Relaxed);
    }

    /// One of its streams has passed: frees it if that was the last.
    fn pass(self) {
        if self.others.as_ref().is_some_and(|others| others.fetch_sub(1, AcqRel) != 1) {
            return;
        }
        self.uncount();
        let bytes = self.span.block();
        release_passed(self.home, self.span, self.index);
        if let Some(Notify { call, tag }) = self.notify {
            call(tag, bytes);
        }
    }

    /// Its context died.
    fn lose(self) {
        if self.others.as_ref().is_some_and(|others| others.fetch_sub(1, AcqRel) != 1) {
            return;
        }
        self.uncount();
        LOST_BLOCKS.fetch_add(1, Relaxed);
        LOST_BYTES.fetch_add(self.span.block(), Relaxed);
    }
}

/// Frees a PENDING block that no stream uses any more. What its policy does to contents is done now, not before.
pub(crate) fn release_passed(home: Home, span: &'static Span, index: u16) {
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    let block = span.address(index) as *mut u8;
    // SAFETY: the block is PENDING, taken out of its batch by us alone, and the GPU is done with it.
    if !unsafe { redzone::check_and_poison(home.ops, block, span.block(), policy) } {
        return home.pools.report_corruption(); // never handed out again
    }
    if is_dedicated(span) {
        let _ = home.free_dedicated(span, slot::PENDING);
    } else if let Ok(Remote::Orphan) = span.free_remote(usize::from(index), slot::PENDING) {
        home.visit_orphan(span);
    }
}

impl Track {
    fn stream(&self) -> Option<Stream> {
        match &self.stream {
            Hold::Own(stream) => Some(stream.clone()),
            Hold::Foreign(stream) => stream.upgrade(),
        }
    }

    /// Records the batch's event.
    fn close(&self, batch: Batch) {
        if batch.blocks.is_empty() {
            return;
        }
        // A foreign stream whose last handle is going closes its batches itself.
        let Some(stream) = self.stream() else { return self.reopen(batch) };
        match stream.is_capturing() {
            Ok(true) => self.reopen(batch), // an event would become part of the graph
            Ok(false) => match stream.record_untimed() {
                Ok(event) => lock(&self.queue).closed.push(Closed { event, batch }),
                Err(error) => self.failed(batch, &error),
            },
            Err(error) => self.failed(batch, &error),
        }
    }

    fn failed(&self, batch: Batch, error: &CudaError) {
        if error.kind() == CudaErrorKind::ContextLost {
            batch.blocks.into_iter().for_each(Pending::lose);
        } else {
            self.reopen(batch); // kept: reuse without an answer from the driver would not be safe
        }
    }

    fn reopen(&self, mut batch: Batch) {
        let mut queue = lock(&self.queue);
        queue.open.bytes += batch.bytes;
        queue.open.wanted |= batch.wanted;
        queue.open.blocks.append(&mut batch.blocks);
    }

    /// Takes up what has passed; answers whether anything did.
    fn look(&self, urgency: Urgency) -> bool {
        let open = {
            let mut queue = lock(&self.queue);
            let open = &mut queue.open;
            let close = !open.blocks.is_empty()
                && (urgency == Urgency::Wait || open.wanted || open.blocks.len() >= WORTH_CLOSING);
            open.wanted = !open.blocks.is_empty();
            close.then(|| std::mem::take(open))
        };
        if let Some(batch) = open {
            self.close(batch);
        }
        let closed = std::mem::take(&mut lock(&self.queue).closed);
        let mut waiting = Vec::new();
        let mut passed = false;
        for closed in closed {
            let done = match urgency {
                Urgency::Look if !waiting.is_empty() => Ok(false), // in order: later ones are not done either
                Urgency::Look => closed.event.done(),
                Urgency::Wait => closed.event.synchronize().map(|()| true),
            };
            match done {
                Ok(true) => {
                    passed = true;
                    closed.batch.blocks.into_iter().for_each(Pending::pass);
                }
                Err(error) if error.kind() == CudaErrorKind::ContextLost => {
                    closed.batch.blocks.into_iter().for_each(Pending::lose);
                }
                Ok(false) | Err(_) => waiting.push(closed),
            }
        }
        if !waiting.is_empty() {
            let mut queue = lock(&self.queue);
            waiting.append(&mut queue.closed);
            queue.closed = waiting;
        }
        passed
    }

    fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.open.blocks.is_empty() && queue.closed.is_empty()
    }
}

/// Takes up what has passed on all streams; answers whether anything did. The pools call it when they need memory.
pub(super) fn reclaim(urgency: Urgency) -> bool {
    if PENDING_BLOCKS.load(Relaxed) == 0 {
        return false;
    }
    let tracks: Vec<_> = lock(&TRACKS).iter().flat_map(HashMap::values).cloned().collect();
    let mut passed = false;
    for track in &tracks {
        passed |= track.look(urgency);
    }
    drop(tracks);
    forget_dropped_streams();
    passed
}

/// Lets streams go that nobody else holds and nothing waits for. Blocks that are still marked with one find it gone when
/// they are freed: it has passed then.
fn forget_dropped_streams() {
    let mut gone = Vec::new();
    if let Some(tracks) = lock(&TRACKS).as_mut() {
        tracks.retain(|_, track| match &track.stream {
            Hold::Own(stream) if stream.is_last() && track.is_idle() => {
                gone.push(stream.clone());
                false
            }
            _ => true,
        });
    }
    for stream in gone {
        // Its queue may still run work of blocks that are live and marked.
        if !matches!(stream.query(), Ok(true)) {
            let mut tracks = lock(&TRACKS);
            let track = Track { stream: Hold::Own(stream.clone()), queue: Mutex::default() };
            tracks.get_or_insert_default().entry(stream.id()).or_insert_with(|| Arc::new(track));
        }
    }
}

/// The last handle of a foreign stream is going: whatever was used on it is waited for now, since nothing can be asked
/// of the stream later.
pub(crate) fn farewell(stream: u64, synchronize: impl FnOnce() -> Result<(), CudaError>) {
    let Some(track) = lock(&TRACKS).as_mut().and_then(|tracks| tracks.remove(&stream)) else { return };
    let result = synchronize();
    let queue = std::mem::take(&mut *lock(&track.queue));
    let batches = std::iter::once(queue.open).chain(queue.closed.into_iter().map(|closed| closed.batch));
    for block in batches.flat_map(|batch| batch.blocks) {
        match result {
            Ok(()) => block.pass(),
            Err(_) => block.lose(),
        }
    }
}
