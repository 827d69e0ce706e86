//! command-r and cohere2: attention and feed-forward in parallel from one norm without bias, scaled logits.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, kind, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let scaled = with(decoder(111, "command-r", DIMS, false), "logit_scale", Value::f32(0.6));
    // Layer 3 sees all positions and uses none: the default pattern of a file that names no layers.
    let windows =
        with(decoder(113, "cohere2", Dims { layers: 5, ..DIMS }, false), "logit_scale", Value::f32(0.6));
    let windows = with(windows, "attention.sliding_window", Value::u32(10));
    let named = with(decoder(114, "cohere2", DIMS, true), "logit_scale", Value::f32(1.2));
    let named = with(named, "attention.sliding_window", Value::u32(7));
    let named = with(named, "attention.sliding_window_pattern", Value::array(kind::BOOL, 2, &[0, 1]));
    vec![
        ("command-r", scaled),
        ("command-r-biases", decoder(112, "command-r", DIMS, true)),
        ("cohere2", windows),
        ("cohere2-named", named),
    ]
}

fn decoder(seed: u64, architecture: &str, dims: Dims, bias: bool) -> Forge {
    let (forge, vocab) = start(seed, architecture, dims);
    let forge = with(forge, "attention.layer_norm_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(5e4));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(dims.hidden, vocab, true);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims, bias));
    weights.norm("output_norm.weight", dims.hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims, bias: bool) {
    weights.norm(&format!("{layer}.attn_norm.weight"), dims.hidden);
    weights.qkv(layer, dims, Qkv { fused: false, bias });
    weights.attention_output(layer, dims);
    weights.gated(layer, dims, false);
}
