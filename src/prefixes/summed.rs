//! Files with a checksum after what is read at once, which appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Extension of a file that is being written.
pub(super) const PART: &str = "part";

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("it could not be read: {0}")]
    Io(#[from] io::Error),
    #[error("it is not whole: {0}")]
    Damaged(&'static str),
    #[error("it is of version {found}, and this daemon reads version {known}")]
    Version { found: u32, known: u32 },
    #[error("it belongs to another model or user")]
    Other,
}

/// Writes a file that its owner alone may read. It begins with `magic` and `version`, then comes `content`, then the CRC-32
/// of all that (u32). It appears under its name only when it is whole. Returns its bytes.
pub(super) fn write(
    path: &Path,
    magic: &[u8; 8],
    version: u32,
    content: impl FnOnce(&mut Out) -> io::Result<()>,
) -> io::Result<u64> {
    create(path, magic, version, |out| {
        content(out)?;
        out.sum()
    })
}

/// As [`write`], for `content` that has its own checksums.
pub(super) fn create(
    path: &Path,
    magic: &[u8; 8],
    version: u32,
    content: impl FnOnce(&mut Out) -> io::Result<()>,
) -> io::Result<u64> {
    let part = path.with_extension(PART);
    let _ = fs::remove_file(&part); // left by a daemon that was killed
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    let mut out = Out { to: BufWriter::new(file), crc: crc32fast::Hasher::new(), bytes: 0 };
    let all = || {
        out.put(magic)?;
        out.number(version)?;
        content(&mut out)?;
        out.to.flush()?;
        fs::rename(&part, path)
    };
    if let Err(error) = all() {
        let _ = fs::remove_file(&part); // the error says why it is of no use
        return Err(error);
    }
    Ok(out.bytes)
}

/// A file that is being written.
pub(super) struct Out {
    to: BufWriter<File>,
    crc: crc32fast::Hasher,
    bytes: u64,
}

impl Out {
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        self.to.write_all(bytes)
    }

    /// The CRC-32 of all before.
    pub fn sum(&mut self) -> io::Result<()> {
        let crc = self.crc.clone().finalize();
        self.number(crc)
    }

    pub fn number(&mut self, number: u32) -> io::Result<()> {
        self.put(&number.to_le_bytes())
    }

    pub fn wide(&mut self, number: u64) -> io::Result<()> {
        self.put(&number.to_le_bytes())
    }

    /// A number of things that follow.
    pub fn count(&mut self, count: usize) -> io::Result<()> {
        self.number(u32::try_from(count).map_err(|_| io::Error::other("more than a file can have"))?)
    }

    pub fn text(&mut self, text: &str) -> io::Result<()> {
        self.count(text.len())?;
        self.put(text.as_bytes())
    }
}

/// Reads a file whole. Nothing of it is used unless all of it is right.
///
/// # Errors
/// [`FileError`]. A count in the file takes no memory that its length does not justify.
pub(super) fn read<T>(
    path: &Path,
    magic: &[u8; 8],
    version: u32,
    content: impl FnOnce(&mut In) -> Result<T, FileError>,
) -> Result<T, FileError> {
    let mut from = In::open(path, magic, version)?;
    let content = content(&mut from)?;
    from.check()?;
    match from.left {
        0 => Ok(content),
        _ => Err(FileError::Damaged("it is too long")),
    }
}

/// A file that is being read.
pub(super) struct In {
    from: BufReader<File>,
    crc: crc32fast::Hasher,
    /// Bytes of the file that were not read.
    left: u64,
}

impl In {
    /// Opens a file that begins with `magic` and `version`.
    pub fn open(path: &Path, magic: &[u8; 8], version: u32) -> Result<Self, FileError> {
        let file = File::open(path)?;
        let left = file.metadata()?.len();
        let mut from = Self { from: BufReader::new(file), crc: crc32fast::Hasher::new(), left };
        if from.array::<8>()? != *magic {
            return Err(FileError::Damaged("its first bytes are others"));
        }
        match from.number()? {
            found if found == version => Ok(from),
            found => Err(FileError::Version { found, known: version }),
        }
    }

    /// Compares the CRC-32 of all before with the one that is read next.
    pub fn check(&mut self) -> Result<(), FileError> {
        let crc = self.crc.clone().finalize();
        match self.number()? {
            found if found == crc => Ok(()),
            _ => Err(FileError::Damaged("its checksum is another")),
        }
    }

    /// The file, and how many bytes of it were not read.
    pub fn rest(self) -> (File, u64) {
        (self.from.into_inner(), self.left)
    }

    pub fn bytes(&mut self, count: u64) -> Result<Vec<u8>, FileError> {
        self.take(count)?;
        let mut bytes = vec![0; usize::try_from(count).unwrap_or(usize::MAX)]; // at most the file's length
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FileError> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Counts bytes that are read next, before they take memory.
    fn take(&mut self, count: u64) -> Result<(), FileError> {
        self.left = self.left.checked_sub(count).ok_or(FileError::Damaged("it ends early"))?;
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), FileError> {
        self.from.read_exact(bytes)?;
        self.crc.update(bytes);
        Ok(())
    }

    pub fn number(&mut self) -> Result<u32, FileError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn wide(&mut self) -> Result<u64, FileError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A text of at most that many bytes.
    pub fn text(&mut self, bytes_max: usize) -> Result<String, FileError> {
        let bytes = self.number()?;
        if bytes as usize > bytes_max {
            return Err(FileError::Damaged("a text is too long"));
        }
        let bytes = self.bytes(bytes.into())?;
        String::from_utf8(bytes).map_err(|_| FileError::Damaged("a text is not UTF-8"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Each changed byte of a file, and each missing or further one, must be `refused`. Leaves the file too long.
    pub fn assert_every_byte_counts(path: &Path, refused: impl Fn() -> bool) {
        let whole = fs::read(path).unwrap();
        for at in 0..whole.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                fs::write(path, &bytes).unwrap();
                assert!(refused(), "byte {at} ^ {change}");
            }
            fs::write(path, &whole[..at]).unwrap();
            assert!(refused(), "{at} bytes");
        }
        fs::write(path, [&whole[..], &[0]].concat()).unwrap();
        assert!(refused(), "one byte more");
    }
}
