//! GGUF parser: bytes to a checked header. Format: ggml `docs/gguf.md`, versions 2 and 3, little endian.
//!
//! The parser reads a file front to back by `pread` in growing chunks, never through a mapping. It trusts nothing in
//! the file. Before it allocates, it compares every count with what the rest of the file can hold, so the file's real
//! bytes bound the memory. All arithmetic on outside numbers is checked. The limits of a header are in [`limits`].
//! After [`Gguf::open`], no later code needs to check an offset, a size or a string again.

#![forbid(unsafe_code)]
#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::share::Charge;
use crate::tensor::{LazyTensor, MapError, MappedFile};

mod error;
pub mod limits;
mod metadata;
mod shared_arrays;
mod source;
mod tensors;
mod value;

pub use error::{GgufError, Place};
pub use source::ReadAt;
pub use tensors::TensorInfo;
pub use value::{Array, FromValue, Strings, Value};

use limits::{
    ALIGNMENT_DEFAULT, ALIGNMENT_MAX, ALIGNMENT_MIN, METADATA_ENTRY_BYTES_MIN, METADATA_MAX,
    TENSOR_ROW_BYTES_MIN, TENSORS_MAX,
};
use source::{Cursor, FileSource};

/// Heap bytes of a metadata entry or a tensor beside its value: names, indices, and the plan's operations.
const ROW_HEAP_BYTES: u64 = 512;

/// A checked GGUF header: metadata and tensor table.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    alignment: u32,
    header_bytes: u64,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    tensor_index: HashMap<Box<str>, usize>,
}

/// A key and its value. Several headers may share the value.
pub type Entry = (Box<str>, Arc<Value>);

/// Returns the values that other headers hold under a key. The parser shares an equal value instead of building it
/// again.
pub type Known<'k> = &'k dyn Fn(&str) -> Vec<Arc<Value>>;

#[derive(Clone, Debug, Default)]
struct Metadata {
    entries: Vec<Entry>,
    index: HashMap<Box<str>, usize>,
}

impl Gguf {
    /// Reads and checks the header by pread, then maps the file. Touches no byte of the mapping.
    ///
    /// Cost: 9 ms for a vocabulary of 152,000 tokens and as many merges, in the page cache (measured, Zen 5).
    ///
    /// # Errors
    /// [`GgufError`] names the field, its offset and the limit; [`MapError::Changed`] when the file changes meanwhile.
    pub fn open(file: File) -> Result<(Self, Arc<MappedFile>), GgufError> {
        Self::open_beside(file, &|_| Vec::new())
    }

