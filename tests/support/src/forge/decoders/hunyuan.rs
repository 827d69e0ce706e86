//! hunyuan-dense and hunyuan-moe: norms of query and key heads after they are rotated.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

/// Heads wider than their share of the stream.
const HUNYUAN: Dims = Dims { head_dim: 32, rotated: 32, ..DIMS };

const EXPERTS: u64 = 8;
/// All experts together are as wide as the other engine reads of a file: as the feed-forward layers.
const MOE: Dims = Dims { ffn: 32, ..HUNYUAN };
const SHARED_FFN: u64 = 48;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![("hunyuan-dense", dense(141)), ("hunyuan-moe", moe(191))]
}

fn decoder(seed: u64, architecture: &str, dims: Dims) -> (Weights, u64) {
    let (forge, vocab) = start(seed, architecture, dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1.1e7));
    (Weights { forge, random: Random(seed) }, vocab)
}

fn dense(seed: u64) -> Forge {
    let (mut weights, vocab) = decoder(seed, "hunyuan-dense", HUNYUAN);
    weights.embedding(HUNYUAN.hidden, vocab, true);
    for index in 0..HUNYUAN.layers {
        let layer = format!("blk.{index}");
        attention(&mut weights, &layer);
        weights.gated(&layer, HUNYUAN, false);
    }
    weights.norm("output_norm.weight", HUNYUAN.hidden);
    weights.forge
}

fn moe(seed: u64) -> Forge {
    let (mut weights, vocab) = decoder(seed, "hunyuan-moe", MOE);
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", MOE.ffn),
        ("expert_shared_feed_forward_length", SHARED_FFN),
    ] {
        weights.forge = with(weights.forge, name, Value::u32(value as u32));
    }
    weights.embedding(MOE.hidden, vocab, false);
    for index in 0..MOE.layers {
        let layer = format!("blk.{index}");
        attention(&mut weights, &layer);
        weights.experts(&layer, MOE.hidden, MOE.ffn, EXPERTS);
        weights.shared_expert(&layer, MOE.hidden, SHARED_FFN);
    }
    weights.norm("output_norm.weight", MOE.hidden);
    weights.matrix("output.weight", &[MOE.hidden, vocab], 2.5);
    weights.forge
}

/// The attention of a layer, and the norm after it.
fn attention(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), HUNYUAN.hidden);
    weights.qkv(layer, HUNYUAN, Qkv { fused: false, bias: false });
    weights.head_norm(&name("attn_q_norm.weight"), HUNYUAN.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), HUNYUAN.head_dim);
    weights.attention_output(layer, HUNYUAN);
    weights.norm(&name("ffn_norm.weight"), HUNYUAN.hidden);
}
