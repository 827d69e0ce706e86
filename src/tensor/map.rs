//! A mapped model file: opened read-only, mapped once, watched for truncation.
//!
//! Guarantees. Mapping reads nothing; pages are loaded on access. The bytes are the file's while
//! [`MappedFile::check_unchanged`] and [`MappedFile::check_poison`] succeed. A process that may write the file can
//! change the bytes under a reader at any time. So no reader may base memory safety on them, and each request calls
//! both checks again. A truncated file or a failing disk gives zeros and a poison flag, not a dead process (`guard`). A
//! file that is unlinked or replaced by rename stays alive in the mapping.
//!
//! The mapping uses the kernel's default read-ahead. Measured over a 491 MB file outside the page cache (virtual disk,
//! read-ahead set to 8 MiB), touching one byte, then every page in order:
//!
//! | advice | one byte | read for it | every page |
//! |---|---|---|---|
//! | none | 5.8 ms | 5.5 MB | 0.8-1.7 GB/s |
//! | `MADV_SEQUENTIAL` | 2.5 ms | 1.3 MB | 3.7 GB/s |
//! | `MADV_RANDOM` | 0.1 ms | 4 KiB | 0.08 GB/s, and 5 times slower when cached |
//!
//! Weights are read whole, layer after layer, so `MADV_RANDOM` is 10 to 40 times slower. `MADV_SEQUENTIAL` reads
//! faster, but the kernel then drops these pages first under memory pressure. That is wrong for weights that every
//! token needs.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FileType, OFlags};

use super::guard::Watched;

/// Identity of a file's content: device, inode, size and both times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Last change of the inode, nanoseconds since the epoch.
    pub ctime_ns: i128,
}

/// Why a file could not be mapped or read.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A byte range outside the file.
    #[error(
        "bytes {start}..{end} lie outside the file of {len} bytes, or do not have the size of their type and shape"
    )]
    OutOfRange {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The file's length.
        len: u64,
    },
    /// The file was truncated, or its disk failed, while it was mapped.
    #[error(
        "the model file lost bytes while mapped (truncated, or a disk error): load it again once the file is whole"
    )]
    Poisoned,
    /// The file is not a regular file opened for reading only.
    #[error("{kind} cannot be a model file: pass a regular file opened for reading only")]
    NotRegular {
        /// Kind of file found.
        kind: &'static str,
    },
    /// The file has 0 bytes.
    #[error("the file is empty")]
    Empty,
    /// More mapped files than the guard can watch.
    #[error("{limit} model files are mapped already: unload one first")]
    TooMany {
        /// Most mappings at once.
        limit: usize,
    },
    /// The file's content changed after it was mapped.
    #[error("the model file changed on disk after it was mapped: load it again")]
    Changed,
    /// The operating system refused an operation.
    #[error("{what} failed: {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
}

impl MapError {
    /// True when resources were short and the file itself is sound: see [`is_shortage`].
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Os { source, .. } if is_shortage(source))
    }
}

/// A read-only mapping of one file. Shared by reference ([`Arc`]), never cloned.
#[derive(Debug)]
pub struct MappedFile {
    /// Dropped first: fields drop in order, and this entry must go before the mapping.
    watched: Watched,
    map: Mapping,
    file: File,
    /// File for reads past the page cache, opened at first use; `None` inside where these are not supported.
    direct: OnceLock<Option<File>>,
    identity: FileIdentity,
    /// Number of the file's names when it was mapped.
    links: u64,
}

/// A mapping that goes in pieces. While the kernel unmaps a range, no thread of the process gets other memory from it. 60 GB that
/// were read took a second, and no request went on.
#[derive(Debug)]
struct Mapping(Option<memmap2::Mmap>);

/// Bytes that are unmapped at once: some milliseconds.
const PIECE_BYTES: usize = 64 << 20;
/// A thread of its own unmaps as many bytes.
const UNMAPPED_ASIDE_BYTES: usize = 1 << 30;

impl std::ops::Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some(map) = self.0.take() else { return };
        if map.len() < UNMAPPED_ASIDE_BYTES {
            return unmap(&map);
        }
        // Without a thread the mapping goes at once, as the spawning drops it.
        let thread = std::thread::Builder::new().name("unmap".into());
        if let Err(error) = thread.spawn(move || unmap(&map)) {
            tracing::debug!(%error, "a mapping goes at once");
        }
    }
}

