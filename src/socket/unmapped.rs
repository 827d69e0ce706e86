//! Users that have no uid in the daemon's user namespace.
//!
//! The kernel reports one uid for all of them. As one user they would share sessions, prefixes and quotas, and could cancel
//! each other's requests.

/// Uids of a namespace that maps all of them.
const ALL: u64 = u32::MAX as u64;

/// The kernel's own default.
const OVERFLOW_UID: u32 = 65_534;

/// The uid that the kernel reports for those without one here (user_namespaces(7)); `None` where all have one.
pub(super) fn uid() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").ok()?;
    let overflow = || std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok();
    (mapped(&map)? < ALL).then(|| overflow().unwrap_or(OVERFLOW_UID))
}

/// Number of uids that have one here: the sum of the third numbers of all lines.
fn mapped(map: &str) -> Option<u64> {
    map.lines().map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_of_a_namespace_are_counted() {
        assert_eq!(mapped("         0          0 4294967295\n"), Some(ALL));
        assert_eq!(mapped("0 1 1000\n1000 0 1\n1001 1001 64536\n"), Some(65_537));
        assert_eq!(mapped(""), Some(0), "nobody has one yet");
        assert_eq!(mapped("0 0\n"), None);
        assert_eq!(mapped("0 0 many\n"), None);
    }
}
