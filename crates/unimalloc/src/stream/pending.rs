//! Freed blocks that wait for their streams.
//!
//! Each stream has an open batch of blocks that were freed after use on it. A batch is closed by one fence, when it is
//! large enough or when somebody needs memory; when the stream has passed the fence, so has it every use that came before
//! the frees in the batch ([`queue`](super::queue)). A stream that is capturing a graph is never touched: its batch stays
//! open.
//!
//! ```text
//! LIVE|MARKED --free--> PENDING, in the open batch --fence--> closed batch --fence passed--> free, through the span
//! ```
//!
//! Batches are reached through one process-wide table, so that any thread's slow path, `trim`, and the retry after a
//! refusal can take them up, whichever thread freed the blocks.

use std::sync::Arc;

use super::marks::{renew, take_streams};
use super::queue::{Batch, Track};
use super::tracks;
use crate::cuda::{destroy_spares, CudaError, Stream};
use crate::meta::slot;
use crate::meta::span::{Remote, Span};
use crate::policy::{redzone, Policy};
use crate::pool::{is_dedicated, Home, Urgency};
use crate::sync::{global, lock, AtomicUsize, Ordering};

use Ordering::{AcqRel, Relaxed};

/// A freed block that waits for one stream, or for one of several.
pub(super) struct Pending {
    pub(super) home: Home,
    pub(super) span: &'static Span,
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

/// What no track can count.
struct Sums {
    /// Entries and bytes by which the tracks count more than once what waits for several streams.
    extra_blocks: AtomicUsize,
    extra_bytes: AtomicUsize,
    lost_blocks: AtomicUsize,
    lost_bytes: AtomicUsize,
}

global! {
    static SUMS: Sums = Sums {
        extra_blocks: AtomicUsize::new(0),
        extra_bytes: AtomicUsize::new(0),
        lost_blocks: AtomicUsize::new(0),
        lost_bytes: AtomicUsize::new(0),
    };
}

/// Freed blocks that the GPU may still use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingStats {
    /// Blocks that wait for their streams.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Blocks whose context died before they passed, or whose stream was let go in the middle of a capture; they are not
    /// used again.
    pub lost_blocks: usize,
    /// Their bytes.
    pub lost_bytes: usize,
}

/// What is pending now, over all streams.
pub fn pending_stats() -> PendingStats {
    let mut stats = PendingStats {
        lost_blocks: SUMS.lost_blocks.load(Relaxed),
        lost_bytes: SUMS.lost_bytes.load(Relaxed),
        ..PendingStats::default()
    };
    for track in tracks::all() {
        stats.blocks += track.blocks.load(Relaxed);
        stats.bytes += track.bytes.load(Relaxed);
    }
    stats.blocks = stats.blocks.saturating_sub(SUMS.extra_blocks.load(Relaxed));
    stats.bytes = stats.bytes.saturating_sub(SUMS.extra_bytes.load(Relaxed));
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
    match one_less(&others, false) {
        Some(End::Passed) => Deferred::Passed(slot::PENDING),
        Some(End::Lost) => {
            count_lost(span);
            Deferred::Pending
        }
        None => {
            count_extra(span, -1); // one of the entries is the block itself
            Deferred::Pending
        }
    }
}

fn count_extra(span: &Span, entries: isize) {
    SUMS.extra_blocks.fetch_add(entries as usize, Relaxed);
    SUMS.extra_bytes.fetch_add((span.block() as isize * entries) as usize, Relaxed);
}

/// Puts a freed block into the open batch of its stream. False if the stream is gone: it has passed.
fn enqueue(mark: u64, block: Pending) -> bool {
    tracks::find(mark).is_some_and(|track| track.push(mark, block))
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

/// In [`Pending::others`]: one of the streams will never be known to have passed.
const ONE_LOST: usize = 1 << (usize::BITS - 1);

/// What became of a block, once the last of its streams has said.
enum End {
    Passed,
    /// Some stream may use it for ever.
    Lost,
}

/// One stream less to wait for; `lost` if it can never be known to have passed. `None` while there are others.
fn one_less(others: &AtomicUsize, lost: bool) -> Option<End> {
    let flag = if lost { ONE_LOST } else { 0 };
    let less = |waits: usize| Some((waits - 1) | flag);
    let (Ok(before) | Err(before)) = others.fetch_update(AcqRel, Relaxed, less);
    match (before & !ONE_LOST, (before | flag) & ONE_LOST) {
        (1, 0) => Some(End::Passed),
        (1, _) => Some(End::Lost),
        _ => None,
    }
}

impl Pending {
    /// One of its streams has passed, or is lost: what becomes of the block, if that was the last.
    fn end(&self, lost: bool) -> Option<End> {
        let Some(others) = &self.others else { return Some(if lost { End::Lost } else { End::Passed }) };
        let end = one_less(others, lost);
        if end.is_none() {
            count_extra(self.span, -1);
        }
        end
    }
}

fn count_lost(span: &Span) {
    SUMS.lost_blocks.fetch_add(1, Relaxed);
    SUMS.lost_bytes.fetch_add(span.block(), Relaxed);
}

/// Takes a passed block over if it keeps its span.
pub(super) type Take<'t> = &'t mut dyn FnMut(&'static Span, u16) -> bool;

/// Frees a PENDING block that no stream uses any more. What its policy does to contents is done now, not before.
fn release_passed(home: Home, span: &'static Span, index: u16, take: Take<'_>) {
    let policy = Policy::from_lane(span.lane.load(Relaxed));
    let block = span.address(index) as *mut u8;
    // SAFETY: the block is PENDING, taken out of its batch by us alone, and the GPU is done with it.
    if !unsafe { redzone::check_and_poison(home.ops, block, span.usable(index), policy) } {
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

/// What becomes of blocks whose stream has passed them: those that wait for no other are free.
pub(super) fn pass(batch: Batch, take: Take<'_>) {
    for block in batch.blocks {
        finish(block, false, take);
    }
}

/// What becomes of blocks that nobody can say any more when the GPU is done with.
pub(super) fn lose(batch: Batch) {
    for block in batch.blocks {
        finish(block, true, &mut |_, _| false);
    }
}

fn finish(block: Pending, lost: bool, take: Take<'_>) {
    match block.end(lost) {
        Some(End::Passed) => {
            let bytes = block.span.block();
            release_passed(block.home, block.span, block.index, take);
            if let Some(Notify { call, tag }) = block.notify {
                call(tag, bytes);
            }
        }
        Some(End::Lost) => count_lost(block.span),
        None => {}
    }
}

/// Takes up what has passed on all streams; answers whether anything did, here or by another thread that was waited for.
/// The pools call it when they need memory. With [`Urgency::Wait`] every block that was pending at the call is free when it
/// returns, whoever took it up, except where its stream is capturing.
pub(super) fn reclaim(urgency: Urgency, take: Take<'_>) -> bool {
    let mut passed = false;
    for track in tracks::all() {
        passed |= match urgency {
            Urgency::Look => track.look(take),
            Urgency::Wait => track.settle(take),
        };
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
/// of the stream later. `synchronize` answers whether that could be done: a stream that is capturing cannot be waited for.
pub(crate) fn farewell(mark: u64, synchronize: impl FnOnce() -> Result<bool, CudaError>) {
    if let Some(track) = tracks::find(mark) {
        track.farewell(mark, synchronize);
    }
}
