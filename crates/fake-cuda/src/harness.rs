//! For tests in Rust: directories to put on the library search path, child processes, and the loaded library's controls.

use crate::config::VERSION_MARK;
use crate::elf::hide_exports;
use crate::versions::{introduced, DEFAULT_VERSION};
use std::ffi::{c_char, c_void, CString, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io};

const DRIVER: &str = "libcuda.so.1";
/// Every name that a program may look for, so that it never finds the real compiler of a machine that has one: that asks
/// the driver for what a stand-in does not have, and crashes.
const COMPILERS: [&str; 4] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"];
/// Stands where there is to be no compiler: the loader refuses it, and looks no further.
const NO_COMPILER: &[u8] = b"There is no NVRTC here: this file keeps the loader from finding another.\n";
const CHILD: &str = "FAKE_CUDA_CHILD";

/// A directory with `libcuda.so.1` of a CUDA 13.0 driver and NVRTC under each of its names.
///
/// # Panics
/// When the library has not been built or cannot be copied; the message says what to do.
pub fn library_dir() -> PathBuf {
    Build::new().dir()
}

/// What kind of installation a directory holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Build {
    version: u32,
    hidden: Vec<String>,
    compiler: bool,
}

impl Default for Build {
    fn default() -> Self {
        Self::new()
    }
}

impl Build {
    /// A CUDA 13.0 driver with its run-time compiler.
    pub fn new() -> Self {
        Self { version: DEFAULT_VERSION, hidden: Vec::new(), compiler: true }
    }

    /// A driver of another version, such as 12010 for 12.1: it lacks what came later, and says that version.
    #[must_use]
    pub fn driver(mut self, version: u32) -> Self {
        assert!(
            (10_000..=99_999).contains(&version),
            "a driver version has five digits, such as 12010 for 12.1"
        );
        self.version = version;
        self
    }

    /// One exported entry point less.
    #[must_use]
    pub fn without(mut self, entry: &str) -> Self {
        self.hidden.push(entry.into());
        self
    }

    /// No NVRTC beside the driver.
    #[must_use]
    pub fn without_compiler(mut self) -> Self {
        self.compiler = false;
        self
    }

    /// Makes the directory, if it is not there and up to date, and gives its path.
    ///
    /// # Panics
    /// When the library has not been built or cannot be copied; the message says what to do.
    pub fn dir(&self) -> PathBuf {
        let (library, profile) = built_library();
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let dir = profile.join("fake-cuda").join(format!("{}-{:016x}", self.version, hasher.finish()));
        self.fill(&library, &dir).unwrap_or_else(|error| panic!("cannot make {}: {error}", dir.display()));
        dir
    }

    fn fill(&self, library: &Path, dir: &Path) -> io::Result<()> {
        let driver = dir.join(DRIVER);
        let compilers = COMPILERS.map(|name| dir.join(name));
        // The driver is put there last.
        if up_to_date(&driver, library) && compilers.iter().all(|compiler| compiler.exists()) {
            return Ok(());
        }
        fs::create_dir_all(dir)?;
        let original = fs::read(library)?;
        let make = |hide: &dyn Fn(&str) -> bool| {
            let mut copy = original.clone();
            let hidden =
                hide_exports(&mut copy, hide).ok_or_else(|| io::Error::other("not a 64-bit ELF library"))?;
            set_version(&mut copy, self.version);
            Ok::<_, io::Error>((copy, hidden))
        };
        let (content, hidden) = make(&|name| {
            name.starts_with("nvrtc")
                || introduced(name) > self.version
                || self.hidden.iter().any(|h| h == name)
        })?;
        for name in &self.hidden {
            assert!(hidden.contains(name), "the library exports no {name} to leave out");
        }
        let compiler =
            if self.compiler { make(&|name| name.starts_with("cu"))?.0 } else { NO_COMPILER.to_vec() };
        place(&compilers[0], |fresh| fs::write(fresh, &compiler))?;
        for name in &compilers[1..] {
            place(name, |fresh| fs::hard_link(&compilers[0], fresh))?;
        }
        place(&driver, |fresh| fs::write(fresh, &content))
    }

    /// `LD_LIBRARY_PATH` with this directory in front of what the variable holds now.
    pub fn search_path(&self) -> OsString {
        let mut path = self.dir().into_os_string();
        if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        path
    }

    /// Runs the body of the test `name` in a process of its own that finds this library, with `variables` set.
    ///
    /// Call it as the only statement of a test, with the test's full name as libtest prints it. In the parent it runs
    /// this test binary again for that one test and fails if that fails; in the child it runs `body`.
    ///
    /// # Panics
    /// When the child does not pass; its output is in the message.
    pub fn in_child(&self, name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
        if let Some(output) = self.child_output(name, variables, body) {
            let text = text_of(&output);
            assert!(output.status.success(), "{name} failed in its own process ({}):\n{text}", output.status);
            assert!(
                text.contains("1 passed"),
                "no test is called {name}; the call needs its full name:\n{text}"
            );
        }
    }

