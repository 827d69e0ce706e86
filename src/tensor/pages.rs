//! Controls which pages of a mapping are in memory: read ahead, locked, freed.
//!
//! A mapping does not guarantee memory: the kernel evicts file pages as it likes. Only locking guarantees it, within
//! `RLIMIT_MEMLOCK`. Here a whole file is first marked as locked on fault (`mlock2` with `MLOCK_ONFAULT`). That takes
//! no time, reads nothing, and is granted or refused at once for all of it. The pages are then loaded by the same
//! reading ahead, piece by piece, that an unlocked file may have. No function here raises SIGBUS where a file lost
//! bytes: the kernel refuses instead.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use rustix::io::Errno;
use rustix::mm::{Advice, MlockFlags};

use super::MapError;
use super::map::{MappedFile, os};
use super::resident::may_ask_for_cache;

/// Pages per query to the kernel.
const ASKED_PAGES: usize = 1 << 16;

impl MappedFile {
    /// Locks every page of the file from its load on, including resident ones. Reads nothing.
    ///
    /// # Errors
    /// [`MapError::Os`]: `EPERM` and `ENOMEM` where `RLIMIT_MEMLOCK` does not allow it; nothing is locked then.
    pub fn lock_pages(&self) -> Result<(), MapError> {
        let (start, len) = self.address();
        // SAFETY: the range is this mapping and nothing else; locking changes no byte of it.
        unsafe { rustix::mm::mlock_with(start, len, MlockFlags::ONFAULT) }.map_err(os("mlock2"))
    }

    /// Reverts [`MappedFile::lock_pages`]; the pages stay until the kernel evicts them.
    ///
    /// # Errors
    /// [`MapError::Os`].
    pub fn unlock_pages(&self) -> Result<(), MapError> {
        let (start, len) = self.address();
        // SAFETY: as in `lock_pages`.
        unsafe { rustix::mm::munlock(start, len) }.map_err(os("munlock"))
    }

    /// Loads the bytes of `range` into this process's memory while the kernel reads those of `next`. Blocks for as long
    /// as the disk takes; with pieces of about 64 MiB the caller can stop in between.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`], [`MapError::Poisoned`] where the file lost bytes, [`MapError::Os`].
    pub fn populate(&self, range: Range<u64>, next: Range<u64>) -> Result<(), MapError> {
        // Only advice: if the kernel ignores it, the next call reads.
        let _ = self.advise(next, Advice::WillNeed);
        match self.advise(range.clone(), Advice::LinuxPopulateRead) {
            Ok(()) => Ok(()),
            // Before Linux 5.14.
            Err(Populate::Refused(Errno::INVAL)) => self.touch(range),
            // Past the end of a truncated file, or a disk that fails to read.
            Err(Populate::Refused(Errno::FAULT | Errno::HWPOISON | Errno::IO)) => Err(MapError::Poisoned),
            Err(Populate::Refused(errno)) => Err(os("madvise")(errno)),
            Err(Populate::Range(error)) => Err(error),
        }
    }

    /// Frees every page that is not locked: from this process, and from the page cache where no other process maps it.
    /// The next reader loads it again from disk.
    ///
    /// # Errors
    /// [`MapError::Os`], also for a locked mapping.
    pub fn give_pages_back(&self) -> Result<(), MapError> {
        let (start, len) = self.address();
        // SAFETY: the mapping is the file's, shared and only read: a dropped page is loaded again with the file's
        // bytes. Zero pages that the guard put over lost bytes are loaded again as zeros.
        unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontNeed) }.map_err(os("madvise"))?;
        rustix::fs::fadvise(self.file(), 0, None, rustix::fs::Advice::DontNeed).map_err(os("posix_fadvise"))
    }

    /// Bytes of the file in the page cache; `None` where the kernel does not report truthfully. About 1 ms per GiB.
    ///
    /// # Errors
    /// [`MapError::Os`].
    pub fn cached_bytes(&self) -> Result<Option<u64>, MapError> {
        if !may_ask_for_cache(self.file())? {
            return Ok(None);
        }
        let page = rustix::param::page_size();
        let mut seen = vec![0u8; ASKED_PAGES.min(self.addresses().len().div_ceil(page))];
        let mut cached = 0u64;
        for start in self.addresses().step_by(ASKED_PAGES * page) {
            let len = self.addresses().end.saturating_sub(start).min(ASKED_PAGES * page);
            // SAFETY: `start..start + len` lies in this mapping, `start` at a page, and `seen` has a byte for each page of it.
            if unsafe { libc::mincore(start as *mut c_void, len, seen.as_mut_ptr()) } != 0 {
                return Err(MapError::Os { what: "mincore", source: std::io::Error::last_os_error() });
            }
            let pages = seen.iter().take(len.div_ceil(page)).filter(|byte| **byte & 1 == 1).count();
            cached = cached.saturating_add((pages * page) as u64);
        }
        Ok(Some(cached.min(self.len())))
    }

    fn address(&self) -> (*mut c_void, usize) {
        let range = self.addresses();
        (range.start as *mut c_void, range.len())
    }

    fn advise(&self, range: Range<u64>, advice: Advice) -> Result<(), Populate> {
        let bytes = self.bytes(range).map_err(Populate::Range)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let first = bytes.as_ptr() as usize;
        let page = first & !(rustix::param::page_size() - 1);
        let len = bytes.len() + (first - page);
        // SAFETY: the pages of `bytes`, all of this mapping, which starts at a page; both kinds of advice load pages
        // and change none.
        unsafe { rustix::mm::madvise(page as *mut c_void, len, advice) }.map_err(Populate::Refused)
    }

    /// Reads one byte of each page.
    fn touch(&self, range: Range<u64>) -> Result<(), MapError> {
        for byte in self.bytes(range)?.iter().step_by(rustix::param::page_size()) {
            std::hint::black_box(*byte);
        }
        self.check_poison()
    }
}

