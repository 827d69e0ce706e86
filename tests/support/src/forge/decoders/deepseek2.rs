//! deepseek2: latent attention, experts after a dense layer, and one that all rows share.

use super::{DIMS, Dims, EPSILON, Forge, Random, TRAINED, Value, Weights, scaled, start, with};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED: u64 = 2;
/// Width of the latent vector, and of compressed queries.
const RANK: u64 = 24;
const QUERY_RANK: u64 = 40;
/// Values of a head's query: not rotated, and rotated; and of a head's result.
const PLAIN: u64 = 16;
const ROTATED: u64 = 8;
const RESULT: u64 = 12;
const DEEPSEEK: Dims = Dims { layers: 3, kv_heads: 1, head_dim: RANK + ROTATED, rotated: ROTATED, ..DIMS };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // As in DeepSeek's files, a tenth of what the model was trained with.
    let yarn = [
        ("type", Value::string("yarn")),
        ("factor", Value::f32(4.0)),
        ("original_context_length", Value::u32(TRAINED)),
        ("yarn_log_multiplier", Value::f32(0.0707)),
    ];
    let sigmoid = with(decoder(182, true), "expert_gating_func", Value::u32(2));
    let sigmoid = with(sigmoid, "expert_weights_norm", Value::bool(true));
    let sigmoid = with(sigmoid, "expert_weights_scale", Value::f32(1.5));
    let groups = with(decoder(183, true), "expert_gating_func", Value::u32(2));
    let groups = with(groups, "expert_group_count", Value::u32(4));
    let groups = with(groups, "expert_group_used_count", Value::u32(2));
    vec![
        ("deepseek2-lite", decoder(181, false)),
        ("deepseek2", scaled(sigmoid, yarn)),
        ("deepseek2-groups", groups),
    ]
}

/// `large`: with compressed queries, and a bias of experts' chances.
fn decoder(seed: u64, large: bool) -> Forge {
    let (mut forge, vocab) = start(seed, "deepseek2", DEEPSEEK);
    for (name, value) in [
        ("attention.value_length", RANK),
        ("attention.key_length_mla", PLAIN + ROTATED),
        ("attention.value_length_mla", RESULT),
        ("attention.kv_lora_rank", RANK),
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", EXPERT_FFN),
        ("expert_shared_count", SHARED),
        ("leading_dense_block_count", 1),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    // The other engine reads it in all models but those of 26 and 27 layers.
    let queries = if large { QUERY_RANK } else { 0 };
    let forge = with(forge, "attention.q_lora_rank", Value::u32(queries as u32));
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(DEEPSEEK.hidden, vocab, false);
    (0..DEEPSEEK.layers).for_each(|index| layer(&mut weights, index, large));
    weights.norm("output_norm.weight", DEEPSEEK.hidden);
    weights.matrix("output.weight", &[DEEPSEEK.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, index: u32, large: bool) {
    let layer = format!("blk.{index}");
    let name = |part: &str| format!("{layer}.{part}.weight");
    let (hidden, heads) = (DEEPSEEK.hidden, DEEPSEEK.heads);
    weights.norm(&name("attn_norm"), hidden);
    let width = heads * (PLAIN + ROTATED);
    if large {
        weights.matrix(&name("attn_q_a"), &[hidden, QUERY_RANK], 1.5);
        weights.norm(&name("attn_q_a_norm"), QUERY_RANK);
        weights.matrix(&name("attn_q_b"), &[QUERY_RANK, width], 2.0);
    } else {
        weights.matrix(&name("attn_q"), &[hidden, width], 2.0);
    }
    weights.matrix(&name("attn_kv_a_mqa"), &[hidden, RANK + ROTATED], 1.5);
    weights.norm(&name("attn_kv_a_norm"), RANK);
    weights.matrix(&name("attn_k_b"), &[PLAIN, RANK, heads], 1.5);
    weights.matrix(&name("attn_v_b"), &[RANK, RESULT, heads], 1.0);
    weights.linear(&format!("{layer}.attn_output"), [heads * RESULT, hidden], 1.0, false);
    weights.norm(&name("ffn_norm"), hidden);
    if index == 0 {
        return weights.gated(&layer, DEEPSEEK, false);
    }
    weights.experts(&layer, hidden, EXPERT_FFN, EXPERTS);
    if large {
        weights.add(&format!("{layer}.exp_probs_b.bias"), &[EXPERTS], 0.0, 0.5);
    }
    weights.shared_expert(&layer, hidden, SHARED * EXPERT_FFN);
}
