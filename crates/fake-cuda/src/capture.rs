//! Stream capture, the calls that it forbids, and the graphs that it gives.

use crate::codes::*;
use crate::entry::lock;
use crate::stream::{Operation, Stream};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// `CU_STREAM_CAPTURE_MODE_*`.
pub const GLOBAL: u32 = 0;
pub const RELAXED: u32 = 2;
const GRAPHS: usize = 0x7000_0000;

/// One capture under way.
pub struct Capture {
    pub id: u64,
    origin: usize,
    context: usize,
    mode: u32,
    thread: ThreadId,
    invalid: AtomicBool,
    recorded: Mutex<Vec<Operation>>,
}

/// A captured graph, or an executable one: the operations in the order in which they were captured.
pub type Graph = Arc<Vec<Operation>>;

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
static GRAPH_TABLE: Mutex<BTreeMap<usize, Graph>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

impl Capture {
    /// Notes operations of a stream that is part of this capture.
    pub fn record(&self, operations: Vec<Operation>) -> Outcome {
        self.check()?;
        lock(&self.recorded).extend(operations);
        Ok(())
    }

    fn check(&self) -> Outcome {
        if self.invalid.load(Acquire) {
            return Err(ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        Ok(())
    }

    /// `CUstreamCaptureStatus`.
    pub fn status(&self) -> u32 {
        1 + u32::from(self.invalid.load(Acquire))
    }

    /// Whether it was ended.
    pub fn over(&self) -> bool {
        !lock(&ACTIVE).iter().any(|active| active.id == self.id)
    }

    /// Something forbidden was done to it.
    pub fn invalidate(&self) {
        self.invalid.store(true, Release);
    }
}

/// `cuThreadExchangeStreamCaptureMode`.
pub fn exchange_mode(mode: u32) -> Outcome<u32> {
    if mode > RELAXED {
        return Err(ERROR_INVALID_VALUE);
    }
    Ok(MODE.try_with(|own| own.replace(mode)).unwrap_or(GLOBAL))
}

/// `cuStreamBeginCapture`.
pub fn begin(stream: &Arc<Stream>, mode: u32) -> Outcome {
    if mode > RELAXED {
        return Err(ERROR_INVALID_VALUE);
    }
    if stream.handle <= 1 {
        return Err(ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut own = lock(&stream.capture);
    if own.is_some() {
        return Err(ERROR_ILLEGAL_STATE);
    }
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Relaxed),
        origin: stream.handle,
        context: stream.context()?.handle,
        mode,
        thread: std::thread::current().id(),
        invalid: AtomicBool::new(false),
        recorded: Mutex::default(),
    });
    lock(&ACTIVE).push(capture.clone());
    *own = Some(capture);
    Ok(())
}

/// `cuStreamEndCapture`: the graph's handle.
pub fn end(stream: &Arc<Stream>) -> Outcome<usize> {
    let mut own = lock(&stream.capture);
    let capture = own.clone().ok_or(ERROR_ILLEGAL_STATE)?;
    if capture.origin != stream.handle {
        return Err(ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    *own = None;
    drop(own);
    lock(&ACTIVE).retain(|active| active.id != capture.id);
    if let Ok(context) = stream.context() {
        for joined in lock(&context.streams).iter() {
            let mut other = lock(&joined.capture);
            if other.as_ref().is_some_and(|c| c.id == capture.id) {
                *other = None;
            }
        }
    }
    capture.check()?;
    let operations = std::mem::take(&mut *lock(&capture.recorded));
    Ok(add_graph(Arc::new(operations)))
}

/// A stream that is destroyed leaves its capture; if it began it, the capture is over.
pub fn forget_stream(stream: &Stream) {
    if let Some(capture) = lock(&stream.capture).take() {
        capture.invalidate();
        if capture.origin == stream.handle {
            lock(&ACTIVE).retain(|active| active.id != capture.id);
        }
    }
}

/// Refuses a call that could break a capture which this thread's mode respects, and breaks that capture.
pub fn forbid_unsafe_call() -> Outcome {
    let mode = MODE.try_with(Cell::get).unwrap_or(GLOBAL);
    if mode == RELAXED {
        return Ok(());
    }
    let me = std::thread::current().id();
    let active = lock(&ACTIVE);
    let broken = active.iter().filter(|capture| {
        let own = capture.thread == me && capture.mode != RELAXED;
        own || mode == GLOBAL && capture.mode == GLOBAL
    });
    let mut any = false;
    for capture in broken {
        capture.invalidate();
        any = true;
    }
    if any {
        Err(ERROR_STREAM_CAPTURE_UNSUPPORTED)
    } else {
        Ok(())
    }
}

/// A wait for a whole context: refused while any of its streams captures, whatever the modes.
pub fn forbid_in(context: usize) -> Outcome {
    let active = lock(&ACTIVE);
    let mut own = active.iter().filter(|capture| capture.context == context).peekable();
    if own.peek().is_none() {
        return Ok(());
    }
    own.for_each(|capture| capture.invalidate());
    Err(ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// A wait for, or a question to, a stream that captures: refused, and the capture is broken.
pub fn forbid_on(stream: &Stream) -> Outcome {
    if let Some(capture) = lock(&stream.capture).as_ref() {
        capture.invalidate();
        return Err(ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// Adds a graph and gives its handle.
pub fn add_graph(graph: Graph) -> usize {
    let handle = GRAPHS + NEXT.fetch_add(1, Relaxed) as usize * 0x100;
    lock(&GRAPH_TABLE).insert(handle, graph);
    handle
}

/// The graph of a handle.
pub fn graph(handle: usize) -> Outcome<Graph> {
    lock(&GRAPH_TABLE).get(&handle).cloned().ok_or(ERROR_INVALID_VALUE)
}

/// `cuGraphDestroy`, `cuGraphExecDestroy`.
pub fn drop_graph(handle: usize) -> Outcome {
    lock(&GRAPH_TABLE).remove(&handle).map(drop).ok_or(ERROR_INVALID_VALUE)
}
