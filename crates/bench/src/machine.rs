//! Where results come from.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine, the commit and the day of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The processor.
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// Operating system and architecture.
    pub system: String,
    /// The commit that was built, with `+` where the tree had changes.
    pub commit: String,
    /// The day, as `2026-11-30`.
    pub day: String,
    /// The command that gave the results.
    pub command: String,
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Origin {
    /// This machine, now.
    pub fn here(command: &str) -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field =
            |name| cpu.lines().find(|line| line.starts_with(name)).and_then(|line| line.split(": ").nth(1));
        let processor = match field("model name") {
            Some(model) => format!("{model}, family {}", field("cpu family").unwrap_or("?")),
            None => "unknown".into(),
        };
        let commit = output("git", &["rev-parse", "--short=10", "HEAD"]).map_or("unknown".into(), |commit| {
            let clean =
                output("git", &["status", "--porcelain", "--untracked-files=no", "--", "crates/unimalloc"])
                    .is_some_and(|changes| changes.is_empty());
            if clean {
                commit
            } else {
                commit + "+"
            }
        });
        Self {
            processor,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            commit,
            day: output("date", &["+%F"]).unwrap_or_else(|| "unknown".into()),
            command: command.to_owned(),
        }
    }
}
