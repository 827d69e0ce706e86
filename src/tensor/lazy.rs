//! A tensor's description: type, shape and byte range, with no byte read.

use std::ops::Range;
use std::sync::Arc;

use super::{DType, MapError, MappedFile};

/// Dimensions of a tensor, fastest-varying first as in GGUF; a matrix `[cols, rows]` holds `rows` rows of `cols`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [u64; 4],
    n_dims: u8,
}

impl Shape {
    /// A shape of 1 to 4 dimensions, each at least 1, whose product fits in u64; otherwise `None`.
    pub fn new(dims: &[u64]) -> Option<Self> {
        if dims.is_empty() || dims.len() > 4 || dims.contains(&0) {
            return None;
        }
        dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        let mut all = [1; 4];
        all[..dims.len()].copy_from_slice(dims);
        Some(Self { dims: all, n_dims: dims.len() as u8 })
    }

    /// The dimensions in file order, fastest first.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.n_dims)]
    }

    /// Values in a row: the fastest dimension.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// Rows: the product of all dimensions but the fastest.
    pub fn rows(&self) -> u64 {
        self.dims[1] * self.dims[2] * self.dims[3]
    }

    /// Total number of values.
    pub fn elements(&self) -> u64 {
        self.cols() * self.rows()
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let texts: Vec<String> = self.dims().iter().map(u64::to_string).collect();
        write!(f, "[{}]", texts.join(", "))
    }
}

#[derive(Debug)]
struct Inner {
    name: Box<str>,
    dtype: DType,
    shape: Shape,
    range: Range<u64>,
    file: Arc<MappedFile>,
}

/// Handle of one tensor in a mapped file: name, type, shape, file range. Clones share it.
///
/// Creating one reads no weight byte. It is `Send` and `Sync` by its parts alone, and keeps the mapping alive.
#[derive(Clone, Debug)]
pub struct LazyTensor(Arc<Inner>);

impl LazyTensor {
    /// A handle on `range` of `file`.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`] when the range lies outside the file, or its size differs from that of type and shape.
    pub fn new(
        name: &str,
        dtype: DType,
        shape: Shape,
        range: Range<u64>,
        file: Arc<MappedFile>,
    ) -> Result<Self, MapError> {
        let need = dtype.row_bytes(shape.cols()).and_then(|b| b.checked_mul(shape.rows()));
        if need != range.end.checked_sub(range.start) || range.end > file.len() {
            return Err(MapError::OutOfRange { start: range.start, end: range.end, len: file.len() });
        }
        Ok(Self(Arc::new(Inner { name: name.into(), dtype, shape, range, file })))
    }

    /// Rows `rows` as a separate tensor called `name`, such as one expert of a tensor that holds all of a layer's.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`] when the rows do not exist or the range is empty.
    pub fn part(&self, name: &str, rows: Range<u64>) -> Result<Self, MapError> {
        let Range { start, end } = self.range();
        let outside = || MapError::OutOfRange { start, end, len: self.file().len() };
        let row_bytes = self.dtype().row_bytes(self.shape().cols()).ok_or_else(outside)?;
        let count = rows.end.checked_sub(rows.start).filter(|_| rows.end <= self.shape().rows());
        let shape = count.and_then(|count| Shape::new(&[self.shape().cols(), count])).ok_or_else(outside)?;
        // At most the tensor's own rows, whose bytes were counted without overflow when it was made.
        let range = start + rows.start * row_bytes..start + rows.end * row_bytes;
        Self::new(name, self.dtype(), shape, range, Arc::clone(self.file()))
    }

    /// Values `columns` of a one-row tensor as a separate tensor called `name`, such as a part of a bias.
    ///
    /// # Errors
    /// [`MapError::OutOfRange`] when the values do not exist, the range is empty, or it splits a quant block.
    pub fn columns(&self, name: &str, columns: Range<u64>) -> Result<Self, MapError> {
        let Range { start, end } = self.range();
        let outside = || MapError::OutOfRange { start, end, len: self.file().len() };
        let count = columns.end.checked_sub(columns.start).filter(|_| columns.end <= self.shape().cols());
        let whole = columns.start.is_multiple_of(self.dtype().block_len() as u64) && self.shape().rows() == 1;
        let shape = count.filter(|_| whole).and_then(|count| Shape::new(&[count])).ok_or_else(outside)?;
        // At most the tensor's own row, whose bytes were counted without overflow when it was made.
        let bytes = |values| self.dtype().row_bytes(values).ok_or_else(outside);
        let first = start + bytes(columns.start)?;
        Self::new(name, self.dtype(), shape, first..first + bytes(shape.cols())?, Arc::clone(self.file()))
    }

    /// The tensor's name in the file, such as `blk.0.attn_q.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Dimensions.
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// Byte range in the file.
    pub fn range(&self) -> Range<u64> {
        self.0.range.clone()
    }

    /// Size in bytes.
    pub fn byte_len(&self) -> u64 {
        self.0.range.end - self.0.range.start
    }

    /// The mapped file that holds the bytes.
    pub fn file(&self) -> &Arc<MappedFile> {
        &self.0.file
    }

    /// The bytes, in place in the mapping. Access may fault pages in; nothing is copied.
    pub fn bytes(&self) -> &[u8] {
        // `new` checked the range against the mapping's length, which never changes.
        self.0.file.bytes(self.0.range.clone()).unwrap_or(&[])
    }

    /// True when both handles refer to the same bytes of the same mapping, such as a tied output matrix and the
    /// embedding.
    pub fn same_bytes(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.file, &other.0.file) && self.0.range == other.0.range
    }

    /// True when both handles refer to the same tensor of the same mapping.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_part_is_its_rows_and_nothing_else() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&(0..=255).collect::<Vec<u8>>()).unwrap();
        let file = MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap();
        // Three experts of two rows of four values, after 16 other bytes.
        let shape = Shape::new(&[4, 2, 3]).unwrap();
        let all = LazyTensor::new("all", DType::F32, shape, 16..112, file).unwrap();
        let second = all.part("all[1]", 2..4).unwrap();
        assert_eq!((second.name(), second.shape().dims(), second.range()), ("all[1]", &[4, 2][..], 48..80));
        assert_eq!(second.bytes(), (48..80).collect::<Vec<u8>>());
        for rows in [0..0, 2..2, 5..7, 6..8, Range { start: 3, end: 2 }, 0..u64::MAX, u64::MAX - 1..u64::MAX]
        {
            assert!(matches!(all.part("none", rows), Err(MapError::OutOfRange { .. })));
        }
        let row = all.part("all[0]", 1..2).unwrap();
        let end = row.columns("all[0][1..4]", 1..4).unwrap();
        assert_eq!((end.shape().dims(), end.range()), (&[3][..], 36..48));
        assert_eq!(end.bytes(), (36..48).collect::<Vec<u8>>());
        for columns in [0..0, 2..5, Range { start: 3, end: 2 }, 0..u64::MAX, u64::MAX - 1..u64::MAX] {
            assert!(matches!(row.columns("none", columns), Err(MapError::OutOfRange { .. })));
        }
        assert!(all.columns("of many rows", 0..2).is_err());
    }
}
