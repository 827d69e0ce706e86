//! Errors of the GGUF parser.

use crate::share::Refusal;
use crate::tensor::{DType, MapError};

/// The place that the parser was reading when it stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Magic, version and the two counts.
    Preamble,
    /// The key of a metadata entry, by its index.
    Key(u64),
    /// The value of this metadata key.
    Value(Box<str>),
    /// The name of a row of the tensor table, by its index.
    TensorName(u64),
    /// The row of this tensor.
    Tensor(Box<str>),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Preamble => f.write_str("the first 24 bytes"),
            Self::Key(index) => write!(f, "metadata key number {index}"),
            Self::Value(key) => write!(f, "metadata {key:?}"),
            Self::TensorName(index) => write!(f, "name of tensor number {index}"),
            Self::Tensor(name) => write!(f, "tensor {name:?}"),
        }
    }
}

/// Why a GGUF file was refused. Offsets are bytes from the start of the file to the refused field.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message names each field: what was found, where, and the limit
pub enum GgufError {
    /// The file could not be mapped, or is not a regular file.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The operating system could not read the file.
    #[error("the model file could not be read at byte {offset}: {source}")]
    Read {
        offset: u64,
        #[source]
        source: std::io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error(
        "not a GGUF file: it starts with {:?}, not \"GGUF\" (convert safetensors and PyTorch files to GGUF first)",
        String::from_utf8_lossy(found)
    )]
    Magic { found: [u8; 4] },
    /// A big-endian file.
    #[error("big-endian GGUF (version {version}) is not supported: convert the file to little endian")]
    BigEndian { version: u32 },
    /// A version other than 2 and 3.
    #[error(
        "GGUF version {found} is not supported (supported: 2 and 3): convert the model again with current tools"
    )]
    Version { found: u32 },
    /// The file ends inside the header.
    #[error(
        "the file ends at byte {file_bytes}, inside {place}, which needs {need} bytes from byte {offset}: the file is \
         incomplete or damaged; copy or download it again"
    )]
    Truncated { place: Place, offset: u64, need: u64, file_bytes: u64 },
    /// A sparse file whose header lies in its holes.
    #[error(
        "{place} at byte {offset} needs {need} bytes, but only {stored_bytes} bytes of the file are on disk: a header cannot \
         lie in the holes of a sparse file"
    )]
    Sparse { place: Place, offset: u64, need: u64, stored_bytes: u64 },
    /// The headers of mapped models leave no room.
    #[error("no room for the header (limits.header_mib): {}", refusal.told(1 << 20, "MiB"))]
    NoRoom { refusal: Refusal },
    /// The header is longer than the parser reads.
    #[error("{place} at byte {offset} needs {need} bytes and ends past the header limit of {limit} bytes")]
    HeaderTooLong { place: Place, offset: u64, need: u64, limit: u64 },
    /// A count above the limit, or above what the rest of the file could hold.
    #[error("{place} at byte {offset}: the file announces {found} {what}; at most {limit} are possible here")]
    Count { place: Place, what: &'static str, offset: u64, found: u64, limit: u64 },
    /// A string or name of a length outside the limits.
    #[error("{place} at byte {offset}: length of {found} bytes; allowed: {min} to {limit}")]
    Length { place: Place, offset: u64, found: u64, min: u64, limit: u64 },
    /// A string that is not UTF-8, a key that is not printable ASCII, or a name with control characters.
    #[error("{place} at byte {offset}: the text is not {expected}")]
    Text { place: Place, offset: u64, expected: &'static str },
    /// The same key twice.
    #[error("metadata key {key:?} appears a second time at byte {offset}")]
    DuplicateKey { key: Box<str>, offset: u64 },
    /// A metadata type number that the format does not have.
    #[error("metadata {key:?} at byte {offset}: unknown value type {found} (known: 0 to 12)")]
    ValueType { key: Box<str>, offset: u64, found: u32 },
    /// An array of arrays.
    #[error("metadata {key:?} at byte {offset}: arrays of arrays are not supported")]
    NestedArray { key: Box<str>, offset: u64 },
    /// A bool that is neither 0 nor 1.
    #[error("metadata {key:?} at byte {offset}: a bool is 0 or 1, not {found}")]
    Bool { key: Box<str>, offset: u64, found: u8 },
    /// `general.alignment` is not a power of two within the limits.
    #[error("general.alignment is {found}; it must be a power of two from {min} to {max}")]
    Alignment { found: u32, min: u32, max: u32 },
    /// The same tensor name twice.
    #[error("tensor {tensor:?} appears a second time at byte {offset}")]
    DuplicateTensor { tensor: Box<str>, offset: u64 },
    /// A count of dimensions outside 1 to 4.
    #[error("tensor {tensor:?} at byte {offset}: {found} dimensions; allowed: 1 to {limit}")]
    Dimensions { tensor: Box<str>, offset: u64, found: u32, limit: u32 },
    /// A dimension of 0, or 2^64 elements or more.
    #[error("tensor {tensor:?} at byte {offset}: shape {dims:?} has a dimension of 0 or too many elements")]
    Shape { tensor: Box<str>, offset: u64, dims: Vec<u64> },
    /// A tensor type number that ggml removed or never had.
    #[error("tensor {tensor:?} at byte {offset}: unknown tensor type {number}")]
    TensorType { tensor: Box<str>, offset: u64, number: u32 },
    /// A row that is not whole quant blocks.
    #[error(
        "tensor {tensor:?} at byte {offset}: rows of {cols} values cannot be split into {dtype} blocks of {} values",
        dtype.block_len()
    )]
    PartialBlock { tensor: Box<str>, offset: u64, dtype: DType, cols: u64 },
    /// The tensor has 2^64 bytes or more.
    #[error("tensor {tensor:?} at byte {offset}: {elements} values of {dtype} need 2^64 bytes or more")]
    Size { tensor: Box<str>, offset: u64, dtype: DType, elements: u64 },
    /// Data that does not start at a multiple of the alignment.
    #[error(
        "tensor {tensor:?} at byte {offset}: data offset {found} is not a multiple of the alignment {alignment}"
    )]
    Unaligned { tensor: Box<str>, offset: u64, found: u64, alignment: u32 },
    /// Data that ends after the file.
    #[error(
        "tensor {tensor:?} at byte {offset}: its data, {bytes} bytes from offset {found} of the data section at byte \
         {data_start}, ends after the file of {file_bytes} bytes: the file is incomplete or damaged; copy or download \
         it again"
    )]
    PastEnd { tensor: Box<str>, offset: u64, found: u64, bytes: u64, data_start: u64, file_bytes: u64 },
    /// Two tensors that share bytes.
    #[error(
        "tensors {tensor:?} and {other:?} overlap: the first ends at byte {end}, the second starts at {start}"
    )]
    Overlap { tensor: Box<str>, other: Box<str>, end: u64, start: u64 },
    /// A required key is missing.
    #[error("the file has no metadata {key:?} ({expected}), which this model needs")]
    MissingKey { key: Box<str>, expected: &'static str },
    /// A key has a value of another type or range.
    #[error("metadata {key:?} is {found}, expected {expected}")]
    KeyType { key: Box<str>, found: String, expected: &'static str },
}
