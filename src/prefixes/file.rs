//! Files of kept prefixes: one holds those of one user and model.
//!
//! Little-endian: `RFPREFIX`, version (u32), digest of the model (32 bytes), user (u64, all ones: all users). Then length of
//! the layout's name (u32), the name, bytes of a page (u64), number of pages (u32). Per page: index of the page that it continues
//! (u32, all ones: none), number of tokens (u32), the tokens (u32 each), the page. Then the CRC-32 of all before (u32).

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::{PrefixPage, Prefixes};

const MAGIC: &[u8; 8] = b"RFPREFIX";
/// Changes with the format.
const VERSION: u32 = 1;
/// No page, or no user.
const NONE: u32 = u32::MAX;
/// Extension of a file that is being written.
pub(super) const PART: &str = "part";
const LAYOUT_BYTES_MAX: usize = 64;

/// Most bytes of a file without its pages.
pub(super) const HEADER_BYTES_MAX: u64 = 128 + LAYOUT_BYTES_MAX as u64;
/// Most bytes of a page in a file, beside its content.
pub(super) const PAGE_BYTES_BESIDE: u64 = 8 + 4 * KV_PAGE_TOKENS as u64;

/// Digest of a model's files, and of all else that its keys and values depend on.
pub(super) type Digest = [u8; 32];

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("it could not be read: {0}")]
    Io(#[from] io::Error),
    #[error("it is not whole: {0}")]
    Damaged(&'static str),
    #[error("it is of version {0}, and this daemon reads version {VERSION}")]
    Version(u32),
    #[error("it belongs to another model or user")]
    Other,
}

/// Writes a file that its owner alone may read. It appears under its name only when it is whole.
pub(super) fn write(path: &Path, digest: &Digest, prefixes: &Prefixes) -> io::Result<u64> {
    let part = path.with_extension(PART);
    let _ = fs::remove_file(&part); // left by a daemon that was killed
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    let mut out = Out { to: BufWriter::new(file), crc: crc32fast::Hasher::new(), bytes: 0 };
    let written = content(&mut out, digest, prefixes).and_then(|()| {
        let crc = out.crc.clone().finalize();
        out.put(&crc.to_le_bytes())?;
        out.to.flush()?;
        fs::rename(&part, path)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&part); // the error says why it is of no use
        return Err(error);
    }
    Ok(out.bytes)
}

fn content(out: &mut Out, digest: &Digest, prefixes: &Prefixes) -> io::Result<()> {
    let count = |n: usize| u32::try_from(n).map_err(|_| io::Error::other("more pages than a file can have"));
    let page_bytes = prefixes.pages.first().map_or(0, |page| page.bytes.len());
    out.put(MAGIC)?;
    out.put(&VERSION.to_le_bytes())?;
    out.put(digest)?;
    out.put(&user(prefixes.uid).to_le_bytes())?;
    out.put(&count(prefixes.layout.len())?.to_le_bytes())?;
    out.put(prefixes.layout.as_bytes())?;
    out.put(&(page_bytes as u64).to_le_bytes())?;
    out.put(&count(prefixes.pages.len())?.to_le_bytes())?;
    for page in &prefixes.pages {
        out.put(&page.after.unwrap_or(NONE).to_le_bytes())?;
        out.put(&count(page.tokens.len())?.to_le_bytes())?;
        page.tokens.iter().try_for_each(|token| out.put(&token.to_le_bytes()))?;
        out.put(&page.bytes)?;
    }
    Ok(())
}

fn user(uid: Option<u32>) -> u64 {
    uid.map_or(u64::MAX, u64::from)
}

struct Out {
    to: BufWriter<File>,
    crc: crc32fast::Hasher,
    bytes: u64,
}

impl Out {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        self.to.write_all(bytes)
    }
}

