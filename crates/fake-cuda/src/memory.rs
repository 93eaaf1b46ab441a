//! Managed, device and pinned memory over `mmap`, and the protection of managed memory while the device works.
//!
//! Device memory, and managed memory on a device without concurrent access, is mapped twice over one memory file: the
//! address that the program gets, which may be inaccessible to it, and an alias through which "the device" works.

use crate::codes::*;
use crate::context::{self, Context};
use crate::entry::{lock, runtime};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::Ordering::*;
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};

const PAGE: usize = 4096;
/// The real driver aligns an allocation to its size rounded up to a power of two; beyond this it is not known to.
const LARGEST_ALIGNMENT: usize = 32 << 20;

/// Where an allocation came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAllocManaged`; `host` is true while it is attached to the host alone.
    Managed { host: bool },
    /// `cuMemAlloc`.
    Device,
    /// `cuMemHostAlloc`.
    Pinned,
}

/// A place that advice or a prefetch names: (location type, id), as in `CUmemLocation`.
pub type Place = (i32, i32);

/// What was last said about a range.
#[derive(Debug, Clone, Copy)]
pub struct Note {
    pub start: usize,
    pub end: usize,
    pub kind: NoteKind,
}

/// Kinds of notes: the advice, and where a prefetch sent the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoteKind {
    ReadMostly(bool),
    Preferred(Option<Place>),
    AccessedBy(Place, bool),
    Prefetched(Place),
}

/// One live allocation. `address .. address + bytes` is what the program was given.
pub struct Allocation {
    pub address: usize,
    pub bytes: usize,
    pub kind: Kind,
    pub device: i32,
    pub context: usize,
    pub id: u64,
    pub notes: Vec<Note>,
    mapped: usize,
    /// Where "the device" reads and writes; equal to `address` when there is no second mapping.
    alias: usize,
}

/// All live allocations, by address.
#[derive(Default)]
pub struct Memory {
    live: BTreeMap<usize, Allocation>,
    next_id: u64,
    protected: bool,
    pub managed: u64,
    pub managed_bytes: u64,
    pub peak_managed_bytes: u64,
    pub device: u64,
    pub device_bytes: u64,
    pub pinned: u64,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory {
    live: BTreeMap::new(),
    next_id: 0,
    protected: false,
    managed: 0,
    managed_bytes: 0,
    peak_managed_bytes: 0,
    device: 0,
    device_bytes: 0,
    pinned: 0,
});

/// Held for reading by device work while it touches memory, for writing while memory is unmapped.
static IN_USE: RwLock<()> = RwLock::new(());

/// Keeps memory mapped while device work touches it.
pub fn keep_mapped() -> RwLockReadGuard<'static, ()> {
    IN_USE.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The table.
pub fn memory() -> MutexGuard<'static, Memory> {
    lock(&MEMORY)
}

impl Memory {
    /// The allocation that `address` lies in.
    pub fn find(&self, address: usize) -> Option<&Allocation> {
        let (_, found) = self.live.range(..=address).next_back()?;
        (address - found.address < found.bytes).then_some(found)
    }

    /// The allocation that the whole range lies in.
    pub fn find_range(&self, address: usize, bytes: usize) -> Option<&Allocation> {
        let found = self.find(address)?;
        (bytes <= found.bytes - (address - found.address)).then_some(found)
    }

    /// As `find_range`.
    pub fn find_range_mut(&mut self, address: usize, bytes: usize) -> Option<&mut Allocation> {
        let start = self.find_range(address, bytes)?.address;
        self.live.get_mut(&start)
    }

    /// Where "the device" finds the bytes of a range that lies in one allocation.
    pub fn device_view(&self, address: usize, bytes: usize) -> Option<usize> {
        let found = self.find_range(address, bytes)?;
        Some(found.alias + (address - found.address))
    }

    fn count(&mut self, kind: Kind, bytes: usize, up: bool) {
        let step = |count: &mut u64, by: u64| *count = if up { *count + by } else { *count - by };
        match kind {
            Kind::Managed { .. } => {
                step(&mut self.managed, 1);
                step(&mut self.managed_bytes, bytes as u64);
                self.peak_managed_bytes = self.peak_managed_bytes.max(self.managed_bytes);
            }
            Kind::Device => {
                step(&mut self.device, 1);
                step(&mut self.device_bytes, bytes as u64);
            }
            Kind::Pinned => step(&mut self.pinned, 1),
        }
    }
}

