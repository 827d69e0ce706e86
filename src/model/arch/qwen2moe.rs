//! `qwen2moe`: Qwen 1.5 and 2 with experts. Weights of a row's experts do not sum to 1. One more expert is for all rows,
//! behind a gate of its own.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Gating, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let found = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    let width = |name: &str| {
        Ok::<_, PlanError>(w.metadata.count_if_there(name, 0..=FFN_MAX)?.filter(|width| *width > 0))
    };
    // Files without these widths state that of all experts of a row together, and that of the shared expert.
    let ffn = width("expert_feed_forward_length")?.unwrap_or((sizes.ffn / found.used).max(1));
    let shared = width("expert_shared_feed_forward_length")?.unwrap_or(sizes.ffn);
    let experts = Experts { ffn, normalise: false, ..found };

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        w.self_attention(rms, x, heads, rope, [Presence::Optional, Presence::Never]);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        w.experts(&experts, normed, x);
        let out = w.shared_expert(normed, shared);
        w.open("shared expert's own gate", "ffn_gate_inp_shexp", normed, out);
        w.add(out, 1.0, x);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, 0, Some(&experts)), context: sizes.context })
}