    /// As `in_child`, for a test that looks at how the child ended, such as by a signal. `None` in the child, after `body`.
    ///
    /// # Panics
    /// When the child cannot be started.
    pub fn child_output(
        &self,
        name: &str,
        variables: &[(&str, &str)],
        body: impl FnOnce(),
    ) -> Option<Output> {
        if env::var(CHILD).is_ok_and(|child| child == name) {
            body();
            return None;
        }
        let mut command = Command::new(env::current_exe().expect("a test knows its own file"));
        command.args([name, "--exact", "--nocapture", "--test-threads=1", "--include-ignored"]);
        for (key, _) in env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("FAKE_CUDA_")) {
            command.env_remove(key);
        }
        command.env(CHILD, name).env("LD_LIBRARY_PATH", self.search_path());
        command.envs(variables.iter().copied());
        Some(command.output().expect("a test can run itself"))
    }
}

fn text_of(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The library that cargo built with this crate, and the folder of its profile.
fn built_library() -> (PathBuf, PathBuf) {
    let exe = env::current_exe().expect("a program knows its own file");
    // target/PROFILE/deps for tests, target/PROFILE for programs, its examples folder, or a bundle of all in one folder.
    for dir in exe.ancestors().skip(1).take(3) {
        for place in ["deps/libfake_cuda.so", "libfake_cuda.so"] {
            let library = dir.join(place);
            if library.is_file() {
                let profile = if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir };
                return (library, profile.to_owned());
            }
        }
    }
    panic!(
        "libfake_cuda.so is not near {}: name fake-cuda as a dev-dependency of the crate under test, or run `cargo build -p fake-cuda` \
         for the same profile first",
        exe.display()
    );
}

fn set_version(library: &mut [u8], version: u32) {
    let digits = version.to_string();
    let length = VERSION_MARK.len() + digits.len();
    for at in 0..library.len().saturating_sub(length) {
        let found =
            library[at..].starts_with(VERSION_MARK) && library[at + VERSION_MARK.len()].is_ascii_digit();
        if found {
            library[at + VERSION_MARK.len()..at + length].copy_from_slice(digits.as_bytes());
        }
    }
}

/// Whether `copy` was made from `original` as it is now: a build writes a newer file.
fn up_to_date(copy: &Path, original: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|data| Ok((data.modified()?, data.len())));
    matches!((time(copy), time(original)), (Ok((copy, a)), Ok((original, b))) if copy > original && a == b)
}

/// Puts a file in its place in one step: other processes may have it loaded, and others may be doing the same.
fn place(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let fresh =
        path.with_extension(format!("new-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed)));
    make(&fresh)?;
    fs::rename(&fresh, path)?;
    // Renaming one name of a file to another of the same file leaves both.
    let _ = fs::remove_file(&fresh);
    Ok(())
}

/// The stand-in that this process has loaded.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    control: unsafe extern "C" fn(*const c_char, i64) -> i64,
    counter: unsafe extern "C" fn(*const c_char) -> u64,
}

/// Which calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// The nth call from now, counted from 1.
    Nth(u32),
    /// Every call from the nth on.
    From(u32),
    /// None any more.
    None,
}

impl Loaded {
    /// `None` if no library named `libcuda.so.1` is loaded, or if it is a real one.
    pub fn find() -> Option<Self> {
        let name = c"libcuda.so.1";
        // SAFETY: the name ends in zero; RTLD_NOLOAD only finds what is there. The handle is not closed, so the library
        // stays loaded as long as the addresses that are taken from it.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the handle is open and the names end in zero.
        let (control, counter): (*mut c_void, *mut c_void) = unsafe {
            (
                libc::dlsym(library, c"fake_cuda_control".as_ptr()),
                libc::dlsym(library, c"fake_cuda_counter".as_ptr()),
            )
        };
        if control.is_null() || counter.is_null() {
            return None;
        }
        // SAFETY: only this crate exports these names, with exactly these types.
        Some(unsafe {
            Self {
                control: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, i64) -> i64>(
                    control,
                ),
                counter: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(
                    counter,
                ),
            }
        })
    }

    /// Switches a fault.
    ///
    /// # Panics
    /// When the library does not understand the key or the value.
    pub fn control(&self, key: &str, value: i64) {
        let text = CString::new(key).expect("a key has no zero byte");
        // SAFETY: the string ends in zero, and the function came from the library as `find` says.
        let answer = unsafe { (self.control)(text.as_ptr(), value) };
        assert_eq!(answer, 0, "the stand-in does not understand {key} = {value}");
    }

    /// Reads a counter.
    ///
    /// # Panics
    /// When the library has no such counter.
    pub fn counter(&self, name: &str) -> u64 {
        let text = CString::new(name).expect("a name has no zero byte");
        // SAFETY: as in `control`.
        let value = unsafe { (self.counter)(text.as_ptr()) };
        assert_ne!(value, u64::MAX, "the stand-in has no counter called {name}");
        value
    }

    /// All driver calls so far.
    pub fn calls(&self) -> u64 {
        self.counter("calls")
    }

    /// Makes calls of one entry point answer `code` without acting.
    ///
    /// # Panics
    /// When the name or the code makes no sense.
    pub fn fail(&self, entry: &str, calls: Calls, code: u32) {
        let nth = match calls {
            Calls::Nth(nth) => i64::from(nth),
            Calls::From(nth) => -i64::from(nth),
            Calls::None => 0,
        };
        let _exists = self.counter(entry);
        self.control(&format!("fail {entry} {code}"), nth);
    }
}
