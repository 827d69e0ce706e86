//! How much of a mapping is in this process's memory, by the kernel's own count.
//!
//! `mincore` is not asked: for a file that we neither own nor may write it calls every page resident.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

/// Sum of `Rss` in bytes of the parts of `range` in `/proc/self/smaps`: pages mapped here, in the page cache or not.
///
/// The kernel walks page tables for it: about 1 ms per GiB that is mapped in. For reports, not for a step.
pub(super) fn resident_bytes(range: Range<usize>) -> io::Result<u64> {
    sum_rss(BufReader::new(File::open("/proc/self/smaps")?), range)
}

fn sum_rss(smaps: impl BufRead, range: Range<usize>) -> io::Result<u64> {
    let mut total = 0u64;
    let mut inside = false;
    for line in smaps.lines() {
        let line = line?;
        if let Some(vma) = vma(&line) {
            if vma.start >= range.end {
                break; // ascending by address
            }
            inside = vma.start >= range.start && vma.end <= range.end;
        } else if inside && let Some(kib) = line.strip_prefix("Rss:") {
            let kib = kib.trim().trim_end_matches(" kB").parse::<u64>().map_err(io::Error::other)?;
            total = total.saturating_add(kib.saturating_mul(1024));
        }
    }
    Ok(total)
}

/// The addresses of a line like `7f12a000-7f13b000 r--s 00000000 fe:00 1234 /path`.
fn vma(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
10000-20000 r--s 00000000 fe:00 7 /m/a.gguf
Size:                 64 kB
Rss:                  12 kB
Pss:                  12 kB
VmFlags: rd mr me ms sd
20000-30000 r--p 00000000 00:00 0
Rss:                   4 kB
40000-50000 r--s 00000000 fe:00 8 /m/b.gguf
Rss:                  64 kB
";

    #[test]
    fn rss_is_summed_over_the_parts_of_one_mapping() {
        let sum = |range| sum_rss(SMAPS.as_bytes(), range).unwrap();
        assert_eq!(sum(0x10000..0x20000), 12 << 10);
        assert_eq!(sum(0x10000..0x30000), 16 << 10, "file pages and the zero pages put over a lost rest");
        assert_eq!(sum(0x40000..0x50000), 64 << 10);
        assert_eq!(sum(0x60000..0x70000), 0);
    }
}
