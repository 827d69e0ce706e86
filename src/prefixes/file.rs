//! Files of kept prefixes: one holds those of one user and model.
//!
//! Little-endian: `RFPREFIX`, version (u32), digest of the model (32 bytes), user (u64, all ones: all users). Then length of
//! the layout's name (u32), the name, bytes of a page (u64), number of pages (u32). Per page: index of the page that it continues
//! (u32, all ones: none), number of tokens (u32), the tokens (u32 each), the page. Then the CRC-32 of all before (u32).

use std::io;
use std::path::Path;

use super::summed::{self, FileError, In, Out};
use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::{PrefixPage, Prefixes};

const MAGIC: &[u8; 8] = b"RFPREFIX";
/// Changes with the format.
const VERSION: u32 = 1;
/// No page, or no user.
const NONE: u32 = u32::MAX;
const LAYOUT_BYTES_MAX: usize = 64;

/// Most bytes of a file without its pages.
pub(super) const HEADER_BYTES_MAX: u64 = 128 + LAYOUT_BYTES_MAX as u64;
/// Most bytes of a page in a file, beside its content.
pub(super) const PAGE_BYTES_BESIDE: u64 = 8 + 4 * KV_PAGE_TOKENS as u64;

/// Digest of a model's files, and of all else that its keys and values depend on.
pub(super) type Digest = [u8; 32];

/// Writes a file that its owner alone may read; see [`summed::write`].
pub(super) fn write(path: &Path, digest: &Digest, prefixes: &Prefixes) -> io::Result<u64> {
    summed::write(path, MAGIC, VERSION, |out| content(out, digest, prefixes))
}

fn content(out: &mut Out, digest: &Digest, prefixes: &Prefixes) -> io::Result<()> {
    let page_bytes = prefixes.pages.first().map_or(0, |page| page.bytes.len());
    out.put(digest)?;
    out.wide(user(prefixes.uid))?;
    out.text(&prefixes.layout)?;
    out.wide(page_bytes as u64)?;
    out.count(prefixes.pages.len())?;
    for page in &prefixes.pages {
        out.number(page.after.unwrap_or(NONE))?;
        out.count(page.tokens.len())?;
        page.tokens.iter().try_for_each(|token| out.number(*token))?;
        out.put(&page.bytes)?;
    }
    Ok(())
}

fn user(uid: Option<u32>) -> u64 {
    uid.map_or(u64::MAX, u64::from)
}

/// Reads a file whole. Nothing of it is used unless all of it is right.
///
/// # Errors
/// [`FileError`]. A count in the file takes no memory that its length does not justify.
pub(super) fn read(path: &Path, digest: &Digest, uid: Option<u32>) -> Result<Prefixes, FileError> {
    summed::read(path, MAGIC, VERSION, |from| prefixes(from, digest, uid))
}

fn prefixes(from: &mut In, digest: &Digest, uid: Option<u32>) -> Result<Prefixes, FileError> {
    if from.array::<32>()? != *digest || from.wide()? != user(uid) {
        return Err(FileError::Other);
    }
    let layout = from.text(LAYOUT_BYTES_MAX)?;
    let page_bytes = from.wide()?;
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
    Ok(Prefixes { uid, layout, pages })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::summed::tests::assert_every_byte_counts;
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
        assert_every_byte_counts(&path, || read(&path, &[7; 32], Some(1000)).is_err());
    }
}
