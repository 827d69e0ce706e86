//! Sources of header bytes, and the cursor that reads them in growing chunks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::error::{GgufError, Place};
use super::limits::HEADER_BYTES_MAX;
use crate::share::Charge;

/// Random access to bytes: a file, or memory in tests and fuzzers.
pub trait ReadAt {
    /// Total length in bytes.
    fn byte_len(&self) -> u64;

    /// Bytes that the source really stores: fewer than its length where a file is sparse.
    fn stored_bytes(&self) -> u64 {
        self.byte_len()
    }

    /// Reads up to `buf.len()` bytes from `offset`. Returns 0 at the end.
    ///
    /// # Errors
    /// As `pread`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// A file and its length when it was opened.
#[derive(Debug)]
pub(super) struct FileSource<'f> {
    pub file: &'f File,
    pub bytes: u64,
    /// Bytes on disk. A file system that does not tell says 0; then the length counts.
    pub stored: u64,
}

impl ReadAt for FileSource<'_> {
    fn byte_len(&self) -> u64 {
        self.bytes
    }

    fn stored_bytes(&self) -> u64 {
        if self.stored == 0 { self.bytes } else { self.stored }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self.file, buf, offset)
    }
}

impl ReadAt for [u8] {
    fn byte_len(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|o| self.get(o..)).unwrap_or(&[]);
        for (to, from) in buf.iter_mut().zip(rest) {
            *to = *from;
        }
        Ok(rest.len().min(buf.len()))
    }
}

/// Heap bytes charged for each byte of a header, before it is read. A vocabulary of 128,000 tokens has 8 MB in the
/// file, and takes 30 MiB with the tokenizer's tables.
pub(super) const HEAP_PER_BYTE: u64 = 4;

/// First read: holds the whole header of a model without a vocabulary.
const CHUNK_BYTES_FIRST: usize = 64 << 10;
/// Largest read, and largest piece returned by [`Cursor::take`]. Read sizes double up to it.
pub(super) const CHUNK_BYTES_MAX: usize = 1 << 20;

/// Reads a source from front to back. Holds at most one chunk, and never allocates more than the source has shown to
/// hold.
pub(super) struct Cursor<'s, S: ReadAt + ?Sized> {
    source: &'s S,
    file_bytes: u64,
    stored_bytes: u64,
    /// Grows with the bytes read; see [`HEAP_PER_BYTE`].
    charge: Option<Charge>,
    /// Read but unconsumed bytes start at `taken`. `buf[0]` is the byte at file offset `start`.
    buf: Vec<u8>,
    start: u64,
    taken: usize,
    chunk: usize,
    /// The place being read, for errors.
    pub place: Place,
}

/// A vocabulary string takes a few of these calls. A million one-byte strings take 10 ms with the calls inlined and the
/// rare paths out of line, and 20 ms without.
impl<'s, S: ReadAt + ?Sized> Cursor<'s, S> {
    pub fn new(source: &'s S, charge: Option<Charge>) -> Self {
        Self {
            source,
            file_bytes: source.byte_len(),
            stored_bytes: source.stored_bytes(),
            charge,
            buf: Vec::new(),
            start: 0,
            taken: 0,
            chunk: CHUNK_BYTES_FIRST,
            place: Place::Preamble,
        }
    }

    /// File offset of the next byte.
    pub fn offset(&self) -> u64 {
        self.start.saturating_add(self.taken as u64)
    }

    /// Moves back to `offset`, which must still lie in the buffer.
    pub fn back_to(&mut self, offset: u64) {
        if (self.start..=self.offset()).contains(&offset) {
            // Lies within the buffer, so it fits.
            self.taken = offset.saturating_sub(self.start) as usize;
        } else {
            self.buf.clear();
            (self.start, self.taken) = (offset, 0);
        }
    }

    /// Bytes that may still be read, up to the end of the file or the header limit.
    pub fn left(&self) -> u64 {
        self.file_bytes.min(HEADER_BYTES_MAX).saturating_sub(self.offset())
    }

