//! `starcoder2`: StarCoder 2. LayerNorms, biases, and a feed-forward half without a gate.

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

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        w.self_attention(layer_norm, x, heads, rope, [Presence::Optional, Presence::Required]);
        let normed = w.norm("feed-forward norm", "ffn_norm", layer_norm, x);
        let up = w.project("feed-forward up", "ffn_up", normed, sizes.ffn, Presence::Required);
        let active = w.activate(Activation::Gelu, up);
        w.add_projection("feed-forward down", "ffn_down", active, x, Presence::Required);
    }
    let logits = w.head(layer_norm, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
