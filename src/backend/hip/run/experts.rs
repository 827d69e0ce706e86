//! Feed-forward layers of experts: the choice, and the chosen ones' work on pairs of a row and an expert.

use super::super::kernels::matmul::{ExpertsA8, ExpertsF32, ExpertsSwigluA8, ExpertsSwigluF32, choice};
use super::super::kernels::ops::{Combine, Route};
use super::super::{DevicePtr, Grid};
use super::forms::is_float;
use super::{Form, Matrix, Run, no_kernel};
use crate::backend::{Activations, BackendError, ExpertDims};
use crate::tensor::DType;

/// Rows of a block of `route`.
const ROUTE_ROWS: u32 = 8;

/// One part of a layer's experts: all of one type and size, found through a table of addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertMatrices {
    /// Address of each expert's matrix; 0 for those not loaded.
    pub table: DevicePtr<u64>,
    /// Element type.
    pub dtype: DType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
}

impl Run<'_> {
    fn experts_dims(&self) -> Result<&ExpertDims, BackendError> {
        self.dims.experts.as_ref().ok_or(BackendError::Batch("experts of a model that has none"))
    }

    pub(super) fn route(&self, norm: DevicePtr<f32>, router: Matrix) -> Result<(), BackendError> {
        let (dims, rows) = (self.experts_dims()?, self.rows());
        let routing = self.scratch.routing()?;
        let input = &self.scratch.input;
        self.norm(norm, DevicePtr::NULL, rows, input, self.form_for(router, rows))?;
        let logits = routing.logits.ptr();
        self.products(&[router], input, rows, logits, dims.count as u32, false)?;
        let arguments = Route {
            logits,
            experts: routing.chosen.ptr(),
            weights: routing.weights.ptr(),
            scale: dims.scale,
            rows,
            count: dims.count as u32,
            used: dims.used as u32,
            normalise: u32::from(dims.normalise),
        };
        let grid = Grid::x(rows.div_ceil(ROUTE_ROWS));
        Ok(self.device.launch(self.stream, Route::route, grid, &arguments)?)
    }

    /// As pairs are few rows each of its own matrix, they meet weights as single rows do.
    fn pair_form(&self, dtype: DType) -> Form {
        if is_float(dtype) || self.activations == Activations::F32 { Form::Float } else { Form::A8 }
    }

    pub(super) fn experts(
        &self,
        norm: DevicePtr<f32>,
        gate: ExpertMatrices,
        up: ExpertMatrices,
        down: ExpertMatrices,
    ) -> Result<(), BackendError> {
        if (gate.dtype, gate.rows, gate.cols) != (up.dtype, up.rows, up.cols) {
            return Err(BackendError::Dims("experts whose gate and up matrices are of two types"));
        }
        let (used, rows) = (self.experts_dims()?.used as u32, self.rows());
        let (routing, pairs) = (self.scratch.routing()?, rows * used);
        let read = self.pair_form(gate.dtype);
        self.norm(norm, DevicePtr::NULL, rows, &self.scratch.input, read)?;
        self.experts_gated(gate, up, self.pair_form(down.dtype), used, pairs)?;
        self.experts_down(down, pairs)?;
        let cols = self.dims.hidden as u32;
        let arguments = Combine {
            results: routing.results.ptr(),
            weights: routing.weights.ptr(),
            places: DevicePtr::NULL,
            residual: self.scratch.residual.ptr(),
            used,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, Combine::combine, grid, &arguments)?)
    }

    fn experts_gated(
        &self,
        gate: ExpertMatrices,
        up: ExpertMatrices,
        form: Form,
        slots: u32,
        pairs: u32,
    ) -> Result<(), BackendError> {
        let routing = self.scratch.routing()?;
        let (dtype, n, cols) = (gate.dtype, gate.rows, gate.cols);
        let (input, out) = (&self.scratch.input, routing.gated.a8());
        let float = if form == Form::Float { routing.gated.values() } else { DevicePtr::NULL };
        let (experts, grid) = (routing.chosen.ptr(), choice::experts_swiglu_grid(n, pairs));
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_swiglu_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let from = input.a8();
            let arguments = ExpertsSwigluA8 {
                gate_table: gate.table,
                up_table: up.table,
                experts,
                n,
                cols,
                codes: from.codes,
                scales: from.scales,
                sums: from.sums,
                slots,
                out_codes: out.codes,
                out_scales: out.scales,
                out_sums: out.sums,
                out: float,
            };
            return Ok(self.device.launch(self.stream, kernel, grid, &arguments)?);
        }
        let kernel = choice::experts_swiglu_f32(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
        let arguments = ExpertsSwigluF32 {
            gate_table: gate.table,
            up_table: up.table,
            experts,
            n,
            cols,
            x: input.values(),
            x_stride: cols,
            slots,
            out_codes: out.codes,
            out_scales: out.scales,
            out_sums: out.sums,
            out: float,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    fn experts_down(&self, down: ExpertMatrices, pairs: u32) -> Result<(), BackendError> {
        let routing = self.scratch.routing()?;
        let (dtype, n, cols) = (down.dtype, down.rows, down.cols);
        let (experts, out) = (routing.chosen.ptr(), routing.results.ptr());
        let grid = choice::experts_grid(n, pairs);
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let from = routing.gated.a8();
            let arguments = ExpertsA8 {
                table: down.table,
                experts,
                n,
                cols,
                codes: from.codes,
                scales: from.scales,
                sums: from.sums,
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
            x: routing.gated.values(),
            x_stride: cols,
            slots: 1,
            out,
            out_stride: n,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}
