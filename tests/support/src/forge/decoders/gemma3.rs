//! gemma3 and gemma-embedding: windows by layer, two rope bases, norms before and after each block, scaled embedding, gated GELU.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, scaled, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // Only layer 5 attends to all positions: the default pattern of a file that names none.
    let whole = decoder(21, Dims { layers: 7, head_dim: 32, rotated: 32, ..DIMS });
    let linear = decoder(22, Dims { layers: 4, kv_heads: 1, ..DIMS });
    let linear = with(linear, "attention.sliding_window_pattern", Value::u32(3));
    let linear = with(linear, "rope.freq_base_swa", Value::f32(5e3));
    let linear = with(linear, "final_logit_softcapping", Value::f32(20.0));
    // As many layers as the one real model whose attention scale comes from another width.
    let deep = Dims { layers: 62, hidden: 32, heads: 2, kv_heads: 1, head_dim: 32, rotated: 32, ffn: 32 };
    vec![
        ("gemma3", whole),
        ("gemma3-linear", scaled(linear, [("type", Value::string("linear")), ("factor", Value::f32(8.0))])),
        ("gemma3-deep", decoder(23, deep)),
        ("gemma3-global", decoder(24, DIMS).without("gemma3.attention.sliding_window")),
    ]
}

/// An encoder of four layers; the third sees all positions.
pub(super) fn encoder(seed: u64) -> Forge {
    let forge = of(seed, "gemma-embedding", Dims { layers: 4, ..DIMS });
    let forge = with(forge, "attention.causal", Value::bool(false));
    with(forge, "attention.sliding_window_pattern", Value::u32(3))
}

fn decoder(seed: u64, dims: Dims) -> Forge {
    of(seed, "gemma3", dims)
}

fn of(seed: u64, architecture: &str, dims: Dims) -> Forge {
    let (forge, vocab) = start(seed, architecture, dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "attention.sliding_window", Value::u32(10));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[dims.hidden, vocab], 0.0, 0.5);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", dims.hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), dims.hidden);
    weights.qkv(layer, dims, Qkv { fused: false, bias: false });
    weights.head_norm(&name("attn_q_norm.weight"), dims.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), dims.head_dim);
    weights.linear(&name("attn_output"), [dims.heads * dims.head_dim, dims.hidden], 1.0, false);
    weights.post_norm(&name("post_attention_norm.weight"), dims.hidden, dims.layers);
    weights.norm(&name("ffn_norm.weight"), dims.hidden);
    weights.linear(&name("ffn_gate"), [dims.hidden, dims.ffn], 1.5, false);
    weights.linear(&name("ffn_up"), [dims.hidden, dims.ffn], 1.5, false);
    weights.linear(&name("ffn_down"), [dims.ffn, dims.hidden], 1.5, false);
    weights.post_norm(&name("post_ffw_norm.weight"), dims.hidden, dims.layers);
}
