//! A block and everybody who keeps it alive.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use unimalloc::cuda::{self, CudaError, Stream};
use unimalloc::{AllocOptions, FreeError};

use crate::account::Account;
use crate::dispatch::{place, Backend};

/// Blocks of `alloc`, of `allocUnsafe` and of magazines never share a span: one of the last is shown to JavaScript as a whole.
const GROUP_OWN: u8 = 1;
const GROUP_POOLED: u8 = 2;
pub const GROUP_MAGAZINE: u8 = 3;

/// What JavaScript asks for.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub bytes: usize,
    pub align: usize,
    /// The placement's number.
    pub placement: u32,
    /// Whether the block reads as zero.
    pub zeroed: bool,
    /// Whether it is one of `allocUnsafe`.
    pub pooled: bool,
    /// The stream that uses it first.
    pub stream: Option<&'a Stream>,
}

/// A live block. It goes back to the pools when it is dropped; that is the only way it does.
///
/// `visible` counts the holders that a program can reach: `ArrayBuffer`s and handed-over tokens. When the last of them lets go, the
/// block is no longer part of its allocator's current bytes. It is pending until the streams it was used on have passed, which the
/// allocator's core takes care of.
#[derive(Debug)]
pub struct Block {
    address: usize,
    usable: usize,
    requested: usize,
    account: Arc<Account>,
    /// Once 0 it stays 0: nobody can attach to a block that was let go.
    visible: AtomicU32,
    returned: bool,
    /// Whether work on the GPU was given the block: then it may still be writing to it.
    used_on_gpu: AtomicBool,
    /// Something out of our sight may use the bytes: they are never handed out again.
    kept: AtomicBool,
    /// What names the block to other threads, made when it is first shared.
    pub token: OnceLock<[u8; 16]>,
}

/// What a hold has of its block. Most blocks are never anybody else's, and then cost neither an allocation nor a locked operation.
#[derive(Debug)]
pub enum Share {
    /// All of it: nobody else knows the block.
    Sole(Block),
    /// One of several.
    Common(Arc<Block>),
    /// While the first becomes the second.
    Neither,
}

impl Share {
    /// A share for somebody else.
    pub fn divide(&mut self) -> Arc<Block> {
        let block = match std::mem::replace(self, Self::Neither) {
            Self::Sole(block) => Arc::new(block),
            Self::Common(block) => block,
            Self::Neither => unreachable!("a share is divided by one at a time"),
        };
        *self = Self::Common(Arc::clone(&block));
        block
    }
}

impl Deref for Share {
    type Target = Block;

    fn deref(&self) -> &Block {
        match self {
            Self::Sole(block) => block,
            Self::Common(block) => block,
            Self::Neither => unreachable!("a share is not looked at while it is divided"),
        }
    }
}

/// Why no block came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The allocator's own `maxBytes`.
    Limit,
    /// The reason is in `unimalloc::last_error()`.
    Backend,
}

/// Blocks whose environment ended while a hidden alias of their bytes could still be alive; see [`quarantine`].
static QUARANTINED_BLOCKS: AtomicU64 = AtomicU64::new(0);
static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

impl Block {
    /// Allocates a block with one visible holder: the caller, who ends that with [`release`].
    pub fn allocate(account: &Arc<Account>, wanted: &Wanted<'_>) -> Result<Self, Refusal> {
        if !account.has_room(wanted.bytes as u64) {
            return Err(Refusal::Limit);
        }
        let options = AllocOptions {
            place: place(account.device, wanted.placement),
            zeroed: wanted.zeroed,
            group: if wanted.pooled { GROUP_POOLED } else { GROUP_OWN },
        };
        let ptr = account.backend.alloc(account.policy, wanted.bytes, wanted.align, &options, wanted.stream);
        if ptr.is_null() {
            return Err(Refusal::Backend);
        }
        let usable = account.backend.usable_size(ptr);
        if !account.admit(usable as u64, wanted.bytes as u64) {
            // SAFETY: the block was allocated above and nobody has seen its address.
            let freed = unsafe { account.backend.free_now(account.policy, ptr) };
            debug_assert!(freed.is_ok(), "a block that was just allocated is live");
            return Err(Refusal::Limit);
        }
        Ok(Self::enter(account, ptr as usize, usable, wanted.bytes, false))
    }

    /// Takes over a live block that a magazine handed out, from the books that JavaScript keeps. For the account's own thread.
    pub fn take_over(
        account: &Arc<Account>,
        address: usize,
        usable: usize,
        requested: usize,
        used_on_gpu: bool,
    ) -> Self {
        account.take_over(usable as u64, requested as u64);
        Self::enter(account, address, usable, requested, used_on_gpu)
    }

    fn enter(
        account: &Arc<Account>,
        address: usize,
        usable: usize,
        requested: usize,
        used_on_gpu: bool,
    ) -> Self {
        Self {
            address,
            usable,
            requested,
            account: Arc::clone(account),
            visible: AtomicU32::new(1),
            returned: false,
            used_on_gpu: AtomicBool::new(used_on_gpu),
            kept: AtomicBool::new(false),
            token: OnceLock::new(),
        }
    }

