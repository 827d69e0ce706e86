//! `glm4moe`: GLM 4.5 to 4.7. Experts are chosen by sigmoids with a bias, and one more is for all rows. The first layers
//! may be dense. RoPE rotates part of each head.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, Gating, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    w.metadata.refuse_any("rope.dimension_sections", "multi-dimensional positions", |n| n > 0)?;
    let found = experts::required(&w.metadata, Gating::Sigmoid, &[Gating::Softmax, Gating::Sigmoid])?;
    let normalise = w.metadata.flag_if_there("expert_weights_norm")?.unwrap_or(false);
    let experts = Experts { bias: Presence::Required, normalise, ..found };
    let shared = experts::shared_width(&w.metadata, &experts)?;
    let dense = experts::leading_dense(&w.metadata, sizes.blocks)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        if w.has("attn_q_norm.weight") {
            w.head_norms(rms, heads, qkv); // the larger models
        }
        let attended = w.attend(heads, rope, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let normed = w.norm("feed-forward norm", "post_attention_norm", rms, x);
        if layer < dense {
            let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Never);
            w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
            continue;
        }
        w.experts_and_shared(&experts, normed, shared, x);
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    let ffn = if dense > 0 { sizes.ffn } else { 0 };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, Some(&experts)), context: sizes.context })
}
