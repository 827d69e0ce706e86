//! Runs steps of a program. `bind` turns it into units, and `model` is an open program on the device. `addresses` finds
//! the addresses of its weights. `run` launches units, `graphs` replays them, `sampling` draws tokens, after
//! `adjusting` has changed logits.

pub mod addresses;
mod adjusting;
mod arrays;
pub mod bind;
mod expert_tables;
pub mod graphs;
pub mod kv;
pub mod model;
mod rope;
mod run;
mod sampling;
mod scratch;
pub mod states;

use crate::backend::hip::kernels::MatrixUnit;
use crate::backend::hip::kernels::thresholds::{self, Family, Order, Thresholds};
use crate::backend::{ActivationType, KvType};
use crate::tensor::DType;

/// Element types to compute with: the same for all models of a backend, but for pages of codes ([`KvType::within`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// Form of activations in products with quantised weights.
    pub activations: ActivationType,
    /// Element type of KV pages.
    pub kv: KvType,
    /// The unit that multiplies weights with f16 rows.
    pub unit: MatrixUnit,
    /// Whether a row's bits may depend on the rows that are computed with it.
    pub order: Order,
}

impl Modes {
    /// The device's row thresholds.
    pub fn thresholds(self) -> Thresholds {
        thresholds::of(self.unit, self.order)
    }

    /// The kernels that multiply `rows` rows of `cols` values with weights of a type.
    pub fn family(self, dtype: DType, rows: u32, cols: u32) -> Family {
        thresholds::family(self.thresholds(), self.activations, dtype, rows as usize, cols)
    }

    /// Rows from which pairs of a row and an expert are sorted by expert. `dtypes`: the type of gate and up matrices,
    /// and of down matrices.
    pub fn sorted_from(self, dtypes: [DType; 2]) -> Option<usize> {
        thresholds::sorted_from(self.thresholds(), self.activations, dtypes)
    }

    /// Whether f16 rows lie in tiles.
    pub fn tiled(self) -> bool {
        self.unit.has(MatrixUnit::AcrossWaves)
    }
}
