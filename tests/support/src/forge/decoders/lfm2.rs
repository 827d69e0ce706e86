//! lfm2: short convolutions between two gates, and attention in some layers; lfm2moe: with experts behind the first layer.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const LFM2: Dims = Dims { layers: 3, ..DIMS };
const TAPS: u64 = 4;
const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let (mut experts, vocab) = begin(212, "lfm2moe");
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", EXPERT_FFN),
        ("leading_dense_block_count", 1),
        ("expert_gating_func", 2),
    ] {
        experts = with(experts, name, Value::u32(value as u32));
    }
    let (dense, _) = begin(211, "lfm2");
    vec![("lfm2", decoder(211, (dense, vocab), 3)), ("lfm2moe", decoder(212, (experts, vocab), 1))]
}

fn begin(seed: u64, architecture: &str) -> (Forge, u64) {
    let (forge, vocab) = start(seed, architecture, LFM2);
    let forge = with(forge, "attention.head_count_kv", Value::i32s(&[0, 2, 0]));
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    (with(forge, "shortconv.l_cache", Value::u32(TAPS as u32)), vocab)
}

/// `dense`: layers at the start that have no experts.
fn decoder(seed: u64, (forge, vocab): (Forge, u64), dense: u32) -> Forge {
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(LFM2.hidden, vocab, true);
    (0..LFM2.layers)
        .for_each(|index| layer(&mut weights, &format!("blk.{index}"), index == 1, index < dense));
    weights.norm("token_embd_norm.weight", LFM2.hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, attends: bool, dense: bool) {
    let name = |part: &str| format!("{layer}.{part}");
    let hidden = LFM2.hidden;
    weights.norm(&name("attn_norm.weight"), hidden);
    if attends {
        weights.qkv(layer, LFM2, Qkv { fused: false, bias: false });
        weights.head_norm(&name("attn_q_norm.weight"), LFM2.head_dim);
        weights.head_norm(&name("attn_k_norm.weight"), LFM2.head_dim);
        weights.attention_output(layer, LFM2);
    } else {
        weights.linear(&name("shortconv.in_proj"), [hidden, 3 * hidden], 1.5, false);
        weights.add(&name("shortconv.conv.weight"), &[TAPS, hidden], 0.0, 0.9);
        weights.linear(&name("shortconv.out_proj"), [hidden, hidden], 1.0, false);
    }
    weights.norm(&name("ffn_norm.weight"), hidden);
    if dense {
        weights.gated(layer, LFM2, false);
    } else {
        weights.experts(layer, hidden, EXPERT_FFN, EXPERTS);
        weights.add(&name("exp_probs_b.bias"), &[EXPERTS], 0.0, 0.3);
    }
}
