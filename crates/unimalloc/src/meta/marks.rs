//! Room for a span's marks: which streams each block is or was used on. What the words mean is the stream layer's.

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// One word per block of a span: 0 before its first use by a stream. Made at the span's first launch. A word outlives the
/// block, as a note that the GPU used these bytes last.
pub(crate) struct MarkTable(Box<[AtomicU64]>);

impl MarkTable {
    pub(crate) fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Relaxed));
    }

    pub(crate) fn word(&self, index: usize) -> Option<&AtomicU64> {
        self.0.get(index)
    }
}
