//! `qwen3next`: Qwen3-Next; `qwen35` and `qwen35moe`: Qwen 3.5. Three of four layers have a gated delta rule instead of attention.
//! Attention has a gate for each value, RoPE for a part of each head, and norms of heads.

use super::Written;
use super::experts::{self, Experts};
use super::metadata::Metadata;
use super::recurrent::DeltaNet;
use super::rope;
use super::sizes::{FFN_MAX, Sizes, norm};
use super::writer::{Heads, Norm, Presence, Qkv, Writer};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, Gating, HeadPart, NormKind, RopeId, RopeLayout, ValueId};

/// The difference between these architectures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Decays and amounts come from one matrix, in runs of those that share a key head.
    Next,
    /// They come from two matrices, value heads have key heads in turn, and positions have sections.
    Later,
}

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let experts = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    write_layers(w, Kind::Next, Some(experts))
}

pub(super) fn write_later(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    experts::none(&w.metadata)?;
    write_layers(w, Kind::Later, None)
}

pub(super) fn write_later_moe(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let experts = experts::required(&w.metadata, Gating::Softmax, &[Gating::Softmax])?;
    write_layers(w, Kind::Later, Some(experts))
}

fn write_layers(w: &mut Writer<'_>, kind: Kind, experts: Option<Experts>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let (heads, rms) = (sizes.heads, norm(&w.metadata, NormKind::Rms)?);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, heads.dim, sizes.context)?;
    if kind == Kind::Later {
        check_sections(&w.metadata, angles.dims / 2)?;
    }
    let delta = DeltaNet::read(&w.metadata, kind == Kind::Later)?;
    if kind == Kind::Next && delta.heads.values < 2 * delta.heads.keys {
        return Err(w.metadata.unsupported("one value head for each key head (ssm.time_step_rank)"));
    }
    if heads.dim < 2 {
        return Err(w.metadata.unsupported("heads of one value (attention.key_length)"));
    }
    let recurrent = recurrent_layers(&w.metadata, &sizes)?;
    let shared = match &experts {
        None => None,
        Some(_) => w.metadata.count_if_there("expert_shared_feed_forward_length", 0..=FFN_MAX)?,
    };
    let shared = shared.filter(|width| *width > 0).unwrap_or(sizes.ffn);

    let x = w.embedding(sizes.hidden, 1.0);
    let rope = w.plain_rope(&angles);
    for (layer, recurrent) in (0..sizes.layers).zip(recurrent) {
        w.layer(layer);
        let normed = w.norm("norm of the layer", "attn_norm", rms, x);
        if recurrent {
            linear_attention(w, kind, &delta, rms, normed, x);
        } else {
            gated_attention(w, heads, rope, rms, normed, x);
        }
        let normed = w.norm("feed-forward norm", "post_attention_norm", rms, x);
        match &experts {
            None => {
                let gated = w.gated(normed, sizes.ffn, Activation::Silu, Presence::Never);
                w.add_projection("feed-forward down", "ffn_down", gated, x, Presence::Never);
            }
            Some(experts) => {
                w.experts(experts, normed, x);
                let out = w.shared_expert(normed, shared);
                w.open("shared expert's own gate", "ffn_gate_inp_shexp", normed, out);
                w.add(out, 1.0, x);
            }
        }
    }
    (sizes.layers..sizes.blocks).for_each(|layer| w.unused_layer(layer));
    let logits = w.head(rms, x);
    let ffn = if experts.is_some() { 0 } else { sizes.ffn };
    Ok(Written { logits, shape: Shape::new(&sizes, ffn, experts.as_ref()), context: sizes.context })
}

/// Whether each layer has a delta rule.
fn recurrent_layers(metadata: &Metadata<'_>, sizes: &Sizes) -> Result<Vec<bool>, PlanError> {
    let interval = metadata.count_if_there("full_attention_interval", 1..=1 << 16)?.unwrap_or(4);
    match metadata.flags_if_there("attention.recurrent_layers")? {
        None => Ok((1..=sizes.layers).map(|number| !number.is_multiple_of(interval)).collect()),
        Some(flags) if flags.len() == sizes.blocks => Ok(flags),
        Some(_) => {
            let key = metadata.key("attention.recurrent_layers");
            Err(PlanError::Key { key, want: "one value for each layer" })
        }
    }
}

/// Pairs of a head turn by a position of text, height or width, which are all the same in texts. Pairs without any of these
/// are refused.
fn check_sections(metadata: &Metadata<'_>, pairs: usize) -> Result<(), PlanError> {
    let name = "rope.dimension_sections";
    let sections = metadata
        .numbers(name)?
        .ok_or(PlanError::Key { key: metadata.key(name), want: "an array of integers" })?;
    let turned = |pair: usize| sections.get(pair % 3).is_some_and(|count| pair < 3 * count);
    let sum: usize = sections.iter().take(4).sum();
    if sum != pairs || !(0..pairs).all(turned) {
        return Err(metadata.unsupported(&format!("sections {sections:?} of {pairs} pairs ({name})")));
    }
    Ok(())
}

/// A delta rule, with the gate and the output.
fn linear_attention(w: &mut Writer<'_>, kind: Kind, delta: &DeltaNet, rms: Norm, from: ValueId, x: ValueId) {
    let values = delta.heads.values as usize;
    let qkv =
        w.project("query, key and value projections", "attn_qkv", from, delta.mixed_width(), Presence::Never);
    let gate = w.project("gate of the output", "attn_gate", from, delta.width(), Presence::Never);
    let [decay, amount] = match kind {
        Kind::Later => [("decays", "ssm_alpha"), ("amounts", "ssm_beta")]
            .map(|(role, stem)| w.project(role, stem, from, values, Presence::Never)),
        Kind::Next => {
            let both = w.project("amounts and decays", "ssm_ba", from, 2 * values, Presence::Never);
            let each = delta.heads.values / delta.heads.keys; // at least 2
            [each, 0].map(|first| {
                let part = |first, width| (both, HeadPart { head_dim: 2 * each, first, width });
                w.join_heads([part(first, 1), part(first + 1, each - 1)])
            })
        }
    };
    let out = w.delta_net(delta, rms, qkv, [decay, amount, gate]);
    w.add_projection("recurrent output", "ssm_out", out, x, Presence::Never);
}

/// Attention; the query projection has a gate beside each head.
fn gated_attention(w: &mut Writer<'_>, heads: Heads, rope: RopeId, rms: Norm, from: ValueId, x: ValueId) {
    let both =
        w.project("query and gate projections", "attn_q", from, 2 * heads.query_width(), Presence::Never);
    let k = w.project("key projection", "attn_k", from, heads.key_width(), Presence::Never);
    let v = w.project("value projection", "attn_v", from, heads.key_width(), Presence::Never);
    let dim = heads.dim as u32; // at most HEAD_DIM_MAX
    let [q, gate] = [0, dim].map(|first| {
        let part = |first, width| (both, HeadPart { head_dim: 2 * dim, first, width });
        w.join_heads([part(first, 1), part(first + 1, dim - 1)])
    });
    let qkv = Qkv { q, k, v };
    w.head_norms(rms, heads, qkv);
    let attended = w.attend(heads, rope, qkv, heads.scale(), None);
    let gated = w.gate(Activation::Sigmoid, gate, attended);
    w.add_projection("attention output", "attn_output", gated, x, Presence::Never);
}
