//! Limits of a header. A file outside these limits is refused, and the error names the limit.
//!
//! Real files stay far inside: a 262,144-token vocabulary with merges has a header of about 20 MB. The largest mixture
//! models have about 2,000 tensors and 100 metadata keys.

/// Bytes from the start of the file to the end of the tensor table.
pub const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Metadata entries.
pub const METADATA_MAX: u64 = 65_536;
/// Rows of the tensor table.
pub const TENSORS_MAX: u64 = 262_144;
/// Bytes of a metadata key: the format's own limit, 2^16 - 1.
pub const KEY_BYTES_MAX: u64 = 65_535;
/// Bytes of one string value or array element.
pub const STRING_BYTES_MAX: u64 = 16 << 20;
/// Bytes of a tensor name: the format's own limit.
pub const TENSOR_NAME_BYTES_MAX: u64 = 64;
/// Dimensions of a tensor.
pub const DIMS_MAX: u32 = 4;
/// Default of `general.alignment`, from the format.
pub const ALIGNMENT_DEFAULT: u32 = 32;
/// Smallest `general.alignment`: the format requires a multiple of 8.
pub const ALIGNMENT_MIN: u32 = 8;
/// Largest `general.alignment`: the largest page size in use.
pub const ALIGNMENT_MAX: u32 = 65_536;

/// Bytes of the smallest metadata entry: key length, a key of 1 byte, type, a value of 1 byte.
pub(super) const METADATA_ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// Bytes of the smallest row of the tensor table: name length, a name of 1 byte, count of dimensions, one dimension,
/// type, offset.
pub(super) const TENSOR_ROW_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;