/// (free, total) as the device reports them.
pub fn info() -> (u64, u64) {
    let total = runtime().config.total_bytes;
    let free = match runtime().free_bytes.load(Relaxed) {
        set @ 0.. => set as u64,
        _ => {
            let memory = memory();
            total.saturating_sub(memory.managed_bytes + memory.device_bytes)
        }
    };
    (free, total)
}

/// Allocates in `context`.
pub fn allocate(context: &Context, bytes: usize, kind: Kind) -> Outcome<usize> {
    if bytes == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    if kind == Kind::Device && bytes as u64 > info().0 {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    let config = &runtime().config;
    let misalign =
        if matches!(kind, Kind::Managed { .. }) { runtime().misalign.load(Relaxed) as usize } else { 0 };
    let aliased = match kind {
        Kind::Managed { .. } => !config.concurrent,
        Kind::Device => true,
        Kind::Pinned => false,
    };
    let mapped = bytes.checked_next_multiple_of(PAGE).ok_or(ERROR_OUT_OF_MEMORY)?;
    let alignment =
        bytes.checked_next_power_of_two().unwrap_or(LARGEST_ALIGNMENT).clamp(PAGE, LARGEST_ALIGNMENT);
    let address = reserve(mapped, alignment, misalign)?;
    let alias = match back(address, mapped, aliased) {
        Ok(alias) => alias,
        Err(code) => {
            unmap(address, mapped);
            return Err(code);
        }
    };
    let mut memory = memory();
    let hidden = kind == Kind::Device || memory.protected && kind == Kind::Managed { host: false };
    if hidden {
        protect(address, mapped, false);
    }
    memory.next_id += 1;
    let id = memory.next_id;
    memory.count(kind, bytes, true);
    memory.live.insert(
        address,
        Allocation {
            address,
            bytes,
            kind,
            device: context.device,
            context: context.handle,
            id,
            notes: Vec::new(),
            mapped,
            alias,
        },
    );
    Ok(address)
}

/// Frees the allocation that starts exactly at `address` and is of a kind that `accepts` takes.
pub fn free(address: usize, accepts: impl Fn(Kind) -> bool) -> Outcome {
    let mut memory = memory();
    match memory.live.get(&address) {
        Some(found) if accepts(found.kind) => {}
        _ => return Err(ERROR_INVALID_VALUE),
    }
    let Some(gone) = memory.live.remove(&address) else { return Err(ERROR_INVALID_VALUE) };
    memory.count(gone.kind, gone.bytes, false);
    drop(memory);
    release(&gone);
    Ok(())
}

fn release(gone: &Allocation) {
    let _nobody = IN_USE.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    unmap(gone.address, gone.mapped);
    if gone.alias != gone.address {
        unmap(gone.alias, gone.mapped);
    }
}

/// Frees everything that belongs to a context that ends.
pub fn drop_of_context(context: usize) {
    let mut memory = memory();
    let addresses: Vec<_> =
        memory.live.values().filter(|a| a.context == context).map(|a| a.address).collect();
    let gone: Vec<_> = addresses.iter().filter_map(|address| memory.live.remove(address)).collect();
    for allocation in &gone {
        memory.count(allocation.kind, allocation.bytes, false);
    }
    // Unmapping waits for device work, which may itself wait for the table.
    drop(memory);
    gone.iter().for_each(release);
}

/// On a device without concurrent access: hides managed memory from the host, as a launch does.
/// The caller holds the submission lock, so that no `unprotect_if_idle` decides in between.
pub fn protect_for_work() {
    if runtime().config.concurrent {
        return;
    }
    let mut memory = memory();
    if !memory.protected {
        memory.protected = true;
        set_protection(&memory, false);
    }
}

/// On a device without concurrent access: shows managed memory again, as a synchronisation does that finds the
/// device idle. The caller holds the submission lock.
pub fn unprotect_if_idle() {
    if runtime().config.concurrent || context::all().iter().any(|context| context.at_work()) {
        return;
    }
    let mut memory = memory();
    if memory.protected {
        memory.protected = false;
        set_protection(&memory, true);
    }
}

fn set_protection(memory: &Memory, open: bool) {
    for allocation in memory.live.values().filter(|a| a.kind == Kind::Managed { host: false }) {
        protect(allocation.address, allocation.mapped, open);
    }
}

/// Reserves address space: `alignment`-aligned, then moved up by `misalign`.
fn reserve(bytes: usize, alignment: usize, misalign: usize) -> Outcome<usize> {
    let whole = bytes.checked_add(alignment + misalign).ok_or(ERROR_OUT_OF_MEMORY)?;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            whole,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    let base = base as usize;
    let address = base.next_multiple_of(alignment) + misalign;
    if address > base {
        unmap(base, address - base);
    }
    let tail = base + whole - (address + bytes);
    if tail > 0 {
        unmap(address + bytes, tail);
    }
    Ok(address)
}

/// Backs a reserved range with memory and says where its second mapping is (or the same address).
fn back(address: usize, bytes: usize, aliased: bool) -> Outcome<usize> {
    if !aliased {
        return if protect(address, bytes, true) { Ok(address) } else { Err(ERROR_OUT_OF_MEMORY) };
    }
    // SAFETY: the name is a zero-terminated literal; the descriptor is closed below, on every path, once.
    let file = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(ERROR_OPERATING_SYSTEM);
    }
    let map = |at: usize, fixed: libc::c_int| {
        // SAFETY: the fixed mapping replaces exactly the range that `reserve` made and that nobody has seen yet; the
        // other one is at an address of the kernel's choice. `file` is open and `bytes` long.
        unsafe {
            libc::mmap(
                at as *mut libc::c_void,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | fixed,
                file,
                0,
            )
        }
    };
    // SAFETY: `file` is the descriptor opened above.
    let sized = unsafe { libc::ftruncate(file, bytes as libc::off_t) } == 0;
    let mut alias = libc::MAP_FAILED;
    if sized && map(address, libc::MAP_FIXED) != libc::MAP_FAILED {
        alias = map(0, 0);
    }
    // SAFETY: `file` was opened above and is closed only here; mappings outlive it.
    unsafe { libc::close(file) };
    if alias == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    Ok(alias as usize)
}

