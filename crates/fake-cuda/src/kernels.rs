//! The kernels that the stand-in can run, found by the name of their `.entry`.

use crate::codes::*;
use crate::memory::{keep_mapped, memory};
use crate::ptx::{Entry, Param};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

/// Kernels that were run.
pub static RUN: AtomicU64 = AtomicU64::new(0);

/// One launch: the parameters were copied when it was made.
pub struct Launch {
    kernel: Kernel,
    params: Vec<Param>,
    bytes: Vec<u8>,
    threads: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    FillF32,
    VectorAdd,
    Scale,
    WriteU8,
    Spin,
    Fault,
    Nothing,
}

/// Parameter count of a kernel, and the kernel.
fn known(name: &str) -> Option<(usize, Kernel)> {
    Some(match plain_name(name) {
        "fill_f32" => (3, Kernel::FillF32),
        "vector_add" => (4, Kernel::VectorAdd),
        "scale" => (3, Kernel::Scale),
        "write_u8" => (3, Kernel::WriteU8),
        "spin" => (1, Kernel::Spin),
        "fault" => (0, Kernel::Fault),
        "nothing" => (0, Kernel::Nothing),
        _ => return None,
    })
}

/// `fill_f32` of `_Z8fill_f32Pfjf`.
fn plain_name(name: &str) -> &str {
    let Some(mangled) = name.strip_prefix("_Z") else { return name };
    let digits = mangled.find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
    mangled[..digits].parse().ok().and_then(|length: usize| mangled[digits..].get(..length)).unwrap_or(name)
}

impl Launch {
    /// Checks that `entry` is a kernel that can be run here.
    pub fn new(entry: &Entry, bytes: Vec<u8>, threads: u64) -> Outcome<Self> {
        let (count, kernel) = known(&entry.name).ok_or(ERROR_NOT_SUPPORTED)?;
        if entry.params.len() < count {
            return Err(ERROR_NOT_SUPPORTED);
        }
        Ok(Self { kernel, params: entry.params.clone(), bytes, threads })
    }

    /// Does what the kernel does; an error loses the context.
    pub fn run(&self) -> Outcome {
        RUN.fetch_add(1, Relaxed);
        match self.kernel {
            Kernel::Nothing => Ok(()),
            Kernel::Fault => Err(ERROR_ILLEGAL_ADDRESS),
            Kernel::Spin => {
                // The GPU is busy, not this machine's cores.
                std::thread::sleep(Duration::from_secs_f64(self.number(0).max(0.0) / 1000.0));
                Ok(())
            }
            Kernel::FillF32 => self.each(1, |[out, ..], index| store(out, index, self.number(2) as f32)),
            Kernel::Scale => {
                self.each(1, |[out, ..], index| store(out, index, load(out, index) * self.number(2) as f32))
            }
            Kernel::VectorAdd => {
                self.each(3, |[a, b, c], index| store(c, index, load(a, index) + load(b, index)))
            }
            Kernel::WriteU8 => {
                let _mapped = keep_mapped();
                let count = self.count(1);
                let out = view(self.integer(0) as usize, count)?;
                let value = self.integer(2) as u8;
                // SAFETY: `view` says that `count` bytes are mapped there for the device; `_mapped` keeps them so.
                unsafe { std::ptr::write_bytes(out as *mut u8, value, count) };
                Ok(())
            }
        }
    }

    /// Runs `body` once per element of `arrays` leading float arrays; their length follows them.
    fn each(&self, arrays: usize, body: impl Fn([usize; 3], usize)) -> Outcome {
        let _mapped = keep_mapped();
        let count = self.count(arrays);
        let mut views = [0; 3];
        for (index, slot) in views.iter_mut().take(arrays).enumerate() {
            let address = self.integer(index) as usize;
            if !address.is_multiple_of(align_of::<f32>()) {
                return Err(ERROR_MISALIGNED_ADDRESS);
            }
            *slot = view(address, count * size_of::<f32>())?;
        }
        (0..count).for_each(|index| body(views, index));
        Ok(())
    }

    /// One thread an element: a launch with too few threads leaves the rest as it was.
    fn count(&self, param: usize) -> usize {
        self.integer(param).min(self.threads) as usize
    }

    fn raw(&self, index: usize) -> &[u8] {
        let param = self.params[index];
        &self.bytes[param.offset..param.offset + param.size]
    }

    /// A parameter as a whole number; a negative 32-bit count counts as none.
    fn integer(&self, index: usize) -> u64 {
        let raw = self.raw(index);
        let mut bytes = [0; 8];
        bytes[..raw.len().min(8)].copy_from_slice(&raw[..raw.len().min(8)]);
        u64::from_le_bytes(bytes)
    }

    fn number(&self, index: usize) -> f64 {
        let integer = self.integer(index);
        match (self.params[index].float, self.params[index].size) {
            (true, 4) => f64::from(f32::from_bits(integer as u32)),
            (true, 8) => f64::from_bits(integer),
            _ => integer as f64,
        }
    }
}

/// Where the device finds a range. Outside of live memory it faults, as the real one does.
fn view(address: usize, bytes: usize) -> Outcome<usize> {
    if bytes == 0 {
        return Ok(0);
    }
    memory().device_view(address, bytes).ok_or(ERROR_ILLEGAL_ADDRESS)
}

fn store(array: usize, index: usize, value: f32) {
    // SAFETY: `each` passes indices below the count whose range `view` found mapped, and keeps it mapped. Other threads
    // may race on the values, as on a GPU; a volatile write keeps that from being more than a race on values.
    unsafe { (array as *mut f32).add(index).write_volatile(value) };
}

fn load(array: usize, index: usize) -> f32 {
    // SAFETY: as in `store`.
    unsafe { (array as *const f32).add(index).read_volatile() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mangled_names() {
        assert_eq!(plain_name("fill_f32"), "fill_f32");
        assert_eq!(plain_name("_Z8fill_f32Pfjf"), "fill_f32");
        assert_eq!(plain_name("_Z99short"), "_Z99short");
        assert_eq!(plain_name("_Z"), "_Z");
    }
}
