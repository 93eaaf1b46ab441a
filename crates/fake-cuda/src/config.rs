//! What the environment asks of the library, read once at the first call into it.

use crate::codes::CUresult;
use crate::versions::DEFAULT_VERSION;
use std::ffi::CStr;

/// One injected failure: calls number `from` (1-based, of that entry point) answer `code` without acting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exported name of the entry point.
    pub entry: String,
    /// The call that fails.
    pub from: u64,
    /// Whether every later call fails as well.
    pub onwards: bool,
    /// The code it answers.
    pub code: CUresult,
}

/// A delay, for one entry point or for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delay {
    /// Exported name, or `None` for every entry point.
    pub entry: Option<String>,
    /// Microseconds slept before the call acts.
    pub micros: u64,
}

/// The parsed environment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each field is the variable of its name, described in the crate's documentation"
)]
pub struct Config {
    pub driver_version: u32,
    pub init_error: CUresult,
    pub devices: i32,
    pub managed: bool,
    pub concurrent: bool,
    pub pageable: bool,
    pub compute: u32,
    pub name: String,
    pub total_bytes: u64,
    pub free_bytes: Option<u64>,
    pub misalign: u64,
    pub failures: Vec<Failure>,
    pub delays: Vec<Delay>,
    pub lag_us: u64,
    pub lose_at_call: u64,
    pub deinit_at_call: u64,
    pub abort_on_exit_calls: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            driver_version: built_version(),
            init_error: 0,
            devices: 1,
            managed: true,
            concurrent: true,
            pageable: false,
            compute: 90,
            name: "Fake CUDA device".into(),
            total_bytes: 16 << 30,
            free_bytes: None,
            misalign: 0,
            failures: Vec::new(),
            delays: Vec::new(),
            lag_us: 0,
            lose_at_call: 0,
            deinit_at_call: 0,
            abort_on_exit_calls: false,
        }
    }
}

/// Carries the version of this build. `Build` rewrites the digits in a copy of the library.
pub const VERSION_MARK: &[u8] = b"fake-cuda driver version: ";
#[used]
static VERSION: [u8; 32] = *b"fake-cuda driver version: 13000\0";

fn built_version() -> u32 {
    // SAFETY: VERSION is a live static of exactly this type; the volatile read only keeps the compiler from
    // assuming the digits that it saw.
    let bytes = unsafe { std::ptr::read_volatile(&VERSION) };
    let digits = bytes.get(VERSION_MARK.len()..).and_then(|rest| CStr::from_bytes_until_nul(rest).ok());
    digits.and_then(|text| text.to_str().ok()?.parse().ok()).unwrap_or(DEFAULT_VERSION)
}

/// `4096`, `64KiB`, `16GiB`.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// `cuMemAllocManaged@3=2`, `cuMemFree_v2@1+=999`.
pub fn parse_failure(text: &str) -> Option<Failure> {
    let (entry, rest) = text.split_once('@')?;
    let (nth, code) = rest.split_once('=')?;
    let (nth, onwards) = nth.strip_suffix('+').map_or((nth, false), |nth| (nth, true));
    let from = nth.parse().ok().filter(|n| *n > 0)?;
    let code = code.parse().ok().filter(|code| *code > 0)?;
    (entry.starts_with("cu")).then(|| Failure { entry: entry.into(), from, onwards, code })
}

/// `250`, `cuMemAllocManaged=250`.
fn parse_delay(text: &str) -> Option<Delay> {
    let (entry, micros) = match text.split_once('=') {
        Some((entry, micros)) => (Some(entry.to_owned()), micros),
        None => (None, text),
    };
    Some(Delay { entry, micros: micros.parse().ok()? })
}

fn parse_flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn list<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(parse).collect()
}