/// Lets go of the pages of a mapping, piece by piece, before it is dropped.
#[allow(unsafe_code)]
fn unmap(map: &memmap2::Mmap) {
    let start = map.as_ptr() as usize;
    for from in (0..map.len()).step_by(PIECE_BYTES) {
        let bytes = PIECE_BYTES.min(map.len() - from);
        // SAFETY: the range lies in the mapping, whose only owner is the caller, and begins at a page. Pages of a file come back
        // when they are read again.
        let gone = unsafe {
            rustix::mm::madvise((start + from) as *mut _, bytes, rustix::mm::Advice::LinuxDontNeed)
        };
        if gone.is_err() {
            return; // a locked range, which goes with the mapping
        }
    }
}

impl MappedFile {
    /// Identifies `file` by `fstat` and `fcntl` alone. Reads nothing, so a pipe or a device is refused without
    /// blocking.
    ///
    /// # Errors
    /// [`MapError::NotRegular`], [`MapError::Empty`], [`MapError::Os`].
    pub fn inspect(file: &File) -> Result<FileIdentity, MapError> {
        let flags = rustix::fs::fcntl_getfl(file).map_err(os("fcntl"))?;
        if flags.contains(OFlags::PATH) {
            return Err(MapError::NotRegular { kind: "a path descriptor (O_PATH)" });
        }
        if flags & OFlags::ACCMODE != OFlags::RDONLY {
            return Err(MapError::NotRegular { kind: "a file opened for writing" });
        }
        // Its reads would need aligned memory, and fail otherwise.
        if flags.contains(OFlags::DIRECT) {
            return Err(MapError::NotRegular { kind: "a file opened with O_DIRECT" });
        }
        let stat = rustix::fs::fstat(file).map_err(os("fstat"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(MapError::NotRegular { kind: "a directory" }),
            FileType::Fifo => return Err(MapError::NotRegular { kind: "a pipe" }),
            FileType::Socket => return Err(MapError::NotRegular { kind: "a socket" }),
            FileType::CharacterDevice | FileType::BlockDevice => {
                return Err(MapError::NotRegular { kind: "a device" });
            }
            _ => return Err(MapError::NotRegular { kind: "this kind of file" }),
        }
        let identity = FileIdentity::of(&stat);
        if identity.size == 0 {
            return Err(MapError::Empty);
        }
        Ok(identity)
    }

    /// Maps the whole of `file`, reading nothing.
    ///
    /// # Errors
    /// As [`Self::inspect`], and [`MapError::TooMany`].
    #[allow(unsafe_code)]
    pub fn map(file: File) -> Result<Arc<Self>, MapError> {
        let identity = Self::inspect(&file)?;
        let mmap = |source| MapError::Os { what: "mmap", source };
        let len = usize::try_from(identity.size).map_err(|e| mmap(std::io::Error::other(e)))?;
        // SAFETY: the caveat of file mappings is that another process changes or shortens the file. Changed bytes:
        // every reader treats them as arbitrary numbers (module documentation). Lost bytes: the guard below turns the
        // SIGBUS into zeros. This process never writes: the descriptor is read-only and the map is too.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(&file) }.map_err(mmap)?;
        let start = map.as_ptr() as usize;
        // SAFETY: the range is the mapping made above, which starts at a page. It is read only through `bytes`, whose
        // references borrow the MappedFile. So they end before `watched` is dropped, which is before `map` is.
        let watched = unsafe { Watched::new(start..start.saturating_add(len)) }?;
        let links = names(&rustix::fs::fstat(&file).map_err(os("fstat"))?);
        let map = Mapping(Some(map));
        Ok(Arc::new(Self { watched, map, file, direct: OnceLock::new(), identity, links }))
    }

    /// Length in bytes, fixed at mapping time.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// True for an empty file.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The identity the file had when it was mapped.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The open file, for another process to map.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The bytes of `range`, in place.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`].
    pub fn bytes(&self, range: Range<u64>) -> Result<&[u8], MapError> {
        let err = || MapError::OutOfRange { start: range.start, end: range.end, len: self.len() };
        let start = usize::try_from(range.start).map_err(|_| err())?;
        let end = usize::try_from(range.end).map_err(|_| err())?;
        self.map.get(start..end).ok_or_else(err)
    }

    /// Fills `out` with the bytes from `offset` on, without touching the mapping: a truncated file is an error here,
    /// not a SIGBUS. For bytes sent to a device.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`], [`MapError::Poisoned`] when the file ends before, [`MapError::Os`].
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), MapError> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len());
        let Some(end) = end else {
            let end = offset.saturating_add(out.len() as u64);
            return Err(MapError::OutOfRange { start: offset, end, len: self.len() });
        };
        let mut rest = out;
        while !rest.is_empty() {
            let from = end - rest.len() as u64;
            match rustix::io::pread(&self.file, &mut *rest, from) {
                Ok(0) => return Err(MapError::Poisoned),
                Ok(read) => rest = rest.get_mut(read..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(os("pread")(error)),
            }
        }
        Ok(())
    }

    /// Asks the kernel to start reading these bytes into its page cache, all at once. Reads by several threads look
    /// random to the kernel, and it then reads little ahead. Only a hint; bytes already cached cost a look-up each.
    pub fn will_need(&self, range: &Range<u64>) {
        let length = std::num::NonZeroU64::new(range.end.saturating_sub(range.start));
        if length.is_some() {
            // Only a hint, so a refusal is ignored.
            let _ = rustix::fs::fadvise(&self.file, range.start, length, rustix::fs::Advice::WillNeed);
        }
    }

    /// Fails when the file lost bytes since it was mapped (a SIGBUS was caught). Costs one atomic load.
    ///
    /// # Errors
    /// [`MapError::Poisoned`].
    pub fn check_poison(&self) -> Result<(), MapError> {
        if self.watched.poisoned() { Err(MapError::Poisoned) } else { Ok(()) }
    }

    /// True if the file lost no bytes, and has the identity that it had when it was mapped. Costs one `fstat`.
    pub fn is_as_mapped(&self) -> bool {
        let same = |stat| FileIdentity::of(&stat) == self.identity;
        self.check_poison().is_ok() && rustix::fs::fstat(&self.file).is_ok_and(same)
    }

    /// True while a directory has a name for the file. Costs one `fstat`.
    pub fn has_name(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| names(&stat) > 0)
    }

    /// Addresses of the mapping. The last page may extend past the end.
    pub(super) fn addresses(&self) -> Range<usize> {
        let range = self.map.as_ptr_range();
        range.start as usize..range.end as usize
    }

    /// The file for direct reads, opened at first use.
    pub(super) fn direct_file(&self) -> &OnceLock<Option<File>> {
        &self.direct
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Fails when the mapped file's content changed: its size or modification time. Costs one `fstat`.
    ///
    /// The inode's change time does not count: a new or removed name and other permissions change it too.
    ///
    /// # Errors
    /// [`MapError::Poisoned`] when the file is shorter than before, [`MapError::Changed`], [`MapError::Os`].
    pub fn check_unchanged(&self) -> Result<(), MapError> {
        self.check_against(&self.identity)
    }

    /// As [`check_unchanged`](Self::check_unchanged), against an identity that the file had earlier.
    ///
    /// # Errors
    /// As [`check_unchanged`](Self::check_unchanged).
    pub(crate) fn check_against(&self, earlier: &FileIdentity) -> Result<(), MapError> {
        let look = || Ok(FileIdentity::of(&rustix::fs::fstat(&self.file).map_err(os("fstat"))?));
        let mut now: FileIdentity = look()?;
        // A truncation between the kernel's reads of size and time is seen as a new time: 1 in 1,000 was. Some file
        // systems also set the time before the size. A look after a moment has the size that belongs to the time.
        for _ in 0..2 {
            if now.size == earlier.size && now.mtime_ns != earlier.mtime_ns {
                std::thread::sleep(SIZE_FOLLOWS);
                now = look()?;
            }
        }
        if now.size < earlier.size {
            return Err(MapError::Poisoned);
        }
        let same = (now.size, now.mtime_ns) == (earlier.size, earlier.mtime_ns);
        if same { Ok(()) } else { Err(MapError::Changed) }
    }

    /// As [`check_unchanged`](Self::check_unchanged), and fails when the inode's change time is another: a writer can
    /// set the modification time back, but not that one. A rename or new permissions change it too. A new or removed
    /// name is told from a change: clients may remove a file that they passed.
    ///
    /// # Errors
    /// As [`check_unchanged`](Self::check_unchanged).
    pub fn check_untouched(&self) -> Result<(), MapError> {
        self.check_unchanged()?;
        let stat = rustix::fs::fstat(&self.file).map_err(os("fstat"))?;
        let same = FileIdentity::of(&stat).ctime_ns == self.identity.ctime_ns || names(&stat) != self.links;
        if same { Ok(()) } else { Err(MapError::Changed) }
    }
}

