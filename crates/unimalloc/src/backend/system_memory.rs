//! How much of the machine's memory this process could use: what is free, within the limits of its control groups.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::budget::Seen;

/// A look costs tens of microseconds (a few files of /proc and /sys), so a burst of growth shares one. What the
/// burst itself takes is counted by the budget; only what other processes take meanwhile is missed.
const KEPT_FOR: Duration = Duration::from_millis(10);

/// The host's memory now, not older than 10 ms. `None` where the system does not tell.
pub(crate) fn look() -> Option<Seen> {
    static START: OnceLock<Instant> = OnceLock::new();
    static LOOKED_AT: AtomicU64 = AtomicU64::new(0);
    static AVAILABLE: AtomicU64 = AtomicU64::new(0);
    static TOTAL: AtomicU64 = AtomicU64::new(0);

    // From 1, so that 0 means never.
    let now = START.get_or_init(Instant::now).elapsed().as_micros() as u64 + 1;
    let looked_at = LOOKED_AT.load(Ordering::Acquire);
    if looked_at != 0 && now.saturating_sub(looked_at) < KEPT_FOR.as_micros() as u64 {
        return Some(Seen {
            available: AVAILABLE.load(Ordering::Relaxed),
            total: TOTAL.load(Ordering::Relaxed),
        });
    }
    let seen = read()?;
    AVAILABLE.store(seen.available, Ordering::Relaxed);
    TOTAL.store(seen.total, Ordering::Relaxed);
    LOOKED_AT.store(now, Ordering::Release);
    Some(seen)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
use linux::read;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux {
    use std::path::{Path, PathBuf};

    use super::Seen;

    pub(super) fn read() -> Option<Seen> {
        let (available, total) = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        let mut seen = Seen { available, total };
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        tighten(&mut seen, Path::new("/sys/fs/cgroup"), &groups);
        Some(seen)
    }

    /// Bytes of `MemAvailable` and `MemTotal`.
    fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Some((field("MemAvailable")?, field("MemTotal")?))
    }

    /// Applies every limit from this process's group up to the root, for both versions of control groups.
    /// `groups` is the text of /proc/self/cgroup.
    fn tighten(seen: &mut Seen, root: &Path, groups: &str) {
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            if controllers.is_empty() {
                walk_up(root, path, |group| {
                    limit(seen, group, "memory.max", "memory.current", "inactive_file");
                });
            } else if controllers.split(',').any(|name| name == "memory") {
                walk_up(&root.join("memory"), path, |group| {
                    limit(
                        seen,
                        group,
                        "memory.limit_in_bytes",
                        "memory.usage_in_bytes",
                        "total_inactive_file",
                    );
                });
            }
        }
    }

    /// Visits the group's directory and its parents up to `root`. Inside a container the path may name directories
    /// that only the host sees; the root is then the container's own group and is visited all the same.
    fn walk_up(root: &Path, path: &str, mut visit: impl FnMut(&Path)) {
        let relative = Path::new(path.trim_start_matches('/'));
        if relative.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            // "/../other": the group lies outside what is mounted here.
            visit(root);
            return;
        }
        let mut group: PathBuf = root.join(relative);
        loop {
            visit(&group);
            if group == root || !group.pop() {
                break;
            }
        }
    }

    /// Page cache that was not used lately (`inactive`) is charged to the group but goes when memory is needed.
    fn limit(seen: &mut Seen, group: &Path, max: &str, used: &str, inactive: &str) {
        let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
        // "max" and version 1's number near 2^63 mean none.
        let Some(max) = read(max).and_then(|text| text.trim().parse::<u64>().ok()) else { return };
        if max >= 1 << 62 {
            return;
        }
        let used = read(used).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
        let cache = read("memory.stat")
            .and_then(|text| {
                text.lines()
                    .find_map(|line| line.strip_prefix(inactive)?.strip_prefix(' ')?.trim().parse().ok())
            })
            .unwrap_or(0);
        seen.total = seen.total.min(max);
        seen.available = seen.available.min(max.saturating_sub(used.saturating_sub(cache)));
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        const MIB: u64 = 1 << 20;

        #[test]
        fn meminfo() {
            let text = "MemTotal:       24689764 kB\nMemFree:  1 kB\nMemAvailable:   12000000 kB\n";
            assert_eq!(parse_meminfo(text), Some((12_000_000 * 1024, 24_689_764 * 1024)));
            assert_eq!(parse_meminfo("MemTotal: 5 kB\n"), None);
        }

        #[test]
        fn both_versions_of_control_groups_and_their_parents_limit() {
            let root = std::env::temp_dir().join(format!("unimalloc-cgroup-{}", std::process::id()));
            let write = |path: &str, text: &str| {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            };
            let full = Seen { available: 900 * MIB, total: 1000 * MIB };
            let seen = |groups: &str| {
                let mut seen = full;
                tighten(&mut seen, &root, groups);
                seen
            };
            write("a/b/memory.max", "max\n");
            write("a/memory.max", &format!("{}\n", 200 * MIB));
            write("a/memory.current", &format!("{}\n", 150 * MIB));
            write("a/memory.stat", &format!("anon 5\ninactive_file {}\n", 30 * MIB));
            write("memory/c/memory.limit_in_bytes", &format!("{}\n", 50 * MIB));
            write("memory/c/memory.usage_in_bytes", &format!("{}\n", 60 * MIB));
            write("memory/memory.limit_in_bytes", "9223372036854771712\n");

            assert_eq!(
                seen("0::/a/b\n"),
                Seen { available: 80 * MIB, total: 200 * MIB },
                "the parent's limit"
            );
            assert_eq!(seen("0::/elsewhere\n"), full);
            assert_eq!(seen("0::/../outside\n"), full);
            assert_eq!(seen("4:cpu,cpuacct:/c\n3:memory:/c\n"), Seen { available: 0, total: 50 * MIB });
            assert_eq!(seen("4:cpu,cpuacct:/c\n"), full, "another controller");
            assert_eq!(seen("nonsense\n"), full);
            std::fs::remove_dir_all(&root).unwrap();
        }
    }
}

#[cfg(windows)]
fn read() -> Option<Seen> {
    use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};

    // SAFETY: a structure of integers, for which all zeros is a value.
    let mut status: MEMORYSTATUSEX = unsafe { std::mem::zeroed() };
    status.dwLength = std::mem::size_of::<MEMORYSTATUSEX>() as u32;
    // SAFETY: the structure is ours and says its own length.
    if unsafe { GlobalMemoryStatusEx(&mut status) } == 0 {
        return None;
    }
    // Memory must be backed by commit charge as well as by RAM.
    Some(Seen { available: status.ullAvailPhys.min(status.ullAvailPageFile), total: status.ullTotalPhys })
}

#[cfg(not(any(windows, target_os = "linux", target_os = "android")))]
fn read() -> Option<Seen> {
    // These systems do not say what is available in a portable way; all of it is then the base, and what this
    // process holds is counted against that.
    // SAFETY: sysconf reads a constant of the system.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let total = u64::try_from(pages).ok()?.checked_mul(u64::try_from(page).ok()?)?;
    Some(Seen { available: total, total })
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_has_memory() {
        let seen = super::look().expect("this system tells its memory");
        assert!(seen.available > 1 << 20 && seen.available <= seen.total, "{seen:?}");
    }
}