    /// Takes the charge, for the header that was read.
    pub fn into_charge(self) -> Option<Charge> {
        self.charge
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Fails unless `need` bytes may still be read.
    #[inline(always)]
    pub fn expect_left(&self, need: u64) -> Result<(), GgufError> {
        if need <= self.left().min(self.stored_bytes.saturating_sub(self.offset())) {
            return Ok(());
        }
        Err(self.too_short(need))
    }

    /// The error for `need` bytes that may not be read.
    #[cold]
    fn too_short(&self, need: u64) -> GgufError {
        let (place, offset) = (self.place.clone(), self.offset());
        if need > self.file_bytes.saturating_sub(offset) {
            return GgufError::Truncated { place, offset, need, file_bytes: self.file_bytes };
        }
        if need <= self.left() {
            return GgufError::Sparse { place, offset, need, stored_bytes: self.stored_bytes };
        }
        GgufError::HeaderTooLong { place, offset, need, limit: HEADER_BYTES_MAX }
    }

    /// The next `count` bytes, at most [`CHUNK_BYTES_MAX`].
    #[inline(always)]
    pub fn take(&mut self, count: usize) -> Result<&[u8], GgufError> {
        debug_assert!(count <= CHUNK_BYTES_MAX);
        if self.buf.get(self.taken..self.taken.saturating_add(count)).is_none() {
            self.expect_left(count as u64)?;
            self.fill(count)?;
        }
        let (start, end) = (self.taken, self.taken.saturating_add(count));
        self.taken = end;
        // `fill` has read `count` bytes, or it failed.
        self.buf.get(start..end).ok_or_else(|| GgufError::Truncated {
            place: self.place.clone(),
            offset: self.start,
            need: count as u64,
            file_bytes: self.file_bytes,
        })
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// The next four bytes as an integer.
    pub fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    /// The next eight bytes as an integer.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Appends the next `count` bytes to `out`, in chunks.
    #[inline(always)]
    pub fn append(&mut self, count: u64, out: &mut Vec<u8>) -> Result<(), GgufError> {
        self.expect_left(count)?;
        let mut left = count;
        while left > 0 {
            let step = left.min(CHUNK_BYTES_FIRST as u64);
            // At most CHUNK_BYTES_FIRST, so it fits.
            out.extend_from_slice(self.take(step as usize)?);
            left = left.saturating_sub(step);
        }
        Ok(())
    }

    /// Reads until the buffer holds `count` bytes. The caller has called `expect_left`.
    #[cold]
    fn fill(&mut self, count: usize) -> Result<(), GgufError> {
        self.start = self.offset();
        self.buf.drain(..self.taken);
        self.taken = 0;
        let mut have = self.buf.len();
        // `left` counts from `start`, so it covers what is already in the buffer.
        let want = self.chunk.max(count).min(usize::try_from(self.left()).unwrap_or(usize::MAX));
        self.chunk = self.chunk.saturating_mul(2).min(CHUNK_BYTES_MAX);
        if let Some(charge) = &mut self.charge {
            let more = (want as u64).saturating_sub(have as u64).saturating_mul(HEAP_PER_BYTE);
            charge.grow(more).map_err(|refusal| GgufError::NoRoom { refusal })?;
        }
        self.buf.resize(want.max(have), 0);
        while have < count {
            let offset = self.start.saturating_add(have as u64);
            let room = self.buf.get_mut(have..).unwrap_or_default();
            match self.source.read_at(room, offset) {
                // The file shrank after it was opened.
                Ok(0) => {
                    let (place, need) = (self.place.clone(), count as u64);
                    return Err(GgufError::Truncated { place, offset: self.start, need, file_bytes: offset });
                }
                Ok(n) => have = have.saturating_add(n).min(self.buf.len()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(GgufError::Read { offset, source }),
            }
        }
        self.buf.truncate(have);
        Ok(())
    }
}
