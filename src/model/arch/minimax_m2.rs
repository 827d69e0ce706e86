//! `minimax-m2`: MiniMax M2. Norms over all queries and all keys of a row. RoPE rotates part of each head. Experts are
//! chosen by sigmoids with a bias.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Gating, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let found = experts::required(&w.metadata, Gating::Sigmoid, &[Gating::Softmax, Gating::Sigmoid])?;
    let experts = Experts { bias: Presence::Required, ..found };

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Never);
        w.norm_groups("query norm", "attn_q_norm", rms, heads.query_width(), qkv.q);
        w.norm_groups("key norm", "attn_k_norm", rms, heads.key_width(), qkv.k);
        let attended = w.attend(heads, rope, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        w.experts(&experts, normed, x);
    }
    let logits = w.head_with(rms, x, Presence::Required, Presence::Never);
    Ok(Written { logits, shape: Shape::new(&sizes, 0, Some(&experts)), context: sizes.context })
}
