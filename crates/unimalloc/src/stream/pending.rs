//! Freed blocks that wait for their streams.
//!
//! Each stream has an open batch of blocks that were freed after use on it. A batch is closed by one fence, when it is
//! large enough or when somebody needs memory; when the stream has passed the fence, so has it every use that came before
//! the frees in the batch. A stream that is capturing a graph is never touched: its batch stays open.
//!
//! ```text
//! LIVE|MARKED --free--> PENDING, in the open batch --fence--> closed batch --fence passed--> free, through the span
//! ```
//!
//! Batches are reached through one process-wide table, so that any thread's slow path, `trim`, and the retry after a
//! refusal can take them up, whichever thread freed the blocks. No lock is held across a driver call: batches are taken
//! out, looked at, and what has not passed is put back.

use std::collections::VecDeque;
use std::sync::Arc;

use super::marks::{renew, take_streams};
use super::tracks::{self, Hold, Track};
use crate::cuda::{destroy_spares, CudaError, CudaErrorKind, Fence, Stream};
use crate::meta::slot;
use crate::meta::span::{Remote, Span};
use crate::policy::{redzone, Policy};
use crate::pool::{is_dedicated, Home, Urgency};
use crate::sync::{lock, AtomicUsize, Ordering};

use Ordering::{AcqRel, Relaxed};

/// A batch closes by itself at this many blocks, or this many bytes.
const BATCH_BLOCKS: usize = 64;
const BATCH_BYTES: usize = 8 << 20;
/// Somebody who needs memory closes a batch from this many blocks on, if none is on its way, or one that so many have
/// looked at: an event costs about a microsecond, and so does asking for it.
const WORTH_CLOSING: usize = 32;
const LOOKS: u8 = 16;

/// A freed block that waits for one stream, or for one of several.
struct Pending {
    home: Home,
    span: &'static Span,
    index: u16,
    /// Streams still to pass, where it waits for several, and one more until it waits for all of them.
    others: Option<Arc<AtomicUsize>>,
    /// Who wants to hear when it has passed.
    notify: Option<Notify>,
}

/// Called with `tag` and the block's bytes when a pending block has passed and is free, or was handed out again to its
/// stream, on whatever thread took it up; never for one that is lost with its context. It must not block or call the allocator.
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
    /// How often somebody needed memory while this batch was open.
    looks: u8,
}

struct Closed {
    fence: Fence,
    batch: Batch,
}

/// What is pending on a stream.
#[derive(Default)]
pub(super) struct Queue {
    /// The number of the stream that the queue is of; 0: of none.
    pub(super) mark: u64,
    pub(super) generation: u32,
    pub(super) stream: Option<Hold>,
    /// Threads that have taken batches out, and will put some back.
    looking: usize,
    open: Batch,
    /// In the stream's order.
    closed: VecDeque<Closed>,
}

/// Entries and bytes by which the tracks count more than once what waits for several streams.
static EXTRA_BLOCKS: AtomicUsize = AtomicUsize::new(0);
static EXTRA_BYTES: AtomicUsize = AtomicUsize::new(0);
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
    let mut stats = PendingStats {
        lost_blocks: LOST_BLOCKS.load(Relaxed),
        lost_bytes: LOST_BYTES.load(Relaxed),
        ..PendingStats::default()
    };
    for track in tracks::all() {
        stats.blocks += track.blocks.load(Relaxed);
        stats.bytes += track.bytes.load(Relaxed);
    }
    stats.blocks = stats.blocks.saturating_sub(EXTRA_BLOCKS.load(Relaxed));
    stats.bytes = stats.bytes.saturating_sub(EXTRA_BYTES.load(Relaxed));
    stats
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
    let (mut first, mut rest) = (None, Vec::new());
    take_streams(span, index, |mark| match first {
        None => first = Some(mark),
        Some(_) => rest.push(mark),
    });
    let Some(first) = first else { return Deferred::Passed(slot::PENDING) };
    let index = index as u16;
    if rest.is_empty() {
        let block = Pending { home, span, index, others: None, notify };
        return if enqueue(first, block) { Deferred::Pending } else { Deferred::Passed(slot::PENDING) };
    }
    let others = Arc::new(AtomicUsize::new(rest.len() + 2));
    for mark in std::iter::once(first).chain(rest) {
        count_extra(span, 1);
        if !enqueue(mark, Pending { home, span, index, others: Some(Arc::clone(&others)), notify }) {
            count_extra(span, -1);
            others.fetch_sub(1, AcqRel);
        }
    }
    if others.fetch_sub(1, AcqRel) == 1 {
        return Deferred::Passed(slot::PENDING);
    }
    count_extra(span, -1); // one of the entries is the block itself
    Deferred::Pending
}

