//! Number of compute threads and name of the processor.

use std::collections::HashSet;
use std::path::Path;

/// Physical cores that this process may use: its affinity mask, with hyper-threads counted once, limited by its
/// cgroup's quota.
///
/// Two compute threads on one core share its execution units and gain nothing in these loops.
pub fn available() -> usize {
    // Counts logical processors, by affinity and cgroup quota (v1 and v2).
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    physical().map_or(logical, |cores| cores.min(logical)).max(1)
}

/// Number of distinct cores in the affinity mask; `None` if sysfs does not give the topology.
fn physical() -> Option<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cores = HashSet::new();
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)) {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        cores.insert(std::fs::read_to_string(Path::new(&path)).ok()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// The processor's name from the kernel, or the architecture's name.
pub fn model_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| parse_model_name(&text))
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn parse_model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let name = line.split_once(':')?.1.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_first_processors() {
        let check = |text: &str, expect: Option<&str>| assert_eq!(parse_model_name(text).as_deref(), expect);
        check("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n", Some("AMD EPYC"));
        check("processor\t: 0\nmodel name\t:\n", None);
        check("", None);
    }

    #[test]
    fn no_more_threads_than_the_system_allows() {
        let n = available();
        assert!(n >= 1 && n <= std::thread::available_parallelism().unwrap().get());
    }
}
