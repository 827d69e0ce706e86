//! Which layers see only the last positions, and how many.

use super::metadata::Metadata;
use super::sizes::Sizes;
use crate::model::plan::PlanError;

/// Windows of a model's layers.
pub(super) enum Window {
    /// All layers see everything.
    None,
    /// Some see only so many positions, their own among them.
    Of {
        /// Positions.
        positions: u32,
        /// By number of the layer.
        layers: Vec<bool>,
    },
}

impl Window {
    /// Positions that a layer sees, where it does not see all.
    pub fn of(&self, layer: usize) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Of { positions, layers } => layers.get(layer)?.then_some(*positions),
        }
    }
}

/// What the metadata say, where `rotated` values of a head turn. Where they name no layers, one in `period` sees everything: the last of each run.
pub(super) fn window(
    metadata: &Metadata<'_>,
    sizes: &Sizes,
    rotated: usize,
    period: u32,
) -> Result<Window, PlanError> {
    let positions = match metadata.count_if_there("attention.sliding_window", 0..=1 << 30)? {
        None | Some(0) => return Ok(Window::None),
        Some(positions) => positions as u32,
    };
    // Layers with a window and those without have one shape here.
    let widths = [
        ("attention.key_length_swa", sizes.heads.dim),
        ("attention.value_length_swa", sizes.heads.dim),
        ("rope.dimension_count_swa", rotated),
    ];
    for (name, width) in widths {
        if let Some(other) = metadata.count_if_there(name, 0..=1 << 30)?.filter(|other| *other != width) {
            return Err(metadata.unsupported(&format!("heads of {other} within windows ({name})")));
        }
    }
    let name = "attention.sliding_window_pattern";
    let layers = match metadata.flags_if_there(name)? {
        // Shorter ones leave the rest without a window.
        Some(mut flags) => {
            flags.resize(sizes.blocks, false);
            flags
        }
        None => {
            let period = metadata.count_if_there(name, 0..=1 << 30)?.unwrap_or(period as usize);
            let within = |layer: usize| period == 0 || layer % period < period - 1;
            (0..sizes.blocks).map(within).collect()
        }
    };
    Ok(Window::Of { positions, layers })
}