/// Why pages were not loaded.
enum Populate {
    Range(MapError),
    Refused(Errno),
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::super::resident::HostPages;
    use super::*;

    const BYTES: u64 = 3 << 20;

    fn file() -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; BYTES as usize + 11]).unwrap();
        file
    }

    #[test]
    fn pages_come_in_pieces_and_go_again() {
        let file = file();
        let mapped = MappedFile::map(File::open(file.path()).unwrap()).unwrap();
        let pages = || HostPages::of([&*mapped].into_iter()).unwrap();
        assert_eq!(pages(), HostPages { mapped_bytes: BYTES + 11, resident_bytes: 0, locked_bytes: 0 });
        let half = BYTES / 2 + 5; // not at a page
        mapped.populate(0..half, half..BYTES + 11).unwrap();
        assert!(pages().resident_bytes >= half);
        mapped.populate(half..BYTES + 11, 0..0).unwrap();
        let all = (BYTES + 11).next_multiple_of(rustix::param::page_size() as u64);
        assert_eq!(pages().resident_bytes, all);
        mapped.give_pages_back().unwrap();
        assert_eq!(pages().resident_bytes, 0);
        assert!(mapped.bytes(0..BYTES).unwrap().iter().all(|byte| *byte == 7), "they come again");
        assert!(matches!(mapped.populate(0..BYTES + 12, 0..0), Err(MapError::OutOfRange { .. })));
        mapped.touch(0..BYTES + 11).unwrap();
        // The test owns the file, so the kernel reports its cached bytes.
        assert_eq!(mapped.cached_bytes().unwrap(), Some(BYTES + 11));
    }

    #[test]
    fn locked_pages_stay_when_told_to_go() {
        let file = file();
        let mapped = MappedFile::map(File::open(file.path()).unwrap()).unwrap();
        let pages = || HostPages::of([&*mapped].into_iter()).unwrap();
        mapped.lock_pages().unwrap();
        mapped.populate(0..BYTES + 11, 0..0).unwrap();
        let all = (BYTES + 11).next_multiple_of(rustix::param::page_size() as u64);
        assert_eq!((pages().resident_bytes, pages().locked_bytes), (all, all));
        assert!(
            matches!(mapped.give_pages_back(), Err(MapError::Os { .. })),
            "locked pages are not given back"
        );
        assert_eq!(pages().locked_bytes, all);
        mapped.unlock_pages().unwrap();
        assert_eq!((pages().resident_bytes, pages().locked_bytes), (all, 0));
        mapped.give_pages_back().unwrap();
        assert_eq!(pages().resident_bytes, 0);
    }

    #[test]
    fn a_file_cut_short_is_an_error_and_no_fault() {
        let file = file();
        let mapped = MappedFile::map(File::open(file.path()).unwrap()).unwrap();
        mapped.lock_pages().unwrap();
        file.as_file().set_len(BYTES / 2).unwrap();
        mapped.populate(0..BYTES / 2, 0..0).unwrap();
        assert!(matches!(mapped.populate(BYTES / 2..BYTES, 0..0), Err(MapError::Poisoned)));
        mapped.check_poison().expect("nobody read there");
    }
}