    pub fn address(&self) -> usize {
        self.address
    }

    pub fn usable(&self) -> usize {
        self.usable
    }

    pub fn requested(&self) -> usize {
        self.requested
    }

    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Adds a visible holder, unless the last one has let go.
    pub fn hold(&self) -> bool {
        self.visible
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |holders| match holders {
                0 => None,
                _ => holders.checked_add(1),
            })
            .is_ok()
    }

    /// How many visible holders there are.
    pub fn holders(&self) -> u32 {
        self.visible.load(Ordering::Relaxed)
    }

    /// Whether that was the last visible holder.
    fn drop_visible(&self) -> bool {
        // AcqRel: what any holder did to the bytes happens before the block is handed out again.
        self.visible.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Notes that work on the GPU was given the block.
    pub fn note_gpu_use(&self) {
        self.used_on_gpu.store(true, Ordering::Relaxed);
    }

    /// Waits until no work on the GPU writes to the block any more.
    pub fn wait_for_gpu(&self) -> Result<(), CudaError> {
        if self.used_on_gpu.swap(false, Ordering::Relaxed) {
            cuda::synchronize_all()?; // the work may have been another device's than the block's own
        }
        Ok(())
    }

    /// Nobody can reach the block any more, and it is not given back: from its account to the blocks that are kept.
    fn leave_for_good(&self) {
        self.account.end(self.usable as u64, self.requested as u64);
        count_quarantined(1, self.usable);
    }

    fn give_back(&mut self) -> Result<(), FreeError> {
        if std::mem::replace(&mut self.returned, true) {
            return Ok(());
        }
        let usable = self.usable as u64;
        // SAFETY: `&mut self` with no visible holder left means that nobody but queued work uses the bytes, and `returned`
        // makes this happen once.
        unsafe { self.account.backend.free(self.address as *mut u8, &self.account, usable) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if *self.visible.get_mut() > 0 {
            // Only on an error path of ours: an owner went away without `release`.
            *self.visible.get_mut() = 0;
            self.account.let_go(self.usable as u64, self.requested as u64);
        }
        // A block that fails its checks stays on the account as pending: the allocator has retired its memory, and
        // nobody waits here for the answer.
        let _ = self.give_back();
    }
}

/// Ends one visible hold. When the caller was the last owner, the answer tells what came of giving the block back.
pub fn release(share: Share) -> Result<(), FreeError> {
    let block = match share {
        Share::Sole(mut block) => {
            *block.visible.get_mut() = 0;
            return give_up(block);
        }
        Share::Common(block) => block,
        Share::Neither => return Ok(()),
    };
    if !block.drop_visible() {
        return Arc::into_inner(block).map_or(Ok(()), |mut block| block.give_back());
    }
    if block.kept.load(Ordering::Relaxed) {
        block.leave_for_good();
        return Ok(());
    }
    match Arc::try_unwrap(block) {
        Ok(block) => give_up(block),
        // Somebody is looking at it, and gives it back.
        Err(block) => {
            block.account.let_go(block.usable as u64, block.requested as u64);
            Ok(())
        }
    }
}

/// Gives back a block that is nobody else's and that no holder can reach any more.
fn give_up(mut block: Block) -> Result<(), FreeError> {
    let (usable, requested) = (block.usable as u64, block.requested as u64);
    if block.account.backend != Backend::Host || *block.used_on_gpu.get_mut() {
        block.account.let_go(usable, requested);
        return block.give_back();
    }
    // No stream was given the block, so it is not pending: it leaves the books in one step.
    block.returned = true;
    let account = &block.account;
    // SAFETY: as in `give_back`.
    let freed = unsafe { account.backend.free_now(account.policy, block.address as *mut u8) };
    match freed {
        Ok(()) => account.end(usable, requested),
        // It stays on the account as pending: the allocator has retired its memory.
        Err(_) => account.let_go(usable, requested),
    }
    freed
}

/// Ends one visible hold of a block, and keeps the block for good, because something out of our sight may still use its bytes. It is on its
/// account for as long as others can reach it.
pub fn quarantine(share: Share) {
    match share {
        Share::Sole(block) => {
            block.leave_for_good();
            std::mem::forget(block);
        }
        Share::Common(block) => {
            // Seen by whoever lets go last: `drop_visible` orders the two.
            block.kept.store(true, Ordering::Relaxed);
            if block.drop_visible() {
                block.leave_for_good();
            }
            std::mem::forget(block);
        }
        Share::Neither => {}
    }
}

/// Counts blocks that are kept for good.
pub fn count_quarantined(blocks: usize, bytes: usize) {
    QUARANTINED_BLOCKS.fetch_add(blocks as u64, Ordering::Relaxed);
    QUARANTINED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Blocks and bytes kept for good.
pub fn quarantined() -> (u64, u64) {
    (QUARANTINED_BLOCKS.load(Ordering::Relaxed), QUARANTINED_BYTES.load(Ordering::Relaxed))
}
