//! Activations in the form that the weights they meet ask for.

use super::super::kernels::ops::{NormA8, NormF32, NormX16, QuantiseA8, QuantiseX16};
use super::super::scratch::{Activations as Rows, MATRIX_ROWS, padded};
use super::super::{DevicePtr, Grid};
use super::Run;
use crate::backend::{Activations, BackendError};
use crate::tensor::DType;

/// A form of activation rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// 8-bit codes with scales and sums.
    A8,
    /// f32.
    Float,
    /// f16 with a scale for each row: for matrix products of many rows.
    Half,
}

/// All forms.
pub const FORMS: [Form; 3] = [Form::A8, Form::Float, Form::Half];

/// Whether a type holds plain numbers.
pub fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Threads that take a row of `cols` values in fours, all at once if a block has as many: one row is bound by latency. Not by the
/// number of rows: a row's bits depend on it.
fn norm_threads(cols: u32) -> u32 {
    cols.div_ceil(4).next_multiple_of(64).clamp(64, 1024)
}

impl Run<'_> {
    /// In which form `rows` rows of `cols` values meet weights of a type. F32 weights would lose by f16.
    pub(super) fn form(&self, dtype: DType, rows: u32, cols: u32) -> Form {
        let many = rows as usize >= MATRIX_ROWS && cols.is_multiple_of(8) && dtype != DType::F32;
        match self.activations {
            Activations::F32 => Form::Float,
            Activations::Int8 if many => Form::Half,
            Activations::Int8 if is_float(dtype) => Form::Float,
            Activations::Int8 => Form::A8,
        }
    }

    /// RMS norm of residual rows (those that `which` names, or the first ones) into `out`.
    pub(super) fn norm(
        &self,
        weight: DevicePtr<f32>,
        which: DevicePtr<u32>,
        rows: u32,
        out: &Rows,
        form: Form,
    ) -> Result<(), BackendError> {
        let (x, cols, eps) = (self.scratch.residual.ptr(), self.dims.hidden as u32, self.dims.norm_eps);
        let (device, stream, grid) = (self.device, self.stream, Grid::x(rows).threads(norm_threads(cols)));
        match form {
            Form::A8 => {
                let a8 = out.a8();
                let arguments = NormA8 {
                    x,
                    weight,
                    rows: which,
                    codes: a8.codes,
                    scales: a8.scales,
                    sums: a8.sums,
                    eps,
                    cols,
                    padded: padded(self.dims.hidden) as u32,
                };
                device.launch(stream, NormA8::norm_a8, grid, &arguments)?;
            }
            Form::Float => {
                let arguments = NormF32 { x, weight, rows: which, out: out.values(), eps, cols };
                device.launch(stream, NormF32::norm_f32, grid, &arguments)?;
            }
            Form::Half => {
                let (halves, row_scales) = out.halves();
                let arguments = NormX16 { x, weight, rows: which, out: halves, row_scales, eps, cols };
                device.launch(stream, NormX16::norm_x16, grid, &arguments)?;
            }
        }
        Ok(())
    }

    /// Another form of f32 rows without gaps.
    pub(super) fn convert(
        &self,
        x: DevicePtr<f32>,
        cols: u32,
        out: &Rows,
        form: Form,
    ) -> Result<(), BackendError> {
        if form == Form::Half {
            let (halves, row_scales) = out.halves();
            let arguments = QuantiseX16 { x, out: halves, row_scales, stride: cols, cols };
            let grid = Grid::x(self.rows());
            return Ok(self.device.launch(self.stream, QuantiseX16::quantise_x16, grid, &arguments)?);
        }
        let (a8, padded) = (out.a8(), padded(cols as usize) as u32);
        let arguments =
            QuantiseA8 { x, codes: a8.codes, scales: a8.scales, sums: a8.sums, stride: cols, cols, padded };
        let grid = Grid::xy(padded.div_ceil(1024), self.rows());
        Ok(self.device.launch(self.stream, QuantiseA8::quantise_a8, grid, &arguments)?)
    }
}
