//! gpt-oss: sinks, windows in every second layer, and experts with biases and a clamped gate.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, TRAINED, Value, Weights, scaled, start, with};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let yarn = [
        ("type", Value::string("yarn")),
        ("factor", Value::f32(4.0)),
        ("original_context_length", Value::u32(TRAINED)),
    ];
    let wide = Dims { layers: 3, head_dim: 32, rotated: 32, ..DIMS };
    let named = with(
        decoder(182, Dims { layers: 3, kv_heads: 1, ..DIMS }),
        "attention.sliding_window_pattern",
        Value::u32(3),
    );
    vec![("gpt-oss", scaled(decoder(181, wide), yarn)), ("gpt-oss-plain", named)]
}

fn decoder(seed: u64, dims: Dims) -> Forge {
    let (mut forge, vocab) = start(seed, "gpt-oss", dims);
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", EXPERT_FFN),
        ("attention.sliding_window", 10),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(150_000.0));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(dims.hidden, vocab, false);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", dims.hidden);
    weights.matrix("output.weight", &[dims.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), dims.hidden);
    weights.qkv(layer, dims, Qkv { fused: false, bias: true });
    // Some sinks are above all scores of their head, others far below.
    weights.add(&name("attn_sinks.weight"), &[dims.heads], 2.0, 6.0);
    weights.linear(&name("attn_output"), [dims.heads * dims.head_dim, dims.hidden], 1.0, true);
    weights.norm(&name("post_attention_norm.weight"), dims.hidden);
    weights.linear(&name("ffn_gate_inp"), [dims.hidden, EXPERTS], 1.5, true);
    // Every tenth gate and up or so is beyond the limit of 7.
    for (role, [cols, rows], gain) in [
        ("gate", [dims.hidden, EXPERT_FFN], 4.0),
        ("up", [dims.hidden, EXPERT_FFN], 4.0),
        ("down", [EXPERT_FFN, dims.hidden], 0.15),
    ] {
        weights.matrix(&name(&format!("ffn_{role}_exps.weight")), &[cols, rows, EXPERTS], gain);
        weights.add(&name(&format!("ffn_{role}_exps.bias")), &[rows, EXPERTS], 0.0, 0.3);
    }
}
