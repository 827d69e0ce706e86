//! Operations with recurrent states.

use super::{Run, Weights, activation};
use crate::backend::BackendError;
use crate::backend::hip::Grid;
use crate::backend::hip::kernels::recurrent as kernels;
use crate::backend::hip::step::bind::{Convolve, DeltaRule, SelectiveScan, Taps};

/// Workgroups that fill a large device. A workgroup that has less of a head's state makes more of them.
const FILLING: u64 = 512;

/// Threads for each output of a head (`SHARERS / PAIR` of kernels/recurrent/rows.h).
const THREADS_OF_OUTPUT: u32 = 4;

/// Rows per workgroup of a convolution, at most: it reads up to three more.
const TILE_MAX: u32 = 16;

/// Tiles of rows that fill a large device.
const TILES: u32 = 64;

/// The widest workgroups that still fill the device, for so many outputs of each of `heads` heads. No bit of a result depends on
/// their width.
fn grid(outputs: u32, heads: u32, sequences: u32) -> Grid {
    let of = |threads: u32| {
        Grid::xyz(outputs.div_ceil(threads / THREADS_OF_OUTPUT), heads, sequences).threads(threads)
    };
    let fills =
        |grid: &Grid| grid.workgroups.iter().map(|count| u64::from(*count)).product::<u64>() >= FILLING;
    [256, 128].map(of).into_iter().find(fills).unwrap_or_else(|| of(64))
}

impl Run<'_> {
    pub(super) fn convolve(
        &self,
        unit: &Convolve,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let kernel = match unit.taps {
            Taps::Two => kernels::Convolve::convolve_2,
            Taps::Three => kernels::Convolve::convolve_3,
            Taps::Four => kernels::Convolve::convolve_4,
        };
        let tile = (rows / TILES).clamp(1, TILE_MAX);
        let arguments = kernels::Convolve {
            x: self.at(unit.from),
            row_seq: self.places.sequences,
            runs: self.places.runs,
            weight: weights.vector(unit.weight),
            bias: weights.optional(unit.bias),
            out: self.at(unit.out),
            state_offset: unit.state,
            x_stride: unit.from.stride,
            out_stride: unit.out.stride,
            rows,
            tile,
            width: unit.width,
            activation: activation(unit.activation),
        };
        let grid = Grid::xy(unit.width.div_ceil(1024), rows.div_ceil(tile));
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    pub(super) fn selective_scan(
        &self,
        unit: &SelectiveScan,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let kernel = match unit.columns {
            ..=64 => kernels::SelectiveScan::selective_scan_64,
            65..=128 => kernels::SelectiveScan::selective_scan_128,
            _ => kernels::SelectiveScan::selective_scan_256,
        };
        let arguments = kernels::SelectiveScan {
            from: self.at(unit.from),
            steps: self.at(unit.steps),
            step_bias: weights.vector(unit.step_bias.at),
            rate: weights.vector(unit.rate.at),
            skip: weights.vector(unit.skip.at),
            runs: self.places.runs,
            out: self.at(unit.out),
            state_offset: unit.state,
            stride: unit.from.stride,
            steps_stride: unit.steps.stride,
            out_stride: unit.out.stride,
            bias_stride: unit.step_bias.stride,
            rate_stride: unit.rate.stride,
            skip_stride: unit.skip.stride,
            heads: unit.heads,
            groups: unit.groups,
            head_dim: unit.head_dim,
            columns: unit.columns,
        };
        let grid = grid(unit.head_dim, unit.heads, self.layout.runs as u32);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    pub(super) fn delta_rule(&self, unit: &DeltaRule, weights: &Weights<'_>) -> Result<(), BackendError> {
        let heads = unit.heads;
        let kernel = match heads.key_dim {
            ..=64 => kernels::DeltaRule::delta_rule_64,
            65..=128 => kernels::DeltaRule::delta_rule_128,
            _ => kernels::DeltaRule::delta_rule_256,
        };
        let arguments = kernels::DeltaRule {
            from: self.at(unit.from),
            decay: self.at(unit.decay),
            decay_bias: weights.vector(unit.decay_bias.at),
            rate: weights.vector(unit.rate.at),
            amount: self.at(unit.amount),
            runs: self.places.runs,
            out: self.at(unit.out),
            state_offset: unit.state,
            eps: unit.eps,
            stride: unit.from.stride,
            decay_stride: unit.decay.stride,
            amount_stride: unit.amount.stride,
            out_stride: unit.out.stride,
            bias_stride: unit.decay_bias.stride,
            rate_stride: unit.rate.stride,
            keys: heads.keys,
            key_dim: heads.key_dim,
            values: heads.values,
            value_dim: heads.value_dim,
            in_turn: u32::from(heads.in_turn),
        };
        let grid = grid(heads.value_dim, heads.values, self.layout.runs as u32);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}
