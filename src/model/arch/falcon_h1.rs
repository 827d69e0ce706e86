//! `falcon-h1`: Falcon-H1. Attention and Mamba 2 read one norm and add to one stream. The converter multiplied the model's
//! factors into its weights.

use super::Written;
use super::experts;
use super::recurrent::Mamba;
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let mamba = Mamba::read(&w.metadata)?;
    let scale = w.metadata.float_if_there("attention.scale")?.filter(|scale| *scale != 0.0);
    let scale = scale.unwrap_or(heads.scale());

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("norm of the layer", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        let attended = w.attend(heads, rope, qkv, scale, None);
        let recurrent = w.mamba(&mamba, rms, [Presence::Optional, Presence::Optional], normed);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        w.add_projection("recurrent output", "ssm_out", recurrent, x, Presence::Never);
        let normed = w.norm_named("feed-forward norm", "ffn_norm", rms, x);
        let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Optional);
        w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Optional);
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}
