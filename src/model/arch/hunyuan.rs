//! `hunyuan-dense` and `hunyuan-moe`: Hunyuan. Heads of q and k are normed after RoPE. With experts, one more is for all rows.

use super::Written;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Heads, Norm, Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Gating, NormKind, RopeId, RopeLayout, ValueId};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        attention_half(w, rms, x, (heads, rope));
        w.feed_forward(rms, x, sizes.ffn, Presence::Never);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let experts = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    // The width is that of all shared experts together.
    w.metadata.count_if_there("expert_shared_count", 0..=64)?;
    let shared = w.metadata.count_if_there("expert_shared_feed_forward_length", 0..=FFN_MAX)?;
    let shared = shared.filter(|width| *width > 0).unwrap_or(sizes.ffn);

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        attention_half(w, rms, x, (heads, rope));
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        w.experts_and_shared(&experts, normed, shared, x);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, 0, Some(&experts)), context: sizes.context })
}

/// Attends to the norm of `x`, and adds the output to `x`.
fn attention_half(w: &mut Writer<'_>, norm: Norm, x: ValueId, (heads, rope): (Heads, RopeId)) {
    let normed = w.norm("attention norm", "attn_norm", norm, x);
    let qkv = w.qkv(heads, normed, Presence::Optional);
    w.rotate(heads, [rope, rope], qkv);
    w.head_norms(norm, heads, qkv);
    let attended = w.attend_rotated(heads, qkv, heads.scale(), None);
    w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
}