fn count_extra(span: &Span, entries: isize) {
    EXTRA_BLOCKS.fetch_add(entries as usize, Relaxed);
    EXTRA_BYTES.fetch_add((span.block() as isize * entries) as usize, Relaxed);
}

/// Puts a freed block into the open batch of its stream. False if the stream is gone: it has passed.
fn enqueue(mark: u64, block: Pending) -> bool {
    let Some(track) = tracks::find(mark) else { return false };
    let full = {
        let mut queue = lock(&track.queue);
        if queue.mark != mark {
            return false;
        }
        track.count(&mut queue, 1, block.span.block() as isize);
        queue.open.bytes += block.span.block();
        queue.open.blocks.push(block);
        let full = queue.open.blocks.len() >= BATCH_BLOCKS || queue.open.bytes >= BATCH_BYTES;
        full.then(|| queue.take_open())
    };
    if let Some((batch, stream)) = full {
        let closing = track.close(batch, stream);
        track.finish(mark, Left::of(closing), VecDeque::new());
    }
    true
}

/// A pending block that `fits`, freed after use on `stream` alone, for reuse on that stream without waiting: later work
/// on it comes after the earlier. Its slot word becomes live and marked again.
pub(crate) fn reuse_on(
    stream: &Stream,
    fits: impl FnMut(&'static Span) -> bool,
) -> Option<(&'static Span, u16)> {
    // "Later work on it" may be another thread's otherwise, and that is another stream.
    let mark = Some(stream.track()).filter(|mark| *mark != 0 && !stream.is_per_thread())?;
    let block = take_back(tracks::find(mark)?, mark, fits)?;
    renew(block.span, block.index, mark);
    block.span.set_state(block.index, slot::LIVE | slot::MARKED);
    if let Some(Notify { call, tag }) = block.notify {
        call(tag, block.span.block());
    }
    Some((block.span, block.index))
}

/// Takes a block that `fits` and waits for no other stream out of a stream's queue.
fn take_back(track: &Track, mark: u64, mut fits: impl FnMut(&'static Span) -> bool) -> Option<Pending> {
    /// Blocks to look at, the latest first.
    const LOOK_AT: usize = 64;
    let mut queue = lock(&track.queue);
    if queue.mark != mark {
        return None;
    }
    let open = std::iter::once(&queue.open);
    let batches = open.chain(queue.closed.iter().rev().map(|closed| &closed.batch));
    let (back, at) = batches
        .enumerate()
        .flat_map(|(back, batch)| (0..batch.blocks.len()).rev().map(move |at| (back, at, &batch.blocks[at])))
        .take(LOOK_AT)
        .find(|(_, _, block)| block.others.is_none() && fits(block.span))
        .map(|(back, at, _)| (back, at))?;
    let batch = match back {
        0 => &mut queue.open,
        back => {
            let at = queue.closed.len() - back;
            &mut queue.closed[at].batch
        }
    };
    let block = batch.blocks.swap_remove(at);
    batch.bytes -= block.span.block();
    track.count(&mut queue, -1, -(block.span.block() as isize));
    Some(block)
}

impl Pending {
    /// One of its streams has passed: whether that was the last.
    fn is_last(&self) -> bool {
        let last = self.others.as_ref().is_none_or(|others| others.fetch_sub(1, AcqRel) == 1);
        if !last {
            count_extra(self.span, -1);
        }
        last
    }
}

/// Takes a passed block over if it keeps its span.
type Take<'t> = &'t mut dyn FnMut(&'static Span, u16) -> bool;

/// Frees a PENDING block that no stream uses any more. What its policy does to contents is done now, not before.
fn release_passed(home: Home, span: &'static Span, index: u16, take: Take<'_>) {
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    let block = span.address(index) as *mut u8;
    // SAFETY: the block is PENDING, taken out of its batch by us alone, and the GPU is done with it.
    if !unsafe { redzone::check_and_poison(home.ops, block, span.block(), policy) } {
        return home.pools.report_corruption(); // never handed out again
    }
    if is_dedicated(span) {
        let _ = home.free_dedicated(span, slot::PENDING);
    } else if take(span, index) {
        // Its keeper has it.
    } else if let Ok(Remote::Orphan) = span.free_remote(usize::from(index), slot::PENDING) {
        home.visit_orphan(span);
    }
}

impl Queue {
    /// Takes the open batch out, to be closed where no lock is held; [`Track::finish`] must follow.
    fn take_open(&mut self) -> (Batch, Option<Stream>) {
        self.looking += 1;
        (std::mem::take(&mut self.open), self.stream.as_ref().and_then(Hold::stream))
    }

    fn is_empty(&self) -> bool {
        self.open.blocks.is_empty() && self.closed.is_empty()
    }
}

/// What became of an open batch that was taken out: at most one of the two.
#[derive(Default)]
struct Left {
    open: Option<Batch>,
    closed: Option<Closed>,
}

impl Left {
    fn of(closing: Closing) -> Self {
        match closing {
            Closing::Closed(closed) => Self { open: None, closed: Some(closed) },
            Closing::Open(batch) => Self { open: Some(batch), closed: None },
            Closing::Gone => Self::default(),
        }
    }
}

/// What became of a batch that was to be closed.
enum Closing {
    Closed(Closed),
    /// Not now.
    Open(Batch),
    /// Its context died, and it with it.
    Gone,
}

impl Track {
    /// The numbers are written under the queue's lock alone, so that counting takes no atomic step of its own.
    fn count(&self, _queue: &mut Queue, blocks: isize, bytes: isize) {
        self.blocks.store(self.blocks.load(Relaxed).wrapping_add_signed(blocks), Relaxed);
        self.bytes.store(self.bytes.load(Relaxed).wrapping_add_signed(bytes), Relaxed);
    }

    fn uncount(&self, batch: &Batch) {
        self.count(&mut lock(&self.queue), -(batch.blocks.len() as isize), -(batch.bytes as isize));
    }

    /// The stream has passed a batch: frees those of its blocks that wait for no other.
    fn pass(&self, batch: Batch, take: Take<'_>) {
        self.uncount(&batch);
        for block in batch.blocks {
            if block.is_last() {
                let bytes = block.span.block();
                release_passed(block.home, block.span, block.index, take);
                if let Some(Notify { call, tag }) = block.notify {
                    call(tag, bytes);
                }
            }
        }
    }

    /// The context of a batch died.
    fn lose(&self, batch: Batch) {
        self.uncount(&batch);
        for block in batch.blocks {
            if block.is_last() {
                LOST_BLOCKS.fetch_add(1, Relaxed);
                LOST_BYTES.fetch_add(block.span.block(), Relaxed);
            }
        }
    }

    /// Sets the fence of a batch. Calls the driver.
    fn close(&self, batch: Batch, stream: Option<Stream>) -> Closing {
        if batch.blocks.is_empty() {
            return Closing::Gone;
        }
        // A foreign stream whose last handle is going closes its batches itself.
        let Some(stream) = stream else { return Closing::Open(batch) };
        match Fence::after(&stream) {
            Ok(Some(fence)) => Closing::Closed(Closed { fence, batch }),
            Err(error) if error.kind() == CudaErrorKind::ContextLost => {
                self.lose(batch);
                Closing::Gone
            }
            // Capturing; or no answer from the driver, without which reuse would not be safe.
            Ok(None) | Err(_) => Closing::Open(batch),
        }
    }

    /// Puts back what was taken out: `waiting` batches, which are older than those in the queue, and what became of the
    /// open one. If the stream said farewell meanwhile, all of it has passed.
    fn finish(&self, mark: u64, left: Left, mut waiting: VecDeque<Closed>) {
        let Left { open, closed } = left;
        {
            let mut queue = lock(&self.queue);
            if queue.mark == mark {
                queue.looking -= 1;
                if let Some(mut batch) = open {
                    queue.open.bytes += batch.bytes;
                    queue.open.blocks.append(&mut batch.blocks);
                }
                if !waiting.is_empty() {
                    waiting.append(&mut queue.closed);
                    queue.closed = waiting;
                }
                queue.closed.extend(closed);
                return;
            }
        }
        open.into_iter().for_each(|batch| self.pass(batch, &mut |_, _| false));
        for Closed { fence, batch } in waiting.into_iter().chain(closed) {
            match fence.passed() {
                Ok(true) => self.pass(batch, &mut |_, _| false),
                // The farewell could not wait, and nobody can any more.
                Ok(false) | Err(_) => self.lose(batch),
            }
        }
    }

    /// Takes up what has passed; answers whether anything did.
    fn look(&self, urgency: Urgency, take: Take<'_>) -> bool {
        if self.blocks.load(Relaxed) == 0 {
            return false;
        }
        let (mark, open, mut closed) = {
            let mut queue = lock(&self.queue);
            if queue.mark == 0 || queue.is_empty() {
                return false;
            }
            queue.open.looks = queue.open.looks.saturating_add(1);
            let worth = queue.open.blocks.len() >= WORTH_CLOSING || queue.open.looks >= LOOKS;
            let closes = !queue.open.blocks.is_empty()
                && (urgency == Urgency::Wait || queue.closed.is_empty() && worth);
            let open = closes.then(|| queue.take_open());
            if open.is_none() {
                if queue.closed.is_empty() {
                    return false;
                }
                queue.looking += 1;
            }
            (queue.mark, open, std::mem::take(&mut queue.closed))
        };
        let mut left = open.map_or_else(Left::default, |(batch, stream)| Left::of(self.close(batch, stream)));
        closed.extend(left.closed.take());
        let mut passed = false;
        while let Some(first) = closed.front() {
            let done = match urgency {
                Urgency::Look => first.fence.passed(),
                Urgency::Wait => first.fence.wait().map(|()| true),
            };
            match done {
                Ok(true) => {
                    passed = true;
                    closed.pop_front().into_iter().for_each(|closed| self.pass(closed.batch, take));
                }
                Err(error) if error.kind() == CudaErrorKind::ContextLost => {
                    closed.pop_front().into_iter().for_each(|closed| self.lose(closed.batch));
                }
                Ok(false) | Err(_) => break, // in order: later ones are not passed either
            }
        }
        self.finish(mark, left, closed);
        passed
    }

    /// Lets the stream go if nobody else holds it and nothing waits for it. Blocks that are still marked with it find it
    /// gone when they are freed: it has passed then.
    fn let_go(&self, urgency: Urgency) {
        let idle = |queue: &Queue, handles| match &queue.stream {
            Some(Hold::Own(stream)) => {
                (queue.is_empty() && queue.looking == 0 && stream.handles() == handles)
                    .then(|| stream.clone())
            }
            _ => None,
        };
        let Some(stream) = idle(&lock(&self.queue), 1) else { return };
        // It may still run work of blocks that are live and marked.
        let passed = match urgency {
            Urgency::Look => stream.query(),
            Urgency::Wait => Fence::after(&stream).and_then(|fence| match fence {
                Some(fence) => fence.wait().map(|()| true),
                None => Ok(false),
            }),
        };
        if !matches!(passed, Ok(true)) {
            return;
        }
        let (mark, held) = {
            let mut queue = lock(&self.queue);
            if idle(&queue, 2).is_none() {
                return; // another thread looks, or freed a block meanwhile
            }
            (std::mem::take(&mut queue.mark), queue.stream.take())
        };
        tracks::give_back(mark);
        drop((held, stream)); // destroys the stream: a driver call, so no lock is held
    }
}

/// Takes up what has passed on all streams; answers whether anything did. The pools call it when they need memory.
pub(super) fn reclaim(urgency: Urgency, take: Take<'_>) -> bool {
    let mut passed = false;
    for track in tracks::all() {
        passed |= track.look(urgency, take);
        if passed || urgency == Urgency::Wait {
            track.let_go(urgency);
        }
    }
    if urgency == Urgency::Wait {
        destroy_spares();
    }
    passed
}

/// The last handle of a foreign stream is going: whatever was used on it is waited for now, since nothing can be asked
/// of the stream later.
pub(crate) fn farewell(mark: u64, synchronize: impl FnOnce() -> Result<(), CudaError>) {
    let Some(track) = tracks::find(mark) else { return };
    let result = synchronize();
    let (open, closed) = {
        let mut queue = lock(&track.queue);
        if queue.mark != mark {
            return;
        }
        queue.mark = 0;
        queue.stream = None;
        queue.looking = 0;
        (std::mem::take(&mut queue.open), std::mem::take(&mut queue.closed))
    };
    for batch in std::iter::once(open).chain(closed.into_iter().map(|closed| closed.batch)) {
        match result {
            Ok(()) => track.pass(batch, &mut |_, _| false),
            Err(_) => track.lose(batch),
        }
    }
    tracks::give_back(mark);
}
