//! What `UNIMALLOC_LOG` has the allocator say. Each case runs in a process of its own, whose standard error is read.
#![cfg(target_os = "linux")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::{alloc, free};
use unimalloc::log::{enabled, line, Level};
use unimalloc::{last_error, thread_alloc, trim, AllocError, HostBackend, StandardPolicy};

type B = HostBackend;
const MIB: usize = 1 << 20;

thread_local!(static ALLOCATED: Cell<usize> = const { Cell::new(0) });

/// Counts what the program's own allocator is asked for by a thread.
struct Counting;

// SAFETY: all calls are passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATED.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Runs a case of [`cases`] with the variable set.
fn run(case: &str, level: Option<&str>) -> (Output, Vec<String>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cases", "--nocapture"]).env("LOG_CASE", case);
    command.env_remove("UNIMALLOC_LOG").env_remove("UNIMALLOC_MAX_BYTES");
    if let Some(level) = level {
        command.env("UNIMALLOC_LOG", level);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{case}: {text}");
    (output, text.lines().filter(|line| line.starts_with("unimalloc ")).map(str::to_owned).collect())
}

/// The value of a key in a line.
fn value<'l>(line: &'l str, key: &str) -> &'l str {
    line.split(' ')
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        .unwrap_or_else(|| panic!("{key}: {line}"))
}

fn events<'l>(lines: &'l [String], event: &str) -> Vec<&'l str> {
    lines.iter().map(String::as_str).filter(|line| line.split(' ').nth(4) == Some(event)).collect()
}

/// Run by the others, in processes of their own.
#[test]
fn cases() {
    let Ok(case) = std::env::var("LOG_CASE") else { return };
    match case.as_str() {
        "blocks" => {
            let blocks = [40, 1].map(|mib| alloc::<StandardPolicy, B>(mib * MIB, 256));
            blocks.into_iter().for_each(|block| free::<StandardPolicy, B>(block).unwrap());
            trim::<B>(0);
        }
        "hot" => {
            let before = [alloc::<StandardPolicy, B>(64, 16), alloc::<StandardPolicy, B>(100_000, 16)];
            line(Level::Error, format_args!("mark"));
            for _ in 0..1000 {
                free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(64, 16)).unwrap();
                free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(100_000, 16)).unwrap();
            }
            line(Level::Error, format_args!("mark"));
            before.into_iter().for_each(|block| free::<StandardPolicy, B>(block).unwrap());
        }
        "refusal" => {
            HostBackend::set_limit(Some(64 << 20));
            let cached = alloc::<StandardPolicy, B>(40 * MIB, 256);
            free::<StandardPolicy, B>(cached).unwrap();
            let live = alloc::<StandardPolicy, B>(20 * MIB, 256); // for which the cached memory has to go
            assert!(thread_alloc::<StandardPolicy, B>(60 * MIB, 256).is_null());
            free::<StandardPolicy, B>(live).unwrap();
        }
        "memory" => no_memory(),
        "fork" => fork(),
        "allocations" => {
            assert!(enabled(Level::Debug));
            let before = ALLOCATED.get();
            line(Level::Debug, format_args!("{} {:?} {}", 5, AllocError::Budget, "x".repeat(0)));
            line(Level::Warn, format_args!("{:p} {}", &raw const before, AllocError::Budget));
            assert_eq!(ALLOCATED.get(), before);
        }
        other => panic!("no case {other:?}"),
    }
}

#[test]
fn nothing_is_said_unless_it_is_asked_for() {
    for level in [None, Some(""), Some("off")] {
        for case in ["blocks", "refusal"] {
            assert_eq!(run(case, level).1, [""; 0], "{case} with {level:?}");
        }
    }
}

#[test]
fn each_region_that_comes_and_goes_is_said_with_its_bytes_and_address() {
    let (_, lines) = run("blocks", Some("debug"));
    let (came, went) = (events(&lines, "allocate"), events(&lines, "free"));
    let told = |lines: &[&str]| {
        let mut told: Vec<_> = lines
            .iter()
            .map(|line| (value(line, "address").to_owned(), value(line, "bytes").to_owned()))
            .collect();
        told.sort();
        told
    };
    assert_eq!(told(&came), told(&went), "{lines:#?}");
    assert!(came.iter().any(|line| value(line, "bytes") == (40 * MIB).to_string()), "{lines:#?}");
    let trimmed: usize =
        events(&lines, "trim").iter().map(|line| value(line, "released").parse::<usize>().unwrap()).sum();
    let all: usize = came.iter().map(|line| value(line, "bytes").parse::<usize>().unwrap()).sum();
    assert_eq!(trimmed, all);
}

