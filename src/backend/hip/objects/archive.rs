//! The file of all code objects: a table, then the objects, each a zstd frame.
//!
//! Little-endian: `RFCODEOB`, digest of the sources (32 bytes), number of objects (u32); per object its name (u16 length and
//! UTF-8), length as packed (u64) and unpacked (u64); then the packed objects in that order.

use std::io::Read;

use super::ObjectError;

const MAGIC: &[u8; 8] = b"RFCODEOB";

/// Packed or not, no object of ours is larger.
const SIZE_MAX: u64 = super::OBJECT_MAX;

/// An object for [`write_archive`].
#[derive(Clone, Debug)]
pub struct PackedObject {
    /// Architecture.
    pub name: String,
    /// A zstd frame.
    pub packed: Vec<u8>,
    /// Bytes it unpacks to.
    pub unpacked_bytes: u64,
}

/// The file's bytes. `sources` is a digest of what the objects were built from.
///
/// # Errors
/// [`ObjectError::Archive`] for a name of more than 64 KiB or more than 2^32 objects.
pub fn write_archive(sources: &[u8; 32], objects: &[PackedObject]) -> Result<Vec<u8>, ObjectError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(sources);
    let count = u32::try_from(objects.len()).map_err(|_| ObjectError::Archive("too many objects"))?;
    bytes.extend_from_slice(&count.to_le_bytes());
    for object in objects {
        let length =
            u16::try_from(object.name.len()).map_err(|_| ObjectError::Archive("a name is too long"))?;
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(object.name.as_bytes());
        bytes.extend_from_slice(&(object.packed.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&object.unpacked_bytes.to_le_bytes());
    }
    for object in objects {
        bytes.extend_from_slice(&object.packed);
    }
    Ok(bytes)
}

/// A file of code objects, its table checked.
#[derive(Debug)]
pub struct Archive<'a> {
    sources: [u8; 32],
    entries: Vec<ArchiveEntry<'a>>,
}

/// One object in it.
#[derive(Clone, Copy, Debug)]
pub struct ArchiveEntry<'a> {
    /// Architecture.
    pub name: &'a str,
    /// A zstd frame.
    pub packed: &'a [u8],
    /// Bytes it unpacks to.
    pub unpacked_bytes: u64,
}

impl<'a> Archive<'a> {
    /// Reads the table.
    ///
    /// # Errors
    /// [`ObjectError::Archive`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ObjectError> {
        let mut rest = bytes.strip_prefix(MAGIC).ok_or(ObjectError::Archive("it does not start as one"))?;
        let sources = take::<32>(&mut rest)?;
        let count = u32::from_le_bytes(take(&mut rest)?);
        let mut table = Vec::new();
        for _ in 0..count {
            let length = u16::from_le_bytes(take(&mut rest)?);
            let name = split(&mut rest, length.into())?;
            let name = std::str::from_utf8(name).map_err(|_| ObjectError::Archive("a name is not UTF-8"))?;
            let packed = u64::from_le_bytes(take(&mut rest)?);
            let unpacked = u64::from_le_bytes(take(&mut rest)?);
            if packed > SIZE_MAX || unpacked > SIZE_MAX {
                return Err(ObjectError::Archive("an object is too large"));
            }
            table.push((name, packed as usize, unpacked));
        }
        let mut entries = Vec::new();
        for (name, packed, unpacked_bytes) in table {
            entries.push(ArchiveEntry { name, packed: split(&mut rest, packed)?, unpacked_bytes });
        }
        if !rest.is_empty() {
            return Err(ObjectError::Archive("bytes follow the last object"));
        }
        Ok(Self { sources, entries })
    }

    /// Digest of what the objects were built from.
    pub fn sources(&self) -> &[u8; 32] {
        &self.sources
    }

    /// Its objects.
    pub fn entries(&self) -> impl Iterator<Item = &ArchiveEntry<'a>> {
        self.entries.iter()
    }
}

impl ArchiveEntry<'_> {
    /// The object.
    ///
    /// # Errors
    /// [`ObjectError::Archive`].
    pub fn unpack(&self) -> Result<Vec<u8>, ObjectError> {
        let broken = |_| ObjectError::Archive("an object does not unpack");
        let frame = ruzstd::decoding::StreamingDecoder::new(self.packed).map_err(broken)?;
        let mut bytes = Vec::new();
        let read = frame.take(self.unpacked_bytes + 1).read_to_end(&mut bytes);
        if read.is_err() || bytes.len() as u64 != self.unpacked_bytes {
            return Err(ObjectError::Archive("an object unpacks to another length"));
        }
        Ok(bytes)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], ObjectError> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or(ObjectError::Archive("it ends in its table"))?;
    *rest = tail;
    Ok(*head)
}

fn split<'a>(rest: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], ObjectError> {
    let (head, tail) =
        rest.split_at_checked(bytes).ok_or(ObjectError::Archive("it ends within an object"))?;
    *rest = tail;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn example() -> Vec<u8> {
        let object = |name: &str, body: &[u8]| PackedObject {
            name: name.into(),
            packed: compress_to_vec(body, CompressionLevel::Fastest),
            unpacked_bytes: body.len() as u64,
        };
        let objects = [object("gfx1100", &b"\x7fELF and more ".repeat(100)), object("gfx90a", b"\x7fELF")];
        write_archive(&[7; 32], &objects).expect("short names")
    }

    #[test]
    fn objects_come_back_by_name() {
        let bytes = example();
        let archive = Archive::parse(&bytes).expect("written above");
        assert_eq!(archive.sources(), &[7; 32]);
        let found: Vec<_> =
            archive.entries().map(|e| (e.name, e.unpack().expect("packed above").len())).collect();
        assert_eq!(found, [("gfx1100", 1400), ("gfx90a", 4)]);
    }

    #[test]
    fn no_prefix_and_no_changed_byte_is_more_than_an_error() {
        let bytes = example();
        for end in 0..bytes.len() {
            assert!(Archive::parse(&bytes[..end]).is_err(), "{end}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            if let Ok(archive) = Archive::parse(&changed) {
                for entry in archive.entries() {
                    let _ = entry.unpack().map(|bytes| assert_eq!(bytes.len() as u64, entry.unpacked_bytes));
                }
            }
        }
        assert!(Archive::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
