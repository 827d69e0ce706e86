//! hunyuan-dense: norms of query and key heads after they are rotated.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

/// Heads wider than their share of the stream.
const HUNYUAN: Dims = Dims { head_dim: 32, rotated: 32, ..DIMS };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![("hunyuan-dense", decoder(141))]
}

fn decoder(seed: u64) -> Forge {
    let (forge, vocab) = start(seed, "hunyuan-dense", HUNYUAN);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1.1e7));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(HUNYUAN.hidden, vocab, true);
    (0..HUNYUAN.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}")));
    weights.norm("output_norm.weight", HUNYUAN.hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), HUNYUAN.hidden);
    weights.qkv(layer, HUNYUAN, Qkv { fused: false, bias: false });
    weights.head_norm(&name("attn_q_norm.weight"), HUNYUAN.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), HUNYUAN.head_dim);
    weights.attention_output(layer, HUNYUAN);
    weights.norm(&name("ffn_norm.weight"), HUNYUAN.hidden);
    weights.gated(layer, HUNYUAN, false);
}
