//! Matrix products: which kernel, over which matrices at once.

use super::super::DevicePtr;
use super::super::kernels::matmul::{GemvA8, GemvF32, choice};
use super::super::scratch::Activations as Rows;
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
        let alike = |a: &Matrix, b: &Matrix| a.dtype == b.dtype && a.cols == b.cols;
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
        match self.form(dtype) {
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

    /// Residual += W x.
    pub(super) fn add_to_residual(&self, input: &Rows, matrix: Matrix) -> Result<(), BackendError> {
        let out = self.scratch.residual.ptr();
        self.products(&[matrix], input, self.rows(), out, self.dims.hidden as u32, true)
    }
}
