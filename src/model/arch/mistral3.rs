//! `mistral3`: Mistral Small 3.1 and Ministral 3. Queries may grow with their position.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout, RopeSpec};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    let growth = rope::growth(&w.metadata, sizes.context)?;
    if growth.is_some() && angles.dims != heads.dim {
        let feature =
            "attention.temperature_scale with heads that are rotated in part (rope.dimension_count)";
        return Err(w.metadata.unsupported(feature));
    }
    experts::none(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let keys = w.plain_rope(&angles);
    let queries = if growth.is_some() { w.plain_rope(&RopeSpec { growth, ..angles }) } else { keys };
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        w.rotate(heads, [queries, keys], qkv);
        let attended = w.attend_rotated(heads, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Optional);
        w.feed_forward(rms, x, sizes.ffn, Presence::Optional);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