/// The number of a file's names.
#[allow(clippy::useless_conversion)] // the kernel counts in 32 bits on aarch64
fn names(stat: &rustix::fs::Stat) -> u64 {
    stat.st_nlink.into()
}

/// Longest time from a new time to the size that belongs to it.
const SIZE_FOLLOWS: std::time::Duration = std::time::Duration::from_millis(1);

/// True when the operating system lacked descriptors or memory, in this process or system-wide. The request itself is
/// sound and may succeed later.
pub fn is_shortage(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM].into_iter().any(|shortage| errno == Some(shortage))
}

impl FileIdentity {
    fn of(stat: &rustix::fs::Stat) -> Self {
        let ns = |seconds: i128, nanoseconds: i128| seconds * 1_000_000_000 + nanoseconds;
        Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime_ns: ns(stat.st_mtime.into(), stat.st_mtime_nsec.into()),
            ctime_ns: ns(stat.st_ctime.into(), stat.st_ctime_nsec.into()),
        }
    }
}

/// Builds the error of the operation `what`.
pub(super) fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> MapError {
    move |errno| MapError::Os { what, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, Write};
    use std::os::fd::OwnedFd;

    use super::super::HostPages;
    use super::*;

    fn temp(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn open(path: &str, flags: OFlags) -> File {
        File::from(rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty()).unwrap())
    }

    #[track_caller]
    fn refused(file: File, kind: &str) {
        match MappedFile::map(file) {
            Err(MapError::NotRegular { kind: found }) => assert_eq!(found, kind),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bytes_are_read_past_the_mapping_and_a_lost_end_is_an_error() {
        let file = temp(&(0..=255).collect::<Vec<u8>>());
        let mapped = MappedFile::map(File::open(file.path()).unwrap()).unwrap();
        let mut out = [0; 6];
        mapped.read_at(250, &mut out).unwrap();
        assert_eq!(out, [250, 251, 252, 253, 254, 255]);
        assert!(matches!(mapped.read_at(251, &mut out), Err(MapError::OutOfRange { end: 257, .. })));
        assert!(matches!(mapped.read_at(u64::MAX, &mut out), Err(MapError::OutOfRange { .. })));
        file.as_file().set_len(253).unwrap();
        assert!(matches!(mapped.read_at(250, &mut out), Err(MapError::Poisoned)));
    }

    #[test]
    fn only_regular_files_opened_for_reading_are_mapped() {
        let file = temp(b"1234");
        let path = file.path().to_str().unwrap();
        refused(open("/", OFlags::RDONLY), "a directory");
        refused(open("/dev/zero", OFlags::RDONLY), "a device");
        refused(open(path, OFlags::PATH), "a path descriptor (O_PATH)");
        refused(open(path, OFlags::RDWR), "a file opened for writing");
        refused(open(path, OFlags::WRONLY), "a file opened for writing");
        let elsewhere = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        // Some file systems know no such opening.
        if let Ok(direct) = rustix::fs::open(elsewhere.path(), OFlags::DIRECT, rustix::fs::Mode::empty()) {
            refused(File::from(direct), "a file opened with O_DIRECT");
        }
        let (read_end, _write_end) = std::io::pipe().unwrap();
        refused(File::from(OwnedFd::from(read_end)), "a pipe");
        let fifo = tempfile::tempdir().unwrap();
        let fifo = fifo.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        refused(open(fifo.to_str().unwrap(), OFlags::RDONLY | OFlags::NONBLOCK), "a pipe");
        // A socket is open for writing too, so this check refuses it before its kind is checked.
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (socket, _peer) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        refused(File::from(socket), "a file opened for writing");
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        refused(File::from(event), "a file opened for writing");
        // A regular file by its mode, but of length 0, like all of /proc.
        assert!(matches!(MappedFile::map(open("/proc/self/mem", OFlags::RDONLY)), Err(MapError::Empty)));
        assert!(matches!(MappedFile::map(temp(b"").reopen_read_only()), Err(MapError::Empty)));
        assert_eq!(MappedFile::map(open(path, OFlags::RDONLY)).unwrap().bytes(1..3).unwrap(), b"23");
    }

    #[test]
    fn an_earlier_identity_tells_a_cut_from_a_change() {
        let file = temp(b"12345678");
        let mapped = MappedFile::map(File::open(file.path()).unwrap()).unwrap();
        let now = mapped.identity();
        assert!(mapped.check_against(&now).is_ok());
        let larger = FileIdentity { size: now.size + 1, ..now };
        assert!(matches!(mapped.check_against(&larger), Err(MapError::Poisoned)));
        let older = FileIdentity { mtime_ns: now.mtime_ns - 1, ..now };
        assert!(matches!(mapped.check_against(&older), Err(MapError::Changed)));
        let smaller = FileIdentity { size: now.size - 1, ..now };
        assert!(matches!(mapped.check_against(&smaller), Err(MapError::Changed)));
    }

    #[test]
    fn a_shortage_is_told_from_a_refusal() {
        use rustix::io::Errno;
        for (errno, shortage) in
            [(Errno::MFILE, true), (Errno::NFILE, true), (Errno::NOMEM, true), (Errno::ACCESS, false)]
        {
            assert_eq!(is_shortage(&errno.into()), shortage, "{errno}");
        }
        assert!(!is_shortage(&Error::other("of another kind")));
    }

    trait ReopenReadOnly {
        fn reopen_read_only(&self) -> File;
    }

    impl ReopenReadOnly for tempfile::NamedTempFile {
        fn reopen_read_only(&self) -> File {
            File::open(self.path()).unwrap()
        }
    }

    #[test]
    fn ranges_outside_the_file_are_refused_with_their_numbers() {
        let file = temp(&[7; 5000]);
        let mapped = MappedFile::map(file.reopen_read_only()).unwrap();
        assert_eq!((mapped.len(), mapped.is_empty()), (5000, false));
        assert_eq!(mapped.bytes(4999..5000).unwrap(), [7]);
        assert!(mapped.bytes(5000..5000).unwrap().is_empty());
        for range in [4999..5001, 5001..5001, u64::MAX - 1..u64::MAX, Range { start: 3, end: 2 }] {
            match mapped.bytes(range.clone()) {
                Err(MapError::OutOfRange { start, end, len }) => {
                    assert_eq!((start..end, len), (range, 5000));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_write_to_the_file_is_seen_by_check_unchanged() {
        let mut file = temp(&[7; 100]);
        let mapped = MappedFile::map(file.reopen_read_only()).unwrap();
        mapped.check_unchanged().unwrap();
        file.write_all(b"more").unwrap();
        assert!(matches!(mapped.check_unchanged(), Err(MapError::Changed)));

        // Changed in place with the same size: only the time shows it. Set by hand, because two writes can fall into
        // one tick of the kernel's clock.
        let file = temp(&[7; 100]);
        let mapped = MappedFile::map(file.reopen_read_only()).unwrap();
        file.as_file().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(matches!(mapped.check_unchanged(), Err(MapError::Changed)));
        assert_ne!(mapped.identity(), MappedFile::inspect(&file.reopen_read_only()).unwrap());
    }

    #[test]
    fn a_replaced_or_unlinked_file_lives_on_in_its_mapping() {
        let file = temp(b"old");
        let path = file.path().to_owned();
        let mapped = MappedFile::map(file.reopen_read_only()).unwrap();
        let new = temp(b"new");
        std::fs::rename(new.path(), &path).unwrap();
        assert_eq!(mapped.bytes(0..3).unwrap(), b"old");
        mapped.check_poison().unwrap();
        // The rename removed the old inode's last name and so changed its ctime, but not its content.
        mapped.check_unchanged().unwrap();
        let renamed = MappedFile::inspect(&File::open(&path).unwrap()).unwrap();
        assert_ne!(mapped.identity(), renamed, "the name leads to another file now");
    }

    #[test]
    fn mapping_makes_no_page_resident_and_reading_does() {
        let file = temp(&vec![1; 1 << 20]);
        let mapped = MappedFile::map(file.reopen_read_only()).unwrap();
        assert_eq!(HostPages::of(std::iter::once(&*mapped)).unwrap().resident_bytes, 0);
        assert_eq!(
            mapped.bytes(0..mapped.len()).unwrap().iter().map(|&b| u64::from(b)).sum::<u64>(),
            1 << 20
        );
        assert_eq!(HostPages::of(std::iter::once(&*mapped)).unwrap().resident_bytes, 1 << 20);
    }
}
