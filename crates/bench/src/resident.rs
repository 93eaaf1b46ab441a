//! The peak resident set of a mixed workload, in a process of its own per peer.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::for_each_peer;
use crate::machine::Origin;
use crate::peer::{Mimalloc, Peer};
use crate::random::Random;

/// Peaks by workload and peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Residence {
    /// Where and when.
    pub origin: Origin,
    /// Peers, in the order of the columns.
    pub peers: Vec<String>,
    /// Results by workload.
    pub rows: Vec<Peak>,
}

/// The peaks of one workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// The workload's name.
    pub workload: String,
    /// The most bytes that were live at once, as the program asked for them.
    pub live_bytes: usize,
    /// Bytes above those of a process that did nothing, in the order of [`Residence::peers`].
    pub peak_bytes: Vec<usize>,
}

/// The mixed workloads, by name. Every byte of every block is written.
pub const MIXES: [&str; 3] = ["mixed sizes", "phases of growing sizes", "large blocks"];

/// The status field of this process, in bytes.
fn status(field: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0) << 10
}

fn fill((address, size): (usize, usize)) {
    // SAFETY: the block is live, this long, and ours alone.
    unsafe { (address as *mut u8).write_bytes(1, size) };
}

/// Runs one mix in this process and answers (most bytes live, growth of the peak resident set).
pub fn run_here<P: Peer>(mix: usize) -> (usize, usize) {
    P::enter_thread();
    let mut random = Random(3);
    let (steps, live, low, high) = match mix {
        0 => (400_000, 20_000, 16, 32 << 10),
        1 => (400_000, 20_000, 16, 1 << 10),
        _ => (4_000, 200, 64 << 10, 8 << 20),
    };
    let mut blocks: Vec<(usize, usize)> = Vec::with_capacity(live);
    let (mut bytes, mut most) = (0, 0);
    let before = status("VmHWM");
    for step in 0..steps {
        // In the phases mix, sizes double four times: what small sizes gave back must serve larger ones.
        let high = if mix == 1 { high << (step * 5 / steps) } else { high };
        let size = random.log_within(low, high);
        if blocks.len() == live {
            let at = random.below(live);
            let (address, old) = blocks.swap_remove(at);
            // SAFETY: the block is live and freed once.
            unsafe { P::free(address as *mut u8, old) };
            bytes -= old;
        }
        let block = P::alloc(size);
        assert!(!block.is_null());
        fill((block as usize, size));
        blocks.push((block as usize, size));
        bytes += size;
        most = most.max(bytes);
    }
    (most, status("VmHWM").saturating_sub(before))
}

/// As [`run_here`] for the peer of this name; `None` for an unknown one.
pub fn run_named(peer: &str, mix: usize) -> Option<(usize, usize)> {
    macro_rules! run {
        ($peer:ty) => {
            if peer == <$peer as Peer>::NAME {
                return Some(run_here::<$peer>(mix));
            }
        };
    }
    for_each_peer!(run);
    None
}

/// Runs every mix with every peer, each in a process of its own: this program with `resident-one PEER MIX`.
pub fn measure(command: &str) -> std::io::Result<Residence> {
    let mut peers = Vec::new();
    macro_rules! name {
        ($peer:ty) => {
            peers.push(<$peer as Peer>::NAME.to_owned())
        };
    }
    for_each_peer!(name);
    let program = std::env::current_exe()?;
    let mut rows = Vec::new();
    for (mix, workload) in MIXES.iter().enumerate() {
        let mut row = Peak { workload: (*workload).to_owned(), live_bytes: 0, peak_bytes: Vec::new() };
        for peer in &peers {
            let output = Command::new(&program).args(["resident-one", peer, &mix.to_string()]).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let mut numbers = text.split_whitespace().map_while(|number| number.parse::<usize>().ok());
            let (Some(live), Some(peak)) = (numbers.next(), numbers.next()) else {
                return Err(std::io::Error::other(format!(
                    "{peer} did not finish \"{workload}\": {}",
                    String::from_utf8_lossy(&output.stderr)
                )));
            };
            row.live_bytes = live;
            row.peak_bytes.push(peak);
        }
        rows.push(row);
    }
    Ok(Residence { origin: Origin::here(command), peers, rows })
}

impl Residence {
    /// Peaks over mimalloc's, in the order of the peers.
    pub fn ratios(&self, row: &Peak) -> Vec<f64> {
        let base =
            self.peers.iter().position(|peer| peer == Mimalloc::NAME).map_or(1, |at| row.peak_bytes[at]);
        row.peak_bytes.iter().map(|peak| *peak as f64 / base.max(1) as f64).collect()
    }
}
