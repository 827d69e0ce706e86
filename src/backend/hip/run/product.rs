//! Matrix products: which kernel, over which matrices at once.

use super::super::kernels::matmul::{Dequant, GemmF16, GemvA8, GemvF32, choice};
use super::super::scratch::{Activations as Rows, SLAB_BYTES, WIDE_ROWS};
use super::super::{DevicePtr, Grid};
use super::{Form, Matrix, Run, no_kernel, offset};
use crate::backend::BackendError;

/// Matrices that one launch takes.
const TOGETHER: usize = 3;

impl Run<'_> {
    /// `out[row] = [W0 x, W1 x, ...]` (or added to what is there) for matrices that share an input. Neighbours of one type
    /// are one launch, up to three.
    pub(super) fn products(
        &self,
        matrices: &[Matrix],
        input: &Rows,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: bool,
    ) -> Result<(), BackendError> {
        let mut column = 0;
        let alike = |a: &Matrix, b: &Matrix| (a.dtype, a.cols) == (b.dtype, b.cols);
        for group in matrices.chunk_by(alike).flat_map(|run| run.chunks(TOGETHER)) {
            self.group(group, input, rows, offset(out, column), out_stride, add)?;
            column += group.iter().map(|matrix| matrix.rows as usize).sum::<usize>();
        }
        Ok(())
    }

    fn group(
        &self,
        group: &[Matrix],
        input: &Rows,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: bool,
    ) -> Result<(), BackendError> {
        let Some(first) = group.first() else { return Ok(()) };
        let of = |index: usize| group.get(index);
        let (w, n) = (|i| of(i).map_or(DevicePtr::NULL, |m| m.at), |i| of(i).map_or(0, |m| m.rows));
        let bias = |i| of(i).map_or(DevicePtr::NULL, |m| m.bias);
        let outputs = [n(0), n(1), n(2)];
        let (dtype, cols, add) = (first.dtype, first.cols, u32::from(add));
        match self.form_for(*first, rows) {
            Form::Half => {
                let mut column = 0;
                for matrix in group {
                    self.expand_and_multiply(*matrix, input, rows, offset(out, column), out_stride, add)?;
                    column += matrix.rows as usize;
                }
            }
            Form::A8 => {
                let chosen = choice::gemv_a8(dtype, rows).ok_or_else(|| no_kernel("gemv", dtype))?;
                let a8 = input.a8();
                let arguments = GemvA8 {
                    w0: w(0),
                    w1: w(1),
                    w2: w(2),
                    n0: outputs[0],
                    n1: outputs[1],
                    n2: outputs[2],
                    bias0: bias(0),
                    bias1: bias(1),
                    bias2: bias(2),
                    cols,
                    codes: a8.codes,
                    scales: a8.scales,
                    sums: a8.sums,
                    rows,
                    out,
                    out_stride,
                    add,
                };
                let grid = choice::gemv_grid(outputs, rows, chosen.columns);
                self.device.launch(self.stream, chosen.kernel, grid, &arguments)?;
            }
            Form::Float => {
                let chosen = choice::gemv_f32(dtype, rows).ok_or_else(|| no_kernel("gemv", dtype))?;
                let arguments = GemvF32 {
                    w0: w(0),
                    w1: w(1),
                    w2: w(2),
                    n0: outputs[0],
                    n1: outputs[1],
                    n2: outputs[2],
                    bias0: bias(0),
                    bias1: bias(1),
                    bias2: bias(2),
                    cols,
                    x: input.values(),
                    x_stride: cols,
                    rows,
                    out,
                    out_stride,
                    add,
                };
                let grid = choice::gemv_grid(outputs, rows, chosen.columns);
                self.device.launch(self.stream, chosen.kernel, grid, &arguments)?;
            }
        }
        Ok(())
    }

    /// In which form rows meet a matrix.
    pub(super) fn form_for(&self, matrix: Matrix, rows: u32) -> Form {
        self.form(matrix.dtype, rows, matrix.cols)
    }

    /// A matrix product of many rows: weights are expanded to f16 slab by slab, each multiplied while it is in the cache.
    fn expand_and_multiply(
        &self,
        matrix: Matrix,
        input: &Rows,
        rows: u32,
        out: DevicePtr<f32>,
        out_stride: u32,
        add: u32,
    ) -> Result<(), BackendError> {
        let stride = matrix.cols.next_multiple_of(8);
        let (x, x_scale) = input.halves();
        let slab: DevicePtr<u16> = self.scratch.slab.ptr();
        let expand = choice::dequant(matrix.dtype);
        // F16 has that form already: one slab is all of it.
        let at_once = match expand {
            None => matrix.rows,
            Some(_) => {
                let slab = self.scratch.slab.len();
                let room = if rows < WIDE_ROWS { slab } else { slab.min(SLAB_BYTES) };
                (room as u32 / (2 * stride)).min(matrix.rows)
            }
        };
        if at_once == 0 {
            return Err(BackendError::Internal("a row of weights is longer than a slab".to_owned()));
        }
        for first in (0..matrix.rows).step_by(at_once as usize) {
            let n = at_once.min(matrix.rows - first);
            let w = match expand {
                None => matrix.at.cast(),
                Some(kernel) => {
                    let arguments = Dequant {
                        planes: matrix.at,
                        weights: u64::from(matrix.rows) * u64::from(matrix.cols),
                        cols: matrix.cols,
                        first,
                        rows: n,
                        out: slab,
                    };
                    let groups = (u64::from(n) * u64::from(stride)).div_ceil(32);
                    let grid = Grid::x(groups.div_ceil(256).clamp(1, 1 << 16) as u32);
                    self.device.launch(self.stream, kernel, grid, &arguments)?;
                    slab
                }
            };
            let arguments = GemmF16 {
                w,
                w_stride: stride,
                n,
                x,
                x_stride: matrix.cols,
                x_scale,
                k: matrix.cols,
                rows,
                out: offset(out, first as usize),
                out_stride,
                bias: offset(matrix.bias, first as usize),
                add,
            };
            let (kernel, grid) = choice::gemm(n, rows);
            self.device.launch(self.stream, kernel, grid, &arguments)?;
        }
        Ok(())
    }

    /// Residual += W x.
    pub(super) fn add_to_residual(&self, input: &Rows, matrix: Matrix) -> Result<(), BackendError> {
        let out = self.scratch.residual.ptr();
        self.products(&[matrix], input, self.rows(), out, self.dims.hidden as u32, true)
    }
}
