//! `gpu`: what managed memory costs on a GPU, against the driver and the pools that come with it.
//!
//! ```text
//! gpu [--commit ID] [--out FILE.json] [--only NAME]...
//! ```
//!
//! Every workload runs all its peers in one process, in turns where they are compared. Managed memory in use stays below
//! 1 GiB: more than a card has free can hang it.

mod contents;
mod driver;
mod kernels;
mod measure;
mod pairs;
mod peers;
mod results;

use std::process::ExitCode;

use results::{Results, Workload};
use unimalloc::cuda;

type Run = fn(&mut Bench) -> Result<Vec<Workload>, String>;

const WORKLOADS: [(&str, Run); 10] = [
    ("pair", pairs::by_size),
    ("resident", pairs::resident),
    ("threads", pairs::threads),
    ("random", pairs::random_sizes),
    ("launch", kernels::alloc_launch_free),
    ("busy", kernels::free_while_busy),
    ("round-trip", contents::round_trip),
    ("device", contents::device_fill),
    ("neighbours", contents::neighbours),
    ("small", contents::small_blocks),
];

/// What the workloads share.
struct Bench {
    gpu: peers::Gpu,
    kernels: kernels::Kernels,
    results: Results,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (mut commit, mut out, mut only) = (None, None, Vec::new());
    let mut rest = arguments.iter().cloned();
    while let Some(option) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("{option} needs a value"));
        match option.as_str() {
            "--commit" => commit = Some(value()?),
            "--out" => out = Some(value()?),
            "--only" => only.push(value()?),
            _ => {
                return Err(format!(
                    "unknown option {option}: gpu [--commit ID] [--out FILE] [--only NAME]..."
                ))
            }
        }
    }
    if let Some(reason) = cuda::unavailable_reason() {
        println!("gpu: skipped, {reason}");
        return Ok(());
    }
    peers::limit(peers::BESIDE_OTHERS);
    let command: String = only.iter().map(|name| format!(" --only {name}")).collect();
    let results = Results::new(&format!("gpu{command}"), commit)?;
    let mut bench = Bench { gpu: peers::Gpu::new()?, kernels: kernels::Kernels::new()?, results };
    for (name, workload) in WORKLOADS {
        if !only.is_empty() && !only.iter().any(|only| only == name) {
            continue;
        }
        let measured = workload(&mut bench)?;
        for workload in measured {
            print!("{}", workload.text());
            bench.results.workloads.push(workload);
        }
        peers::give_all_back();
        // So that a later failure costs only what came after.
        if let Some(file) = &out {
            bench.results.write(file)?;
        }
    }
    print!("{}", bench.results.budgets_text());
    Ok(())
}
