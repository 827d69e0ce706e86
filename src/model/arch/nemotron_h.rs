//! `nemotron_h`: Nemotron-H and Nemotron Nano 2. A layer is one of Mamba 2, attention without positions, and a feed-forward
//! with squared ReLU. `nemotron_h_moe`: Nemotron 3, whose feed-forwards are experts without gates.

use super::Written;
use super::experts::{self, Experts};
use super::recurrent::Mamba;
use super::rope;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Norm, Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, Gating, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    write_layers(w, None)
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let mut experts = experts::required(&w.metadata, Gating::Sigmoid, &[Gating::Sigmoid])?;
    experts.groups = experts::groups(&w.metadata, &experts)?;
    experts.bias = Presence::Required;
    (experts.gated, experts.activation) = (false, Activation::SquaredRelu);
    experts.normalise = w.metadata.flag_if_there("expert_weights_norm")? == Some(true);
    let shared = w.metadata.count("expert_shared_feed_forward_length", 1..=FFN_MAX)?;
    // The files state the width of all shared experts together.
    w.metadata.count_if_there("expert_shared_count", 0..=FFN_MAX)?;
    write_layers(w, Some((experts, shared)))
}

/// Writes the model, with these experts, and one for all rows of a width, in place of its feed-forwards.
fn write_layers(w: &mut Writer<'_>, experts: Option<(Experts, usize)>) -> Result<Written, PlanError> {
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
        if let (true, Some((experts, shared))) = (feeds, &experts) {
            w.experts(experts, normed, x);
            let out = w.shared_expert_without_gate(normed, *shared);
            w.add(out, 1.0, x);
        } else if feeds {
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
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    let experts = experts.as_ref().map(|(experts, _)| experts);
    let ffn = if experts.is_some() { 0 } else { sizes.ffn };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, experts), context: sizes.context })
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
