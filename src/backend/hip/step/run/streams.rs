//! Operations on residual streams and on the sizes of rows.

use super::forms::row_threads;
use super::{Run, Weights};
use crate::backend::BackendError;
use crate::backend::hip::Grid;
use crate::backend::hip::device::pointer::DevicePtr;
use crate::backend::hip::kernels::streams as kernels;
use crate::backend::hip::step::bind::{AddToStreams, MixStreams, Multiply, Rescale, Sparsify};

impl Run<'_> {
    pub(super) fn multiply(
        &self,
        unit: &Multiply,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let Multiply { weight, rows: values, cols } = *unit;
        let arguments = kernels::MultiplyRows {
            weight: weights.vector(weight),
            x: self.at(values),
            stride: values.stride,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, kernels::MultiplyRows::multiply_rows, grid, &arguments)?)
    }

    pub(super) fn rescale(&self, unit: &Rescale, rows: u32) -> Result<(), BackendError> {
        let Rescale { rows: values, group, groups, eps, like } = *unit;
        let (like_stride, like_cols) = like.map_or((1, 1), |(view, cols)| (view.stride, cols));
        let arguments = kernels::RescaleRows {
            x: self.at(values),
            like: like.map_or(DevicePtr::NULL, |(view, _)| self.at(view)),
            eps,
            group,
            stride: values.stride,
            like_stride,
            like_cols,
        };
        let grid = Grid::xy(groups, rows).threads(row_threads(group.max(like_cols)));
        Ok(self.device.launch(self.stream, kernels::RescaleRows::rescale_rows, grid, &arguments)?)
    }

    pub(super) fn sparsify(&self, unit: &Sparsify, rows: u32) -> Result<(), BackendError> {
        let Sparsify { rows: values, cols, deviations } = *unit;
        let arguments = kernels::SparsifyRows { x: self.at(values), deviations, stride: values.stride, cols };
        let kernel = kernels::SparsifyRows::sparsify_rows;
        let grid = Grid::x(rows).threads(row_threads(cols));
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    pub(super) fn mix_streams(&self, unit: &MixStreams, rows: u32) -> Result<(), BackendError> {
        let MixStreams { amounts, from, out, streams, cols } = *unit;
        let arguments = kernels::MixStreams {
            amounts: self.at(amounts),
            x: self.at(from),
            out: self.at(out),
            streams,
            cols,
            amounts_stride: amounts.stride,
            x_stride: from.stride,
            out_stride: out.stride,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, kernels::MixStreams::mix_streams, grid, &arguments)?)
    }

    pub(super) fn add_to_streams(&self, unit: &AddToStreams, rows: u32) -> Result<(), BackendError> {
        let AddToStreams { from, amounts, first, out, streams, cols } = *unit;
        let arguments = kernels::AddToStreams {
            x: self.at(from),
            amounts: amounts.map_or(DevicePtr::NULL, |view| self.at(view)),
            out: self.at(out),
            first,
            streams,
            cols,
            x_stride: from.stride,
            amounts_stride: amounts.map_or(0, |view| view.stride),
            out_stride: out.stride,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, kernels::AddToStreams::add_to_streams, grid, &arguments)?)
    }
}
