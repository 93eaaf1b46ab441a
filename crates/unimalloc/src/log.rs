//! What the allocator decides, said on standard error where `UNIMALLOC_LOG` asks for it.
//!
//! Off unless it is set, and then one load on paths that are slow anyway; no hot path looks. A line is put together on the stack and
//! written by one system call: no memory, no lock, nothing that a fork could leave half done. So it may be said from inside the
//! allocator, by a process that has no memory left, and in the child of a fork. The usual facades hand lines to loggers that allocate and
//! lock, which in here would call the allocator again.
//!
//! ```text
//! unimalloc 1764499200.123 4711 debug allocate backend=host bytes=33554432 address=0x7f2400000000
//!           seconds        thread level event    what it is about
//! ```

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::backend::fork;

/// How much somebody must want to know for a line to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Something is lost: a context, a span that was written to.
    Error = 1,
    /// A request was refused for good.
    Warn = 2,
    /// Which backend and why, what was given back.
    Info = 3,
    /// Each call of the system or the driver for memory, each hint that does not apply.
    Debug = 4,
}

const NAMES: [(&str, u8); 5] = [
    ("off", 0),
    ("error", Level::Error as u8),
    ("warn", Level::Warn as u8),
    ("info", Level::Info as u8),
    ("debug", Level::Debug as u8),
];

const UNREAD: u8 = u8::MAX;
/// The least urgent level that is written; 0 for none.
static MOST: AtomicU8 = AtomicU8::new(UNREAD);

/// Whether lines of a level are written. The environment is read at the first call.
pub fn enabled(level: Level) -> bool {
    let most = match MOST.load(Relaxed) {
        UNREAD => read(),
        most => most,
    };
    level as u8 <= most
}

#[cold]
fn read() -> u8 {
    // Another thread may have been changing the environment when the process forked.
    if fork::forked() {
        return 0;
    }
    let level = from_environment();
    MOST.store(level.unwrap_or(0), Relaxed);
    if level.is_none() {
        write(format_args!("warn UNIMALLOC_LOG is not understood: use error, warn, info, debug or off"));
    }
    level.unwrap_or(0)
}

/// The level of that name; nothing is off. `None` where it is not understood.
fn parse(text: &[u8]) -> Option<u8> {
    let text = text.trim_ascii();
    if text.is_empty() {
        return Some(0);
    }
    NAMES.iter().find(|(name, _)| name.as_bytes() == text).map(|(_, level)| *level)
}

#[cfg(unix)]
fn from_environment() -> Option<u8> {
    // SAFETY: the name is NUL-terminated. The answer is read before this returns: a program that changes the variable in another thread
    // at this moment takes a string away from under every reader, those of the standard library included.
    let text = unsafe {
        let text = libc::getenv(c"UNIMALLOC_LOG".as_ptr());
        if text.is_null() {
            return Some(0);
        }
        std::ffi::CStr::from_ptr(text)
    };
    parse(text.to_bytes())
}

#[cfg(not(unix))]
fn from_environment() -> Option<u8> {
    std::env::var_os("UNIMALLOC_LOG").map_or(Some(0), |text| parse(text.to_string_lossy().as_bytes()))
}

/// Writes a line. Ask [`enabled`] first.
#[cold]
pub fn line(level: Level, what: fmt::Arguments<'_>) {
    let name = NAMES.iter().find(|(_, number)| *number == level as u8).map_or("", |(name, _)| name);
    write(format_args!("{name} {what}"));
}

/// A line on the stack: what does not fit is cut off, and a line break within becomes a space.
struct Line {
    bytes: [u8; 1024],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte stays for the end of the line.
        let room = self.bytes.len() - 1 - self.len;
        let text = text.as_bytes();
        let text = &text[..text.len().min(room)];
        for (to, from) in self.bytes[self.len..].iter_mut().zip(text) {
            *to = if from.is_ascii_control() { b' ' } else { *from };
        }
        self.len += text.len();
        Ok(())
    }
}

fn write(text: fmt::Arguments<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut line = Line { bytes: [0; 1024], len: 0 };
    let _ = write!(line, "unimalloc {}.{:03} {} {text}", now.as_secs(), now.subsec_millis(), thread());
    line.bytes[line.len] = b'\n';
    emit(&line.bytes[..=line.len]);
}

#[cfg(target_os = "linux")]
fn thread() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::gettid() as usize }
}

#[cfg(not(target_os = "linux"))]
fn thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.try_with(|here| std::ptr::from_ref(here).addr()).unwrap_or(0)
}

/// Whoever does not read standard error misses the line; nothing here depends on it.
#[cfg(unix)]
fn emit(line: &[u8]) {
    // SAFETY: the bytes are readable, and the system checks the descriptor.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

#[cfg(not(unix))]
fn emit(line: &[u8]) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line);
}

/// Says something at a level, if somebody wants to know.
macro_rules! say {
    ($level:expr, $($what:tt)*) => {{
        use $crate::log::Level;
        let level: Level = $level;
        if $crate::log::enabled(level) {
            $crate::log::line(level, format_args!($($what)*));
        }
    }};
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_by_name() {
        assert_eq!(
            ["", " ", "off", "error", "warn", "info", " debug "].map(|text| parse(text.as_bytes())),
            [Some(0), Some(0), Some(0), Some(1), Some(2), Some(3), Some(4)]
        );
        for text in ["1", "DEBUG", "trace", "debug,info"] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_long_line_is_cut_off_and_stays_one() {
        let mut line = Line { bytes: [0; 1024], len: 0 };
        write!(line, "a\nb\u{1b}c{}", "x".repeat(5000)).unwrap();
        assert_eq!(line.len, 1023);
        assert!(line.bytes.starts_with(b"a b cxxx"));
    }
}
