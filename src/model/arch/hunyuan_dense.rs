//! `hunyuan-dense`: Hunyuan, dense. Heads of q and k are normed after RoPE.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        w.rotate(heads, [rope, rope], qkv);
        w.head_norms(rms, heads, qkv);
        let attended = w.attend_rotated(heads, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        w.feed_forward(rms, x, sizes.ffn, Presence::Never);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
