//! What an allocator must do, said simply; and a driver that runs both side by side.
//!
//! The model is a list of live blocks. After each step the allocator's books are recounted (`audit`) and compared with it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use unimalloc::{
    alloc_with, audit, decay, last_error, set_retention, stats, thread_free, thread_realloc, trim,
    usable_size, AllocOptions, FreeError, HardenedPolicy, LocalAllocatorSelector, Place, Placement, Policy,
    SecurePolicy, StandardPolicy, ThreadAllocator, ThreadSlots,
};

use super::faulty::Faults;

/// One step. `who` picks an actor, `block` a live block, by their remainder.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    Alloc {
        who: usize,
        policy: Policy,
        size: usize,
        align: u32,
        zeroed: bool,
        group: u8,
    },
    Free {
        who: usize,
        block: usize,
        policy: Policy,
    },
    Realloc {
        who: usize,
        block: usize,
        size: usize,
        align: u32,
    },
    /// Frees what was freed before.
    DoubleFree {
        who: usize,
        freed: usize,
    },
    /// Frees an address inside a live block.
    InteriorFree {
        who: usize,
        block: usize,
        offset: usize,
    },
    /// The actor ends: a thread exits, or a hand-made allocator is dropped. Another takes its place.
    End {
        who: usize,
    },
    Trim {
        who: usize,
        keep: usize,
    },
    Decay {
        who: usize,
    },
    Retain {
        bytes: usize,
    },
    /// The backend refuses requests, or releases, for a while.
    Refuse {
        after: usize,
        count: usize,
    },
    RefuseFrees {
        count: usize,
    },
    Misalign {
        bytes: usize,
    },
}

struct Block {
    size: usize,
    usable: usize,
    policy: Policy,
    fill: u8,
}

/// A thread, or a pair of hand-made allocators that stands for one.
enum Actor<B: ThreadSlots> {
    Local { plain: ThreadAllocator<B>, encoded: ThreadAllocator<B> },
    Thread { jobs: Sender<Job>, done: Receiver<()>, thread: JoinHandle<()> },
}

type Job = Box<dyn FnOnce() + Send>;

impl<B: ThreadSlots> Actor<B> {
    fn local() -> Self {
        Self::Local { plain: ThreadAllocator::new(), encoded: ThreadAllocator::new_encrypted() }
    }

    fn thread() -> Self {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let (report, done) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            for job in inbox {
                job();
                report.send(()).unwrap();
            }
        });
        Self::Thread { jobs, done, thread }
    }

    fn run<R: Send + 'static>(&self, f: impl FnOnce() -> R + Send + 'static) -> R {
        match self {
            Self::Local { plain, encoded } => {
                for handle in [plain, encoded] {
                    <B as LocalAllocatorSelector<B>>::register_current_allocator_ptr(handle.as_ptr());
                }
                f()
            }
            Self::Thread { jobs, done, .. } => {
                let (send, receive) = mpsc::channel();
                jobs.send(Box::new(move || send.send(f()).unwrap())).unwrap();
                done.recv().expect("the thread panicked");
                receive.recv().unwrap()
            }
        }
    }

    fn end(self) {
        if let Self::Thread { jobs, thread, .. } = self {
            drop(jobs);
            thread.join().expect("the thread panicked");
        }
    }
}

/// The allocator under test and its model.
pub struct World<B: ThreadSlots> {
    faults: &'static Faults,
    actors: Vec<Actor<B>>,
    threads: bool,
    live: BTreeMap<usize, Block>,
    freed: Vec<usize>,
    /// A block that is not in the model yet.
    fresh: usize,
    fill: u8,
}

/// Groups above 0 go with a placement of their own.
fn alloc<B: ThreadSlots>(policy: Policy, size: usize, align: usize, zeroed: bool, group: u8) -> usize {
    let placement = [Placement::Auto, Placement::Host, Placement::Device][usize::from(group) % 3];
    let options = AllocOptions { zeroed, group, place: Place { device: 0, placement } };
    let block = match policy {
        Policy::Standard if !zeroed && group == 0 => {
            unimalloc::thread_alloc::<StandardPolicy, B>(size, align)
        }
        Policy::Standard => alloc_with::<StandardPolicy, B>(size, align, &options),
        Policy::Secure => alloc_with::<SecurePolicy, B>(size, align, &options),
        Policy::Hardened => alloc_with::<HardenedPolicy, B>(size, align, &options),
    };
    block as usize
}

fn free<B: ThreadSlots>(policy: Policy, block: usize) -> Result<(), FreeError> {
    let block = block as *mut u8;
    // SAFETY: the driver frees live blocks of its own, or addresses that must be refused.
    unsafe {
        match policy {
            Policy::Standard => thread_free::<StandardPolicy, B>(block),
            Policy::Secure => thread_free::<SecurePolicy, B>(block),
            Policy::Hardened => thread_free::<HardenedPolicy, B>(block),
        }
    }
}