    /// As [`Gguf::open`]; `known` arrays are compared with the file byte by byte and shared. 2 ms where all arrays are
    /// known.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open_beside(file: File, known: Known<'_>) -> Result<(Self, Arc<MappedFile>), GgufError> {
        let (gguf, mapped, _) = Self::open_charged(file, known, None)?;
        Ok((gguf, mapped))
    }

    /// As [`Gguf::open_beside`]. The charge grows before each read; in the end it is what the header's own values take,
    /// with the tables that are made of them.
    ///
    /// # Errors
    /// As [`Gguf::open`], and [`GgufError::NoRoom`].
    pub fn open_charged(
        file: File,
        known: Known<'_>,
        charge: Option<Charge>,
    ) -> Result<(Self, Arc<MappedFile>, Option<Charge>), GgufError> {
        let identity = MappedFile::inspect(&file)?;
        let meta = file.metadata().map_err(|source| GgufError::Read { offset: 0, source })?;
        // The unit of st_blocks is 512 bytes on every file system.
        let stored = meta.blocks().saturating_mul(512);
        let source = FileSource { file: &file, bytes: identity.size, stored };
        let (gguf, mut charge) = Self::parse_charged(&source, known, charge)?;
        if let Some(charge) = &mut charge {
            charge.shrink(charge.amount().saturating_sub(gguf.heap_charge()));
        }
        let mapped = MappedFile::map(file)?;
        if mapped.identity() != identity {
            mapped.check_against(&identity)?; // tells a file that was cut
            return Err(MapError::Changed.into());
        }
        Ok((gguf, mapped, charge))
    }

    /// Heap bytes to charge for this header. Values that it shares with other headers cost nothing.
    fn heap_charge(&self) -> u64 {
        let own = self.metadata.entries.iter().filter(|(_, value)| Arc::strong_count(value) == 1);
        let values = own.map(|(_, value)| value.heap_bytes() as u64).fold(0, u64::saturating_add);
        let rows = (self.metadata.entries.len() as u64).saturating_add(self.tensors.len() as u64);
        values.saturating_mul(source::HEAP_PER_BYTE).saturating_add(rows.saturating_mul(ROW_HEAP_BYTES))
    }

    /// Reads and checks the header in `source`.
    ///
    /// # Errors
    /// [`GgufError`].
    pub fn parse<S: ReadAt + ?Sized>(source: &S) -> Result<Self, GgufError> {
        Self::parse_beside(source, &|_| Vec::new())
    }

    /// As [`Gguf::parse`], with shared arrays as in [`Gguf::open_beside`].
    ///
    /// # Errors
    /// As [`Gguf::parse`].
    pub fn parse_beside<S: ReadAt + ?Sized>(source: &S, known: Known<'_>) -> Result<Self, GgufError> {
        Ok(Self::parse_charged(source, known, None)?.0)
    }

    fn parse_charged<S: ReadAt + ?Sized>(
        source: &S,
        known: Known<'_>,
        charge: Option<Charge>,
    ) -> Result<(Self, Option<Charge>), GgufError> {
        let mut cursor = Cursor::new(source, charge);
        let version = version(&mut cursor)?;
        let tensor_count = count(&mut cursor, "tensors", TENSORS_MAX, TENSOR_ROW_BYTES_MIN)?;
        let entry_count = count(&mut cursor, "metadata entries", METADATA_MAX, METADATA_ENTRY_BYTES_MIN)?;
        let metadata = metadata(&mut cursor, entry_count, known)?;
        let alignment = alignment(&metadata)?;

        // Grows row by row: a sparse file's length can promise rows that do not exist.
        let mut rows = Vec::new();
        for index in 0..tensor_count {
            rows.push(cursor.tensor_row(index)?);
        }
        let header_bytes = cursor.offset();
        let tensor_index = tensors::index_names(&rows)?;
        // A header has at most 2^28 bytes and the alignment at most 2^16, so this cannot overflow.
        let data_start = header_bytes.checked_next_multiple_of(alignment.into()).unwrap_or(u64::MAX);
        let tensors = tensors::place_in_file(rows, data_start, alignment, cursor.file_bytes())?;
        tensors::check_overlap(&tensors)?;
        let gguf = Self { version, alignment, header_bytes, metadata, tensors, tensor_index };
        Ok((gguf, cursor.into_charge()))
    }

    /// GGUF version of the file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the tensors in bytes.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Bytes from the start of the file to the end of the tensor table.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// All metadata in file order.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.metadata.entries.iter().map(|(key, value)| (&**key, &**value))
    }

    /// The metadata entries whose keys `wanted` accepts, in file order. Shared, not copied.
    pub fn entries(&self, wanted: impl Fn(&str) -> bool) -> Vec<Entry> {
        self.metadata.entries.iter().filter(|(key, _)| wanted(key)).cloned().collect()
    }

    /// Replaces its own values of these keys with the given ones, to share memory. The values must be equal.
    pub fn share(&mut self, entries: &[Entry]) {
        for (key, value) in entries {
            let place = self.metadata.index.get(key).copied();
            if let Some((_, own)) = place.and_then(|place| self.metadata.entries.get_mut(place)) {
                debug_assert!(own == value, "{key} is another value here");
                *own = Arc::clone(value);
            }
        }
    }

    /// A metadata value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A required value.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], [`GgufError::KeyType`].
    pub fn required<'g, T: FromValue<'g>>(&'g self, key: &str) -> Result<T, GgufError> {
        self.optional(key)?.ok_or_else(|| GgufError::MissingKey { key: key.into(), expected: T::EXPECTED })
    }

    /// An optional value; fails when it has another type.
    ///
    /// # Errors
    /// [`GgufError::KeyType`].
    pub fn optional<'g, T: FromValue<'g>>(&'g self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).ok_or_else(|| GgufError::KeyType {
            key: key.into(),
            found: value.describe(),
            expected: T::EXPECTED,
        })
    }

    fn as_type<'g, T: FromValue<'g>>(&'g self, key: &str) -> Option<T> {
        T::from_value(self.get(key)?)
    }

    /// A string value; `None` when absent or of another type.
    pub fn string(&self, key: &str) -> Option<&str> {
        self.as_type(key)
    }

    /// A value of any integer type as u64; `None` when absent, negative or of another type.
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        self.as_type(key)
    }

    /// F32 or F64 as f32; `None` when absent or of another type.
    pub fn float(&self, key: &str) -> Option<f32> {
        self.as_type(key)
    }

    /// A bool; `None` when absent or of another type.
    pub fn boolean(&self, key: &str) -> Option<bool> {
        self.as_type(key)
    }

    /// An array; `None` when absent or of another type.
    pub fn array(&self, key: &str) -> Option<&Array> {
        self.as_type(key)
    }

    /// An array of strings; `None` when absent or of another type.
    pub fn strings(&self, key: &str) -> Option<&Strings> {
        self.as_type(key)
    }

    /// The tensor table in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A row of the tensor table by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.tensor_index.get(name)?)
    }

    /// A lazy handle on a tensor of `file`. `None` when the table lacks the name or `file` does not belong to this
    /// header.
    pub fn lazy(&self, name: &str, file: &Arc<MappedFile>) -> Option<LazyTensor> {
        let info = self.tensor(name)?;
        LazyTensor::new(&info.name, info.dtype, info.shape, info.range.clone(), Arc::clone(file)).ok()
    }
}

