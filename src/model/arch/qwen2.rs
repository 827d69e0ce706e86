//! `qwen2`: Qwen 2 and 2.5, QwQ, and models distilled into them. q, k and v have biases.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        w.self_attention(rms, x, heads, rope, [Presence::Required, Presence::Never]);
        w.feed_forward(rms, x, sizes.ffn, Presence::Never);
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
