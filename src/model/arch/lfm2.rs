//! `lfm2`: LFM2, dense; `lfm2moe`: with experts after the first layers. Most layers have a short convolution between two gates
//! instead of attention.

use super::Written;
use super::experts::{self, Experts};
use super::recurrent::TAPS;
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Norm, Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, Gating, NormKind, RopeLayout, ValueId};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    write_layers(w, None)
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let found = experts::required(&w.metadata, Gating::Sigmoid, &[Gating::Sigmoid])?;
    write_layers(w, Some(Experts { bias: Presence::Required, ..found }))
}

fn write_layers(w: &mut Writer<'_>, experts: Option<Experts>) -> Result<Written, PlanError> {
    let (sizes, attends) = Sizes::read_hybrid(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let taps = w.metadata.count("shortconv.l_cache", TAPS)?;
    let dense = match &experts {
        None => sizes.layers,
        Some(_) => experts::leading_dense(&w.metadata, sizes.blocks)?,
    };

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for (layer, attends) in (0..sizes.layers).zip(attends) {
        w.layer(layer);
        let normed = w.norm("operator norm", "attn_norm", rms, x);
        if attends {
            let qkv = w.qkv(heads, normed, Presence::Never);
            w.head_norms(rms, heads, qkv);
            let attended = w.attend(heads, rope, qkv, heads.scale(), None);
            w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        } else {
            short_convolution(w, taps, normed, x);
        }
        match &experts {
            Some(experts) if layer >= dense => feed_experts(w, rms, experts, x),
            _ => w.feed_forward(rms, x, sizes.ffn, Presence::Never),
        }
    }
    let logits = w.head_after("token_embd_norm", rms, x);
    let ffn = if dense > 0 { sizes.ffn } else { 0 };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, experts.as_ref()), context: sizes.context })
}

/// `out(c * convolution(b * v))` of three projections b, c and v.
fn short_convolution(w: &mut Writer<'_>, taps: usize, from: ValueId, x: ValueId) {
    let hidden = w.width(x);
    let rows = [hidden; 3];
    let [b, c, v] = w.project_pieces("convolution's input", "shortconv.in_proj", from, rows, Presence::Never);
    let gated = w.gate(Activation::Linear, b, v);
    let convolved = w.convolve("shortconv.conv", taps, Presence::Never, None, gated);
    let gated = w.gate(Activation::Linear, c, convolved);
    w.add_projection("convolution's output", "shortconv.out_proj", gated, x, Presence::Never);
}

fn feed_experts(w: &mut Writer<'_>, rms: Norm, experts: &Experts, x: ValueId) {
    let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
    w.experts(experts, normed, x);
}
