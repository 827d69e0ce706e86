//! phi2: attention and feed-forward in parallel from one norm, positions in a part of each head, a logit bias.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let partial = Dims { rotated: 6, ..DIMS };
    vec![
        ("phi2", decoder(41, Dims { kv_heads: 4, ..partial }, Qkv { fused: false, bias: true })),
        ("phi2-fused", decoder(42, partial, Qkv { fused: true, bias: true })),
    ]
}

fn decoder(seed: u64, dims: Dims, qkv: Qkv) -> Forge {
    let (forge, vocab) = start(seed, "phi2", dims);
    let forge = with(forge, "attention.layer_norm_epsilon", Value::f32(EPSILON));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[dims.hidden, vocab], 0.0, 1.0);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims, qkv));
    weights.layer_norm("output_norm", dims.hidden);
    weights.linear("output", [dims.hidden, vocab], 2.5, true);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims, qkv: Qkv) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.layer_norm(&name("attn_norm"), dims.hidden);
    weights.qkv(layer, dims, qkv);
    weights.linear(&name("attn_output"), [dims.heads * dims.head_dim, dims.hidden], 1.0, true);
    weights.linear(&name("ffn_up"), [dims.hidden, dims.ffn], 1.5, true);
    weights.linear(&name("ffn_down"), [dims.ffn, dims.hidden], 1.5, true);
}
