//! `llama`: Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama and every model converted under that name.
//!
//! The converter permutes q and k rows so that rotary pairs are neighbours. Layers may have experts.

use super::Written;
use super::sizes::{Sizes, norm};
use super::writer::{Presence, Writer};
use super::{experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout};

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::rope(&w.metadata, RopeLayout::Interleaved, heads.dim, sizes.context)?;
    let experts = experts::read(&w.metadata)?;

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.rope(&angles);
    let mut dense = false;
    for layer in 0..sizes.layers {
        w.layer(layer);
        w.self_attention(rms, x, heads, rope, [Presence::Optional, Presence::Optional]);
        let normed = w.norm("feed-forward norm", "ffn_norm", rms, x);
        match &experts {
            // A model may mix dense and expert layers.
            Some(experts) if !w.has("ffn_gate.weight") => w.experts(experts, normed, x),
            _ => {
                dense = true;
                let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Optional);
                w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Optional);
            }
        }
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    let shape = Shape::new(&sizes, if dense { sizes.ffn } else { 0 }, experts.as_ref());
    Ok(Written { logits, shape, context: sizes.context })
}
