//! ernie4_5: llama without divisors of frequencies.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![("ernie4_5", decoder(131, false)), ("ernie4_5-biases", decoder(132, true))]
}

/// With biases it also has an output matrix of its own.
fn decoder(seed: u64, bias: bool) -> Forge {
    let (forge, vocab) = start(seed, "ernie4_5", DIMS);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(5e5));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(DIMS.hidden, vocab, !bias);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), bias));
    weights.norm("output_norm.weight", DIMS.hidden);
    if bias {
        weights.matrix("output.weight", &[DIMS.hidden, vocab], 2.5);
    }
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, bias: bool) {
    weights.norm(&format!("{layer}.attn_norm.weight"), DIMS.hidden);
    weights.qkv(layer, DIMS, Qkv { fused: false, bias });
    weights.attention_output(layer, DIMS);
    weights.norm(&format!("{layer}.ffn_norm.weight"), DIMS.hidden);
    weights.gated(layer, DIMS, false);
}
