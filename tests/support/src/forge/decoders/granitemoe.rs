//! granitemoe: granite with experts, and one that all rows share.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const EXPERTS: u64 = 8;
const SHARED_FFN: u64 = 48;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![("granitemoe", decoder(161, SHARED_FFN)), ("granitemoe-unshared", decoder(162, 0))]
}

/// `shared`: width of the shared expert, or 0.
fn decoder(seed: u64, shared: u64) -> Forge {
    let (mut forge, vocab) = start(seed, "granitemoe", DIMS);
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("feed_forward_length", 32),
        ("expert_shared_feed_forward_length", shared),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    for (key, value) in
        [("embedding_scale", 6.0), ("attention.scale", 0.45), ("residual_scale", 0.4), ("logit_scale", 3.0)]
    {
        forge = with(forge, key, Value::f32(value));
    }
    // llama.cpp rotates no heads of this architecture without the key.
    let forge = with(forge, "rope.scaling.finetuned", Value::bool(true));
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(DIMS.hidden, vocab, false);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), shared));
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.matrix("output.weight", &[DIMS.hidden, vocab], 10.0);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, shared: u64) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), DIMS.hidden);
    weights.qkv(layer, DIMS, Qkv { fused: false, bias: false });
    weights.attention_output(layer, DIMS);
    weights.norm(&name("ffn_norm.weight"), DIMS.hidden);
    weights.experts(layer, DIMS.hidden, 32, EXPERTS);
    if shared > 0 {
        weights.shared_expert(layer, DIMS.hidden, shared);
    }
}
