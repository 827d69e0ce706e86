//! `gemma3n`: the text part of Gemma 3n. Four residual streams run beside each other (AltUp): each layer predicts all of them,
//! computes the first, and corrects all by the difference. Each layer has a low-rank path beside attention
//! (Laurel) and an input of its own from the token. The last layers attend to keys and values of earlier ones.

use super::metadata::Metadata;
use super::sizes::{Sizes, WIDTH_MAX, norm};
use super::window::{Ropes, Window, window};
use super::writer::{Attention, Heads, Norm, Presence, Qkv, Writer};
use super::{Written, experts, gemma2, rope};
use crate::model::plan::{PlanError, Shape};
use crate::program::{Activation, NormKind, RopeLayout, StateId, ValueId};

/// Default period of layers without a window, where the file does not name the layers.
const PATTERN: u32 = 5;

/// Streams of files that do not state them, and the most.
const STREAMS: usize = 4;
const STREAMS_MAX: u64 = 8;

/// Width of each layer's own input in files that do not state it.
const INPUT: usize = 256;

/// Layers with keys and values of their own in files that do not state how many share them.
const OWN_KV: usize = 20;

/// Gates of these layers are sparse in files that do not say which, by so many deviations: 5 % of normal values pass.
const SPARSE_LAYERS: usize = 10;
const SPARSE_DEVIATIONS: f32 = 1.644_853_6;

/// Rank of the low-rank path in a file without its matrix, for the message.
const LAUREL_RANK: u64 = 64;

/// Sizes and numbers that all layers use.
struct Decoder {
    sizes: Sizes,
    rms: Norm,
    streams: usize,
    /// Width of each layer's own input.
    input: usize,
    windows: Window,
    ropes: Ropes,
    /// Deviations of each layer's sparse gates.
    sparse: Vec<Option<f32>>,
    /// Layers with keys and values of their own: the first ones.
    own_kv: usize,
}

pub(super) fn write(w: &mut Writer<'_>) -> Result<Written, PlanError> {
    let sizes = Sizes::read(&w.metadata, w.vocab)?;
    let rms = norm(&w.metadata, NormKind::Rms)?;
    experts::none(&w.metadata)?;
    let cap = gemma2::cap(&w.metadata, "final_logit_softcapping", 30.0)?;
    w.metadata.refuse_any("altup.active_idx", "another active stream than the first", |index| index != 0)?;
    let streams = w.metadata.count_if_there("altup.num_inputs", 2..=STREAMS_MAX)?.unwrap_or(STREAMS);
    let input = w.metadata.count_if_there("embedding_length_per_layer_input", 1..=4096)?.unwrap_or(INPUT);
    let sparse = sparse_layers(&w.metadata, sizes.blocks)?;
    if sizes.ffn < 2 && sparse.iter().any(Option::is_some) {
        return Err(w.metadata.unsupported("sparse gates of one value (feed_forward_length = 1)"));
    }
    // A real number in files of early converters.
    let shared = w.metadata.whole_if_there("attention.shared_kv_layers", 0..=sizes.layers as u64 - 1)?;
    let own_kv = shared.map_or(sizes.layers.min(OWN_KV), |shared| sizes.layers - shared);
    let angles = rope::without_factors(&w.metadata, RopeLayout::Halves, sizes.heads.dim, sizes.context)?;
    let windows = window(&w.metadata, &sizes, angles.dims, PATTERN)?;

    let x = w.embedding(sizes.hidden, (sizes.hidden as f32).sqrt());
    let (table, scale) = ("per_layer_token_embd", (input as f32).sqrt());
    let inputs = w.embed_beside("token embedding of each layer", table, input * sizes.layers, scale);
    let ropes = Ropes::of(w, &windows, &angles)?;
    let decoder = Decoder { sizes, rms, streams, input, windows, ropes, sparse, own_kv };

    let mut stream = x;
    let mut states = Vec::new();
    for layer in 0..decoder.sizes.layers {
        w.layer(layer);
        if layer == 0 {
            stream = w.outside_layer(|w| decoder.begin(w, x, inputs));
        }
        stream = decoder.layer(w, layer, &mut states, stream, inputs)?;
    }
    let last = w.take(stream);
    let merged = w.merge_streams("altup_unembd_proj", last, streams);
    let logits = w.logits("output_norm", rms, merged, [Presence::Optional, Presence::Never]);
    if let Some(cap) = cap {
        w.cap(logits, cap);
    }
    let Sizes { ffn, context, .. } = decoder.sizes;
    Ok(Written { logits, shape: Shape::new(&decoder.sizes, ffn, None), context })
}

