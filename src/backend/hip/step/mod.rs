//! Steps of a program on a device.

pub mod bind;

use crate::backend::{Activations, KvType};

/// Element types to compute with: the same for all models of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// Form of activations in products with quantised weights.
    pub activations: Activations,
    /// Element type of KV pages.
    pub kv: KvType,
}