#[test]
fn a_level_leaves_out_what_is_less_urgent() {
    let count = |level| run("refusal", Some(level)).1.len();
    let [error, warn, info, debug] = ["error", "warn", "info", "debug"].map(count);
    assert!(error == 0 && 0 < warn && warn < info && info < debug, "{error} {warn} {info} {debug}");
}

#[test]
fn a_refusal_is_said_with_its_reason_and_what_was_given_back_before() {
    let (_, lines) = run("refusal", Some("info"));
    let refused = events(&lines, "refused");
    assert_eq!(refused.len(), 1, "{lines:#?}");
    assert_eq!((value(refused[0], "reason"), value(refused[0], "bytes")), ("Budget:", "62914560"));
    let released = events(&lines, "reclaim").into_iter().map(|line| value(line, "released"));
    assert!(released.clone().any(|bytes| bytes == (40 * MIB).to_string()), "{lines:#?}");
}

#[test]
fn a_warm_loop_says_nothing() {
    let (_, lines) = run("hot", Some("debug"));
    let marks: Vec<_> =
        lines.iter().enumerate().filter(|(_, line)| line.ends_with(" mark")).map(|(at, _)| at).collect();
    assert_eq!(marks.len(), 2);
    assert_eq!(marks[1], marks[0] + 1, "{:#?}", &lines[marks[0]..=marks[1]]);
}

#[test]
fn a_value_that_means_nothing_is_said_once() {
    let (_, lines) = run("blocks", Some("loud"));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("UNIMALLOC_LOG is not understood: use error"), "{lines:#?}");
}

#[test]
fn a_line_takes_no_memory() {
    run("allocations", Some("debug"));
}

/// Lets the process have no more address space, and takes what there is.
fn no_memory() {
    free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(MIB, 256)).unwrap();
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').next().unwrap().parse().unwrap();
    let limit = (pages * 4096 + 100 * MIB) as libc::rlim_t;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: the structure is whole, and read before the call returns.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
    assert_eq!(set, 0);
    let mut live = [std::ptr::null_mut(); 100];
    for block in &mut live {
        *block = thread_alloc::<StandardPolicy, B>(10 * MIB, 256);
    }
    assert_eq!(last_error(), Some(AllocError::OutOfMemory));
    for block in live {
        free::<StandardPolicy, B>(block).unwrap();
    }
}

#[test]
fn a_process_without_memory_says_so_and_goes_on() {
    let (_, lines) = run("memory", Some("debug"));
    let refused = events(&lines, "refused");
    assert!(
        refused.len() > 50 && refused.iter().all(|line| value(line, "reason") == "OutOfMemory:"),
        "{refused:#?}"
    );
}

/// A child that is forked while another thread says line after line can say its own.
fn fork() {
    alloc::<StandardPolicy, B>(MIB, 256);
    std::thread::spawn(|| loop {
        line(Level::Debug, format_args!("busy"));
        free::<StandardPolicy, B>(alloc::<StandardPolicy, B>(20 * MIB, 256)).unwrap();
        trim::<B>(0);
    });
    for _ in 0..50 {
        // SAFETY: the child makes calls that are safe after a fork (the claim that is tested), and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            line(Level::Debug, format_args!("child"));
            let refused = thread_alloc::<StandardPolicy, B>(100 * MIB, 256).is_null();
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut status = -1;
        // SAFETY: a child of this process, and one integer to write to.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
            assert!(Instant::now() < deadline, "the child hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(status, 0);
    }
    // SAFETY: as above; the other thread is in the middle of something.
    unsafe { libc::_exit(0) };
}

#[test]
fn the_child_of_a_fork_can_say_something_whatever_other_threads_were_saying() {
    let (_, lines) = run("fork", Some("debug"));
    assert_eq!(lines.iter().filter(|line| line.ends_with(" child")).count(), 50);
    let whole = |line: &String| line.split(' ').count() >= 5;
    assert!(lines.iter().all(whole), "a line was torn");
}
