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

use crate::backend::{ActivationType, KvType};
use scratch::{GEMM_ROWS, GRAPH_ROWS, GRAPH_ROWS_WITHOUT_GEMM, MATRIX_ROWS};

/// Element types to compute with: the same for all models of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// Form of activations in products with quantised weights.
    pub activations: ActivationType,
    /// Element type of KV pages.
    pub kv: KvType,
    /// Whether the device has products of quantised weights with f16 rows: they need a matrix unit.
    pub gemm: bool,
}

impl Modes {
    /// Rows from which products take f16 rows.
    pub fn matrix_rows(self) -> usize {
        if self.gemm { GEMM_ROWS } else { MATRIX_ROWS }
    }

    /// Most rows of a step recorded for replay.
    pub fn graph_rows(self) -> usize {
        if self.gemm { GRAPH_ROWS } else { GRAPH_ROWS_WITHOUT_GEMM }
    }
}
