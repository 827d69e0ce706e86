//! qwen3next, qwen35 and qwen35moe: gated delta rules, and attention with a gate for each value.

use super::{DIMS, Dims, EPSILON, Forge, Random, Value, Weights, start, with, with_merged_experts};

const QWEN: Dims = Dims { layers: 3, head_dim: 32, rotated: 16, ..DIMS };
const TAPS: u64 = 3;
const KEYS: u64 = 2;
const VALUES: u64 = 4;
/// Values of a key and of a value.
const DIM: u64 = 64;
const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED_FFN: u64 = 48;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let interval = |forge| with(forge, "full_attention_interval", Value::u32(3));
    // A list of the layers with a delta rule; the second has attention.
    let listed = |forge| with(forge, "attention.recurrent_layers", Value::i32s(&[1, 0, 1]));
    vec![
        ("qwen3next", decoder(231, "qwen3next", 2, interval)),
        ("qwen35", decoder(232, "qwen35", 2, interval)),
        ("qwen35-listed", decoder(233, "qwen35", 1, listed)),
        ("qwen35moe", decoder(234, "qwen35moe", 2, interval)),
        ("qwen35moe-merged", with_merged_experts(decoder(235, "qwen35moe", 2, interval), EXPERTS)),
    ]
}

/// `attends`: the layer with attention.
fn decoder(seed: u64, architecture: &str, attends: u32, set: impl Fn(Forge) -> Forge) -> Forge {
    let (mut forge, vocab) = start(seed, architecture, QWEN);
    for (name, value) in [
        ("ssm.conv_kernel", TAPS),
        ("ssm.inner_size", VALUES * DIM),
        ("ssm.state_size", DIM),
        ("ssm.time_step_rank", VALUES),
        ("ssm.group_count", KEYS),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    let experts = architecture != "qwen35";
    if experts {
        for (name, value) in [
            ("expert_count", EXPERTS),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", EXPERT_FFN),
            ("expert_shared_feed_forward_length", SHARED_FFN),
        ] {
            forge = with(forge, name, Value::u32(value as u32));
        }
    }
    let next = architecture == "qwen3next";
    if !next {
        forge = with(forge, "rope.dimension_sections", Value::i32s(&[3, 3, 2, 0]));
    }
    let forge = set(with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON)));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(QWEN.hidden, vocab, false);
    for index in 0..QWEN.layers {
        let layer = format!("blk.{index}");
        weights.norm(&format!("{layer}.attn_norm.weight"), QWEN.hidden);
        if index == attends {
            attention(&mut weights, &layer)
        } else {
            delta(&mut weights, &layer, next)
        }
        weights.norm(&format!("{layer}.post_attention_norm.weight"), QWEN.hidden);
        if experts {
            weights.experts(&layer, QWEN.hidden, EXPERT_FFN, EXPERTS);
            weights.matrix(&format!("{layer}.ffn_gate_inp_shexp.weight"), &[QWEN.hidden], 1.5);
            weights.shared_expert(&layer, QWEN.hidden, SHARED_FFN);
        } else {
            weights.gated(&layer, QWEN, false);
        }
    }
    weights.norm("output_norm.weight", QWEN.hidden);
    weights.matrix("output.weight", &[QWEN.hidden, vocab], 2.5);
    weights.forge
}

fn attention(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    let (q, kv) = (QWEN.heads * QWEN.head_dim, QWEN.kv_heads * QWEN.head_dim);
    weights.linear(&name("attn_q"), [QWEN.hidden, 2 * q], 2.0, false);
    weights.linear(&name("attn_k"), [QWEN.hidden, kv], 2.0, false);
    weights.linear(&name("attn_v"), [QWEN.hidden, kv], 1.0, false);
    weights.head_norm(&name("attn_q_norm.weight"), QWEN.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), QWEN.head_dim);
    weights.attention_output(layer, QWEN);
}

/// Adds a delta rule whose heads remember between two and some fifty tokens. `next`: decays and amounts are in one matrix.
fn delta(weights: &mut Weights, layer: &str, next: bool) {
    let name = |part: &str| format!("{layer}.{part}");
    let (hidden, width) = (QWEN.hidden, VALUES * DIM);
    let mixed = 2 * KEYS * DIM + width;
    weights.linear(&name("attn_qkv"), [hidden, mixed], 1.5, false);
    weights.linear(&name("attn_gate"), [hidden, width], 1.5, false);
    weights.add(&name("ssm_conv1d.weight"), &[TAPS, mixed], 0.0, 0.9);
    weights.add(&name("ssm_dt.bias"), &[VALUES], -1.5, 0.8);
    weights.add(&name("ssm_a"), &[VALUES], -0.4, 0.35);
    if next {
        weights.linear(&name("ssm_ba"), [hidden, 2 * VALUES], 1.0, false);
    } else {
        weights.linear(&name("ssm_beta"), [hidden, VALUES], 1.0, false);
        weights.linear(&name("ssm_alpha"), [hidden, VALUES], 1.0, false);
    }
    weights.norm(&name("ssm_norm.weight"), DIM);
    weights.linear(&name("ssm_out"), [width, hidden], 1.0, false);
}
