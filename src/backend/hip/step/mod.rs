//! Steps of a program on a device.

pub mod bind;

use crate::backend::{Activations, KvType};

/// How a backend computes: the same for all its models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modes {
    /// What quantised weights meet.
    pub activations: Activations,
    /// Element of KV pages.
    pub kv: KvType,
}