fn protect(address: usize, bytes: usize, open: bool) -> bool {
    let rights = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    // SAFETY: the range is one that this module mapped and has not unmapped. Taking rights away can only fault a
    // program that touches memory which the device owns, and that fault is what it is for.
    unsafe { libc::mprotect(address as *mut libc::c_void, bytes, rights) == 0 }
}

fn unmap(address: usize, bytes: usize) {
    // SAFETY: the range is one that this module mapped, and its entry in the table is gone or was never made.
    unsafe { libc::munmap(address as *mut libc::c_void, bytes) };
}

impl Allocation {
    /// The latest note of a kind on a range; `None` where parts of the range differ.
    pub fn latest(&self, start: usize, bytes: usize, of: impl Fn(&NoteKind) -> bool) -> Option<NoteKind> {
        let end = start + bytes;
        let note =
            self.notes.iter().rev().find(|note| of(&note.kind) && note.start < end && start < note.end)?;
        (note.start <= start && end <= note.end).then_some(note.kind)
    }

    /// Every place that the whole range is mapped by.
    pub fn accessed_by(&self, start: usize, bytes: usize) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for note in self.notes.iter().filter(|note| note.start <= start && start + bytes <= note.end) {
            if let NoteKind::AccessedBy(place, on) = note.kind {
                places.retain(|known| *known != place);
                if on {
                    places.push(place);
                }
            }
        }
        places
    }

    /// Remembers a note, replacing those of the same kind that it covers.
    pub fn note(&mut self, note: Note) {
        let same = |known: &NoteKind| match (known, &note.kind) {
            (NoteKind::AccessedBy(a, _), NoteKind::AccessedBy(b, _)) => a == b,
            _ => std::mem::discriminant(known) == std::mem::discriminant(&note.kind),
        };
        self.notes.retain(|known| !(same(&known.kind) && note.start <= known.start && known.end <= note.end));
        self.notes.push(note);
    }
}

/// `cuStreamAttachMemAsync`: memory attached to the host alone stays the host's while the device works.
pub fn attach(address: usize, host: bool) {
    let mut memory = memory();
    let Some(start) = memory.find(address).map(|found| found.address) else { return };
    let protected = memory.protected;
    if let Some(found) = memory.live.get_mut(&start) {
        found.kind = Kind::Managed { host };
        protect(found.address, found.mapped, host || !protected);
    }
}

/// The peak starts anew from what is live now.
pub fn reset_peak() {
    let mut memory = memory();
    memory.peak_managed_bytes = memory.managed_bytes;
}
