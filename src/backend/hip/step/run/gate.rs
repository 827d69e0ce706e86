//! Gates: two products and their gate in one launch where a kernel exists, else a gate over computed values.

use super::forms::{A8, row_threads};
use super::{Run, Weights, activation, no_kernel};
use crate::backend::BackendError;
use crate::backend::hip::kernels::matmul::{GemvGatedA8, GemvGatedF32, choice};
use crate::backend::hip::kernels::ops::{GatedA8, GatedF32, GatedX16};
use crate::backend::hip::step::bind::{Form, Gate, GatedProducts, View, form, fuses, of_products};
use crate::backend::hip::step::scratch::padded;
use crate::backend::hip::{DevicePtr, Grid};

/// Factors and biases of the gates and ups of rows that belong to experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Expert of each row; null for rows without factors and biases.
    pub experts: DevicePtr<u32>,
    /// A number for each expert, or null.
    pub gate_factor: DevicePtr<f32>,
    /// A number for each expert, or null.
    pub up_factor: DevicePtr<f32>,
    /// A row for each expert, or null.
    pub gate_bias: DevicePtr<f32>,
    /// A row for each expert, or null.
    pub up_bias: DevicePtr<f32>,
}

impl Terms {
    /// Of rows that belong to no expert.
    pub const NONE: Self = Self {
        experts: DevicePtr::NULL,
        gate_factor: DevicePtr::NULL,
        up_factor: DevicePtr::NULL,
        gate_bias: DevicePtr::NULL,
        up_bias: DevicePtr::NULL,
    };
}

impl Run<'_> {
    pub(super) fn gated_products(
        &self,
        unit: &GatedProducts,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let out = unit.forms.at(rows).only().unwrap_or(Form::Float);
        if of_products(unit.activation) && fuses(self.bound.modes, &unit.gate, &unit.up, out, rows) {
            return self.fused(unit, out, rows, weights);
        }
        let Some(both) = unit.both else { return Err(no_kernel("gate", unit.gate.dtype)) };
        let matrices = [weights.matrix(&unit.gate), weights.matrix(&unit.up)];
        self.products(&matrices, &unit.from, rows, self.at(both), both.stride, false)?;
        let cols = unit.gate.rows;
        let up = Some(View { column: both.column + cols, ..both });
        let gate =
            Gate { activation: unit.activation, gate: both, up, cols, out: unit.out, forms: unit.forms };
        self.gate(&gate, rows, &Terms::NONE)
    }

    /// Launches both products and their gate at once.
    fn fused(
        &self,
        unit: &GatedProducts,
        out: Form,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let (gate, up) = (weights.matrix(&unit.gate), weights.matrix(&unit.up));
        let (dtype, n, cols) = (gate.dtype, gate.rows, gate.cols);
        let to = self.a8(&unit.out);
        let float = if out == Form::Float { self.floats(&unit.out) } else { DevicePtr::NULL };
        if form(self.bound.modes, dtype, rows, cols) == Form::A8 {
            let chosen = choice::gated_a8(dtype, rows).ok_or_else(|| no_kernel("gate", dtype))?;
            let A8 { codes, scales, sums } = self.a8(&unit.from);
            let arguments = GemvGatedA8 {
                gate: gate.at,
                up: up.at,
                n,
                gate_bias: gate.bias,
                up_bias: up.bias,
                cols,
                codes,
                scales,
                sums,
                rows,
                activation: activation(unit.activation),
                out_codes: to.codes,
                out_scales: to.scales,
                out_sums: to.sums,
                out: float,
            };
            let grid = choice::gated_grid(n, rows, chosen.columns);
            return Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?);
        }
        let chosen = choice::gated_f32(dtype, rows).ok_or_else(|| no_kernel("gate", dtype))?;
        let arguments = GemvGatedF32 {
            gate: gate.at,
            up: up.at,
            n,
            gate_bias: gate.bias,
            up_bias: up.bias,
            cols,
            x: self.floats(&unit.from),
            x_stride: unit.from.float.map_or(cols, |view| view.stride),
            rows,
            activation: activation(unit.activation),
            out_codes: to.codes,
            out_scales: to.scales,
            out_sums: to.sums,
            out: float,
        };
        let grid = choice::gated_grid(n, rows, chosen.columns);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    pub(super) fn gate(&self, unit: &Gate, rows: u32, terms: &Terms) -> Result<(), BackendError> {
        let &Terms { experts, gate_factor, up_factor, gate_bias, up_bias } = terms;
        let (gate, cols, stride) = (self.at(unit.gate), unit.cols, unit.gate.stride);
        let up = unit.up.map_or(DevicePtr::NULL, |up| self.at(up));
        let activation = activation(unit.activation);
        match unit.forms.at(rows).only().unwrap_or(Form::Float) {
            Form::A8 => {
                let (A8 { codes, scales, sums }, padded) = (self.a8(&unit.out), padded(cols as usize) as u32);
                let arguments = GatedA8 {
                    gate,
                    up,
                    experts,
                    gate_factor,
                    up_factor,
                    gate_bias,
                    up_bias,
                    codes,
                    scales,
                    sums,
                    stride,
                    cols,
                    padded,
                    activation,
                };
                let grid = Grid::xy(padded.div_ceil(1024), rows);
                self.device.launch(self.stream, GatedA8::gated_a8, grid, &arguments)?;
            }
            Form::Float => {
                let out = self.floats(&unit.out);
                let arguments = GatedF32 {
                    gate,
                    up,
                    experts,
                    gate_factor,
                    up_factor,
                    gate_bias,
                    up_bias,
                    out,
                    stride,
                    cols,
                    activation,
                };
                let grid = Grid::xy(cols.div_ceil(1024), rows);
                self.device.launch(self.stream, GatedF32::gated_f32, grid, &arguments)?;
            }
            Form::Half => {
                let (out, row_scales) = self.halves(&unit.out);
                let tiled = self.tiled();
                let arguments = GatedX16 {
                    gate,
                    up,
                    experts,
                    gate_factor,
                    up_factor,
                    gate_bias,
                    up_bias,
                    out,
                    row_scales,
                    stride,
                    cols,
                    activation,
                    tiled,
                };
                let grid = Grid::x(rows).threads(row_threads(cols));
                self.device.launch(self.stream, GatedX16::gated_x16, grid, &arguments)?;
            }
        }
        Ok(())
    }
}
