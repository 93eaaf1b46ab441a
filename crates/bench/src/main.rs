//! `unimalloc-bench`: compares allocators and writes what it found.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use unimalloc_bench::compare::{compare, Plan, Row};
use unimalloc_bench::{report, resident};

const USAGE: &str = "\
usage: unimalloc-bench compare [--rounds N] [--ms X] [--duel] [--only NAME]... [--out FILE.json]
       unimalloc-bench resident [--out FILE.json]
       unimalloc-bench report COMPARE.json RESIDENT.json DIRECTORY

compare   every workload with every peer, in turns; --duel: unimalloc and mimalloc alone
resident  peak resident set of mixed workloads, a process per peer
report    a table and pictures from the results of both";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    let command = format!("unimalloc-bench {}", arguments.join(" "));
    match arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("compare", rest)) => run_compare(rest, &command),
        Some(("resident", rest)) => run_resident(rest, &command),
        Some(("report", [comparison, residence, directory])) => {
            let failed = |error: report::Failure| format!("the report was not written: {error}");
            report::write(&read(comparison)?, &read(residence)?, Path::new(directory)).map_err(failed)
        }
        Some(("resident-one", [peer, mix])) => {
            let mix = mix.parse().map_err(|_| USAGE)?;
            let (live, peak) = resident::run_named(peer, mix).ok_or("no peer of this name was built")?;
            println!("{live} {peak}");
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

fn run_compare(arguments: &[String], command: &str) -> Result<(), String> {
    let mut plan = Plan { rounds: 31, milliseconds: 5.0, only: Vec::new(), duel: false };
    let mut out = None;
    let mut arguments = arguments.iter();
    while let Some(option) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{option} needs a value\n{USAGE}"));
        match option.as_str() {
            "--rounds" => plan.rounds = value()?.parse().map_err(|_| USAGE)?,
            "--ms" => plan.milliseconds = value()?.parse().map_err(|_| USAGE)?,
            "--only" => plan.only.push(value()?.clone()),
            "--duel" => plan.duel = true,
            "--out" => out = Some(value()?.clone()),
            _ => return Err(format!("unknown option {option}\n{USAGE}")),
        }
    }
    if plan.rounds == 0 {
        return Err("--rounds must be at least 1".into());
    }
    let mut first = true;
    let results = compare(&plan, command, |peers, row| {
        if std::mem::take(&mut first) {
            println!("{:<20}{}", "", peers.iter().map(|name| format!("{name:>21}")).collect::<String>());
        }
        println!("{}", line(row));
    });
    write(out.as_deref(), &results)
}

fn line(row: &Row) -> String {
    let cells = row.cells.iter().map(|cell| format!("{:>11.1} ns {:>6.2}×", cell.nanoseconds, cell.ratio));
    format!("{:<20}{}", row.workload, cells.collect::<String>())
}

fn run_resident(arguments: &[String], command: &str) -> Result<(), String> {
    let out = match arguments {
        [] => None,
        [option, file] if option == "--out" => Some(file.as_str()),
        _ => return Err(USAGE.into()),
    };
    let results = resident::measure(command).map_err(|error| error.to_string())?;
    for row in &results.rows {
        println!("{} ({} MiB live at most)", row.workload, row.live_bytes >> 20);
        for ((peer, peak), ratio) in results.peers.iter().zip(&row.peak_bytes).zip(results.ratios(row)) {
            println!("  {peer:<20}{:>8} MiB {ratio:>6.2}×", peak >> 20);
        }
    }
    write(out, &results)
}

fn write(out: Option<&str>, results: &impl serde::Serialize) -> Result<(), String> {
    let Some(file) = out else { return Ok(()) };
    let text = serde_json::to_string_pretty(results).map_err(|error| error.to_string())?;
    fs::write(file, text + "\n").map_err(|error| format!("{file}: {error}"))
}

fn read<T: serde::de::DeserializeOwned>(file: &str) -> Result<T, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{file}: {error}"))
}