/// The places of a block that the driver writes and checks: all of a small one, the edges and a byte per page of others.
fn places(size: usize) -> impl Iterator<Item = usize> {
    let edge = if size <= 2048 { size } else { 64 };
    (0..edge).chain((edge..size - edge).step_by(4096)).chain(size - edge.min(size)..size)
}

impl<B: ThreadSlots> World<B> {
    /// `actors` threads, or as many pairs of hand-made allocators on this one.
    pub fn new(faults: &'static Faults, actors: usize, threads: bool) -> Self {
        faults.heal();
        let make = |_| if threads { Actor::thread() } else { Actor::local() };
        let actors = (0..actors).map(make).collect();
        Self { faults, actors, threads, live: BTreeMap::new(), freed: Vec::new(), fresh: 0, fill: 1 }
    }

    fn actor(&self, who: usize) -> &Actor<B> {
        &self.actors[who % self.actors.len()]
    }

    fn pick(&self, block: usize) -> Option<usize> {
        let at = block.checked_rem(self.live.len())?;
        self.live.keys().nth(at).copied()
    }

    fn refusals(&self) -> usize {
        self.faults.refused.load(SeqCst)
    }

    /// Takes a fresh block into the model: where it lies, what it holds, how large it is.
    fn admit(&mut self, address: usize, size: usize, align: usize, policy: Policy) -> Block {
        self.fresh = address;
        assert_eq!(address % align, 0, "alignment {align}");
        let usable = usable_size::<B>(address as *const u8);
        assert!(usable >= size.max(1), "{usable} usable of {size}");
        let before = self.live.range(..address).next_back();
        assert!(
            before.is_none_or(|(start, block)| start + block.usable <= address),
            "overlaps the block before"
        );
        let after = self.live.range(address..).next();
        assert!(after.is_none_or(|(start, _)| address + usable <= *start), "overlaps the block after");
        self.fresh = 0;
        self.fill = self.fill.wrapping_add(2);
        self.freed.retain(|freed| *freed != address);
        Block { size, usable, policy, fill: self.fill | 1 }
    }

    fn write(address: usize, block: &Block) {
        for at in places(block.size) {
            // SAFETY: inside a live block that only this test uses.
            unsafe { ((address + at) as *mut u8).write(block.fill) };
        }
    }

    fn check(address: usize, size: usize, expected: u8, what: &str) {
        for at in places(size) {
            // SAFETY: inside a live block that only this test uses.
            let found = unsafe { ((address + at) as *const u8).read() };
            assert_eq!(found, expected, "{what}: byte {at} of {size} at {address:x}");
        }
    }

    /// Runs one step on both, and recounts.
    pub fn step(&mut self, op: &Op) {
        match *op {
            Op::Alloc { who, policy, size, align, zeroed, group } => {
                let (align, refusals) = (1 << align, self.refusals());
                let address = self.actor(who).run(move || alloc::<B>(policy, size, align, zeroed, group));
                if address == 0 {
                    assert!(self.refusals() > refusals, "null without a refusal: {:?}", last_error());
                } else {
                    let block = self.admit(address, size, align, policy);
                    if zeroed || policy != Policy::Standard {
                        Self::check(address, size, 0, "zeroed");
                    }
                    Self::write(address, &block);
                    self.live.insert(address, block);
                }
            }
            Op::Free { who, block, policy } => {
                let Some(address) = self.pick(block) else { return };
                let block = self.live.remove(&address).unwrap();
                Self::check(address, block.size, block.fill, "contents");
                assert_eq!(self.actor(who).run(move || free::<B>(policy, address)), Ok(()));
                self.freed.push(address);
            }
            Op::Realloc { who, block, size, align } => {
                let Some(address) = self.pick(block) else { return };
                let (align, refusals) = (1 << align, self.refusals());
                // SAFETY: the block is live and the driver's.
                let moved = self.actor(who).run(move || unsafe {
                    thread_realloc::<StandardPolicy, B>(address as *mut u8, size, align) as usize
                });
                let old = &self.live[&address];
                if moved == 0 {
                    assert!(self.refusals() > refusals, "null without a refusal: {:?}", last_error());
                    Self::check(address, old.size, old.fill, "a failed realloc");
                } else {
                    let old = self.live.remove(&address).unwrap();
                    if moved != address {
                        self.freed.push(address);
                    }
                    let block = self.admit(moved, size, align, old.policy);
                    // What the model wrote to the old block is a subset of what it checks now only where all is written.
                    let kept = old.size.min(size);
                    if kept <= 2048 && old.size <= 2048 {
                        Self::check(moved, kept, old.fill, "after realloc");
                    }
                    Self::write(moved, &block);
                    self.live.insert(moved, block);
                }
            }
            Op::DoubleFree { who, freed } => {
                let Some(at) = freed.checked_rem(self.freed.len()) else { return };
                let address = self.freed[at];
                let result = self.actor(who).run(move || free::<B>(Policy::Standard, address));
                // Its memory may serve another block now that it lies inside of, or have gone back.
                assert!(
                    matches!(result, Err(FreeError::DoubleFree | FreeError::NotOurs | FreeError::Interior)),
                    "{result:?}"
                );
            }
            Op::InteriorFree { who, block, offset } => {
                let Some(address) = self.pick(block) else { return };
                let usable = self.live[&address].usable;
                let inside = address + 1 + offset % (usable - 1).max(1);
                let result = self.actor(who).run(move || free::<B>(Policy::Hardened, inside));
                assert_eq!(result, Err(FreeError::Interior));
            }
            Op::End { who } => {
                let at = who % self.actors.len();
                let next = if self.threads { Actor::thread() } else { Actor::local() };
                std::mem::replace(&mut self.actors[at], next).end();
            }
            Op::Trim { who, keep } => {
                self.actor(who).run(move || trim::<B>(keep));
            }
            Op::Decay { who } => {
                self.actor(who).run(decay::<B>);
            }
            Op::Retain { bytes } => {
                set_retention::<B>(bytes);
            }
            Op::Refuse { after, count } => {
                self.faults.refuse_at.store(after as isize, SeqCst);
                self.faults.refuse_more.store(count as isize, SeqCst);
            }
            Op::RefuseFrees { count } => self.faults.refuse_frees.store(count, SeqCst),
            Op::Misalign { bytes } => self.faults.misalign.store(bytes, SeqCst),
        }
        self.recount();
    }

