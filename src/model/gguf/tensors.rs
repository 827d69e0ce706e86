//! The tensor table: rows as stored, then byte ranges checked against the file.

use std::collections::HashMap;
use std::ops::Range;

use super::error::{GgufError, Place};
use super::limits::{DIMS_MAX, TENSOR_NAME_BYTES_MAX};
use super::source::{Cursor, ReadAt};
use crate::tensor::{DType, Shape};

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
    pub range: Range<u64>,
}

/// A row, read before the start of the data section is known.
pub(super) struct Row {
    info: TensorInfo,
    /// File offset of the row's `offset` field.
    field: u64,
    bytes: u64,
    data_offset: u64,
}

impl<S: ReadAt + ?Sized> Cursor<'_, S> {
    /// The next row, number `index`.
    pub fn tensor_row(&mut self, index: u64) -> Result<Row, GgufError> {
        self.place = Place::TensorName(index);
        let offset = self.offset();
        let name = String::from_utf8(self.short_text(TENSOR_NAME_BYTES_MAX)?)
            .ok()
            .filter(|n| !n.chars().any(char::is_control))
            .ok_or_else(|| GgufError::Text {
                place: self.place.clone(),
                offset,
                expected: "UTF-8 without control characters",
            })?;
        let tensor: Box<str> = name.as_str().into();
        self.place = Place::Tensor(tensor.clone());

        let offset = self.offset();
        let found = self.u32()?;
        if found == 0 || found > DIMS_MAX {
            return Err(GgufError::Dimensions { tensor, offset, found, limit: DIMS_MAX });
        }
        let mut dims = Vec::with_capacity(DIMS_MAX as usize);
        for _ in 0..found {
            dims.push(self.u64()?);
        }
        let Some(shape) = Shape::new(&dims) else {
            return Err(GgufError::Shape { tensor, offset, dims });
        };

        let offset = self.offset();
        let number = self.u32()?;
        let Some(dtype) = DType::from_ggml(number) else {
            return Err(GgufError::TensorType { tensor, offset, number });
        };
        let cols = shape.cols();
        if !cols.is_multiple_of(dtype.block_len() as u64) {
            return Err(GgufError::PartialBlock { tensor, offset, dtype, cols });
        }
        let Some(bytes) = dtype.row_bytes(cols).and_then(|b| b.checked_mul(shape.rows())) else {
            return Err(GgufError::Size { tensor, offset, dtype, elements: shape.elements() });
        };

        let field = self.offset();
        let data_offset = self.u64()?;
        Ok(Row { info: TensorInfo { name, dtype, shape, range: 0..0 }, field, bytes, data_offset })
    }
}

/// Computes each row's range in a file of `file_bytes` whose data section starts at `data_start`.
pub(super) fn place_in_file(
    rows: Vec<Row>,
    data_start: u64,
    alignment: u32,
    file_bytes: u64,
) -> Result<Vec<TensorInfo>, GgufError> {
    let mut infos = Vec::with_capacity(rows.len());
    for Row { mut info, field: offset, bytes, data_offset: found } in rows {
        if !found.is_multiple_of(alignment.into()) {
            return Err(GgufError::Unaligned { tensor: info.name.into(), offset, found, alignment });
        }
        let range = data_start
            .checked_add(found)
            .and_then(|start| Some(start..start.checked_add(bytes)?))
            .filter(|range| range.end <= file_bytes);
        let Some(range) = range else {
            let tensor = info.name.into();
            return Err(GgufError::PastEnd { tensor, offset, found, bytes, data_start, file_bytes });
        };
        info.range = range;
        infos.push(info);
    }
    Ok(infos)
}

/// Fails when two tensors share bytes.
pub(super) fn check_overlap(infos: &[TensorInfo]) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = infos.iter().collect();
    order.sort_unstable_by_key(|info| info.range.start);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        if second.range.start < first.range.end {
            return Err(GgufError::Overlap {
                tensor: first.name.as_str().into(),
                other: second.name.as_str().into(),
                end: first.range.end,
                start: second.range.start,
            });
        }
    }
    Ok(())
}

/// Maps each name to its row's index. Fails at the second row of a name.
pub(super) fn index_names(rows: &[Row]) -> Result<HashMap<Box<str>, usize>, GgufError> {
    let mut index = HashMap::with_capacity(rows.len());
    for (number, row) in rows.iter().enumerate() {
        let name: Box<str> = row.info.name.as_str().into();
        if index.insert(name, number).is_some() {
            return Err(GgufError::DuplicateTensor {
                tensor: row.info.name.as_str().into(),
                offset: row.field,
            });
        }
    }
    Ok(index)
}
