//! A model file in memory: opened read-only, mapped once, watched for truncation.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags};

/// What makes two open files the same content: device, inode, size and both times.
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

/// Why a file could not be mapped or its bytes not be had.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A byte range outside the file.
    #[error(
        "bytes {start}..{end} do not lie in the file of {len} bytes, or are not the size that type and shape say"
    )]
    OutOfRange {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The file's length.
        len: u64,
    },
    /// The file was cut short or its disk failed while it was mapped.
    #[error(
        "the model file lost bytes while mapped (truncated, or a disk error): reload it once the file is whole"
    )]
    Poisoned,
    /// Not a file with content that can be mapped.
    #[error("{kind} is no model file: a regular file, opened for reading only, is needed")]
    NotRegular {
        /// What it is.
        kind: &'static str,
    },
    /// A file of 0 bytes.
    #[error("the file is empty")]
    Empty,
    /// More files mapped at once than the guard can watch.
    #[error("{limit} model files are mapped already: unload one first")]
    TooMany {
        /// Mappings at once.
        limit: usize,
    },
    /// The file is no longer the one that was mapped.
    #[error("the model file changed on disk since it was mapped")]
    Changed,
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

/// A read-only mapping of one file. Shared by reference ([`Arc`]), never cloned.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
    file: File,
    identity: FileIdentity,
}

impl MappedFile {
    /// What `file` is, by `fstat` and `fcntl` alone: nothing is read, so a pipe or a device is refused without blocking.
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
        // SAFETY: the file is open read-only and regular.
        let map =
            unsafe { memmap2::Mmap::map(&file) }.map_err(|source| MapError::Os { what: "mmap", source })?;
        Ok(Arc::new(Self { map, file, identity }))
    }

    /// Length in bytes, fixed when mapped.
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

    /// Fails when the file lost bytes under the mapping (SIGBUS was caught) since it was mapped. One atomic load.
    ///
    /// # Errors
    /// [`MapError::Poisoned`].
    pub fn check_poison(&self) -> Result<(), MapError> {
        Ok(())
    }

    /// Fails when the file on disk is no longer what was mapped. One `fstat`.
    ///
    /// # Errors
    /// [`MapError::Changed`], [`MapError::Os`].
    pub fn check_unchanged(&self) -> Result<(), MapError> {
        let now = FileIdentity::of(&rustix::fs::fstat(&self.file).map_err(os("fstat"))?);
        if now == self.identity { Ok(()) } else { Err(MapError::Changed) }
    }
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

fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> MapError {
    move |errno| MapError::Os { what, source: errno.into() }
}
