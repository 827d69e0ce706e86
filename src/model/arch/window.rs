//! Attention windows: which layers have one, and its size.

use super::metadata::Metadata;
use super::sizes::Sizes;
use super::writer::Writer;
use crate::model::plan::PlanError;
use crate::program::{RopeId, RopeScaling, RopeSpec};

/// Windows of a model's layers.
pub(super) enum Window {
    /// No layer has a window.
    None,
    /// Some layers see only the last positions.
    Of {
        /// Size of the window in positions, the row's own included.
        positions: u32,
        /// By layer number: true for a layer with a window.
        layers: Vec<bool>,
    },
}

impl Window {
    /// Window of a layer in positions; `None` for a layer without.
    pub fn of(&self, layer: usize) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Of { positions, layers } => layers.get(layer)?.then_some(*positions),
        }
    }
}

/// RoPE of layers with a window, and of those without.
#[derive(Clone, Copy)]
pub(super) struct Ropes {
    within: RopeId,
    everywhere: RopeId,
}

impl Ropes {
    /// Layers with one of `windows` have a base of their own, 10,000 if the file states none, and no scaling.
    pub fn of(w: &mut Writer<'_>, windows: &Window, angles: &RopeSpec) -> Result<Self, PlanError> {
        let everywhere = w.plain_rope(angles);
        let within = match windows {
            Window::None => everywhere,
            Window::Of { .. } => {
                let theta = w.metadata.above_0("rope.freq_base_swa")?.unwrap_or(10_000.0);
                w.plain_rope(&RopeSpec { theta, scaling: RopeScaling::None, ..angles.clone() })
            }
        };
        Ok(Self { within, everywhere })
    }

    /// That of a layer with this window.
    pub fn at(self, window: Option<u32>) -> RopeId {
        if window.is_some() { self.within } else { self.everywhere }
    }
}

/// Refuses another RoPE base in layers with a window, for an architecture that has one base.
pub(super) fn refuse_other_base(metadata: &Metadata<'_>, theta: f32) -> Result<(), PlanError> {
    match metadata.above_0("rope.freq_base_swa")? {
        Some(base) if base != theta => {
            let feature = format!("a RoPE base of {base} in windowed layers (rope.freq_base_swa)");
            Err(metadata.unsupported(&feature))
        }
        _ => Ok(()),
    }
}

/// Reads the windows. `rotated` is the number of rotated values of a head. If the metadata name no layers, the last
/// layer of each run of `period` has no window.
pub(super) fn window(
    metadata: &Metadata<'_>,
    sizes: &Sizes,
    rotated: usize,
    period: u32,
) -> Result<Window, PlanError> {
    window_or(metadata, sizes, rotated, period, 0)
}

/// As [`window`], with `default` positions in files that state none.
pub(super) fn window_or(
    metadata: &Metadata<'_>,
    sizes: &Sizes,
    rotated: usize,
    period: u32,
    default: u32,
) -> Result<Window, PlanError> {
    let last = |layer: usize, period: usize| layer % period == period - 1;
    windows(metadata, sizes, rotated, (period, default), last)
}

/// As [`window`], where the first layer of each run has no window.
pub(super) fn window_but_first(
    metadata: &Metadata<'_>,
    sizes: &Sizes,
    rotated: usize,
    period: u32,
) -> Result<Window, PlanError> {
    windows(metadata, sizes, rotated, (period, 0), |layer, period| layer.is_multiple_of(period))
}

/// `sees_all` tells of a layer and a period above 0 whether it has no window.
fn windows(
    metadata: &Metadata<'_>,
    sizes: &Sizes,
    rotated: usize,
    (period, default): (u32, u32),
    sees_all: fn(usize, usize) -> bool,
) -> Result<Window, PlanError> {
    let positions = match metadata.count_if_there("attention.sliding_window", 0..=1 << 30)? {
        None => default,
        Some(positions) => positions as u32,
    };
    if positions == 0 {
        return Ok(Window::None);
    }
    // Only equal head widths in layers with and without a window are supported.
    let widths = [
        ("attention.key_length_swa", sizes.heads.dim),
        ("attention.value_length_swa", sizes.heads.dim),
        ("rope.dimension_count_swa", rotated),
    ];
    for (name, width) in widths {
        if let Some(other) = metadata.count_if_there(name, 0..=1 << 30)?.filter(|other| *other != width) {
            return Err(metadata.unsupported(&format!("head width {other} in windowed layers ({name})")));
        }
    }
    let name = "attention.sliding_window_pattern";
    let layers = match metadata.flags_if_there(name)? {
        // Layers past the end of a short array have no window.
        Some(mut flags) => {
            flags.resize(sizes.blocks, false);
            flags
        }
        None => {
            let period = metadata.count_if_there(name, 0..=1 << 30)?.unwrap_or(period as usize);
            let within = |layer: usize| period == 0 || !sees_all(layer, period);
            (0..sizes.blocks).map(within).collect()
        }
    };
    Ok(Window::Of { positions, layers })
}
