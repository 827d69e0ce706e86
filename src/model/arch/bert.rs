//! `bert`, `nomic-bert`, `jina-bert-v2` and `jina-bert-v3`: encoders. All rows of a text see each other, and a LayerNorm follows
//! each half of a layer.
//!
//! BERT adds learned positions to the token embeddings, the first of Jina's lowers scores by distance, the others rotate. As in
//! llama.cpp, all tokens have the first token type, and GELU is its approximation by tanh. A file with a classifier scores texts.

use super::sizes::{Sizes, norm};
use super::writer::{Attention, Norm, Presence, Qkv, Writer};
use super::{Encoded, experts, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout, TableRow, ValueId};

/// Longer texts are refused: a step has room for the rows of a whole one.
const TEXT_ROWS_MAX: u32 = 8192;

pub(super) fn write(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    let sizes = Sizes::of_encoder(&w.metadata, w.vocab)?;
    let layer_norm = norm(&w.metadata, NormKind::Layer)?;
    experts::none(&w.metadata)?;

    let x = types_embedded(w, &sizes)?;
    w.add_row("position embedding", "position_embd", sizes.context as usize, TableRow::Position, x);
    w.norm_groups("embedding norm", "token_embd_norm", layer_norm, sizes.hidden, x);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let qkv = w.qkv(sizes.heads, x, Presence::Required);
        attention_half(w, &sizes, layer_norm, qkv, x, Presence::Required);
        let up = w.project("feed-forward up", "ffn_up", x, sizes.ffn, Presence::Required);
        let active = w.activate(Activation::Gelu, up);
        feed_forward_half(w, &sizes, layer_norm, active, x, Presence::Required);
    }
    encoded(w, &sizes, x, None)
}

/// Feed-forwards have a gate, as a tensor of its own or in the up projection, or none. Some files norm queries and keys, and the sum
/// after attention twice.
pub(super) fn write_jina_v2(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    let sizes = Sizes::of_encoder(&w.metadata, w.vocab)?;
    let layer_norm = norm(&w.metadata, NormKind::Layer)?;
    experts::none(&w.metadata)?;

    // Files need not name what all models were trained with.
    w.metadata.ignore_if("attention.max_alibi_bias", |most| most == 8.0);

    let mut x = types_embedded(w, &sizes)?;
    w.norm_groups("embedding norm", "token_embd_norm", layer_norm, sizes.hidden, x);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let qkv = w.qkv(sizes.heads, x, Presence::Optional);
        for (role, stem, value) in [("query norm", "attn_q_norm", qkv.q), ("key norm", "attn_k_norm", qkv.k)]
        {
            if w.has(&format!("{stem}.weight")) {
                w.norm_groups(role, stem, layer_norm, w.width(value), value);
            }
        }
        let how = Attention { both_ways: true, alibi: true, ..Attention::of(sizes.heads.scale(), None) };
        let attended = w.store_and_attend(sizes.heads, qkv, how);
        let sum = w.project("attention output", "attn_output", attended, sizes.hidden, Presence::Required);
        w.add(x, 1.0, sum);
        w.norm_groups("norm after attention", "attn_output_norm", layer_norm, sizes.hidden, sum);
        if w.has("attn_norm_2.weight") {
            w.add(x, 1.0, sum);
            w.norm_groups("second norm after attention", "attn_norm_2", layer_norm, sizes.hidden, sum);
        }
        x = sum;
        let active = if w.has("ffn_gate.weight") {
            w.gated(x, sizes.ffn, Activation::Gelu, Presence::Never)
        } else if w.rows("ffn_up.weight") == Some(2 * sizes.ffn as u64) {
            w.gated_pieces(x, sizes.ffn, Activation::Gelu)
        } else {
            let up = w.project("feed-forward up", "ffn_up", x, sizes.ffn, Presence::Optional);
            w.activate(Activation::Gelu, up)
        };
        feed_forward_half(w, &sizes, layer_norm, active, x, Presence::Optional);
    }
    encoded(w, &sizes, x, None)
}

