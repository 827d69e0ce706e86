//! The loop that the vector kernels share for f32 activations: tiles of 4 weight rows by several activation rows.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{MatrixView, Output};
use crate::backend::cpu::activations::ActivationView;
use crate::backend::cpu::prefetch::prefetch_far;
use crate::backend::cpu::quant::dequantize_row;
use crate::tensor::DType;

/// Weight rows per tile.
pub(super) const ROWS: usize = 4;

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
    let ahead = ahead(weight.row_bytes());
    for at in (0..rows.len()).step_by(ROWS) {
        let count = (rows.len() - at).min(ROWS);
        let (weights, dtype) = tile_rows(weight, rows.start + at, count, values);
        for m in (0..acts.rows()).step_by(K::TILE) {
            let n = (acts.rows() - m).min(K::TILE);
            let x = acts.values[m * acts.stride..][..n * acts.stride].as_ptr();
            let tile = Tile { weights, cols: weight.cols(), acts: x, stride: acts.stride, ahead };
            let mut sums = [[0.0; 6]; ROWS];
            // SAFETY: the caller vouches for the processor. `tile_rows` returns pointers to whole rows. The slice above
            // holds `n` rows whose stride is `cols` rounded up to 32 and whose padding `ActivationBuffer` keeps zero.
            unsafe { K::multiply(dtype, n, tile, &mut sums) };
            for (i, sums) in sums.iter().enumerate().take(count) {
                for (j, sum) in sums.iter().enumerate().take(n) {
                    out.values[(m + j) * out.stride + at + i] = *sum;
                }
            }
        }
    }
}

/// Pointers to `count` rows from `first` on, and their type. The last row is repeated to make four.
fn tile_rows(
    weight: &MatrixView<'_>,
    first: usize,
    count: usize,
    values: &mut Vec<f32>,
) -> ([*const u8; ROWS], DType) {
    let row = |i: usize| i.min(count - 1);
    let cols = weight.cols();
    if matches!(weight.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return (std::array::from_fn(|i| weight.row(first + row(i)).as_ptr()), weight.dtype());
    }
    values.resize(ROWS * cols, 0.0);
    for (i, values) in values.chunks_exact_mut(cols).enumerate().take(count) {
        // `MatrixView::new` checked the type and the length.
        if dequantize_row(weight.dtype(), weight.row(first + i), values).is_err() {
            values.fill(f32::NAN);
        }
    }
    (std::array::from_fn(|i| values[row(i) * cols..].as_ptr().cast()), DType::F32)
}
