//! Runs every workload with every peer in turns, and keeps medians and ratios.
//!
//! Machines are noisy and clocks drift, so a peer is compared with mimalloc only within a round: both ran a few
//! milliseconds apart. The median over the rounds is what is reported, with the quartiles beside it.

use serde::{Deserialize, Serialize};

use crate::for_each_peer;
use crate::machine::Origin;
use crate::peer::{mimalloc_version, Mimalloc, Peer, Unimalloc};
use crate::workload::{Sample, Workload};

/// A run of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Where and when.
    pub origin: Origin,
    /// The version of mimalloc.
    pub mimalloc: String,
    /// Rounds per workload.
    pub rounds: usize,
    /// Peers, in the order of the columns.
    pub peers: Vec<String>,
    /// Results by workload.
    pub rows: Vec<Row>,
}

/// The results of one workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The workload's name.
    pub workload: String,
    /// In the order of [`Comparison::peers`].
    pub cells: Vec<Cell>,
}

/// One peer on one workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Median nanoseconds per operation.
    pub nanoseconds: f64,
    /// Median of time over mimalloc's time in the same round.
    pub ratio: f64,
    /// Lower and upper quartile of that.
    pub quartiles: [f64; 2],
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Rounds per workload.
    pub rounds: usize,
    /// How long each run takes, in milliseconds: a peer that is slower does less.
    pub milliseconds: f64,
    /// Only workloads whose name contains one of these; all if empty.
    pub only: Vec<String>,
    /// Only unimalloc (Standard) and mimalloc.
    pub duel: bool,
}

type Runner = fn(Workload, f64) -> Sample;

fn runners(duel: bool) -> Vec<(&'static str, Runner)> {
    fn runner<P: Peer>() -> (&'static str, Runner) {
        (P::NAME, |workload, scale| workload.run::<P>(scale))
    }
    if duel {
        return vec![runner::<Unimalloc>(), runner::<Mimalloc>()];
    }
    let mut runners = Vec::new();
    macro_rules! add {
        ($peer:ty) => {
            runners.push(runner::<$peer>())
        };
    }
    for_each_peer!(add);
    runners
}

/// The value below which `part` of the values lie; sorts them.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part).round() as usize]
}

/// Runs the plan; `progress` hears of each row when it is done.
pub fn compare(plan: &Plan, command: &str, mut progress: impl FnMut(&[&str], &Row)) -> Comparison {
    let runners = runners(plan.duel);
    let names: Vec<_> = runners.iter().map(|(name, _)| *name).collect();
    let mut rows = Vec::new();
    for workload in Workload::all() {
        let name = workload.name();
        if !plan.only.is_empty() && !plan.only.iter().any(|only| name.contains(only.as_str())) {
            continue;
        }
        let row = measure(workload, &runners, plan);
        progress(&names, &row);
        rows.push(row);
    }
    Comparison {
        origin: Origin::here(command),
        mimalloc: mimalloc_version(),
        rounds: plan.rounds,
        peers: names.iter().map(|name| (*name).to_owned()).collect(),
        rows,
    }
}

/// The scale at which a run takes about so many milliseconds. Finding it also warms caches up, the allocator's and the
/// processor's.
fn calibrate(workload: Workload, run: Runner, milliseconds: f64) -> f64 {
    let mut scale = 0.001;
    loop {
        let took = run(workload, scale).time.as_secs_f64() * 1e3;
        let factor = milliseconds / took.max(1e-6);
        if factor < 4.0 || scale > 1e3 {
            return scale * factor;
        }
        scale *= factor.min(16.0);
    }
}

fn measure(workload: Workload, runners: &[(&str, Runner)], plan: &Plan) -> Row {
    let scales: Vec<_> =
        runners.iter().map(|(_, run)| calibrate(workload, *run, plan.milliseconds)).collect();
    let mimalloc =
        runners.iter().position(|(name, _)| *name == Mimalloc::NAME).expect("mimalloc always runs");
    let mut times = vec![Vec::with_capacity(plan.rounds); runners.len()];
    for round in 0..plan.rounds {
        // Each round starts with another peer, so that none always follows the same one.
        for turn in 0..runners.len() {
            let at = (turn + round) % runners.len();
            times[at].push((runners[at].1)(workload, scales[at]).nanoseconds());
        }
    }
    let base = times[mimalloc].clone();
    let cells = times
        .into_iter()
        .map(|mut times| {
            let mut ratios: Vec<_> = times.iter().zip(&base).map(|(time, base)| time / base).collect();
            Cell {
                nanoseconds: quantile(&mut times, 0.5),
                ratio: quantile(&mut ratios, 0.5),
                quartiles: [quantile(&mut ratios, 0.25), quantile(&mut ratios, 0.75)],
            }
        })
        .collect();
    Row { workload: workload.name(), cells }
}
