//! Streams: ordered queues, each executed by a worker thread of its own, and the default stream's order with the
//! others. Events and captures are beside it.

use crate::capture::{self, Capture};
use crate::codes::*;
use crate::context::{self, Context};
use crate::entry::{lock, runtime};
use crate::event::Event;
use crate::memory;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Work of a stream; an error loses the context. Shared, since a graph runs it again at every launch.
pub type Work = Arc<dyn Fn() -> Outcome + Send + Sync>;

/// One entry of a queue.
#[derive(Clone)]
pub enum Operation {
    /// Device work. Skipped once the context is lost.
    Run(Work),
    /// Completes that recording of the event.
    Record(Arc<Event>, u64),
    /// Waits for that recording of the event.
    AwaitEvent(Arc<Event>, u64),
    /// Waits until a stream has completed that many operations.
    AwaitStream(Arc<Stream>, u64),
}

impl Operation {
    /// Whether it makes the device work. The others only say how far a stream has come.
    fn is_work(&self) -> bool {
        matches!(self, Self::Run(_))
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Operation>,
    submitted: u64,
    completed: u64,
    /// Operations that are work, submitted and not completed.
    work: u64,
    has_worker: bool,
    ended: bool,
}

/// One stream.
pub struct Stream {
    pub handle: usize,
    pub id: u64,
    pub flags: u32,
    pub priority: i32,
    pub context: Weak<Context>,
    default: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The capture that this stream is part of.
    pub capture: Mutex<Option<Arc<Capture>>>,
}

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
const HANDLES: usize = 0x5000_0000;
const HANDLE_STEP: usize = 0x200;

/// Handles in use, and those given back: the latest is given out again first, as the real driver does.
#[derive(Default)]
struct Streams {
    live: BTreeMap<usize, Arc<Stream>>,
    spare: Vec<usize>,
    ever: usize,
}

static STREAMS: Mutex<Streams> = Mutex::new(Streams { live: BTreeMap::new(), spare: Vec::new(), ever: 0 });
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Held while work is submitted, so that the order between streams is the order of submission.
static SUBMISSION: Mutex<()> = Mutex::new(());

thread_local! {
    static PER_THREAD_STREAMS: RefCell<HashMap<u64, Arc<Stream>>> = RefCell::default();
}

impl Stream {
    fn new(context: &Arc<Context>, handle: usize, flags: u32, priority: i32, default: bool) -> Arc<Self> {
        let stream = Arc::new(Self {
            handle,
            id: NEXT_ID.fetch_add(1, Relaxed),
            flags,
            priority,
            context: Arc::downgrade(context),
            default,
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::new(None),
        });
        let mut streams = lock(&context.streams);
        streams.retain(|stream| !stream.ended());
        streams.push(stream.clone());
        stream
    }

