//! `command-r`: Command R and Aya. `cohere2`: Command R7B and Command A, whose layers without a window use no positions.
//!
//! Attention and feed-forward read the same LayerNorm, which has no bias. Logits are multiplied by `logit_scale`.

use super::Written;
use super::sizes::{Sizes, norm};
use super::window::{Window, refuse_other_base, window};
use super::writer::{Norm, Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout, RopeSpec};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 4;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let (sizes, angles) = read(w)?;
    write_layers(w, &sizes, &angles, None)
}

pub(super) fn write_cohere2(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let (sizes, angles) = read(w)?;
    refuse_other_base(&w.metadata, angles.theta)?;
    match window(&w.metadata, &sizes, angles.dims, PATTERN)? {
        // The window says which layers use positions.
        Window::None => {
            let key = w.metadata.key("attention.sliding_window");
            Err(PlanError::Key { key, want: "a number of positions above 0" })
        }
        windows => write_layers(w, &sizes, &angles, Some(&windows)),
    }
}

fn read(w: &Writer<'_>) -> Result<(Sizes, RopeSpec), PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    experts::none(&w.metadata)?;
    let angles = rope::without_factors(&w.metadata, RopeLayout::Interleaved, sizes.heads.dim, sizes.context)?;
    Ok((sizes, angles))
}

fn write_layers(
    w: &mut Writer<'_>,
    sizes: &Sizes,
    angles: &RopeSpec,
    windows: Option<&Window>,
) -> Result<Written, PlanError> {
    let heads = sizes.heads;
    let layer_norm = Norm { bias: false, ..norm(&w.metadata, NormKind::Layer)? };
    // 0 means no factor.
    let factor = w.metadata.float_if_there("logit_scale")?.filter(|by| *by != 0.0);

    let x = w.embedding(sizes.hidden, 1.0);
    let (rotated, unrotated) = (w.plain_rope(angles), w.unrotated(angles));
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", layer_norm, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        let window = windows.and_then(|windows| windows.of(layer));
        let rope = if windows.is_some() && window.is_none() { unrotated } else { rotated };
        let attended = w.attend(heads, rope, qkv, heads.scale(), window);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Never);
        w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
    }
    let logits = w.head_with(layer_norm, x, Presence::Never, Presence::Never);
    w.scale(logits, factor.unwrap_or(1.0));
    Ok(Written { logits, shape: Shape::new(sizes, sizes.ffn, None), context: sizes.context })
}
