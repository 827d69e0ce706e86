//! Weight rows times activation rows: `out[m][row] = sum over k of weight[row][k] * activation[m][k]`.
//!
//! Single-threaded; pool threads call it for their own ranges of weight rows. Weights are read in place, at any
//! alignment.
//!
//! **One order of summation.** The bits of an output depend only on its weight row and its activation row. They do not
//! depend on the number of rows, the tile, the thread or the instruction set.
//! - 8-bit activations, groups g of 32 in rising order, `acc` f32 from 0: `acc = fma(f32(dot_g) * act_scale_g,
//!   weight_scale_g, acc)`, with `dot_g` exact in i32. Then the same with the fine codes and their scale, unless that
//!   scale is 0. Then, for types with a minimum, `acc = fma(act_scaled_sum_g, min_g, acc)`. Types with a scale per 16
//!   do each of these steps for both halves, with a scaled sum of each half.
//! - f32 activations: 16 lanes; lane l sums k = l, l+16, ... by fma (a short last step is padded with zeros). Then
//!   lanes l and l+8, l+4, l+2, l+1 are added.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod codecs;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod floats;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod strips;

use std::ops::Range;

use super::activations::ActivationView;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::isa::Isa;
use super::isa::Kernels;
use super::quant::{self, GroupKind};
use crate::backend::ActivationType;
use crate::tensor::DType;

/// Errors of a refused product; nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatmulError {
    /// The CPU has no arithmetic for the weights' type.
    #[error("type {0} has no CPU arithmetic")]
    Unsupported(DType),
    /// The bytes do not match this type and shape.
    #[error("{rows} rows of {cols} values of {dtype} do not take {bytes} bytes")]
    Size {
        /// Weight type.
        dtype: DType,
        /// Weight rows.
        rows: usize,
        /// Values per row.
        cols: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// Weight rows and activation rows differ in length.
    #[error("weight rows hold {weight} values, activation rows {activation}")]
    Cols {
        /// Values per weight row.
        weight: usize,
        /// Values per activation row.
        activation: usize,
    },
    /// The matrix does not have these rows.
    #[error("weight rows {start}..{end} are outside a matrix of {rows} rows")]
    Range {
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Rows of the matrix.
        rows: usize,
    },
    /// The output is too small.
    #[error("{need} outputs at stride {stride} do not fit in {len}")]
    Output {
        /// Values that must fit, including gaps between rows.
        need: usize,
        /// Distance between output rows.
        stride: usize,
        /// Length of the output.
        len: usize,
    },
}

/// A weight matrix read in place: `rows` rows of `cols` values, row after row.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> MatrixView<'a> {
    /// A matrix over `bytes`, at any alignment.
    ///
    /// # Errors
    /// [`MatmulError::Unsupported`], [`MatmulError::Size`].
    pub fn new(dtype: DType, rows: usize, cols: usize, bytes: &'a [u8]) -> Result<Self, MatmulError> {
        if !quant::is_supported(dtype) {
            return Err(MatmulError::Unsupported(dtype));
        }
        let row_bytes = dtype.row_bytes(cols as u64).and_then(|b| usize::try_from(b).ok());
        match row_bytes {
            Some(row_bytes) if row_bytes.checked_mul(rows) == Some(bytes.len()) => {
                Ok(Self { dtype, rows, cols, row_bytes, bytes })
            }
            _ => Err(MatmulError::Size { dtype, rows, cols, bytes: bytes.len() }),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows: outputs of a projection.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row: inputs of a projection.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The bytes of row `index`. Panics past the last row.
    pub fn row(&self, index: usize) -> &'a [u8] {
        self.rows_bytes(index, 1)
    }

    /// The bytes of `count` rows from `first` on. Panics past the last row.
    fn rows_bytes(&self, first: usize, count: usize) -> &'a [u8] {
        &self.bytes[first * self.row_bytes..][..count * self.row_bytes]
    }
}

/// Scratch memory of a call. Each thread keeps one between calls, so that calls do not allocate.
#[derive(Debug, Default)]
pub struct MatmulScratch {
    /// Weight rows expanded to f32.
    values: Vec<f32>,
    #[cfg(target_arch = "x86_64")]
    avx2: avx2::Scratch,
    #[cfg(target_arch = "x86_64")]
    avx512: avx512::Scratch,
    #[cfg(target_arch = "aarch64")]
    neon: neon::Scratch,
}

impl MatmulScratch {
    /// Empty; the first calls grow it.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Destination of a call: `out[m * stride + (row - rows.start)]`.
#[derive(Debug)]
struct Output<'a> {
    values: &'a mut [f32],
    stride: usize,
}

impl Kernels {
    /// Multiplies weight rows `rows` with every row of `acts`, into `out[m * out_stride + (row - rows.start)]`. Other
    /// elements of `out` keep their values.
    ///
    /// Quantised weights take the A8 form of the activations under [`ActivationType::Int8`], else the f32 form; F32, F16
    /// and BF16 weights always take the f32 form. Non-finite weights or activations give non-finite outputs. Reads
    /// the range's bytes about once per 256 activation rows.
    ///
    /// # Errors
    /// [`MatmulError`] if shapes do not match; `out` is then unchanged.
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_rows(
        self,
        weight: &MatrixView<'_>,
        rows: Range<usize>,
        acts: &ActivationView<'_>,
        mode: ActivationType,
        scratch: &mut MatmulScratch,
        out: &mut [f32],
        out_stride: usize,
    ) -> Result<(), MatmulError> {
        check(weight, &rows, acts, out.len(), out_stride)?;
        if rows.is_empty() || acts.rows() == 0 {
            return Ok(());
        }
        let out = Output { values: out, stride: out_stride };
        let int8 = match mode {
            ActivationType::Int8 => GroupKind::of(weight.dtype),
            ActivationType::F32 => None,
        };
        match (self.isa(), int8) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Vnni, Some(_)) => avx512::int8(self, weight, rows, acts, scratch, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Vnni, None) => avx512::float(self, weight, rows, acts, scratch, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Some(_)) => avx2::int8(self, weight, rows, acts, scratch, out),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, None) => avx2::float(self, weight, rows, acts, scratch, out),
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, Some(_)) => neon::int8(self, weight, rows, acts, scratch, out),
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, None) => neon::float(self, weight, rows, acts, scratch, out),
            (_, Some(kind)) => portable::int8(weight, rows, acts, kind, out),
            (_, None) => portable::float(weight, rows, acts, scratch, out),
        }
        Ok(())
    }
}

fn check(
    weight: &MatrixView<'_>,
    rows: &Range<usize>,
    acts: &ActivationView<'_>,
    out_len: usize,
    stride: usize,
) -> Result<(), MatmulError> {
    if weight.cols != acts.cols() {
        return Err(MatmulError::Cols { weight: weight.cols, activation: acts.cols() });
    }
    if rows.start > rows.end || rows.end > weight.rows {
        return Err(MatmulError::Range { start: rows.start, end: rows.end, rows: weight.rows });
    }
    if acts.rows() == 0 || rows.is_empty() {
        return Ok(());
    }
    let need = (acts.rows() - 1).saturating_mul(stride).saturating_add(rows.len());
    if need > out_len || (acts.rows() > 1 && stride < rows.len()) {
        return Err(MatmulError::Output { need, stride, len: out_len });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
