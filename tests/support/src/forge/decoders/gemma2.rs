//! gemma2: capped scores and logits, windows in every second layer, norms before and after each block, gated GELU.

use super::{DIMS, Dims, EPSILON, Forge, Random, Value, Weights, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let wide = Dims { layers: 4, head_dim: 32, rotated: 32, ..DIMS };
    let capped = with(decoder(191, wide), "attn_logit_softcapping", Value::f32(5.0));
    let capped = with(capped, "final_logit_softcapping", Value::f32(8.0));
    // As many layers as the one real model whose attention scale comes from another width; and the caps of early files.
    let deep = Dims { layers: 46, hidden: 32, heads: 2, kv_heads: 1, head_dim: 32, rotated: 32, ffn: 32 };
    vec![("gemma2", capped), ("gemma2-deep", decoder(192, deep))]
}

fn decoder(seed: u64, dims: Dims) -> Forge {
    let (forge, vocab) = start(seed, "gemma2", dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "attention.sliding_window", Value::u32(10));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(dims.hidden, vocab, true);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", dims.hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    let name = |part: &str| format!("{layer}.{part}.weight");
    weights.norm(&name("attn_norm"), dims.hidden);
    // Positions differ less in weight in many layers, so that the other engine's GELU is not off by more than elsewhere.
    let gain = if dims.layers > 4 { 1.4 } else { 2.0 };
    let kv = dims.kv_heads * dims.head_dim;
    weights.linear(&format!("{layer}.attn_q"), [dims.hidden, dims.heads * dims.head_dim], gain, false);
    weights.linear(&format!("{layer}.attn_k"), [dims.hidden, kv], gain, false);
    weights.linear(&format!("{layer}.attn_v"), [dims.hidden, kv], 1.0, false);
    weights.attention_output(layer, dims);
    weights.post_norm(&name("post_attention_norm"), dims.hidden, dims.layers);
    weights.norm(&name("ffn_norm"), dims.hidden);
    weights.gated(layer, dims, false);
    weights.post_norm(&name("post_ffw_norm"), dims.hidden, dims.layers);
}
