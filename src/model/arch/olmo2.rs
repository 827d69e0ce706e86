//! `olmo2`: OLMo 2 and 3. Norms only after each half of a layer, and over all queries and all keys of a row.

use super::Written;
use super::sizes::{Sizes, norm};
use super::window::{Window, refuse_other_base, window};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout, RopeScaling, RopeSpec};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 4;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;
    let windows = window(&w.metadata, &sizes, angles.dims, PATTERN)?;
    refuse_other_base(&w.metadata, angles.theta)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let everywhere = w.plain_rope(&angles);
    let within = match &windows {
        Window::None => everywhere,
        Window::Of { .. } => w.plain_rope(&RopeSpec { scaling: RopeScaling::None, magnitude: 1.0, ..angles }),
    };
    for layer in 0..sizes.layers {
        w.layer(layer);
        let qkv = w.qkv(heads, x, Presence::Optional);
        w.norm_groups("query norm", "attn_q_norm", rms, heads.query_width(), qkv.q);
        w.norm_groups("key norm", "attn_k_norm", rms, heads.key_width(), qkv.k);
        let window = windows.of(layer);
        let rope = if window.is_some() { within } else { everywhere };
        let attended = w.attend(heads, rope, qkv, heads.scale(), window);
        let out = w.project("attention output", "attn_output", attended, sizes.hidden, Presence::Never);
        w.add_norm("norm after attention", "post_attention_norm", rms, out, x);
        let gated = w.gated(x, sizes.ffn, Activation::Silu, Presence::Never);
        let out = w.project("feed-forward down", "ffn_down", gated, sizes.hidden, Presence::Never);
        w.add_norm("norm after feed-forward", "post_ffw_norm", rms, out, x);
    }
    let logits = w.head_with(rms, x, Presence::Required, Presence::Never);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
