//! How a remote free tells a span's keeper: one bit per parked span, in words that are never freed.
//!
//! The keeper gives each of its spans an index. Telling sets the index's bit and then the summary bit of its chunk.
//! Bits are idempotent and carry no link, so a message to a heap that is gone, or whose inbox was given to another
//! heap since, is only a spurious bit: the reader looks the index up in its own table and ignores what does not fit.

use crate::sync::{global, lock, AtomicPtr, AtomicU32, AtomicU64, Mutex, Ordering};

/// Chunk `c` has `64 << c` bits, so 26 chunks cover four billion spans.
const CHUNKS: usize = 26;

struct Chunk(Box<[AtomicU64]>);

pub(crate) struct Inbox {
    /// A bit per chunk that may hold messages.
    summary: AtomicU32,
    chunks: [AtomicPtr<Chunk>; CHUNKS],
}

global! {
    static RECYCLED: Mutex<Vec<&'static Inbox>> = Mutex::new(Vec::new());
}

fn place(index: u32) -> (usize, usize, u64) {
    let chunk = (index / 64 + 1).ilog2();
    let within = index - 64 * ((1 << chunk) - 1);
    (chunk as usize, within as usize / 64, 1 << (within % 64))
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self {
            summary: AtomicU32::new(0),
            chunks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        }
    }

    /// An inbox for a new heap; it may still hold messages for an earlier owner.
    pub(crate) fn take() -> &'static Self {
        lock(&RECYCLED).pop().unwrap_or_else(|| Box::leak(Box::new(Self::new())))
    }

    /// Hands the inbox on to a later heap.
    pub(crate) fn recycle(&'static self) {
        lock(&RECYCLED).push(self);
    }

    fn chunk(&self, chunk: usize) -> Option<&Chunk> {
        // SAFETY: null or a leaked chunk, published with release by `reserve` and never freed.
        unsafe { self.chunks[chunk].load(Ordering::Acquire).as_ref() }
    }

    /// Makes room for messages about `index`. The owner calls it before it gives the index to a span. False if the process
    /// has no memory left for it.
    pub(crate) fn reserve(&self, index: u32) -> bool {
        let (chunk, _, _) = place(index);
        if self.chunk(chunk).is_none() {
            let mut words = Vec::new();
            if words.try_reserve_exact(1 << chunk).is_err() {
                return false;
            }
            words.resize_with(1 << chunk, || AtomicU64::new(0));
            let chunk_of_words = Box::new(Chunk(words.into_boxed_slice()));
            self.chunks[chunk].store(Box::into_raw(chunk_of_words), Ordering::Release);
        }
        true
    }

    /// Tells the owner to look at the span it gave this index. Any thread may call it, with any index.
    pub(crate) fn tell(&self, index: u32) {
        let (chunk, word, bit) = place(index);
        if let Some(words) = self.chunk(chunk) {
            words.0[word].fetch_or(bit, Ordering::Release);
            self.summary.fetch_or(1 << chunk, Ordering::Release);
        }
    }

    /// Whether [`take_told`](Self::take_told) would find something.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        self.summary.load(Ordering::Relaxed) != 0
    }

    /// Takes all messages; the owner calls it.
    pub(crate) fn take_told(&self, mut told: impl FnMut(u32)) {
        let mut chunks = self.summary.swap(0, Ordering::AcqRel);
        while chunks != 0 {
            let chunk = chunks.trailing_zeros() as usize;
            chunks &= chunks - 1;
            let Some(words) = self.chunk(chunk) else { continue };
            for (at, word) in words.0.iter().enumerate() {
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = word.swap(0, Ordering::AcqRel);
                while bits != 0 {
                    told(64 * ((1 << chunk) - 1) + 64 * at as u32 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_index_has_a_bit_of_its_own() {
        let inbox = Inbox::new();
        let indexes: Vec<u32> = (0..3000).chain([70_000, 1_000_000]).collect();
        for &index in &indexes {
            inbox.reserve(index);
        }
        for &index in indexes.iter().rev() {
            inbox.tell(index);
            inbox.tell(index);
        }
        let mut told = Vec::new();
        inbox.take_told(|index| told.push(index));
        assert_eq!(told, indexes);
        inbox.take_told(|_| panic!("taken already"));
    }

    #[test]
    fn a_message_about_an_unknown_index_is_dropped() {
        let inbox = Inbox::new();
        inbox.tell(u32::MAX / 2);
        assert!(!inbox.has_messages());
    }
}