/// Deviations of each layer's sparse gates. Layers that are not sparse have minus infinity in the file.
fn sparse_layers(metadata: &Metadata<'_>, layers: usize) -> Result<Vec<Option<f32>>, PlanError> {
    let name = "activation_sparsity_scale";
    let Some(stated) = metadata.floats_if_there(name)? else {
        return Ok((0..layers).map(|layer| (layer < SPARSE_LAYERS).then_some(SPARSE_DEVIATIONS)).collect());
    };
    let want = "one number for each layer, finite or minus infinity";
    let key = metadata.key(name);
    if stated.len() != layers {
        return Err(PlanError::Key { key, want });
    }
    if let Some(value) = stated.iter().copied().find(|value| value.is_nan() || *value == f32::INFINITY) {
        return Err(PlanError::Float { key, value, want: "finite, or minus infinity" });
    }
    Ok(stated.into_iter().map(|value| value.is_finite().then_some(value)).collect())
}

impl Decoder {
    /// Completes the inputs of all layers, and makes the streams of the token embedding.
    fn begin(&self, w: &mut Writer<'_>, x: ValueId, inputs: ValueId) -> ValueId {
        let role = "projection to the layers' inputs";
        let width = w.width(inputs);
        let projected = w.project(role, "per_layer_model_proj", x, width, Presence::Never);
        w.scale(projected, 1.0 / (self.sizes.hidden as f32).sqrt());
        w.norm_groups("norm of the layers' inputs", "per_layer_proj_norm", self.rms, self.input, projected);
        w.add(projected, 1.0, inputs);
        w.scale(inputs, std::f32::consts::FRAC_1_SQRT_2);
        w.streams_of("altup_proj", x, self.streams)
    }

    /// Writes a layer, and returns its streams.
    fn layer(
        &self,
        w: &mut Writer<'_>,
        layer: usize,
        states: &mut Vec<StateId>,
        streams: ValueId,
        inputs: ValueId,
    ) -> Result<ValueId, PlanError> {
        let hidden = self.sizes.hidden;
        let router = w.router(self.rms, hidden, self.streams);
        let first = w.slice(streams, 0, hidden);
        let routed = w.route_streams(router, first);
        let predicted = w.mix_streams("altup_predict_coef", routed, streams);
        let first = w.slice(predicted, 0, hidden);

        let normed = w.norm("attention norm", "attn_norm", self.rms, first);
        let laurel = self.laurel(w, normed);
        let attended = self.attend(w, layer, states, normed)?;
        let out = w.project("attention output", "attn_output", attended, hidden, Presence::Never);
        let x = w.norm("norm after attention", "post_attention_norm", self.rms, out);
        w.add(first, 1.0, x);
        w.add(laurel, 1.0, x);
        w.scale(x, std::f32::consts::FRAC_1_SQRT_2);
        self.feed_forward(w, layer, x);

        let routed = w.route_streams(router, x);
        let role = "amounts of the streams' correction";
        let amounts = w.project(role, "altup_correct_coef", routed, self.streams, Presence::Never);
        w.add(first, -1.0, x);
        w.add_to_streams(x, Some(amounts), 0, predicted);
        let added = self.own_input(w, layer, predicted, inputs);
        w.add_to_streams(added, None, 1, predicted);
        Ok(predicted)
    }

