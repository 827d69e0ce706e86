//! `qwen3`: Qwen 3, dense; `qwen3moe`: with experts, as 30B-A3B and 235B-A22B. Heads of q and k are normed before RoPE. A
//! dense file with a classifier is a reranker.

use super::Written;
use super::experts::{self, Experts};
use super::rope;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    experts::none(&w.metadata)?;
    write_layers(w, &sizes, None)
}

pub(super) fn write_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let experts = experts::read(&w.metadata)?;
    write_layers(w, &sizes, experts.as_ref())
}

fn write_layers(w: &mut Writer<'_>, sizes: &Sizes, experts: Option<&Experts>) -> Result<Written, PlanError> {
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.rope(&angles);
    let mut dense = false;
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional); // biases where `attention_bias` was set in training
        w.head_norms(rms, heads, qkv);
        let attended = w.attend(heads, rope, qkv, heads.scale(), None);
        w.add_projection("attention output", "attn_output", attended, x, Presence::Never);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        match experts {
            Some(experts) if !w.has("ffn_gate.weight") => w.experts(experts, normed, x),
            _ => {
                dense = true;
                let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Never);
                w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
            }
        }
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    if experts.is_none() {
        w.yes_or_no(sizes.hidden)?;
    }
    let shape = Shape::new(sizes, if dense { sizes.ffn } else { 0 }, experts);
    Ok(Written { logits, shape, context: sizes.context })
}
