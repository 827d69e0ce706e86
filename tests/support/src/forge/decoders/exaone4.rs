//! exaone4: norms of query and key heads and after each block; with windows, layers without one use no positions.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, push, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // As many layers as the one real model with windows: llama.cpp reads the window's key in no other.
    let deep = Dims { layers: 64, hidden: 32, heads: 2, kv_heads: 1, ffn: 32, ..DIMS };
    let deep = with(decoder(122, deep), "attention.sliding_window", Value::u32(10));
    vec![("exaone4", with_factors(decoder(121, DIMS))), ("exaone4-window", with_factors(deep))]
}

/// Adds divisors of the rope frequencies, from 1 for the fastest pair.
fn with_factors(mut forge: Forge) -> Forge {
    let pairs = DIMS.head_dim / 2;
    let factor = |pair: u64| 1.0 + 15.0 * pair as f32 / (pairs - 1) as f32;
    push(&mut forge, "rope_freqs.weight", &[pairs], (0..pairs).map(factor));
    forge
}

fn decoder(seed: u64, dims: Dims) -> Forge {
    let (forge, vocab) = start(seed, "exaone4", dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(dims.hidden, vocab, false);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", dims.hidden);
    weights.matrix("output.weight", &[dims.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.qkv(layer, dims, Qkv { fused: false, bias: false });
    weights.head_norm(&name("attn_q_norm.weight"), dims.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), dims.head_dim);
    weights.attention_output(layer, dims);
    weights.post_norm(&name("post_attention_norm.weight"), dims.hidden, dims.layers);
    weights.gated(layer, dims, false);
    weights.post_norm(&name("post_ffw_norm.weight"), dims.hidden, dims.layers);
}
