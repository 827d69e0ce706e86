//! The first half of a dense feed-forward layer.

use super::super::kernels::matmul::{SwigluA8, SwigluF32, choice};
use super::super::kernels::ops::{GatedA8, GatedF32, GatedX16};
use super::super::scratch::padded;
use super::super::{DevicePtr, Grid};
use super::forms::FORMS;
use super::{Form, Matrix, Run, no_kernel, offset};
use crate::backend::BackendError;

impl Run<'_> {
    /// Norm, gate and up, `silu(gate) * up` as the down projection wants it.
    pub(super) fn ffn_input(
        &self,
        norm: DevicePtr<f32>,
        gate: Matrix,
        up: Matrix,
        form: Form,
    ) -> Result<(), BackendError> {
        let input = &self.scratch.input;
        for read in FORMS {
            if [gate, up].iter().any(|part| self.form_for(*part, self.rows()) == read) {
                self.norm(norm, DevicePtr::NULL, self.rows(), input, read)?;
            }
        }
        let halves = form == Form::Half || self.form_for(gate, self.rows()) == Form::Half;
        let whole = form == Form::Float || gate.rows.is_multiple_of(32);
        let together = !halves && gate.dtype == up.dtype && whole;
        if together { self.swiglu(gate, up, form) } else { self.gated(gate, up, form) }
    }

    /// Both products and their epilogue in one launch.
    fn swiglu(&self, gate: Matrix, up: Matrix, form: Form) -> Result<(), BackendError> {
        let (dtype, rows, n) = (gate.dtype, self.rows(), gate.rows);
        let (input, out) = (&self.scratch.input, &self.scratch.gated);
        let a8 = out.a8();
        let float = if form == Form::Float { out.values() } else { DevicePtr::NULL };
        match self.form_for(gate, rows) {
            Form::A8 => {
                let chosen = choice::swiglu_a8(dtype, rows).ok_or_else(|| no_kernel("swiglu", dtype))?;
                let from = input.a8();
                let arguments = SwigluA8 {
                    gate: gate.at,
                    up: up.at,
                    n,
                    gate_bias: gate.bias,
                    up_bias: up.bias,
                    cols: gate.cols,
                    codes: from.codes,
                    scales: from.scales,
                    sums: from.sums,
                    rows,
                    out_codes: a8.codes,
                    out_scales: a8.scales,
                    out_sums: a8.sums,
                    out: float,
                };
                let grid = choice::swiglu_grid(n, rows, chosen.columns);
                self.device.launch(self.stream, chosen.kernel, grid, &arguments)?;
            }
            Form::Float | Form::Half => {
                let chosen = choice::swiglu_f32(dtype, rows).ok_or_else(|| no_kernel("swiglu", dtype))?;
                let arguments = SwigluF32 {
                    gate: gate.at,
                    up: up.at,
                    n,
                    gate_bias: gate.bias,
                    up_bias: up.bias,
                    cols: gate.cols,
                    x: input.values(),
                    x_stride: gate.cols,
                    rows,
                    out_codes: a8.codes,
                    out_scales: a8.scales,
                    out_sums: a8.sums,
                    out: float,
                };
                let grid = choice::swiglu_grid(n, rows, chosen.columns);
                self.device.launch(self.stream, chosen.kernel, grid, &arguments)?;
            }
        }
        Ok(())
    }

    /// The products into rows of `[gate | up]`, then the epilogue: for two types, or a width that no group fits.
    fn gated(&self, gate: Matrix, up: Matrix, form: Form) -> Result<(), BackendError> {
        let (rows, n) = (self.rows(), gate.rows);
        let both: DevicePtr<f32> = self.scratch.gate_up.ptr();
        self.products(&[gate, up], &self.scratch.input, rows, both, 2 * n, false)?;
        let (out, up_at) = (&self.scratch.gated, offset(both, n as usize));
        let (gate_bias, up_bias) = (DevicePtr::NULL, DevicePtr::NULL); // added by the products
        match form {
            Form::A8 => {
                let (a8, padded) = (out.a8(), padded(n as usize) as u32);
                let arguments = GatedA8 {
                    gate: both,
                    up: up_at,
                    gate_bias,
                    up_bias,
                    codes: a8.codes,
                    scales: a8.scales,
                    sums: a8.sums,
                    stride: 2 * n,
                    cols: n,
                    padded,
                };
                let grid = Grid::xy(padded.div_ceil(1024), rows);
                self.device.launch(self.stream, GatedA8::swiglu_a8, grid, &arguments)?;
            }
            Form::Float => {
                let arguments = GatedF32 {
                    gate: both,
                    up: up_at,
                    gate_bias,
                    up_bias,
                    out: out.values(),
                    stride: 2 * n,
                    cols: n,
                };
                let grid = Grid::xy(n.div_ceil(1024), rows);
                self.device.launch(self.stream, GatedF32::swiglu_f32, grid, &arguments)?;
            }
            Form::Half => {
                let (halves, row_scales) = out.halves();
                let arguments = GatedX16 {
                    gate: both,
                    up: up_at,
                    gate_bias,
                    up_bias,
                    out: halves,
                    row_scales,
                    stride: 2 * n,
                    cols: n,
                };
                self.device.launch(self.stream, GatedX16::swiglu_x16, Grid::x(rows), &arguments)?;
            }
        }
        Ok(())
    }
}
