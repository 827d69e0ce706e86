//! starcoder2: norms with mean and variance, biases everywhere, ungated GELU.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![
        ("starcoder2", decoder(31, Qkv { fused: false, bias: true }, false)),
        ("starcoder2-fused", decoder(32, Qkv { fused: true, bias: false }, true)),
    ]
}

fn decoder(seed: u64, qkv: Qkv, tied: bool) -> Forge {
    let (forge, vocab) = start(seed, "starcoder2", DIMS);
    let forge = with(forge, "attention.layer_norm_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e5));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[DIMS.hidden, vocab], 0.0, if tied { 0.5 } else { 1.0 });
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), qkv));
    weights.layer_norm("output_norm", DIMS.hidden);
    if !tied {
        weights.matrix("output.weight", &[DIMS.hidden, vocab], 2.5);
    }
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, qkv: Qkv) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.layer_norm(&name("attn_norm"), DIMS.hidden);
    weights.qkv(layer, DIMS, qkv);
    weights.linear(&name("attn_output"), [DIMS.heads * DIMS.head_dim, DIMS.hidden], 1.0, true);
    weights.layer_norm(&name("ffn_norm"), DIMS.hidden);
    weights.linear(&name("ffn_up"), [DIMS.hidden, DIMS.ffn], 1.5, true);
    weights.linear(&name("ffn_down"), [DIMS.ffn, DIMS.hidden], 1.5, true);
}
