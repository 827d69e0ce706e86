//! Resident bytes of mappings, in this process and in the page cache, as counted by the kernel.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use super::MapError;
use super::map::{MappedFile, os};

/// The kernel's counts for some files' mappings, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPages {
    /// Length of the mappings.
    pub mapped_bytes: u64,
    /// Part of the mappings in this process's memory: `Rss` in `/proc/self/smaps`, whole pages.
    pub resident_bytes: u64,
    /// Locked part of the resident bytes: the `Rss` of the ranges that smaps flags `lo`. (smaps' own `Locked` divides
    /// each page by the number of processes that map it.)
    pub locked_bytes: u64,
}

impl HostPages {
    /// Asks the kernel once for all `files`. The kernel walks page tables: about 1 ms per GiB resident in the whole
    /// process. For reports, not for a step.
    ///
    /// # Errors
    /// [`MapError::Os`].
    pub fn of<'a>(files: impl Iterator<Item = &'a MappedFile>) -> Result<Self, MapError> {
        let (mut ranges, mut mapped_bytes) = (Vec::new(), 0u64);
        for file in files {
            let range = file.addresses();
            ranges.push(range.start..range.end.next_multiple_of(rustix::param::page_size()));
            mapped_bytes = mapped_bytes.saturating_add(file.len());
        }
        ranges.sort_unstable_by_key(|range| range.start);
        let sum = File::open("/proc/self/smaps").and_then(|smaps| sum(BufReader::new(smaps), &ranges));
        let (resident_bytes, locked_bytes) =
            sum.map_err(|source| MapError::Os { what: "reading /proc/self/smaps", source })?;
        Ok(Self { mapped_bytes, resident_bytes, locked_bytes })
    }
}

/// `Rss` in bytes of the given ranges (ascending, disjoint), and of their locked parts.
fn sum(smaps: impl BufRead, ranges: &[Range<usize>]) -> io::Result<(u64, u64)> {
    let last = ranges.last().map_or(0, |range| range.end);
    let (mut resident, mut locked) = (0u64, 0u64);
    // `Rss` of the current smaps entry; 0 for an entry outside the ranges.
    let mut rss = 0;
    let mut inside = false;
    for line in smaps.lines() {
        let line = line?;
        if let Some(vma) = vma(&line) {
            if vma.start >= last {
                break; // ascending by address
            }
            let before = ranges.partition_point(|range| range.start <= vma.start);
            let range = before.checked_sub(1).and_then(|found| ranges.get(found));
            inside = range.is_some_and(|range| vma.end <= range.end);
            rss = 0;
        } else if inside && let Some(kib) = line.strip_prefix("Rss:") {
            let kib = kib.trim().trim_end_matches(" kB").parse::<u64>().map_err(io::Error::other)?;
            rss = kib.saturating_mul(1024);
            resident = resident.saturating_add(rss);
        } else if inside
            && let Some(flags) = line.strip_prefix("VmFlags:")
            && flags.split_whitespace().any(|flag| flag == "lo")
        {
            locked = locked.saturating_add(rss);
        }
    }
    Ok((resident, locked))
}

/// The addresses of a line like `7f12a000-7f13b000 r--s 00000000 fe:00 1234 /path`.
fn vma(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// True where the kernel reports the page cache truthfully: to a file's owner and to callers that may write it. For
/// others, `mincore` reports every page as resident, and `cachestat` refuses.
pub(super) fn may_ask_for_cache(file: &File) -> Result<bool, MapError> {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    use std::os::fd::AsRawFd;
    let stat = rustix::fs::fstat(file).map_err(os("fstat"))?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let may_write = || accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    Ok(stat.st_uid == rustix::process::geteuid().as_raw() || may_write())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
10000-20000 r--s 00000000 fe:00 7 /m/a.gguf
Size:                 64 kB
Rss:                  12 kB
Pss:                  12 kB
VmFlags: rd mr me ms lo sd
20000-30000 r--p 00000000 00:00 0
Rss:                   4 kB
VmFlags: rd mr me
40000-50000 r--s 00000000 fe:00 8 /m/b.gguf
Rss:                  64 kB
VmFlags: rd mr me ms lo lf sd
";

    #[test]
    fn rss_and_locks_are_summed_over_the_parts_of_mappings() {
        let kib = |ranges: &[(usize, usize)]| {
            let ranges: Vec<Range<usize>> = ranges.iter().map(|&(start, end)| start..end).collect();
            let (resident, locked) = sum(SMAPS.as_bytes(), &ranges).unwrap();
            (resident >> 10, locked >> 10)
        };
        assert_eq!(kib(&[(0x10000, 0x20000)]), (12, 12));
        assert_eq!(
            kib(&[(0x10000, 0x30000)]),
            (16, 12),
            "file pages and the zero pages put over a lost rest"
        );
        assert_eq!(kib(&[(0x40000, 0x50000)]), (64, 64));
        assert_eq!(kib(&[(0x10000, 0x20000), (0x40000, 0x50000)]), (76, 76));
        assert_eq!(kib(&[(0x60000, 0x70000)]), (0, 0));
        assert_eq!(kib(&[]), (0, 0));
    }
}
