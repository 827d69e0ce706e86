//! `gemma3`: the text part of Gemma 3, and `gemma-embedding`, the encoder made of it. Each half of a layer has a norm before and after it. It uses GELU and scales
//! embeddings. Most layers have windows and a RoPE base of their own.

use super::sizes::{Sizes, norm};
use super::window::{Ropes, window};
use super::writer::{Attention, Presence, Writer};
use super::{Encoded, Written, bert, experts, gemma2, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{NormKind, RopeLayout, ValueId};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 6;

/// Layers of the 27B model. It scales scores by a width other than that of its heads; no key states this.
const LAYERS_27B: usize = 62;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let heads = sizes.heads;
    let cap = gemma2::cap(&w.metadata, "final_logit_softcapping", 0.0)?;
    let scale = match sizes.layers {
        LAYERS_27B => 1.0 / ((sizes.hidden / heads.queries) as f32).sqrt(),
        _ => heads.scale(),
    };
    let x = layers(w, &sizes, scale, false)?;
    let logits = w.head(norm(&w.metadata, NormKind::Rms)?, x);
    if let Some(cap) = cap {
        w.cap(logits, cap);
    }
    Ok(Written { logits, shape: Shape::new(&sizes, sizes.ffn, None), context: sizes.context })
}

pub(super) fn write_encoder(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    let sizes = Sizes::of_encoder(&w.metadata, w.vocab)?;
    let x = layers(w, &sizes, sizes.heads.scale(), true)?;
    w.norm_last(norm(&w.metadata, NormKind::Rms)?, x);
    bert::encoded(w, &sizes, x, None)
}

/// Writes the embedding and all layers, whose rows see `both_ways` or only what is before them. Returns the stream.
fn layers(w: &mut Writer<'_>, sizes: &Sizes, scale: f32, both_ways: bool) -> Result<ValueId, PlanError> {
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    experts::none(&w.metadata)?;
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    let windows = window(&w.metadata, sizes, angles.dims, PATTERN)?;
    let x = w.embedding(sizes.hidden, (sizes.hidden as f32).sqrt());
    let ropes = Ropes::of(w, &windows, &angles)?;
    for layer in 0..sizes.layers {
        w.layer(layer);
        let normed = w.norm("attention norm", "attn_norm", rms, x);
        let qkv = w.qkv(heads, normed, Presence::Optional);
        w.head_norms(rms, heads, qkv);
        let window = windows.of(layer);
        let rope = ropes.at(window);
        w.rotate(heads, [rope, rope], qkv);
        let how = Attention { both_ways, ..Attention::of(scale, window) };
        let attended = w.store_and_attend(heads, qkv, how);
        w.add_normed_halves(rms, attended, x, sizes.ffn);
    }
    Ok(x)
}
