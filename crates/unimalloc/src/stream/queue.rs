//! What is pending on one stream, and who may change it.
//!
//! Frees go into the open batch under the queue's lock. Closing that batch and taking up batches that have passed also need
//! the *turn*, which one thread at a time has: so batches are closed in the stream's order, and somebody who waits for the
//! turn knows that whatever was out of the queue is back, or free. No lock is held across a driver call, and the turn is
//! not held while waiting for the stream.
//!
//! ```text
//! push:      lock, append;   batch full and the turn free?  close
//! look:      the turn free?  close if worth it; take up while the oldest fence has passed
//! settle:    wait for the turn, close, give it back;  wait for the newest fence;  wait for the turn, take up
//! farewell:  wait for the turn, wait for the stream, take all up, vacate the place
//! ```
//!
//! Who waits for the turn goes before those who only try: while somebody waits, nobody else takes it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pending::{lose, pass, Pending, Take};
use super::tracks::{self, Hold};
use crate::cuda::{CudaError, CudaErrorKind, Fence};
use crate::pool::Urgency;
use crate::sync::{lock, wait, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering::Relaxed};

/// A batch closes by itself at this many blocks, or at a segment's worth of bytes, which is at most an eighth of what the
/// process may hold. So much finds room in a heap's cache when it comes back.
const BATCH_BLOCKS: usize = 64;
/// Somebody who needs memory closes a batch from this many blocks on, if none is on its way, or one that so many have
/// looked at: an event costs about a microsecond, and so does asking for it.
const WORTH_CLOSING: usize = 32;
const LOOKS: u8 = 16;

#[derive(Default)]
pub(super) struct Batch {
    pub(super) blocks: Vec<Pending>,
    pub(super) bytes: usize,
    /// How often somebody needed memory while this batch was open.
    looks: u8,
    /// Blocks that were in it when it last could not be closed: the next try is at twice as many.
    refused: usize,
}

impl Batch {
    fn is_full(&self, bytes: usize) -> bool {
        (self.blocks.len() >= BATCH_BLOCKS || self.bytes >= bytes) && self.blocks.len() >= 2 * self.refused
    }

    fn is_worth_closing(&self) -> bool {
        self.blocks.len() >= WORTH_CLOSING || self.looks >= LOOKS
    }

    /// Appends what was freed later.
    fn append(&mut self, mut later: Batch) {
        self.bytes += later.bytes;
        self.blocks.append(&mut later.blocks);
    }
}

pub(super) struct Closed {
    /// Shared with who waits for it.
    fence: Arc<Fence>,
    pub(super) batch: Batch,
}

/// What is pending on a stream.
#[derive(Default)]
pub(super) struct Queue {
    /// The number of the stream that the queue is of; 0: of none.
    pub(super) mark: u64,
    pub(super) generation: u32,
    pub(super) stream: Option<Hold>,
    /// Whether a thread has the turn.
    turn: bool,
    /// Threads that wait for it.
    waiting: usize,
    pub(super) open: Batch,
    /// In the stream's order.
    pub(super) closed: VecDeque<Closed>,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.open.blocks.is_empty() && self.closed.is_empty()
    }
}

/// What is pending on one stream. Never freed, and used again for another stream.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Track {
    pub(super) queue: Mutex<Queue>,
    turn_ended: Condvar,
    /// Blocks that wait here, and their bytes.
    pub(super) blocks: AtomicUsize,
    pub(super) bytes: AtomicUsize,
}

/// The right to take batches out of a queue. A panic gives it back as well: what the thread had taken out is then lost,
/// and nobody waits for ever.
struct Turn<'t>(&'t Track);

impl Turn<'_> {
    /// Gives it back under a lock that is held already.
    fn end(self, mut queue: MutexGuard<'_, Queue>) {
        queue.turn = false;
        let waiting = queue.waiting > 0;
        drop(queue);
        if waiting {
            self.0.turn_ended.notify_all();
        }
        std::mem::forget(self);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.queue).turn = false;
        self.0.turn_ended.notify_all();
    }
}

