//! `smollm3`: SmolLM 3. Every fourth layer uses no positions.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout};

/// The last layer of each run of so many has no rotary embedding; no key states this.
const PERIOD: usize = 4;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let (rotated, unrotated) = (w.plain_rope(&angles), w.unrotated(&angles));
    for layer in 0..sizes.layers {
        w.layer(layer);
        let rope = if layer % PERIOD == PERIOD - 1 { unrotated } else { rotated };
        w.self_attention(rms, x, heads, rope, [Presence::Optional, Presence::Never]);
        w.feed_forward(rms, x, sizes.ffn, Presence::Never);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