    /// A context's default stream.
    pub fn new_default(context: &Arc<Context>) -> Arc<Self> {
        Self::new(context, LEGACY, 0, 0, true)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    fn ended(&self) -> bool {
        let queue = self.queue();
        queue.ended && queue.submitted == queue.completed
    }

    /// How many operations were ever submitted: the ticket to wait for.
    pub fn submitted(&self) -> u64 {
        self.queue().submitted
    }

    /// Whether all of them are done.
    pub fn idle(&self) -> bool {
        let queue = self.queue();
        queue.submitted == queue.completed
    }

    /// Whether any of them that is not done makes the device work.
    pub fn at_work(&self) -> bool {
        self.queue().work > 0
    }

    /// Waits until `ticket` operations are done.
    pub fn wait(&self, ticket: u64) {
        let mut queue = self.queue();
        while queue.completed < ticket {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The stream's context, if it lives.
    pub fn context(&self) -> Outcome<Arc<Context>> {
        self.context.upgrade().ok_or(ERROR_CONTEXT_IS_DESTROYED)
    }

    /// `cuStreamSynchronize` and what follows from the device being idle.
    pub fn synchronize(&self) -> Outcome {
        self.wait(self.submitted());
        settle();
        self.context()?.check_lost()
    }

    fn push(self: &Arc<Self>, operation: Operation) -> Outcome {
        let mut queue = self.queue();
        if queue.ended {
            return Err(ERROR_INVALID_HANDLE);
        }
        if !queue.has_worker {
            let worker = self.clone();
            std::thread::Builder::new()
                .name(format!("fake-cuda {}", self.id))
                .spawn(move || worker.work())
                .map_err(|_| ERROR_OPERATING_SYSTEM)?;
            queue.has_worker = true;
        }
        queue.work += u64::from(operation.is_work());
        queue.waiting.push_back(operation);
        queue.submitted += 1;
        self.changed.notify_all();
        Ok(())
    }

    fn work(self: Arc<Self>) {
        loop {
            let operation = {
                let mut queue = self.queue();
                loop {
                    match queue.waiting.pop_front() {
                        Some(operation) => break operation,
                        None if queue.ended => return,
                        None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            let work = u64::from(operation.is_work());
            lag();
            self.execute(operation);
            lag();
            {
                let mut queue = self.queue();
                queue.completed += 1;
                queue.work -= work;
            }
            self.changed.notify_all();
        }
    }

    fn execute(&self, operation: Operation) {
        match operation {
            Operation::Run(work) => {
                let Some(context) = self.context.upgrade().filter(|context| context.check_lost().is_ok())
                else {
                    return;
                };
                match catch_unwind(AssertUnwindSafe(|| work())) {
                    Ok(Ok(())) => {}
                    Ok(Err(code)) => context.lose(code),
                    Err(_) => context.lose(ERROR_LAUNCH_FAILED),
                }
            }
            Operation::Record(event, recording) => event.complete(recording),
            Operation::AwaitEvent(event, recording) => event.wait(recording),
            Operation::AwaitStream(stream, ticket) => stream.wait(ticket),
        }
    }

    fn end(&self) {
        self.queue().ended = true;
        self.changed.notify_all();
    }
}

/// What lies between a stream and its work on a machine with better things to do.
fn lag() {
    match runtime().config.lag_us {
        0 => {}
        micros => std::thread::sleep(Duration::from_micros(micros)),
    }
}

/// After a synchronisation: managed memory is the host's again if the device has nothing left to do.
pub fn settle() {
    let _order = lock(&SUBMISSION);
    memory::unprotect_if_idle();
}

/// Submits operations together. On a capturing stream they are recorded instead.
pub fn submit(stream: &Arc<Stream>, operations: Vec<Operation>) -> Outcome {
    let _order = lock(&SUBMISSION);
    if let Some(capture) = lock(&stream.capture).as_ref() {
        return capture.record(operations);
    }
    let context = stream.context()?;
    // The default stream waits for the blocking streams and they wait for it; non-blocking ones stand apart.
    if stream.default {
        let others: Vec<_> =
            lock(&context.streams).iter().filter(|other| other.flags & NON_BLOCKING == 0).cloned().collect();
        for other in others.into_iter().filter(|other| !other.default) {
            if lock(&other.capture).is_some() {
                return Err(ERROR_STREAM_CAPTURE_IMPLICIT);
            }
            let ticket = other.submitted();
            if !other.idle() {
                stream.push(Operation::AwaitStream(other, ticket))?;
            }
        }
    } else if stream.flags & NON_BLOCKING == 0 {
        if let Some(legacy) = context.legacy_if_used().filter(|legacy| !legacy.idle()) {
            let ticket = legacy.submitted();
            stream.push(Operation::AwaitStream(legacy, ticket))?;
        }
    }
    if operations.iter().any(Operation::is_work) {
        memory::protect_for_work();
    }
    operations.into_iter().try_for_each(|operation| stream.push(operation))
}

/// Submits device work.
pub fn run(stream: &Arc<Stream>, work: impl Fn() -> Outcome + Send + Sync + 'static) -> Outcome {
    submit(stream, vec![Operation::Run(Arc::new(work))])
}

/// The stream of a handle, whose context is well. The default streams are those of the current context.
pub fn resolve(current: &Outcome<Arc<Context>>, handle: usize) -> Outcome<Arc<Stream>> {
    let stream = match handle {
        0 | LEGACY => current.clone()?.legacy_stream(),
        PER_THREAD => {
            let context = current.clone()?;
            PER_THREAD_STREAMS
                .try_with(|streams| {
                    let mut streams = streams.borrow_mut();
                    streams
                        .entry(context.id)
                        .or_insert_with(|| Stream::new(&context, PER_THREAD, 0, 0, false))
                        .clone()
                })
                .map_err(|_| ERROR_INVALID_CONTEXT)?
        }
        _ => lock(&STREAMS).live.get(&handle).cloned().ok_or(ERROR_INVALID_HANDLE)?,
    };
    stream.context()?.check_lost()?;
    Ok(stream)
}

/// `cuStreamCreate`.
pub fn create(context: &Arc<Context>, flags: u32, priority: i32) -> usize {
    let mut streams = lock(&STREAMS);
    let handle = streams.spare.pop().unwrap_or(HANDLES + streams.ever * HANDLE_STEP);
    if handle == HANDLES + streams.ever * HANDLE_STEP {
        streams.ever += 1;
    }
    let stream = Stream::new(context, handle, flags, priority, false);
    streams.live.insert(handle, stream);
    handle
}

/// `cuStreamDestroy`: returns at once; what was submitted still runs.
pub fn destroy(handle: usize) -> Outcome {
    let mut streams = lock(&STREAMS);
    streams.live.get(&handle).ok_or(ERROR_INVALID_HANDLE)?.context()?.check_lost()?;
    let stream = streams.live.remove(&handle).ok_or(ERROR_INVALID_HANDLE)?;
    streams.spare.push(handle);
    drop(streams);
    capture::forget_stream(&stream);
    stream.end();
    Ok(())
}

/// Ends the streams of a context that ends.
pub fn drop_of_context(context: &Arc<Context>) {
    let mut streams = lock(&STREAMS);
    for stream in lock(&context.streams).drain(..) {
        if streams.live.remove(&stream.handle).is_some() {
            streams.spare.push(stream.handle);
        }
        stream.end();
    }
}

/// Streams that the program made and has not destroyed.
pub fn live() -> u64 {
    lock(&STREAMS).live.len() as u64
}

/// Waits for the whole device, as `cuMemFree` does; other contexts of the device count too.
pub fn synchronize_device(device: i32) {
    for context in context::all().into_iter().filter(|context| context.device == device) {
        let _ = context.synchronize();
    }
    settle();
}
