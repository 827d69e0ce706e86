//! GGUF: bytes to a checked header. Format: ggml `docs/gguf.md`, versions 2 and 3, little endian.

use std::sync::Arc;

use crate::tensor::{DType, LazyTensor, MappedFile, Shape};

/// A metadata value. Arrays hold one element type and do not nest.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// A metadata array.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
}

/// One row of the tensor table.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name, at most 64 bytes.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Shape,
    /// Byte range in the file (absolute), checked to lie inside it and to overlap no other.
    pub range: std::ops::Range<u64>,
}

/// A checked GGUF header: metadata and tensor table.
#[derive(Clone, Debug)]
pub struct Gguf {
    // the parser's author decides what is in here
}

/// Why a file is no model: filled in by the parser.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file could not be read or mapped.
    #[error(transparent)]
    Map(#[from] crate::tensor::MapError),
}

impl Gguf {
    /// Reads and checks the header by pread, then maps the file; no byte of the mapping is touched.
    ///
    /// # Errors
    /// [`GgufError`], naming the field, its offset and the limit.
    pub fn open(_file: std::fs::File) -> Result<(Self, Arc<MappedFile>), GgufError> {
        Err(GgufError::Map(crate::tensor::MapError::Changed))
    }

    /// GGUF version of the file: 2 or 3.
    pub fn version(&self) -> u32 {
        3
    }

    /// All metadata in file order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        std::iter::empty()
    }

    /// A metadata value.
    pub fn get(&self, _key: &str) -> Option<&Value> {
        None
    }

    /// A string value; `None` when absent or of another type.
    pub fn string(&self, _key: &str) -> Option<&str> {
        None
    }

    /// Any non-negative integer type as u64; `None` when absent, negative or of another type.
    pub fn unsigned(&self, _key: &str) -> Option<u64> {
        None
    }

    /// F32 or F64 as f32; `None` when absent or of another type.
    pub fn float(&self, _key: &str) -> Option<f32> {
        None
    }

    /// A bool; `None` when absent or of another type.
    pub fn boolean(&self, _key: &str) -> Option<bool> {
        None
    }

    /// An array; `None` when absent or of another type.
    pub fn array(&self, _key: &str) -> Option<&Array> {
        None
    }

    /// The tensor table in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &[]
    }

    /// A row of the tensor table by name.
    pub fn tensor(&self, _name: &str) -> Option<&TensorInfo> {
        None
    }

    /// A lazy handle on a tensor of `file`, or `None` when the table has no such name.
    pub fn lazy(&self, _name: &str, _file: &Arc<MappedFile>) -> Option<LazyTensor> {
        None
    }
}
