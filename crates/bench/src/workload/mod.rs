//! The workloads, under the names that mimalloc-bench gave them, written from their descriptions.

mod parallel;
mod single;

use std::time::Duration;

use crate::peer::Peer;

/// What a run did and how long it took.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Processor time of all threads, without set-up.
    pub time: Duration,
    /// What the workload counts: pairs of allocation and free, replacements, resizes.
    pub operations: u64,
}

impl Sample {
    /// Nanoseconds per operation. Where threads work side by side: of all of them, over the operations of all of them.
    pub fn nanoseconds(self) -> f64 {
        self.time.as_nanos() as f64 / self.operations as f64
    }
}

/// A program that allocates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// Allocates a block and frees it at once, over and over.
    Pair {
        /// Bytes of each block.
        size: usize,
    },
    /// Allocates 1,000 blocks (fewer of large ones), then frees them in the same order.
    BatchFifo {
        /// Bytes of each block.
        size: usize,
    },
    /// As `BatchFifo`, but the latest block is freed first.
    BatchLifo {
        /// Bytes of each block.
        size: usize,
    },
    /// Holds 10,000 blocks of 256 B to 16 KiB and replaces one at random.
    Random {
        /// Whether the program writes to each block's first and last word.
        touched: bool,
    },
    /// A server: each thread replaces blocks of 10 to 1,000 bytes at random, then hands all it has to a new thread.
    Larson {
        /// Threads at a time.
        threads: usize,
    },
    /// Half of the threads allocate, the other half free what those allocated.
    Xmalloc {
        /// Threads, an even number.
        threads: usize,
    },
    /// Each thread keeps some of what it allocates and swaps some with the others; sizes from words to hundreds of KiB.
    Mstress {
        /// Threads.
        threads: usize,
    },
    /// Each thread frees a block that the main thread allocated, then writes to blocks of its own: do two threads get
    /// blocks on one cache line?
    CacheScratch {
        /// Threads.
        threads: usize,
    },
    /// At most 20 blocks of 5 to 25 MiB, replaced at random; one byte of each page is written.
    MallocLarge,
    /// Allocates 1,600 blocks of one small size and frees them by turns in order, in reverse and interleaved.
    GlibcSimple,
    /// Each thread replaces blocks among 1,024 at random, small sizes more often than large ones, up to 32 KiB.
    GlibcThread {
        /// Threads.
        threads: usize,
    },
    /// One thread allocates, the other frees: batches of 500 through a channel.
    Handoff {
        /// Bytes of each block.
        size: usize,
    },
    /// Grows a block from 16 bytes to 256 KiB, by a half each time, then frees it.
    Realloc,
}

impl Workload {
    /// All of them, in the order of the tables.
    pub fn all() -> Vec<Self> {
        const KIB: usize = 1 << 10;
        const MIB: usize = 1 << 20;
        let pairs = [64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB];
        let batches = [64, KIB, 16 * KIB];
        pairs
            .map(|size| Self::Pair { size })
            .into_iter()
            .chain(batches.map(|size| Self::BatchFifo { size }))
            .chain(batches.map(|size| Self::BatchLifo { size }))
            .chain([
                Self::Random { touched: false },
                Self::Random { touched: true },
                Self::Larson { threads: 2 },
                Self::Xmalloc { threads: 2 },
                Self::Mstress { threads: 2 },
                Self::CacheScratch { threads: 2 },
                Self::MallocLarge,
                Self::GlibcSimple,
                Self::GlibcThread { threads: 2 },
                Self::Handoff { size: 64 },
                Self::Handoff { size: KIB },
                Self::Realloc,
            ])
            .collect()
    }

    /// Its name, with its parameters.
    pub fn name(self) -> String {
        match self {
            Self::Pair { size } => format!("pair {}", bytes(size)),
            Self::BatchFifo { size } => format!("batch-fifo {}", bytes(size)),
            Self::BatchLifo { size } => format!("batch-lifo {}", bytes(size)),
            Self::Random { touched: false } => "random".into(),
            Self::Random { touched: true } => "random, written".into(),
            Self::Larson { threads } => format!("larson ×{threads}"),
            Self::Xmalloc { threads } => format!("xmalloc-test ×{threads}"),
            Self::Mstress { threads } => format!("mstress ×{threads}"),
            Self::CacheScratch { threads } => format!("cache-scratch ×{threads}"),
            Self::MallocLarge => "malloc-large".into(),
            Self::GlibcSimple => "glibc-simple".into(),
            Self::GlibcThread { threads } => format!("glibc-thread ×{threads}"),
            Self::Handoff { size } => format!("handoff {}", bytes(size)),
            Self::Realloc => "realloc".into(),
        }
    }

    /// Runs it once; `scale` times as long as usual, which is some milliseconds with a fast allocator.
    pub fn run<P: Peer>(self, scale: f64) -> Sample {
        let times = |base: u64| ((base as f64 * scale) as u64).max(1);
        P::enter_thread();
        match self {
            Self::Pair { size } => {
                single::pair::<P>(size, times(if size > 1 << 19 { 20_000 } else { 400_000 }))
            }
            Self::BatchFifo { size } => single::batch::<P>(size, false, times(200)),
            Self::BatchLifo { size } => single::batch::<P>(size, true, times(200)),
            Self::Random { touched } => single::random::<P>(touched, times(200_000)),
            Self::MallocLarge => single::malloc_large::<P>(times(100)),
            Self::GlibcSimple => single::glibc_simple::<P>(times(60)),
            Self::Realloc => single::realloc::<P>(times(400)),
            Self::Larson { threads } => parallel::larson::<P>(threads, times(10)),
            Self::Xmalloc { threads } => parallel::xmalloc::<P>(threads, times(2_000)),
            Self::Mstress { threads } => parallel::mstress::<P>(threads, times(20)),
            Self::CacheScratch { threads } => parallel::cache_scratch::<P>(threads, times(100)),
            Self::GlibcThread { threads } => parallel::glibc_thread::<P>(threads, times(100_000)),
            Self::Handoff { size } => parallel::handoff::<P>(size, times(400)),
        }
    }
}

/// A size in words.
pub fn bytes(size: usize) -> String {
    match size {
        size if size >= 1 << 20 => format!("{} MiB", size >> 20),
        size if size >= 1 << 10 => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    }
}

/// A live block: address and size.
type Block = (usize, usize);

fn allocate<P: Peer>(size: usize) -> Block {
    let block = P::alloc(size);
    assert!(!block.is_null(), "{} has no memory for {size} bytes", P::NAME);
    (block as usize, size)
}

fn release<P: Peer>((address, size): Block) {
    // SAFETY: workloads free each block that `allocate` gave them once.
    unsafe { P::free(address as *mut u8, size) }
}

/// Writes the first and the last byte, as a program that uses its memory does.
fn touch((address, size): Block) {
    let block = address as *mut u8;
    // SAFETY: the block is live, this long, and the workload is its only user.
    unsafe {
        block.write_volatile(1);
        block.add(size - 1).write_volatile(1);
    }
}

/// Writes a byte of each page.
fn touch_pages((address, size): Block) {
    for offset in (0..size).step_by(4096) {
        // SAFETY: as in `touch`.
        unsafe { ((address + offset) as *mut u8).write_volatile(1) };
    }
}
