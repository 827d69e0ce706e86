//! `nemotron_h`: Nemotron-H and Nemotron Nano 2. A layer is one of Mamba 2, attention without positions, and a feed-forward
//! with squared ReLU.

use super::Written;
use super::experts;
use super::recurrent::Mamba;
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Norm, Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    let (sizes, attends) = Sizes::read_hybrid(&w.metadata, w.vocab)?;
    let feeds = w.metadata.layers_above_0("feed_forward_length", sizes.blocks)?;
    let (heads, rms) = (sizes.heads, eps(w)?);
    // Files may state angles; no value is rotated.
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let mamba = Mamba::read(&w.metadata)?;
    let scale = w.metadata.float_if_there("attention.scale")?.filter(|scale| *scale != 0.0);
    let scale = scale.unwrap_or(heads.scale());

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.unrotated(&angles);
    for (layer, (attends, feeds)) in (0..sizes.layers).zip(attends.into_iter().zip(feeds)) {
        w.layer(layer);
        let normed = w.norm("norm of the layer", "attn_norm", rms, x);
        if feeds {
            let up = w.project("feed-forward up", "ffn_up", normed, sizes.ffn, Presence::Optional);
            let active = w.activate(Activation::SquaredRelu, up);
            w.add_projection("feed-forward down", "ffn_down", active, x, Presence::Optional);
        } else if attends {
            let qkv = w.qkv(heads, normed, Presence::Optional);
            let attended = w.attend(heads, rope, qkv, scale, None);
            w.add_projection("attention output", "attn_output", attended, x, Presence::Optional);
        } else {
            let out = w.mamba(&mamba, rms, [Presence::Optional, Presence::Required], normed);
            w.add_projection("recurrent output", "ssm_out", out, x, Presence::Never);
        }
    }
    let logits = w.head(rms, x);
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}

/// The norm. Files may state its eps under the name of the other kind of norm.
fn eps(w: &Writer<'_>) -> Result<Norm, PlanError> {
    match w.metadata.float_if_there("attention.layer_norm_rms_epsilon")? {
        Some(_) => norm(&w.metadata, NormKind::Rms),
        None => {
            let named = norm(&w.metadata, NormKind::Layer)?;
            Ok(Norm { kind: NormKind::Rms, bias: false, ..named })
        }
    }
}