    /// The low-rank path beside attention.
    fn laurel(&self, w: &mut Writer<'_>, normed: ValueId) -> ValueId {
        // A wrong rank does not fit the other matrix, which `finish` reports.
        let rank = w.rows("laurel_l.weight").unwrap_or(LAUREL_RANK).min(WIDTH_MAX);
        let down = w.project("low-rank path, down", "laurel_l", normed, rank as usize, Presence::Never);
        let up = w.project("low-rank path, up", "laurel_r", down, self.sizes.hidden, Presence::Never);
        let laurel = w.norm("norm of the low-rank path", "laurel_post_norm", self.rms, up);
        w.add(normed, 1.0, laurel);
        laurel
    }

    /// Attention to the layer's own keys and values, or to those of the last layer with its own that has a window as it has.
    fn attend(
        &self,
        w: &mut Writer<'_>,
        layer: usize,
        states: &mut Vec<StateId>,
        normed: ValueId,
    ) -> Result<ValueId, PlanError> {
        let (heads, rms) = (self.sizes.heads, self.rms);
        let window = self.windows.of(layer);
        let (rope, how) = (self.ropes.at(window), Attention::of(1.0, window));
        if layer < self.own_kv {
            let qkv = w.qkv(heads, normed, Presence::Never);
            w.head_norms(rms, heads, qkv);
            w.norm_heads_without_weights(rms, heads.dim, qkv.v);
            w.rotate(heads, [rope, rope], qkv);
            let Qkv { q, k, v } = qkv;
            let state = w.store(heads, k, v);
            states.push(state);
            return Ok(w.attend_to(state, q, how));
        }
        ["attn_k", "attn_v"].into_iter().for_each(|stem| w.unused(stem));
        let Heads { dim, .. } = heads;
        let q = w.project("query projection", "attn_q", normed, heads.query_width(), Presence::Never);
        w.norm_groups("query norm", "attn_q_norm", rms, dim, q);
        w.rotate_value(heads, rope, q);
        let alike = (0..self.own_kv).rev().find(|other| self.windows.of(*other) == window);
        let state = alike.and_then(|other| states.get(other).copied()).ok_or_else(|| {
            let feature = format!("keys and values of layer {layer} shared, but no earlier layer like it");
            w.metadata.unsupported(&format!("{feature} (attention.shared_kv_layers)"))
        })?;
        Ok(w.attend_to(state, q, how))
    }

    /// Adds the feed-forward half to `x`.
    fn feed_forward(&self, w: &mut Writer<'_>, layer: usize, x: ValueId) {
        let normed = w.norm("feed-forward norm", "ffn_norm", self.rms, x);
        let gate = w.project("feed-forward gate", "ffn_gate", normed, self.sizes.ffn, Presence::Never);
        let up = w.project("feed-forward up", "ffn_up", normed, self.sizes.ffn, Presence::Never);
        if let Some(deviations) = self.sparse.get(layer).copied().flatten() {
            w.sparsify(deviations, gate);
        }
        let gated = w.gate(Activation::Gelu, gate, up);
        let hidden = self.sizes.hidden;
        let out = w.project("feed-forward down", "ffn_down", gated, hidden, Presence::Never);
        w.add_norm("norm after feed-forward", "post_ffw_norm", self.rms, out, x);
    }

    /// The layer's own input, gated by the first stream, as it is added to the others.
    fn own_input(&self, w: &mut Writer<'_>, layer: usize, streams: ValueId, inputs: ValueId) -> ValueId {
        let first = w.slice(streams, 0, self.sizes.hidden);
        w.multiply("scale of the first stream", "altup_correct_scale.weight", first);
        let gate = w.project("gate of the layer's input", "inp_gate", first, self.input, Presence::Never);
        let own = w.slice(inputs, layer * self.input, self.input);
        let gated = w.gate(Activation::Gelu, gate, own);
        let role = "projection of the layer's input";
        let out = w.project(role, "proj", gated, self.sizes.hidden, Presence::Never);
        w.norm("norm of the layer's input", "post_norm", self.rms, out)
    }
}
