//! Reads file bytes past the page cache: for callers that store the bytes elsewhere, so that other cached files stay.
//!
//! The code does not ask whether the bytes are cached already. `mincore` tells the truth only to a file's owner. A read
//! with `RWF_NOWAIT` makes the kernel start to read ahead, up to 8 MiB for one byte.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::map::os;
use super::{MapError, MappedFile};

/// Alignment of direct reads in file and memory, at both ends: a page. No disk has larger blocks.
pub const BLOCK_BYTES: usize = 4096;

impl MappedFile {
    /// Reads `range` past the page cache into `out`. `out` must be aligned to [`BLOCK_BYTES`], with room for a further
    /// block before and behind. Returns the index of the first byte in `out`. `None` where the file system has no
    /// direct reads or `out` does not fit; nothing was read then.
    ///
    /// # Errors
    /// As [`MappedFile::read_at`].
    pub fn read_past_cache(&self, range: &Range<u64>, out: &mut [u8]) -> Result<Option<usize>, MapError> {
        if range.end > self.len() || range.start > range.end {
            return Err(MapError::OutOfRange { start: range.start, end: range.end, len: self.len() });
        }
        let block = BLOCK_BYTES as u64;
        let begin = range.start / block * block;
        let (before, need) = ((range.start - begin) as usize, (range.end - begin) as usize);
        let whole = need.next_multiple_of(BLOCK_BYTES);
        let aligned = out.as_ptr().addr().is_multiple_of(BLOCK_BYTES);
        let (Some(file), Some(out)) = (self.direct(), out.get_mut(..whole).filter(|_| aligned)) else {
            return Ok(None);
        };
        let mut read = 0;
        while read < need {
            match rustix::io::pread(file, out.get_mut(read..).unwrap_or_default(), begin + read as u64) {
                Ok(0) => return Err(MapError::Poisoned),
                // Only the file's last block may be short.
                Ok(count) if read + count >= need || count.is_multiple_of(BLOCK_BYTES) => read += count,
                Ok(_) => return Err(MapError::Poisoned),
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::OPNOTSUPP) if read == 0 => return Ok(None),
                Err(error) => return Err(os("pread")(error)),
            }
        }
        Ok(Some(before))
    }

    /// The same file, opened for direct reads at the first call. It has its own file description: that of a client that
    /// passed the file stays unchanged.
    fn direct(&self) -> Option<&File> {
        let open = || {
            let path = format!("/proc/self/fd/{}", self.file().as_raw_fd());
            let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOCTTY;
            rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
        };
        self.direct_file().get_or_init(open).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    /// A temporary file on disk, beside this test program: the temporary folder may be in memory.
    fn file(bytes: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
        let content: Vec<u8> = (0..bytes).map(|at| (at * 31 + at / 251) as u8).collect();
        let program = std::env::current_exe().unwrap();
        let mut file = tempfile::NamedTempFile::new_in(program.parent().unwrap()).unwrap();
        file.write_all(&content).unwrap();
        file.as_file().sync_all().unwrap();
        (file, content)
    }

    fn map(file: &tempfile::NamedTempFile) -> std::sync::Arc<MappedFile> {
        MappedFile::map(File::open(file.path()).unwrap()).unwrap()
    }

    #[repr(align(4096))]
    struct Aligned([u8; 16 * BLOCK_BYTES]);

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn bytes_read_past_the_cache_are_the_files(start in 0u64..90_000, length in 0u64..50_000) {
            let (file, content) = file(100_001);
            let map = map(&file);
            let range = start..(start + length).min(100_001);
            let mut room = Box::new(Aligned([0xa5; 16 * BLOCK_BYTES]));
            if let Some(at) = map.read_past_cache(&range, &mut room.0).unwrap() {
                let length = (range.end - range.start) as usize;
                prop_assert_eq!(&room.0[at..at + length], &content[range.start as usize..range.end as usize]);
            }
            let unaligned = map.read_past_cache(&range, &mut room.0[1..]).unwrap();
            prop_assert_eq!(unaligned, None);
        }
    }

    #[test]
    fn a_file_cut_short_is_an_error() {
        let (file, _) = file(80_000);
        let map = map(&file);
        file.as_file().set_len(20_000).unwrap();
        let mut room = Box::new(Aligned([0; 16 * BLOCK_BYTES]));
        for range in [10_000..30_000, 40_000..50_000] {
            let read = map.read_past_cache(&range, &mut room.0);
            assert!(matches!(read, Err(MapError::Poisoned) | Ok(None)), "{read:?}");
        }
        let read = map.read_past_cache(&(79_000..80_001), &mut room.0);
        assert!(matches!(read, Err(MapError::OutOfRange { end: 80_001, len: 80_000, .. })), "{read:?}");
    }
}