impl Metadata {
    fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(*self.index.get(key)?).map(|(_, value)| &**value)
    }
}

/// Checks the magic and returns the version.
fn version<S: ReadAt + ?Sized>(cursor: &mut Cursor<'_, S>) -> Result<u32, GgufError> {
    let found = cursor.array()?;
    if found != *b"GGUF" {
        return Err(GgufError::Magic { found });
    }
    match cursor.u32()? {
        version @ (2 | 3) => Ok(version),
        swapped if (1..=3).contains(&swapped.swap_bytes()) => {
            Err(GgufError::BigEndian { version: swapped.swap_bytes() })
        }
        found => Err(GgufError::Version { found }),
    }
}

/// Reads a count of records of at least `record_bytes_min` bytes. All of them must fit in the rest of the file.
fn count<S: ReadAt + ?Sized>(
    cursor: &mut Cursor<'_, S>,
    what: &'static str,
    max: u64,
    record_bytes_min: u64,
) -> Result<u64, GgufError> {
    let offset = cursor.offset();
    let found = cursor.u64()?;
    let limit = cursor.left().checked_div(record_bytes_min).unwrap_or(0).min(max);
    if found > limit {
        return Err(GgufError::Count { place: cursor.place.clone(), what, offset, found, limit });
    }
    Ok(found)
}

fn metadata<S: ReadAt + ?Sized>(
    cursor: &mut Cursor<'_, S>,
    entry_count: u64,
    known: Known<'_>,
) -> Result<Metadata, GgufError> {
    let mut metadata = Metadata::default();
    for number in 0..entry_count {
        let offset = cursor.offset();
        let (key, value) = cursor.entry(number, known)?;
        match metadata.index.entry(key.clone()) {
            Slot::Occupied(_) => return Err(GgufError::DuplicateKey { key, offset }),
            Slot::Vacant(slot) => slot.insert(metadata.entries.len()),
        };
        metadata.entries.push((key, value));
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata) -> Result<u32, GgufError> {
    const KEY: &str = "general.alignment";
    let found = match metadata.get(KEY) {
        None => ALIGNMENT_DEFAULT,
        Some(Value::U32(found)) => *found,
        Some(other) => {
            return Err(GgufError::KeyType { key: KEY.into(), found: other.describe(), expected: "a u32" });
        }
    };
    if !found.is_power_of_two() || !(ALIGNMENT_MIN..=ALIGNMENT_MAX).contains(&found) {
        return Err(GgufError::Alignment { found, min: ALIGNMENT_MIN, max: ALIGNMENT_MAX });
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
