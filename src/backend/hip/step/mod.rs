//! Runs steps of a program. `bind` turns it into units, and `model` is an open program on the device. `resolve` finds
//! the addresses of its weights. `run` launches units, `graphs` replays them, `sampling` draws tokens.

mod arrays;
pub mod bind;
mod expert_tables;
pub mod graphs;
pub mod kv;
pub mod model;
pub mod resolve;
mod rope;
mod run;
mod sampling;
mod scratch;

use crate::backend::hip::kernels::MatrixUnit;
use crate::backend::{ActivationType, KvType};

/// Element types to compute with: the same for all models of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// Form of activations in products with quantised weights.
    pub activations: ActivationType,
    /// Element type of KV pages.
    pub kv: KvType,
    /// The unit that multiplies weights with f16 rows.
    pub unit: MatrixUnit,
}

impl Modes {
    /// Rows from which products take f16 rows. Below, reading weights once for each eight rows is faster. Without
    /// products for quantised weights, these are expanded for a matrix product.
    pub fn matrix_rows(self) -> usize {
        match self.unit {
            MatrixUnit::None => 64,
            MatrixUnit::OfWave => 9,
            MatrixUnit::AcrossWaves => 5,
        }
    }

    /// Rows from which pairs of a row and an expert are sorted by expert.
    pub fn grouped_rows(self) -> Option<usize> {
        (self.unit != MatrixUnit::None && self.activations == ActivationType::Int8).then_some(9)
    }

    /// Whether f16 rows lie in tiles.
    pub fn tiled(self) -> bool {
        self.unit == MatrixUnit::AcrossWaves
    }

    /// Most rows of a step recorded for replay. Without products for quantised weights, more rows are multiplied eight
    /// at a time, or with expanded weights.
    pub fn graph_rows(self) -> usize {
        match self.unit {
            MatrixUnit::None => 8,
            MatrixUnit::OfWave => 64,
            MatrixUnit::AcrossWaves => 128,
        }
    }
}