impl Track {
    /// The numbers are written under the queue's lock alone, so that counting takes no atomic step of its own.
    pub(super) fn count(&self, _queue: &mut Queue, blocks: isize, bytes: isize) {
        self.blocks.store(self.blocks.load(Relaxed).wrapping_add_signed(blocks), Relaxed);
        self.bytes.store(self.bytes.load(Relaxed).wrapping_add_signed(bytes), Relaxed);
    }

    fn uncount(&self, queue: &mut Queue, batch: &Batch) {
        self.count(queue, -(batch.blocks.len() as isize), -(batch.bytes as isize));
    }

    /// The turn, if it is free and nobody waits for it.
    fn try_turn(&self, queue: &mut Queue) -> Option<Turn<'_>> {
        if queue.turn || queue.waiting > 0 {
            return None;
        }
        queue.turn = true;
        Some(Turn(self))
    }

    /// The turn, once its holder has given it back. Holders wait for no turn, so this ends.
    fn wait_turn<'t>(&'t self, mut queue: MutexGuard<'t, Queue>) -> (MutexGuard<'t, Queue>, Turn<'t>, bool) {
        let waits = queue.turn;
        queue.waiting += 1;
        while queue.turn {
            queue = wait(&self.turn_ended, queue);
        }
        queue.waiting -= 1;
        queue.turn = true;
        (queue, Turn(self), waits)
    }

    /// Appends a freed block to the open batch. False if the queue is not that of the block's stream any more.
    pub(super) fn push(&self, mark: u64, block: Pending) -> bool {
        let mut queue = lock(&self.queue);
        if queue.mark != mark {
            return false;
        }
        let (bytes, full) = (block.span.block(), block.home.segment_bytes());
        self.count(&mut queue, 1, bytes as isize);
        queue.open.bytes += bytes;
        queue.open.blocks.push(block);
        if queue.open.is_full(full) {
            // Else who has the turn leaves a batch that the next free finds full again.
            if let Some(turn) = self.try_turn(&mut queue) {
                let queue = self.close(queue, &turn);
                turn.end(queue);
            }
        }
        true
    }

    /// Closes the open batch, if that is possible now. The lock is let go for the driver call and taken again.
    fn close<'t>(&'t self, mut queue: MutexGuard<'t, Queue>, _turn: &Turn<'t>) -> MutexGuard<'t, Queue> {
        if queue.open.blocks.is_empty() {
            return queue;
        }
        // The handle of a foreign stream is good while we have the turn: its farewell waits for it.
        let Some(stream) = queue.stream.as_ref().and_then(Hold::stream) else { return queue };
        let mut batch = std::mem::take(&mut queue.open);
        drop(queue);
        let fence = Fence::after(&stream);
        drop(stream);
        let mut queue = lock(&self.queue);
        match fence {
            Ok(Some(fence)) => {
                queue.closed.push_back(Closed { fence: Arc::new(fence), batch });
                queue
            }
            Err(error) if error.kind() == CudaErrorKind::ContextLost => {
                self.uncount(&mut queue, &batch);
                drop(queue);
                lose(batch);
                lock(&self.queue)
            }
            // Capturing; or no answer from the driver, without which reuse would not be safe.
            Ok(None) | Err(_) => {
                batch.refused = batch.blocks.len();
                batch.append(std::mem::take(&mut queue.open));
                queue.open = batch;
                queue
            }
        }
    }

    /// Takes up the batches that have passed, the oldest first; answers whether there was any. Ends the turn.
    fn take_up<'t>(&'t self, mut queue: MutexGuard<'t, Queue>, turn: Turn<'t>, take: Take<'_>) -> bool {
        let mut any = false;
        while let Some(first) = queue.closed.front() {
            let fence = Arc::clone(&first.fence);
            drop(queue);
            let passed = fence.passed();
            queue = lock(&self.queue);
            let lost = match &passed {
                Ok(passed) if *passed => false,
                Err(error) if error.kind() == CudaErrorKind::ContextLost => true,
                _ => break, // later ones have not passed either
            };
            let Some(Closed { batch, .. }) = queue.closed.pop_front() else { break };
            self.uncount(&mut queue, &batch);
            drop(queue);
            drop(fence); // calls the driver
            if lost {
                lose(batch);
            } else {
                any = true;
                pass(batch, take);
            }
            queue = lock(&self.queue);
        }
        turn.end(queue);
        any
    }

    /// Takes up what has passed; answers whether anything did. Waits for nothing and nobody.
    pub(super) fn look(&self, take: Take<'_>) -> bool {
        if self.blocks.load(Relaxed) == 0 {
            return false;
        }
        let mut queue = lock(&self.queue);
        if queue.mark == 0 || queue.is_empty() {
            return false;
        }
        queue.open.looks = queue.open.looks.saturating_add(1);
        let closes = queue.closed.is_empty();
        if closes && !queue.open.is_worth_closing() {
            return false;
        }
        let Some(turn) = self.try_turn(&mut queue) else { return false };
        if closes {
            queue = self.close(queue, &turn);
        }
        self.take_up(queue, turn, take)
    }

    /// Waits until the stream has passed all that is pending now, and until it is free: also what another thread is taking
    /// up at the moment. Answers whether there was anything.
    pub(super) fn settle(&self, take: Take<'_>) -> bool {
        let queue = lock(&self.queue);
        // Not by the numbers: a thread that has the turn has taken its batch off them already.
        if queue.is_empty() && !queue.turn {
            return false;
        }
        let (queue, turn, waited) = self.wait_turn(queue);
        let queue = self.close(queue, &turn);
        let newest = queue.closed.back().map(|closed| Arc::clone(&closed.fence));
        turn.end(queue);
        let Some(newest) = newest else { return waited };
        // Without the turn: others may take up meanwhile what passes early. What is wrong, `take_up` hears as well.
        let _ = newest.wait();
        let (queue, turn, again) = self.wait_turn(lock(&self.queue));
        self.take_up(queue, turn, take) || waited || again
    }

    /// Lets the stream go if nobody else holds it and nothing waits for it. Blocks that are still marked with it find it
    /// gone when they are freed: it has passed then.
    pub(super) fn let_go(&self, urgency: Urgency) {
        let idle = |queue: &Queue, handles| match &queue.stream {
            Some(Hold::Own(stream)) => {
                (queue.is_empty() && !queue.turn && stream.handles() == handles).then(|| stream.clone())
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

    /// The foreign stream of the queue is going: takes all up, and vacates the place.
    pub(super) fn farewell(&self, mark: u64, synchronize: impl FnOnce() -> Result<bool, CudaError>) {
        let (queue, turn, _) = self.wait_turn(lock(&self.queue));
        if queue.mark != mark {
            return turn.end(queue);
        }
        drop(queue);
        let result = synchronize();
        let mut queue = lock(&self.queue);
        queue.mark = 0;
        queue.stream = None;
        let (open, closed) = (std::mem::take(&mut queue.open), std::mem::take(&mut queue.closed));
        self.uncount(&mut queue, &open);
        closed.iter().for_each(|closed| self.uncount(&mut queue, &closed.batch));
        drop(queue);
        let nobody = &mut |_, _| false;
        let passed = matches!(result, Ok(true));
        for Closed { fence, batch } in closed {
            // A fence before the capture can be waited for where the stream itself cannot.
            if passed || fence.wait().is_ok() {
                pass(batch, nobody);
            } else {
                lose(batch);
            }
        }
        if passed {
            pass(open, nobody);
        } else {
            lose(open);
        }
        turn.end(lock(&self.queue));
        tracks::give_back(mark);
    }
}
