//! mistral3: llama whose queries grow with their position.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, scaled, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // The longest prompt passes five steps of growth, and the frequencies of YaRN.
    let yarn = [
        ("type", Value::string("yarn")),
        ("factor", Value::f32(16.0)),
        ("original_context_length", Value::u32(20)),
        ("yarn_beta_fast", Value::f32(32.0)),
        ("yarn_beta_slow", Value::f32(1.0)),
        ("yarn_log_multiplier", Value::f32(1.0)),
    ];
    let growing = with(scaled(decoder(151), yarn), "attention.temperature_scale", Value::f32(0.4));
    vec![("mistral3", growing), ("mistral3-plain", decoder(152))]
}

fn decoder(seed: u64) -> Forge {
    let (forge, vocab) = start(seed, "mistral3", DIMS);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(DIMS.hidden, vocab, false);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}")));
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.matrix("output.weight", &[DIMS.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str) {
    weights.norm(&format!("{layer}.attn_norm.weight"), DIMS.hidden);
    weights.qkv(layer, DIMS, Qkv { fused: false, bias: false });
    weights.attention_output(layer, DIMS);
    weights.norm(&format!("{layer}.ffn_norm.weight"), DIMS.hidden);
    weights.gated(layer, DIMS, false);
}
