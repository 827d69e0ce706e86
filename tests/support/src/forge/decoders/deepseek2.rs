//! deepseek2: latent attention, experts after a dense layer, and one that all rows share.

use super::{
    DIMS, Dims, EPSILON, Forge, Random, TRAINED, Value, Weights, scaled, start, with, with_merged_experts,
};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED: u64 = 2;
/// Width of compressed queries.
const QUERY_RANK: u64 = 40;

/// Widths of latent attention.
#[derive(Clone, Copy)]
struct Latent {
    heads: u64,
    /// Width of the latent vector.
    rank: u64,
    /// Values of a head's query: not rotated, and rotated; and of a head's result.
    plain: u64,
    rotated: u64,
    result: u64,
}

const SMALL: Latent = Latent { heads: DIMS.heads, rank: 24, plain: 16, rotated: 8, result: 12 };

/// The heads of GLM 4.7 Flash; those of DeepSeek's models are as wide.
const WIDE: Latent = Latent { heads: 20, rank: 512, plain: 128, rotated: 64, result: 128 };

impl Latent {
    fn dims(&self) -> Dims {
        let &Self { heads, rank, rotated, .. } = self;
        Dims { layers: 3, heads, kv_heads: 1, head_dim: rank + rotated, rotated, ..DIMS }
    }
}

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // As in DeepSeek's files, a tenth of what the model was trained with.
    let yarn = [
        ("type", Value::string("yarn")),
        ("factor", Value::f32(4.0)),
        ("original_context_length", Value::u32(TRAINED)),
        ("yarn_log_multiplier", Value::f32(0.0707)),
    ];
    let decoder = |seed, large| decoder(seed, large, SMALL);
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
        ("deepseek2-merged", with_merged_experts(decoder(185, false), EXPERTS)),
    ]
}

/// A decoder whose heads are as wide as those of real models.
pub(super) fn wide() -> Forge {
    decoder(184, true, WIDE)
}

/// `large`: with compressed queries, and a bias of experts' chances.
fn decoder(seed: u64, large: bool, latent: Latent) -> Forge {
    let dims = latent.dims();
    let (mut forge, vocab) = start(seed, "deepseek2", dims);
    for (name, value) in [
        ("attention.value_length", latent.rank),
        ("attention.key_length_mla", latent.plain + latent.rotated),
        ("attention.value_length_mla", latent.result),
        ("attention.kv_lora_rank", latent.rank),
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
    weights.embedding(dims.hidden, vocab, false);
    (0..dims.layers).for_each(|index| layer(&mut weights, index, large, latent));
    weights.norm("output_norm.weight", dims.hidden);
    weights.matrix("output.weight", &[dims.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, index: u32, large: bool, latent: Latent) {
    let dims = latent.dims();
    let Latent { heads, rank, plain, rotated, result } = latent;
    let layer = format!("blk.{index}");
    let name = |part: &str| format!("{layer}.{part}.weight");
    let hidden = dims.hidden;
    weights.norm(&name("attn_norm"), hidden);
    let width = heads * (plain + rotated);
    if large {
        weights.matrix(&name("attn_q_a"), &[hidden, QUERY_RANK], 1.5);
        weights.norm(&name("attn_q_a_norm"), QUERY_RANK);
        weights.matrix(&name("attn_q_b"), &[QUERY_RANK, width], 2.0);
    } else {
        weights.matrix(&name("attn_q"), &[hidden, width], 2.0);
    }
    weights.matrix(&name("attn_kv_a_mqa"), &[hidden, rank + rotated], 1.5);
    weights.norm(&name("attn_kv_a_norm"), rank);
    weights.matrix(&name("attn_k_b"), &[plain, rank, heads], 1.5);
    weights.matrix(&name("attn_v_b"), &[rank, result, heads], 1.0);
    weights.linear(&format!("{layer}.attn_output"), [heads * result, hidden], 1.0, false);
    weights.norm(&name("ffn_norm"), hidden);
    if index == 0 {
        return weights.gated(&layer, dims, false);
    }
    weights.experts(&layer, hidden, EXPERT_FFN, EXPERTS);
    if large {
        weights.add(&format!("{layer}.exp_probs_b.bias"), &[EXPERTS], 0.0, 0.5);
    }
    weights.shared_expert(&layer, hidden, SHARED * EXPERT_FFN);
}
