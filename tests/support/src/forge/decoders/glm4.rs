//! glm4: norms before and after each block, gate and up in one tensor, adjacent pairs rotated in a part of each head.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const GLM4: Dims = Dims { head_dim: 32, rotated: 16, ..DIMS };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![
        ("glm4", decoder(51, Qkv { fused: false, bias: false }, false)),
        ("glm4-biases", decoder(52, Qkv { fused: false, bias: true }, true)),
    ]
}

fn decoder(seed: u64, qkv: Qkv, tied: bool) -> Forge {
    let (forge, vocab) = start(seed, "glm4", GLM4);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[GLM4.hidden, vocab], 0.0, if tied { 0.5 } else { 1.0 });
    (0..GLM4.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), qkv));
    weights.norm("output_norm.weight", GLM4.hidden);
    if !tied {
        weights.matrix("output.weight", &[GLM4.hidden, vocab], 2.5);
    }
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, qkv: Qkv) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), GLM4.hidden);
    weights.qkv(layer, GLM4, qkv);
    weights.linear(&name("attn_output"), [GLM4.heads * GLM4.head_dim, GLM4.hidden], 1.0, false);
    weights.post_norm(&name("post_attention_norm.weight"), GLM4.hidden, GLM4.layers);
    weights.norm(&name("ffn_norm.weight"), GLM4.hidden);
    weights.linear(&name("ffn_up"), [GLM4.hidden, 2 * GLM4.ffn], 1.5, false);
    weights.linear(&name("ffn_down"), [GLM4.ffn, GLM4.hidden], 1.5, false);
    weights.post_norm(&name("post_ffw_norm.weight"), GLM4.hidden, GLM4.layers);
}
