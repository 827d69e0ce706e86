//! Expert choice, and the chosen experts' work on pairs of a row and an expert.

use super::forms::A8;
use super::{Run, Weights, activation, no_kernel};
use crate::backend::BackendError;
use crate::backend::hip::kernels::matmul::{ExpertsA8, ExpertsF32, ExpertsGatedA8, ExpertsGatedF32, choice};
use crate::backend::hip::kernels::ops;
use crate::backend::hip::step::bind::{Experts, Form, Route, pair_form};
use crate::backend::hip::{DevicePtr, Grid};
use crate::tensor::DType;

/// Rows per workgroup of `route`.
const ROUTE_ROWS: u32 = 8;

/// One matrix of a layer's experts (gate, up or down): all of one type and size, found through an address table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertTable {
    /// Address of each expert's matrix; 0 for experts that are not resident.
    pub table: DevicePtr<u64>,
    /// Element type.
    pub dtype: DType,
    /// Outputs of a matrix.
    pub rows: u32,
    /// Inputs of a matrix.
    pub cols: u32,
}

impl Run<'_> {
    pub(super) fn route(&self, unit: &Route, rows: u32) -> Result<(), BackendError> {
        let arguments = ops::Route {
            logits: self.at(unit.logits),
            experts: self.plane(unit.out.chosen),
            weights: self.plane(unit.out.weights),
            scale: unit.scale,
            rows,
            count: unit.count,
            used: unit.out.used,
            normalise: u32::from(unit.normalise),
        };
        let grid = Grid::x(rows.div_ceil(ROUTE_ROWS));
        Ok(self.device.launch(self.stream, ops::Route::route, grid, &arguments)?)
    }

    pub(super) fn experts(
        &self,
        unit: &Experts,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let tables = weights.experts.get(unit.set).copied().flatten();
        let tables = tables.ok_or(BackendError::Absent("no expert of a layer is loaded"))?;
        let [gate, up, down] = tables;
        let used = unit.choice.used;
        self.experts_gated(unit, [gate, up], self.pair_form(down.dtype), rows * used)?;
        self.experts_down(unit, down, rows * used)?;
        let cols = down.rows;
        let arguments = ops::Combine {
            results: self.plane(unit.results),
            weights: self.plane(unit.choice.weights),
            residual: self.at(unit.out),
            used,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, ops::Combine::combine, grid, &arguments)?)
    }

    fn pair_form(&self, dtype: DType) -> Form {
        pair_form(self.bound.modes.activations, dtype)
    }

    fn experts_gated(
        &self,
        unit: &Experts,
        [gate, up]: [ExpertTable; 2],
        out: Form,
        pairs: u32,
    ) -> Result<(), BackendError> {
        let (dtype, n, cols) = (gate.dtype, gate.rows, gate.cols);
        let (slots, to) = (unit.choice.used, self.a8(&unit.gated));
        let float = if out == Form::Float { self.floats(&unit.gated) } else { DevicePtr::NULL };
        let (experts, grid) = (self.plane(unit.choice.chosen), choice::experts_gated_grid(n, pairs));
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_gated_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let A8 { codes, scales, sums } = self.a8(&unit.from);
            let arguments = ExpertsGatedA8 {
                gate_table: gate.table,
                up_table: up.table,
                experts,
                n,
                cols,
                codes,
                scales,
                sums,
                slots,
                activation: activation(unit.activation),
                out_codes: to.codes,
                out_scales: to.scales,
                out_sums: to.sums,
                out: float,
            };
            return Ok(self.device.launch(self.stream, kernel, grid, &arguments)?);
        }
        let kernel = choice::experts_gated_f32(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
        let arguments = ExpertsGatedF32 {
            gate_table: gate.table,
            up_table: up.table,
            experts,
            n,
            cols,
            x: self.floats(&unit.from),
            x_stride: unit.from.float.map_or(cols, |view| view.stride),
            slots,
            activation: activation(unit.activation),
            out_codes: to.codes,
            out_scales: to.scales,
            out_sums: to.sums,
            out: float,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    fn experts_down(&self, unit: &Experts, down: ExpertTable, pairs: u32) -> Result<(), BackendError> {
        let (dtype, n, cols) = (down.dtype, down.rows, down.cols);
        let (experts, out) = (self.plane(unit.choice.chosen), self.plane(unit.results));
        let grid = choice::experts_grid(n, pairs);
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let A8 { codes, scales, sums } = self.a8(&unit.gated);
            let arguments = ExpertsA8 {
                table: down.table,
                experts,
                n,
                cols,
                codes,
                scales,
                sums,
                slots: 1,
                out,
                out_stride: n,
            };
            return Ok(self.device.launch(self.stream, kernel, grid, &arguments)?);
        }
        let kernel = choice::experts_f32(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
        let arguments = ExpertsF32 {
            table: down.table,
            experts,
            n,
            cols,
            x: self.floats(&unit.gated),
            x_stride: cols,
            slots: 1,
            out,
            out_stride: n,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}
