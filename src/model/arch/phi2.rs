//! `phi2`: Phi 1.5 and 2. Attention and feed-forward read the same LayerNorm. RoPE rotates part of each head.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, layer_norm) = (sizes.heads, norm(&w.metadata, NormKind::Layer)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;
    if w.metadata.flag_if_there("use_parallel_residual")? == Some(false) {
        return Err(w.metadata.unsupported("sequential attention and feed-forward (use_parallel_residual)"));
    }

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", layer_norm, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        let attended = w.attend(heads, rope, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Required);
        let up = w.project("feed-forward up", "ffn_up", normed, sizes.ffn, Presence::Required);
        let active = w.activate(Activation::Gelu, up);
        w.add_projection("feed-forward down", "ffn_down", active, x, Presence::Required);
    }
    let logits = w.head_with(layer_norm, x, Presence::Required, Presence::Required);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
