//! The bins of a heap, at addresses that do not change while it lives: its spans point to them. In front of them, the one
//! block that was freed last.
//!
//! That block waits outside its bin. A program that frees a block and asks for one of its class, as most do most of the time,
//! gets it back through one known place. By way of the bin each step would wait for the one before: which bin it is comes out
//! of the block's address by two loads, how many blocks it holds by a third, and the next block's address by a fourth. Five
//! loads of five cycles each are what a pair then takes, however few instructions it has.

use std::mem::MaybeUninit;
use std::ops::{Index, IndexMut};
use std::ptr::{self, NonNull};

use super::bin::{Bin, Cached};
use crate::meta::geometry::{class_size, CLASSES, SHARED_CLASSES};

/// Which of a heap's bins: the number of a key, and a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BinIndex(u32);

impl BinIndex {
    pub fn of(key: usize, class: usize) -> Self {
        debug_assert!(class < CLASSES && key < 1 << 24);
        Self((key << 8 | class) as u32)
    }

    /// As [`number`](Self::number) wrote it.
    pub fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// For the books of a span.
    pub fn number(self) -> u32 {
        self.0
    }

    pub fn key(self) -> usize {
        self.0 as usize >> 8
    }

    pub fn class(self) -> usize {
        self.0 as usize & 0xFF
    }

    /// Bytes of each block.
    pub fn block(self) -> usize {
        class_size(self.class())
    }

    /// Whether its blocks share spans.
    pub fn is_shared(self) -> bool {
        self.class() < SHARED_CLASSES
    }
}

const _: () = assert!(CLASSES <= 1 << 8);

/// One for each class of a key.
type Table = [Bin; CLASSES];

/// A bin for each class of each key of a heap, in the order of its keys.
pub(super) struct Bins {
    /// The bin that the latest freed block belongs to, and which does not hold it yet. Null where there is no such block.
    holder: *mut Bin,
    /// That block. Written whenever `holder` becomes non-null.
    latest: MaybeUninit<Cached>,
    /// Those of the first key, which the hot path uses: `tables[0]`.
    first: NonNull<Table>,
    tables: Vec<NonNull<Table>>,
}

// SAFETY: the tables belong to this value alone, and hold what may be sent; `holder` points into them.
unsafe impl Send for Bins where Table: Send {}

fn table(key: usize, cached: bool) -> NonNull<Table> {
    NonNull::from(Box::leak(Box::new(std::array::from_fn(|class| {
        Bin::new(BinIndex::of(key, class), cached)
    }))))
}

impl Bins {
    /// The bins of one key.
    pub fn new(cached: bool) -> Self {
        let first = table(0, cached);
        Self { holder: ptr::null_mut(), latest: MaybeUninit::uninit(), first, tables: vec![first] }
    }

    /// Adds the bins of another key.
    pub fn add(&mut self, cached: bool) {
        self.tables.push(table(self.tables.len(), cached));
    }

    /// All of them.
    pub fn indices(&self) -> impl Iterator<Item = BinIndex> {
        (0..self.tables.len()).flat_map(|key| (0..CLASSES).map(move |class| BinIndex::of(key, class)))
    }

    /// A cached block of a class of the first key, if its blocks share spans; `None` also for other classes.
    #[inline(always)]
    pub fn pop_first(&mut self, class: usize) -> Option<Cached> {
        // SAFETY: as in `index_mut`.
        let table = unsafe { self.first.as_mut() };
        let bin = table[..SHARED_CLASSES].get_mut(class)?;
        if ptr::eq(self.holder, bin) {
            self.holder = ptr::null_mut();
            // SAFETY: `holder` was not null.
            return Some(unsafe { self.latest.assume_init() });
        }
        bin.pop()
    }

    /// Caches a block of `bin`, in front of it or in it. False, with nothing done, where a bin has no room.
    ///
    /// # Safety
    /// `bin` is one of these: what [`locate`](Self::locate) answered.
    #[inline(always)]
    pub unsafe fn push_latest(&mut self, bin: *mut Bin, block: Cached) -> bool {
        // SAFETY: null, or one of these bins by the caller's promise for an earlier call; and they are borrowed exclusively.
        if let Some(holder) = unsafe { self.holder.as_mut() } {
            if ptr::eq(holder, bin) {
                return holder.push(block);
            }
            // SAFETY: `holder` is not null.
            if !holder.push(unsafe { self.latest.assume_init() }) {
                return false;
            }
        }
        self.holder = bin;
        self.latest = MaybeUninit::new(block);
        true
    }

    /// Whether [`push_latest`](Self::push_latest) would refuse.
    pub fn is_crowded(&self) -> bool {
        // SAFETY: as in `push_latest`.
        unsafe { self.holder.as_ref() }.is_some_and(|holder| holder.vacant() == 0)
    }

    /// Takes the block that was freed last, with its bin's index.
    pub fn take_latest(&mut self) -> Option<(BinIndex, Cached)> {
        // SAFETY: as in `push_latest`.
        let holder = unsafe { self.holder.as_ref() }?;
        self.holder = ptr::null_mut();
        // SAFETY: `holder` was not null.
        Some((holder.at, unsafe { self.latest.assume_init() }))
    }

    /// Where a bin is, for as long as these live.
    pub fn locate(&mut self, at: BinIndex) -> NonNull<Bin> {
        NonNull::from(&mut self[at])
    }
}

impl Index<BinIndex> for Bins {
    type Output = Bin;

    fn index(&self, at: BinIndex) -> &Bin {
        // SAFETY: leaked by `table`, not freed before `drop`, and borrowed for as long as `self` is.
        let table = unsafe { self.tables[at.key()].as_ref() };
        &table[at.class()]
    }
}

impl IndexMut<BinIndex> for Bins {
    fn index_mut(&mut self, at: BinIndex) -> &mut Bin {
        // SAFETY: as in `index`, and exclusively so.
        let table = unsafe { self.tables[at.key()].as_mut() };
        &mut table[at.class()]
    }
}

impl Drop for Bins {
    fn drop(&mut self) {
        for table in self.tables.drain(..) {
            // SAFETY: leaked by `table`; nobody follows a span's pointer to it any more, because the heap is going.
            drop(unsafe { Box::from_raw(table.as_ptr()) });
        }
    }
}