pub(super) fn write_jina(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    write_rotated(w, Presence::Optional, |w, x, ffn| {
        let up = w.project("feed-forward up", "ffn_up", x, ffn, Presence::Optional);
        w.activate(Activation::Gelu, up)
    })
}

pub(super) fn write_nomic(w: &mut Writer<'_>) -> Result<Encoded, PlanError> {
    write_rotated(w, Presence::Never, |w, x, ffn| w.gated(x, ffn, Activation::Silu, Presence::Never))
}

/// An encoder that rotates. `active` makes the values that the down projection takes; `bias` is that of both output projections.
fn write_rotated(
    w: &mut Writer<'_>,
    bias: Presence,
    active: impl Fn(&mut Writer<'_>, ValueId, usize) -> ValueId,
) -> Result<Encoded, PlanError> {
    let sizes = Sizes::of_encoder(&w.metadata, w.vocab)?;
    let layer_norm = norm(&w.metadata, NormKind::Layer)?;
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, sizes.heads.dim, sizes.context)?;
    experts::none(&w.metadata)?;

    let x = types_embedded(w, &sizes)?;
    w.norm_groups("embedding norm", "token_embd_norm", layer_norm, sizes.hidden, x);
    let rope = w.plain_rope(&angles);
    for layer in 0..sizes.layers {
        w.layer(layer);
        let qkv = w.qkv(sizes.heads, x, Presence::Optional);
        w.rotate(sizes.heads, [rope, rope], qkv);
        attention_half(w, &sizes, layer_norm, qkv, x, bias);
        let active = active(w, x, sizes.ffn);
        feed_forward_half(w, &sizes, layer_norm, active, x, bias);
    }
    encoded(w, &sizes, x, None)
}

/// The embeddings of tokens and of the first token type.
fn types_embedded(w: &mut Writer<'_>, sizes: &Sizes) -> Result<ValueId, PlanError> {
    let types = w.metadata.token_types()?;
    let x = w.embedding(sizes.hidden, 1.0);
    if types > 0 {
        w.add_row("token type embedding", "token_types", types, TableRow::First, x);
    }
    Ok(x)
}

/// Attends, adds the output to `x` and norms that.
fn attention_half(w: &mut Writer<'_>, sizes: &Sizes, norm: Norm, qkv: Qkv, x: ValueId, bias: Presence) {
    let how = Attention { both_ways: true, ..Attention::of(sizes.heads.scale(), None) };
    let attended = w.store_and_attend(sizes.heads, qkv, how);
    w.add_projection("attention output", "attn_output", attended, x, bias);
    w.norm_groups("norm after attention", "attn_output_norm", norm, sizes.hidden, x);
}

/// Adds the down projection of the active values to `x` and norms that.
fn feed_forward_half(
    w: &mut Writer<'_>,
    sizes: &Sizes,
    norm: Norm,
    active: ValueId,
    x: ValueId,
    bias: Presence,
) {
    w.add_projection("feed-forward down", "ffn_down", active, x, bias);
    w.norm_groups("norm after feed-forward", "layer_output_norm", norm, sizes.hidden, x);
}

/// The result of an encoder whose last layer left `rows`. A classifier takes first rows, or with `mean` what
/// [`Writer::rows_head`] says.
pub(super) fn encoded(
    w: &mut Writer<'_>,
    sizes: &Sizes,
    rows: ValueId,
    mean: Option<Norm>,
) -> Result<Encoded, PlanError> {
    w.metadata.ignore_one_text("classifier.output_labels");
    w.rows_head(sizes.hidden, mean);
    let context = sizes.context.min(TEXT_ROWS_MAX);
    Ok(Encoded { rows, shape: Shape::new(sizes, sizes.ffn, None), context })
}
