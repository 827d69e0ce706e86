//! The loop that the vector kernels share for f32 activations: tiles of 4 weight rows by several activation rows.
//!
//! All tiles of a block of weight rows take some activation rows before the next ones. So both come from the second cache: 256
//! activation rows of 4,096 columns are 4 MiB, which each four weight rows would read again.
#![allow(unsafe_code)]

use std::ops::Range;

use zerocopy::IntoBytes;

use super::{MatrixView, Output};
use crate::backend::cpu::activations::ActivationView;
use crate::backend::cpu::prefetch::prefetch_far;
use crate::backend::cpu::quant::dequantize_row;
use crate::tensor::DType;

/// Weight rows per tile.
pub(super) const ROWS: usize = 4;

/// Most bytes of a block of weight rows: a quarter of a 1 MiB second-level cache, as 6 activation rows of 10,000 columns take.
const BLOCK_BYTES: usize = 256 << 10;

/// Weight rows of a tile (pointers repeat if there are fewer), and activation rows from `acts` on.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) weights: [*const u8; ROWS],
    pub(super) cols: usize,
    pub(super) acts: *const f32,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // for tiles of several activation rows
    pub(super) stride: usize,
    /// Prefetch distance of weights, in bytes.
    ahead: usize,
}

impl Tile {
    /// Prefetches the byte `ahead` bytes after byte `at` of each row.
    #[inline(always)]
    pub(super) fn prefetch(&self, at: usize) {
        for p in self.weights {
            prefetch_far(p.wrapping_add(at + self.ahead));
        }
    }
}

/// Prefetch distance: for short rows the same place of a later tile, else further on in each row. The processor's own
/// prefetch loses four short rows at every tile's end.
fn ahead(row_bytes: usize) -> usize {
    match row_bytes {
        0..=1024 => 3 * ROWS * row_bytes,
        1025..=4096 => ROWS * row_bytes,
        _ => 2048,
    }
}

/// Kernels of one instruction set.
pub(super) trait FloatKernels {
    /// Most activation rows per tile, at most 6.
    const TILE: usize;

    /// Computes the products of the tile's rows and `n` activation rows; `n` is 1 to [`Self::TILE`].
    ///
    /// # Safety
    /// The processor has the instruction set. Each of `tile.weights` points at `cols` values of F32, F16 or BF16.
    /// `tile.acts` points at `n` rows of `stride` floats: `cols` rounded up to 32, zero beyond `cols`.
    unsafe fn multiply(dtype: DType, n: usize, tile: Tile, sums: &mut [[f32; 6]; ROWS]);
}

/// Multiplies `rows` with all of `acts` into `out`. The caller has checked the shapes. Quantised rows are first
/// expanded to `values`.
///
/// # Safety
/// The processor has the kernels' instruction set.
pub(super) unsafe fn multiply<K: FloatKernels>(
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    values: &mut Vec<f32>,
    out: Output<'_>,
) {
    let block_rows = block_rows(weight);
    for first in rows.clone().step_by(block_rows) {
        let count = (rows.end - first).min(block_rows);
        let block = Block::new(weight, first, count, values);
        for m in (0..acts.rows()).step_by(K::TILE) {
            let n = (acts.rows() - m).min(K::TILE);
            let x = acts.values[m * acts.stride..][..n * acts.stride].as_ptr();
            for at in (0..count).step_by(ROWS) {
                let weights = block.tile(at);
                let tile =
                    Tile { weights, cols: weight.cols(), acts: x, stride: acts.stride, ahead: block.ahead };
                let mut sums = [[0.0; 6]; ROWS];
                // SAFETY: the caller vouches for the processor. `Block` returns pointers to whole rows. The slice above
                // holds `n` rows whose stride is `cols` rounded up to 32 and whose padding `ActivationBuffer` keeps zero.
                unsafe { K::multiply(block.dtype, n, tile, &mut sums) };
                for (i, sums) in sums.iter().enumerate().take(count - at) {
                    for (j, sum) in sums.iter().enumerate().take(n) {
                        out.values[(m + j) * out.stride + first - rows.start + at + i] = *sum;
                    }
                }
            }
        }
    }
}

/// Weight rows of a block, whole tiles.
fn block_rows(weight: &MatrixView<'_>) -> usize {
    let row_bytes = if weight.dtype().is_float() { weight.row_bytes() } else { 4 * weight.cols() };
    (BLOCK_BYTES / row_bytes.max(1) / ROWS).max(1) * ROWS
}

/// Weight rows of F32, F16 or BF16.
struct Block<'a> {
    bytes: &'a [u8],
    dtype: DType,
    rows: usize,
    /// Prefetch distance in bytes.
    ahead: usize,
}

impl<'a> Block<'a> {
    /// `count` rows from `first` on: in place, or expanded to `values`.
    fn new(weight: &MatrixView<'a>, first: usize, count: usize, values: &'a mut Vec<f32>) -> Self {
        let (dtype, cols, ahead) = (weight.dtype(), weight.cols(), ahead(weight.row_bytes()));
        if dtype.is_float() {
            return Self { bytes: weight.rows_bytes(first, count), dtype, rows: count, ahead };
        }
        values.resize(count * cols, 0.0);
        for (i, values) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            // `MatrixView::new` checked the type and the length.
            if dequantize_row(dtype, weight.row(first + i), values).is_err() {
                values.fill(f32::NAN);
            }
        }
        Self { bytes: values.as_bytes(), dtype: DType::F32, rows: count, ahead }
    }

    /// Pointers to the rows of a tile from `at` on. The last row is repeated to make four.
    fn tile(&self, at: usize) -> [*const u8; ROWS] {
        let row_bytes = self.bytes.len() / self.rows;
        std::array::from_fn(|i| self.bytes[(at + i).min(self.rows - 1) * row_bytes..].as_ptr())
    }
}
