//! qwen2moe: expert weights that are not normalized to sum to 1, and a shared expert behind its own gate.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED_FFN: u64 = 48;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    vec![("qwen2moe", decoder(71))]
}

fn decoder(seed: u64) -> Forge {
    let (mut forge, vocab) = start(seed, "qwen2moe", DIMS);
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", EXPERT_FFN),
        ("expert_shared_feed_forward_length", SHARED_FFN),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[DIMS.hidden, vocab], 0.0, 1.0);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}")));
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.matrix("output.weight", &[DIMS.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), DIMS.hidden);
    weights.qkv(layer, DIMS, Qkv { fused: false, bias: true });
    weights.linear(&name("attn_output"), [DIMS.heads * DIMS.head_dim, DIMS.hidden], 1.0, false);
    weights.norm(&name("ffn_norm.weight"), DIMS.hidden);
    weights.matrix(&name("ffn_gate_inp.weight"), &[DIMS.hidden, EXPERTS], 1.5);
    weights.matrix(&name("ffn_gate_exps.weight"), &[DIMS.hidden, EXPERT_FFN, EXPERTS], 1.5);
    weights.matrix(&name("ffn_up_exps.weight"), &[DIMS.hidden, EXPERT_FFN, EXPERTS], 1.5);
    weights.matrix(&name("ffn_down_exps.weight"), &[EXPERT_FFN, DIMS.hidden, EXPERTS], 1.5);
    weights.matrix(&name("ffn_gate_inp_shexp.weight"), &[DIMS.hidden], 1.5);
    weights.linear(&name("ffn_gate_shexp"), [DIMS.hidden, SHARED_FFN], 1.5, false);
    weights.linear(&name("ffn_up_shexp"), [DIMS.hidden, SHARED_FFN], 1.5, false);
    weights.linear(&name("ffn_down_shexp"), [SHARED_FFN, DIMS.hidden], 1.5, false);
}
