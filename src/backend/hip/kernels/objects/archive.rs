//! The archive of all code objects: a table, then zstd frames, each holding a family of similar objects.
//!
//! Little-endian: `RFCODEOB`, digest of the inputs (32 bytes), number of frames (u32). Per frame its packed length
//! (u64) and number of objects (u32). Per object its name (u16 length and UTF-8) and length (u64). Then the frames in
//! that order; an unpacked frame is its objects one after the other.

use std::io::Read;

use super::ObjectError;

const MAGIC: &[u8; 8] = b"RFCODEOB";

/// Largest frame of this program, packed or unpacked.
const SIZE_MAX: u64 = super::OBJECT_MAX;

/// A frame for [`write_archive`].
#[derive(Clone, Debug)]
pub struct PackedFrame {
    /// Architecture and length of each object in the frame.
    pub objects: Vec<(String, u64)>,
    /// The objects one after the other, as a zstd frame.
    pub packed: Vec<u8>,
}

/// The archive's bytes. `digest` is that of the objects' inputs.
///
/// # Errors
/// [`ObjectError::Archive`] for a name of more than 64 KiB, or more than 2^32 frames or objects.
pub fn write_archive(digest: &[u8; 32], frames: &[PackedFrame]) -> Result<Vec<u8>, ObjectError> {
    let count = |n: usize| u32::try_from(n).map_err(|_| ObjectError::Archive("too many objects"));
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(digest);
    bytes.extend_from_slice(&count(frames.len())?.to_le_bytes());
    for frame in frames {
        bytes.extend_from_slice(&(frame.packed.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&count(frame.objects.len())?.to_le_bytes());
        for (name, length) in &frame.objects {
            let name_length =
                u16::try_from(name.len()).map_err(|_| ObjectError::Archive("a name is too long"))?;
            bytes.extend_from_slice(&name_length.to_le_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&length.to_le_bytes());
        }
    }
    for frame in frames {
        bytes.extend_from_slice(&frame.packed);
    }
    Ok(bytes)
}

/// An archive of code objects with a checked table.
#[derive(Debug)]
pub struct Archive<'a> {
    digest: [u8; 32],
    entries: Vec<ArchiveEntry<'a>>,
}

/// One object of an archive.
#[derive(Clone, Copy, Debug)]
pub struct ArchiveEntry<'a> {
    /// Architecture name.
    pub name: &'a str,
    /// Unpacked bytes of the object.
    pub bytes: u64,
    /// The frame that holds the object.
    packed: &'a [u8],
    /// Offset of the object in the unpacked frame, and the frame's unpacked bytes.
    start: u64,
    frame_bytes: u64,
}

impl<'a> Archive<'a> {
    /// Parses the table.
    ///
    /// # Errors
    /// [`ObjectError::Archive`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ObjectError> {
        let mut rest = bytes.strip_prefix(MAGIC).ok_or(ObjectError::Archive("it has no archive header"))?;
        let digest = take::<32>(&mut rest)?;
        let mut frames = Vec::new();
        for _ in 0..u32::from_le_bytes(take(&mut rest)?) {
            let packed = u64::from_le_bytes(take(&mut rest)?);
            if packed > SIZE_MAX {
                return Err(ObjectError::Archive("a frame is too large"));
            }
            frames.push((packed as usize, parse_objects(&mut rest)?));
        }
        let mut entries = Vec::new();
        for (length, objects) in frames {
            let packed = split(&mut rest, length)?;
            let frame_bytes = objects.iter().map(|(_, bytes)| bytes).sum();
            let mut start = 0;
            for (name, bytes) in objects {
                entries.push(ArchiveEntry { name, bytes, packed, start, frame_bytes });
                start += bytes;
            }
        }
        if !rest.is_empty() {
            return Err(ObjectError::Archive("bytes follow the last frame"));
        }
        Ok(Self { digest, entries })
    }

    /// Digest of the inputs: sources, compiler, flags.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The archive's objects.
    pub fn entries(&self) -> impl Iterator<Item = &ArchiveEntry<'a>> {
        self.entries.iter()
    }
}

/// Names and lengths of a frame's objects, whose sum is at most [`SIZE_MAX`] bytes.
fn parse_objects<'a>(rest: &mut &'a [u8]) -> Result<Vec<(&'a str, u64)>, ObjectError> {
    let mut objects = Vec::new();
    let mut sum = 0u64;
    for _ in 0..u32::from_le_bytes(take(rest)?) {
        let length = u16::from_le_bytes(take(rest)?);
        let name = split(rest, length.into())?;
        let name = std::str::from_utf8(name).map_err(|_| ObjectError::Archive("a name is not UTF-8"))?;
        let bytes = u64::from_le_bytes(take(rest)?);
        sum = sum.saturating_add(bytes);
        if sum > SIZE_MAX {
            return Err(ObjectError::Archive("an object is too large"));
        }
        objects.push((name, bytes));
    }
    Ok(objects)
}

impl ArchiveEntry<'_> {
    /// Unpacks the object.
    ///
    /// # Errors
    /// [`ObjectError::Archive`].
    pub fn unpack(&self) -> Result<Vec<u8>, ObjectError> {
        let broken = |_| ObjectError::Archive("an object cannot be unpacked");
        let frame = ruzstd::decoding::StreamingDecoder::new(self.packed).map_err(broken)?;
        let mut all = Vec::new();
        let read = frame.take(self.frame_bytes + 1).read_to_end(&mut all);
        if read.is_err() || all.len() as u64 != self.frame_bytes {
            return Err(ObjectError::Archive("a frame does not unpack to its stated length"));
        }
        // Within the frame; its length was compared above.
        Ok(all.get(self.start as usize..(self.start + self.bytes) as usize).unwrap_or_default().to_vec())
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], ObjectError> {
    let (head, tail) =
        rest.split_first_chunk::<N>().ok_or(ObjectError::Archive("it ends inside its table"))?;
    *rest = tail;
    Ok(*head)
}

fn split<'a>(rest: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], ObjectError> {
    let (head, tail) =
        rest.split_at_checked(bytes).ok_or(ObjectError::Archive("it ends inside an object"))?;
    *rest = tail;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn example() -> Vec<u8> {
        let frame = |objects: &[(&str, &[u8])]| PackedFrame {
            objects: objects.iter().map(|(name, body)| ((*name).to_owned(), body.len() as u64)).collect(),
            packed: compress_to_vec(
                &objects.iter().flat_map(|(_, body)| body.iter().copied()).collect::<Vec<u8>>()[..],
                CompressionLevel::Fastest,
            ),
        };
        let long = b"\x7fELF and more ".repeat(100);
        let frames =
            [frame(&[("gfx1100", &long), ("gfx1101", b"\x7fELF1")]), frame(&[("gfx90a", b"\x7fELF")])];
        write_archive(&[7; 32], &frames).expect("short names")
    }

    #[test]
    fn objects_come_back_by_name() {
        let bytes = example();
        let archive = Archive::parse(&bytes).expect("written above");
        assert_eq!(archive.digest(), &[7; 32]);
        let found: Vec<_> =
            archive.entries().map(|e| (e.name, e.unpack().expect("packed above").len())).collect();
        assert_eq!(found, [("gfx1100", 1400), ("gfx1101", 5), ("gfx90a", 4)]);
        let second = archive.entries().nth(1).expect("three objects").unpack().expect("packed above");
        assert_eq!(second, b"\x7fELF1");
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
                    let _ = entry.unpack().map(|bytes| assert_eq!(bytes.len() as u64, entry.bytes));
                }
            }
        }
        assert!(Archive::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
