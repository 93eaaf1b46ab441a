//! Blocks that work on the GPU may still use.
//!
//! A launch, copy or fill holds its blocks here. A block that the program lets go meanwhile is pending, and goes back to the pools when
//! the work is done. An event is recorded only when one is needed to tell that: when a block of a batch has been let
//! go, or a batch is full. A program that keeps its arrays pays for no events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use unimalloc::cuda::{Event, Stream};

use crate::block::{self, Block};

/// Blocks in an open batch before it is closed by an event.
const BATCH: usize = 64;

/// Work of one stream, in its order.
struct Lane {
    stream: Stream,
    /// Held by work that no event follows yet. No block twice.
    open: Vec<Arc<Block>>,
    closed: Vec<Batch>,
}

struct Batch {
    done: Arc<Event>,
    blocks: Vec<Arc<Block>>,
}

static LANES: OnceLock<Mutex<HashMap<u64, Lane>>> = OnceLock::new();

/// Set when a block was let go while it is held here: only then is there something to poll for.
static SOMETHING_PENDING: AtomicBool = AtomicBool::new(false);

fn lanes() -> MutexGuard<'static, HashMap<u64, Lane>> {
    LANES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells that a block was let go that something else still holds.
pub fn note_pending() {
    SOMETHING_PENDING.store(true, Ordering::Release);
}

impl Lane {
    /// Follows the open batch by an event. Work that is being captured into a graph may run at any later time, and without an event nothing
    /// tells when it is done: such blocks are kept for good.
    fn close(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let blocks = std::mem::take(&mut self.open);
        let event = match self.stream.is_capturing() {
            Ok(false) => self.stream.record().ok(),
            _ => None,
        };
        match event {
            Some(done) => self.closed.push(Batch { done: Arc::new(done), blocks }),
            None => blocks.into_iter().for_each(block::quarantine),
        }
    }

    /// Takes out the blocks of batches that are done, to be dropped where no lock is held.
    fn reap(&mut self, freed: &mut Vec<Arc<Block>>) {
        self.closed.retain_mut(|batch| match batch.done.done() {
            Ok(false) => true,
            Ok(true) => {
                freed.append(&mut batch.blocks);
                false
            }
            // The context is lost, and its memory with it: nothing can be handed out again.
            Err(_) => {
                std::mem::take(&mut batch.blocks).into_iter().for_each(block::quarantine);
                false
            }
        });
    }

    fn has_pending(&self) -> bool {
        let pending = |blocks: &[Arc<Block>]| blocks.iter().any(|block| block.holders() == 0);
        pending(&self.open) || self.closed.iter().any(|batch| pending(&batch.blocks))
    }
}

/// Notes that work just queued on `stream` uses the blocks.
pub fn hold(stream: &Stream, blocks: impl IntoIterator<Item = Arc<Block>>) {
    let mut freed = Vec::new();
    {
        let mut lanes = lanes();
        let lane = lanes.entry(stream.id()).or_insert_with(|| Lane {
            stream: stream.clone(),
            open: Vec::new(),
            closed: Vec::new(),
        });
        for block in blocks {
            if !lane.open.iter().any(|held| Arc::ptr_eq(held, &block)) {
                lane.open.push(block);
            }
        }
        if lane.open.len() >= BATCH {
            lane.close();
            lane.reap(&mut freed);
        }
    }
    drop(freed);
}

/// Gives back what the GPU has finished with. Free of cost while nothing is pending.
pub fn poll() {
    if !SOMETHING_PENDING.swap(false, Ordering::AcqRel) {
        return;
    }
    let mut freed = Vec::new();
    let mut left = false;
    {
        let mut lanes = lanes();
        lanes.retain(|_, lane| {
            if lane.has_pending() {
                if lane.open.iter().any(|block| block.holders() == 0) {
                    lane.close();
                }
                lane.reap(&mut freed);
                left |= lane.has_pending();
            }
            !(lane.open.is_empty() && lane.closed.is_empty())
        });
    }
    if left {
        note_pending();
    }
    drop(freed);
}

/// Waits for the work that pending blocks wait for, and gives them back. False when nothing was pending.
pub fn drain() -> bool {
    let mut events = Vec::new();
    for lane in lanes().values_mut() {
        if lane.has_pending() {
            lane.close();
            events.extend(lane.closed.iter().map(|batch| Arc::clone(&batch.done)));
        }
    }
    if events.is_empty() {
        return false;
    }
    wait(&events);
    note_pending();
    poll();
    true
}

/// Waits for the work that uses a block.
pub fn wait_for(block: &Arc<Block>) {
    let uses = |blocks: &[Arc<Block>]| blocks.iter().any(|held| Arc::ptr_eq(held, block));
    let mut events = Vec::new();
    for lane in lanes().values_mut() {
        if uses(&lane.open) {
            lane.close();
        }
        events.extend(
            lane.closed.iter().filter(|batch| uses(&batch.blocks)).map(|batch| Arc::clone(&batch.done)),
        );
    }
    wait(&events);
}

/// Follows what a stream was given so far by an event, so that the stream itself is not needed any more.
pub fn retire(stream: &Stream) {
    if let Some(lane) = lanes().get_mut(&stream.id()) {
        lane.close();
    }
}

fn wait(events: &[Arc<Event>]) {
    for event in events {
        // A lost context ends the wait, and the poll that follows finds it lost.
        let _ = event.synchronize();
    }
}

/// Launches on devices where the CPU may not touch managed memory meanwhile, made all the same.
static FORBIDDEN_UNTIL: Mutex<Vec<Event>> = Mutex::new(Vec::new());
static HOST_ACCESS_FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on until the stream is done, this package touches no managed memory by the CPU.
pub fn forbid_host_access(stream: &Stream) {
    if let Ok(event) = stream.record() {
        FORBIDDEN_UNTIL.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        HOST_ACCESS_FORBIDDEN.store(true, Ordering::Release);
    }
}

/// Whether the CPU may touch managed memory.
pub fn host_may_access() -> bool {
    if !HOST_ACCESS_FORBIDDEN.load(Ordering::Acquire) {
        return true;
    }
    let mut events = FORBIDDEN_UNTIL.lock().unwrap_or_else(PoisonError::into_inner);
    events.retain(|event| matches!(event.done(), Ok(false)));
    HOST_ACCESS_FORBIDDEN.store(!events.is_empty(), Ordering::Release);
    events.is_empty()
}
