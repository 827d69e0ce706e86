//! `ernie4_5`: ERNIE 4.5, dense; `ernie4_5-moe`: with experts, whose chances may have a bias, and one for all rows.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Gating, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    write_layers(w, None)
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let found = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    write_layers(w, Some(&Experts { bias: Presence::Optional, ..found }))
}

fn write_layers(w: &mut Writer<'_>, experts: Option<&Experts>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    let (mut dense, mut shared) = (sizes.layers, 0);
    if experts.is_some() {
        dense = experts::leading_dense(&w.metadata, sizes.blocks)?;
        shared = w.metadata.count_if_there("expert_shared_feed_forward_length", 0..=FFN_MAX)?.unwrap_or(0);
        // Their width says the same.
        w.metadata.count_if_there("expert_shared_count", 0..=64)?;
    }

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        w.self_attention(rms, x, heads, rope, [Presence::Optional, Presence::Never]);
        match experts {
            Some(experts) if layer >= dense => {
                let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
                w.experts(experts, normed, x);
                if shared > 0 {
                    let out = w.shared_expert(normed, shared);
                    w.add(out, 1.0, x);
                }
            }
            _ => w.feed_forward(rms, x, sizes.ffn, Presence::Never),
        }
    }
    let logits = w.head(rms, x);
    let ffn = if dense > 0 { sizes.ffn } else { 0 };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, experts), context: sizes.context })
}
