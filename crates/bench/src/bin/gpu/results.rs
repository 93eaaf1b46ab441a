//! What is written down: a table per workload, and the ratios that have a budget.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use serde::Serialize;
use unimalloc::cuda;
use unimalloc_bench::machine::Origin;

/// A table of one workload: a row per case, a column per peer or placement.
#[derive(Debug, Clone, Serialize)]
pub struct Workload {
    pub name: String,
    pub title: String,
    /// Of all values.
    pub unit: String,
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
    /// What to know when reading it.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub case: String,
    /// In the order of the columns; none where a peer has no such case.
    pub values: Vec<Option<f64>>,
}

/// A ratio or time that has a budget.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    pub what: String,
    pub value: f64,
    /// The value must be at most, or where `at_least` at least, this.
    pub must: f64,
    pub aim: f64,
    pub at_least: bool,
}

#[derive(Debug, Clone, Serialize)]
pub struct Results {
    pub origin: Origin,
    pub gpu: String,
    pub driver: String,
    pub cuda: String,
    pub workloads: Vec<Workload>,
    pub budgets: Vec<Figure>,
}

impl Workload {
    pub fn new(name: &str, title: &str, unit: &str, columns: &[&str]) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            unit: unit.into(),
            columns: columns.iter().map(|column| (*column).into()).collect(),
            rows: Vec::new(),
            notes: Vec::new(),
        }
    }

    pub fn row(&mut self, case: impl Into<String>, values: &[Option<f64>]) {
        let row = Row { case: case.into(), values: values.to_vec() };
        eprintln!("  {}: {} {:?}", self.name, row.case, row.values);
        self.rows.push(row);
    }

    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub fn text(&self) -> String {
        let mut text = format!("\n{} ({})\n{:<28}", self.title, self.unit, "");
        for column in &self.columns {
            let _ = write!(text, "{column:>22}");
        }
        text.push('\n');
        for row in &self.rows {
            let _ = write!(text, "{:<28}", row.case);
            for value in &row.values {
                let value = value.map_or_else(|| "-".into(), |value| format!("{value:.3}"));
                let _ = write!(text, "{value:>22}");
            }
            text.push('\n');
        }
        for note in &self.notes {
            let _ = writeln!(text, "  {note}");
        }
        text
    }
}

impl Results {
    pub fn new(command: &str, commit: Option<String>) -> Result<Self, String> {
        let device = cuda::devices()
            .map_err(|error| error.to_string())?
            .into_iter()
            .next()
            .ok_or("there is no device")?;
        let mut origin = Origin::here(command);
        origin.commit = commit.unwrap_or(origin.commit);
        let driver = Command::new("nvidia-smi")
            .args(["--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
            .output()
            .map_or_else(|_| "unknown".into(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
        let version = device.driver_version;
        Ok(Self {
            origin,
            gpu: device.name,
            driver,
            cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
            workloads: Vec::new(),
            budgets: Vec::new(),
        })
    }

    /// A value that must be at most `must`.
    pub fn at_most(&mut self, what: impl Into<String>, value: f64, must: f64, aim: f64) {
        self.budgets.push(Figure { what: what.into(), value, must, aim, at_least: false });
    }

    /// A value that must be at least `must`.
    pub fn at_least(&mut self, what: impl Into<String>, value: f64, must: f64, aim: f64) {
        self.budgets.push(Figure { what: what.into(), value, must, aim, at_least: true });
    }

    pub fn write(&self, file: &str) -> Result<(), String> {
        let text = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        fs::write(file, text + "\n").map_err(|error| format!("{file}: {error}"))
    }

    pub fn budgets_text(&self) -> String {
        let mut text = String::from("\nbudgets\n");
        for figure in &self.budgets {
            let meets = |bound: f64| {
                if figure.at_least {
                    figure.value >= bound
                } else {
                    figure.value <= bound
                }
            };
            let verdict = match (meets(figure.must), meets(figure.aim)) {
                (true, true) => "aim met",
                (true, false) => "must met",
                _ => "MISSED",
            };
            let _ = writeln!(
                text,
                "{:<76}{:>12.5}  must {:<9.5} aim {:<9.5} {verdict}",
                figure.what, figure.value, figure.must, figure.aim
            );
        }
        text
    }
}
