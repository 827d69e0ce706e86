//! `glm4`: GLM 4 (0414) and Z1. Norms before and after each half of a layer. RoPE rotates part of each head. Gate and
//! up are one tensor.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;
    w.metadata.refuse_any("rope.dimension_sections", "multi-dimensional positions", |n| n > 0)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        let attended = w.attend(heads, rope, qkv, heads.scale(), None);
        let out = w.project("attention output", "attn_output", attended, sizes.hidden, Presence::Never);
        w.add_norm("norm after attention", "post_attention_norm", rms, out, x);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        let gated = w.gated_pieces(normed, sizes.ffn, Activation::Silu);
        let out = w.project("feed-forward down", "ffn_down", gated, sizes.hidden, Presence::Never);
        w.add_norm("norm after feed-forward", "post_ffw_norm", rms, out, x);
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