/// Reads a file whole. Nothing of it is used unless all of it is right.
///
/// # Errors
/// [`FileError`]. A count in the file takes no memory that its length does not justify.
pub(super) fn read(path: &Path, digest: &Digest, uid: Option<u32>) -> Result<Prefixes, FileError> {
    let file = File::open(path)?;
    let left = file.metadata()?.len();
    let mut from = In { from: BufReader::new(file), crc: crc32fast::Hasher::new(), left };
    if from.array::<8>()? != *MAGIC {
        return Err(FileError::Damaged("its first bytes are others"));
    }
    let version = from.number()?;
    if version != VERSION {
        return Err(FileError::Version(version));
    }
    if from.array::<32>()? != *digest || u64::from_le_bytes(from.array()?) != user(uid) {
        return Err(FileError::Other);
    }
    let name = from.number()? as usize;
    if name > LAYOUT_BYTES_MAX {
        return Err(FileError::Damaged("the name of its layout is too long"));
    }
    let layout = String::from_utf8(from.bytes(name as u64)?)
        .map_err(|_| FileError::Damaged("the name of its layout is not text"))?;
    let page_bytes = u64::from_le_bytes(from.array()?);
    let count = from.number()?;
    let mut pages = Vec::new();
    for index in 0..count {
        let after = Some(from.number()?).filter(|after| *after != NONE);
        let tokens = from.number()? as usize;
        if after.is_some_and(|after| after >= index) || !(1..=KV_PAGE_TOKENS).contains(&tokens) {
            return Err(FileError::Damaged("its pages are not in order"));
        }
        let tokens = (0..tokens).map(|_| from.number()).collect::<Result<_, _>>()?;
        pages.push(PrefixPage { after, tokens, bytes: from.bytes(page_bytes)? });
    }
    let crc = from.crc.clone().finalize();
    if from.number()? != crc || from.left != 0 {
        return Err(FileError::Damaged("its checksum is another"));
    }
    Ok(Prefixes { uid, layout, pages })
}

struct In {
    from: BufReader<File>,
    crc: crc32fast::Hasher,
    /// Bytes of the file that were not read.
    left: u64,
}

impl In {
    fn bytes(&mut self, count: u64) -> Result<Vec<u8>, FileError> {
        let cut = FileError::Damaged("it ends early");
        self.left = self.left.checked_sub(count).ok_or(cut)?;
        let mut bytes = vec![0; usize::try_from(count).unwrap_or(usize::MAX)]; // at most the file's length
        self.from.read_exact(&mut bytes)?;
        self.crc.update(&bytes);
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FileError> {
        let bytes = self.bytes(N as u64)?;
        bytes.try_into().map_err(|_| FileError::Damaged("it ends early"))
    }

    fn number(&mut self) -> Result<u32, FileError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes() -> Prefixes {
        let page = |after, tokens: u32, byte| PrefixPage {
            after,
            tokens: (byte..byte + tokens).collect(),
            bytes: vec![byte as u8; 24],
        };
        let pages = vec![page(None, 32, 1), page(Some(0), 32, 2), page(Some(1), 5, 3), page(Some(0), 1, 4)];
        Prefixes { uid: Some(1000), layout: "cpu f16".to_owned(), pages }
    }

    #[test]
    fn a_file_is_read_as_it_was_written_and_by_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.prefixes");
        let bytes = write(&path, &[7; 32], &prefixes()).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (bytes, 0o600));
        assert_eq!(read(&path, &[7; 32], Some(1000)).unwrap(), prefixes());
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no part is left");
        assert!(matches!(read(&path, &[8; 32], Some(1000)), Err(FileError::Other)));
        assert!(matches!(read(&path, &[7; 32], Some(1001)), Err(FileError::Other)));
        assert!(matches!(read(&path, &[7; 32], None), Err(FileError::Other)));
    }

    #[test]
    fn with_any_byte_changed_or_missing_nothing_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.prefixes");
        write(&path, &[7; 32], &prefixes()).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                fs::write(&path, &bytes).unwrap();
                assert!(read(&path, &[7; 32], Some(1000)).is_err(), "byte {at} ^ {change}");
            }
            fs::write(&path, &whole[..at]).unwrap();
            assert!(read(&path, &[7; 32], Some(1000)).is_err(), "{at} bytes");
        }
        fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
        assert!(read(&path, &[7; 32], Some(1000)).is_err(), "one byte more");
    }
}
