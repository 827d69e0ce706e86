//! Memory that is available for copies of files: the machine's, and that of the daemon's control groups.

use std::path::{Path, PathBuf};

/// Bytes that can be had without pushing out what programs use. `None` if the kernel does not report.
pub(super) fn available() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let machine = kib(&read("/proc/meminfo"), "MemAvailable:")?;
    let groups = groups_of(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
    Some(groups.iter().filter_map(left_of).fold(machine, u64::min))
}

fn kib(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group's files, of one of the two versions.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// Keys in `memory.stat` of pages that the kernel can drop at once.
    drops: [&'static str; 2],
}

/// The process's memory groups and all groups above them, because each limits what is below it.
fn groups_of(cgroup: &str, root: &Path) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let path = Path::new(path.trim_start_matches('/'));
        for above in path.ancestors() {
            if controllers.is_empty() {
                let drops = ["inactive_file ", "active_file "];
                groups.push(Group {
                    folder: root.join(above),
                    limit: "memory.max",
                    used: "memory.current",
                    drops,
                });
            } else if controllers.split(',').any(|name| name == "memory") {
                let drops = ["total_inactive_file ", "total_active_file "];
                let (limit, used) = ("memory.limit_in_bytes", "memory.usage_in_bytes");
                groups.push(Group { folder: root.join("memory").join(above), limit, used, drops });
            }
        }
    }
    groups
}

/// Bytes that a group's limit leaves; `None` if it has no limit.
fn left_of(group: &Group) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(group.folder.join(file)).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let (limit, used) = (number(read(group.limit)?)?, number(read(group.used)?)?);
    let stat = read("memory.stat").unwrap_or_default();
    let value = |key| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
    let drops = group.drops.into_iter().filter_map(value).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(drops)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_above_the_process_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "10\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write("a/memory.stat", "anon 600\nfile 100\ninactive_file 60\nactive_file 40\n");
        write("memory/c/memory.limit_in_bytes", "500");
        write("memory/c/memory.usage_in_bytes", "450");
        write("memory/c/memory.stat", "total_inactive_file 30\n");
        let left = |cgroup: &str| -> Vec<u64> {
            groups_of(cgroup, root.path()).iter().filter_map(left_of).collect()
        };
        assert_eq!(left("0::/a/b\n"), [400]);
        assert_eq!(left("5:cpu,memory:/c\n4:cpuset:/c\n0::/\n"), [80]);
        assert_eq!(left("0::/\nbroken\n"), Vec::<u64>::new());
    }

    #[test]
    fn this_machine_tells() {
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(kib("MemFree: 1 kB\nMemAvailable:   24 kB\n", "MemAvailable:"), Some(24 << 10));
        assert_eq!(kib("MemAvailable: many kB\n", "MemAvailable:"), None);
    }
}