impl Config {
    /// From (name, value) pairs; the error is a sentence that names the variable and what it takes.
    pub fn parse(variables: impl Iterator<Item = (String, String)>) -> Result<Self, String> {
        let mut config = Self::default();
        for (name, value) in variables {
            let Some(key) = name.strip_prefix("FAKE_CUDA_") else { continue };
            config
                .set(key, value.trim())
                .map_err(|takes| format!("fake-cuda: {name}={value:?} is not understood; {takes}"))?;
        }
        Ok(config)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), &'static str> {
        const FLAG: &str = "it takes 0 or 1";
        const NUMBER: &str = "it takes a whole number";
        const BYTES: &str = "it takes a number of bytes, such as 4096, 64KiB or 16GiB";
        match key {
            "DRIVER_VERSION" => self.driver_version = value.parse().map_err(|_| NUMBER)?,
            "INIT_ERROR" => self.init_error = value.parse().map_err(|_| NUMBER)?,
            "DEVICES" => {
                self.devices =
                    value.parse().ok().filter(|n| (0..=64).contains(n)).ok_or("it takes 0 to 64")?;
            }
            "MANAGED" => self.managed = parse_flag(value).ok_or(FLAG)?,
            "CONCURRENT" => self.concurrent = parse_flag(value).ok_or(FLAG)?,
            "PAGEABLE" => self.pageable = parse_flag(value).ok_or(FLAG)?,
            "COMPUTE" => {
                self.compute = value
                    .parse()
                    .ok()
                    .filter(|n| (50..=129).contains(n))
                    .ok_or("it takes a compute capability without its point, such as 75 or 90")?;
            }
            "NAME" => self.name = value.into(),
            "TOTAL_BYTES" => self.total_bytes = parse_bytes(value).ok_or(BYTES)?,
            "FREE_BYTES" => self.free_bytes = Some(parse_bytes(value).ok_or(BYTES)?),
            "MISALIGN" => {
                self.misalign = parse_bytes(value)
                    .filter(|n| n % 4096 == 0 && *n < 32 << 20)
                    .ok_or("it takes a multiple of 4096 below 32MiB, such as 4KiB or 64KiB")?;
            }
            "FAIL" => {
                self.failures = list(value, parse_failure)
                    .ok_or("it takes entry@nth=code or entry@nth+=code, separated by commas")?;
            }
            "DELAY_US" => {
                self.delays = list(value, parse_delay)
                    .ok_or("it takes microseconds or entry=microseconds, separated by commas")?;
            }
            "LAG_US" => self.lag_us = value.parse().map_err(|_| NUMBER)?,
            "LOSE_AT_CALL" => self.lose_at_call = value.parse().map_err(|_| NUMBER)?,
            "DEINIT_AT_CALL" => self.deinit_at_call = value.parse().map_err(|_| NUMBER)?,
            "ABORT_ON_EXIT_CALLS" => self.abort_on_exit_calls = parse_flag(value).ok_or(FLAG)?,
            // The own mark of `Build` on a child process.
            "CHILD" => {}
            _ => return Err("no such variable: see the crate's documentation for the list"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Config, String> {
        Config::parse(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(parse(&[("PATH", "/bin")]).unwrap(), Config::default());
        assert_eq!(Config::default().driver_version, 13_000);
    }

    #[test]
    fn failures_and_delays() {
        let config = parse(&[
            ("FAKE_CUDA_FAIL", "cuMemAllocManaged@3=2, cuMemFree_v2@1+=999"),
            ("FAKE_CUDA_DELAY_US", "10,cuInit=250"),
        ])
        .unwrap();
        assert_eq!(
            config.failures,
            [
                Failure { entry: "cuMemAllocManaged".into(), from: 3, onwards: false, code: 2 },
                Failure { entry: "cuMemFree_v2".into(), from: 1, onwards: true, code: 999 },
            ]
        );
        assert_eq!(config.delays[0], Delay { entry: None, micros: 10 });
        assert_eq!(config.delays[1], Delay { entry: Some("cuInit".into()), micros: 250 });
    }

    #[test]
    fn a_typing_error_is_named() {
        for (name, value) in [
            ("FAKE_CUDA_CONCURENT", "0"),
            ("FAKE_CUDA_CONCURRENT", "no"),
            ("FAKE_CUDA_FAIL", "cuMemAllocManaged@0=2"),
            ("FAKE_CUDA_FAIL", "cuMemAllocManaged=2"),
            ("FAKE_CUDA_MISALIGN", "12"),
            ("FAKE_CUDA_FREE_BYTES", "3 apples"),
        ] {
            let message = parse(&[(name, value)]).unwrap_err();
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
    }

    #[test]
    fn bytes() {
        assert_eq!(parse_bytes("4096"), Some(4096));
        assert_eq!(parse_bytes("64KiB"), Some(65536));
        assert_eq!(parse_bytes("16GiB"), Some(16 << 30));
        assert_eq!(parse_bytes("-1"), None);
        assert_eq!(parse_bytes("99999999999TiB"), None);
    }
}