    fn recount(&self) {
        let audit = audit::<B>().unwrap_or_else(|what| panic!("{what}"));
        let bytes: usize = self.live.values().map(|block| block.usable).sum();
        assert_eq!((audit.live_blocks, audit.usable_bytes), (self.live.len(), bytes));
        let stats = stats::<B>();
        assert_eq!(stats.reserved_bytes, self.faults.held().1, "reserved");
        assert!(stats.cached_bytes + audit.live_bytes <= stats.reserved_bytes);
        assert_eq!(stats.corruptions, 0);
        assert_eq!(self.faults.bad_frees.load(SeqCst), 0, "released what it did not hold");
    }

    /// Frees everything and checks that all of it goes back.
    pub fn finish(mut self) {
        self.faults.heal();
        set_retention::<B>(usize::MAX);
        for who in 0..self.live.len() {
            self.step(&Op::Free { who, block: who, policy: Policy::Standard });
        }
        self.actors.drain(..).for_each(Actor::end);
        trim::<B>(0);
        self.recount();
        assert_eq!(self.faults.held(), (0, 0), "{:?}", stats::<B>());
    }
}

impl<B: ThreadSlots> Drop for World<B> {
    /// After a failed step: what is left must not disturb the next, shorter sequence.
    fn drop(&mut self) {
        self.faults.heal();
        for address in std::mem::take(&mut self.live).into_keys() {
            let _ = free::<B>(Policy::Standard, address);
        }
        let _ = free::<B>(Policy::Standard, self.fresh);
        for actor in self.actors.drain(..) {
            if let Actor::Thread { jobs, thread, .. } = actor {
                drop(jobs);
                let _ = thread.join();
            }
        }
        trim::<B>(0);
    }
}

/// Steps from bytes, for a fuzzer: five bytes each.
pub fn decode(bytes: &[u8]) -> Vec<Op> {
    bytes.chunks_exact(5).map(|b| decode_one([b[0], b[1], b[2], b[3], b[4]])).collect()
}

fn decode_one([kind, who, a, b, c]: [u8; 5]) -> Op {
    let who = usize::from(who);
    let policy = [Policy::Standard, Policy::Secure, Policy::Hardened][usize::from(kind >> 4) % 3];
    // A size of up to 16 MiB: a power of two, and a part of it.
    let size = (1usize << (b % 24)) + (usize::from(c) << (b % 24) >> 8);
    let block = usize::from(a);
    match kind & 15 {
        0..=4 => Op::Alloc {
            who,
            policy,
            size,
            align: u32::from(a) % 22,
            zeroed: a & 0x80 != 0,
            group: (c >> 6) % 3,
        },
        5..=8 => Op::Free { who, block, policy },
        9 => Op::Realloc { who, block, size, align: u32::from(c) % 13 },
        10 => Op::DoubleFree { who, freed: block },
        11 => Op::InteriorFree { who, block, offset: size },
        12 => Op::End { who },
        13 => match c % 3 {
            0 => Op::Trim { who, keep: size },
            1 => Op::Decay { who },
            _ => Op::Retain { bytes: if a & 1 == 0 { usize::MAX } else { size } },
        },
        14 => Op::Refuse { after: usize::from(c % 4), count: usize::from(a % 4) },
        _ => match c % 4 {
            0 => Op::RefuseFrees { count: usize::from(a % 8) },
            1 => Op::Misalign { bytes: 0 },
            2 => Op::Misalign { bytes: 4096 },
            _ => Op::Misalign { bytes: 64 << 10 },
        },
    }
}
