//! What one environment holds: blocks behind its `ArrayBuffer`s, by a handle that JavaScript and the finalizer share.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::block::{Block, Share};
use crate::table::{Own, Table};
use crate::thread_end::Watch;
use crate::thread_number::ThreadNumber;

pub use crate::table::Handle;

/// One environment's hold on a block.
#[derive(Debug)]
pub struct Hold {
    pub block: Share,
    /// The thread of the environment: some engines run finalizers elsewhere, where no Node-API call is allowed.
    pub thread: ThreadNumber,
    /// JavaScript freed the array, but its buffer had been detached by somebody else, so that the bytes may live on in
    /// another buffer. The engine's finalizer ends the hold.
    pub freed: bool,
    /// JavaScript has let the block go and waits for something that may still use it: `free({ after })`.
    pub awaited: bool,
    /// Asks the buffer at the end of its thread whether it has its bytes.
    pub watch: Option<Watch>,
}

impl Hold {
    /// A hold of this thread on a block.
    pub fn new(block: Share) -> Self {
        Self { block, thread: ThreadNumber::current(), freed: false, awaited: false, watch: None }
    }
}

/// Each hold has the number of its thread for a tag.
static HOLDS: Table<Hold> = Table::new();

thread_local! {
    /// Without a destructor: [`leave_thread`] empties it. A thread that has no environment, on which some engines run finalizers, keeps nothing.
    static OWN: ManuallyDrop<Own> = const { ManuallyDrop::new(Own::new()) };
}

/// An environment begins on this thread.
pub fn enter_thread() {
    OWN.with(|own| own.enter());
}

/// An environment of this thread ends.
pub fn leave_thread() {
    OWN.with(|own| HOLDS.leave(own));
}

/// Enters a hold, or gives it back when the table has no place for it.
pub fn insert(hold: Hold) -> Result<Handle, Hold> {
    OWN.with(|own| HOLDS.insert(own, hold.thread.to_word(), hold))
}

/// Ends a hold; `None` if it has ended before.
pub fn take(handle: Handle) -> Option<Hold> {
    OWN.with(|own| HOLDS.take(own, handle))
}

/// Looks at a hold, or changes it; none if it has ended. `look` does not ask for the same one.
pub fn with<T>(handle: Handle, look: impl FnOnce(&mut Hold) -> T) -> Option<T> {
    HOLDS.with(handle, look)
}

/// The block of a hold that has not ended.
pub fn block(handle: Handle) -> Option<Arc<Block>> {
    with(handle, |hold| hold.block.divide())
}

/// Whether a hold has neither ended nor been freed by the program.
pub fn is_held(handle: Handle) -> bool {
    with(handle, |hold| !hold.freed).unwrap_or(false)
}

/// The holds of this thread that are such.
fn of_this_thread(is_such: impl Fn(&Hold) -> bool) -> impl Iterator<Item = Handle> {
    HOLDS
        .find(ThreadNumber::current().to_word())
        .filter(move |handle| with(*handle, |hold| is_such(hold)).unwrap_or(false))
}

/// Whether one of this thread's holds is such. `is_such` ends no hold.
pub fn any_of_this_thread(is_such: impl Fn(&Hold) -> bool) -> bool {
    of_this_thread(is_such).next().is_some()
}

/// The watched holds of this thread.
pub fn watched_by_this_thread() -> Vec<Handle> {
    of_this_thread(|hold| hold.watch.is_some()).collect()
}
