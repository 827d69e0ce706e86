//! olmo2: norms only after each block, and query and key norms over all heads at once.

use super::{DIMS, EPSILON, Forge, Qkv, Random, TRAINED, Value, Weights, kind, scaled, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // The third generation: windows, and stretched positions in the layers without a window.
    let yarn = [("type", Value::string("yarn")), ("factor", Value::f32(4.0))];
    let yarn = yarn.into_iter().chain([("original_context_length", Value::u32(TRAINED))]);
    let window = with(decoder(62), "attention.sliding_window", Value::u32(10));
    let window = with(window, "attention.sliding_window_pattern", Value::array(kind::BOOL, 2, &[1, 0]));
    vec![("olmo2", decoder(61)), ("olmo2-window", scaled(window, yarn))]
}

fn decoder(seed: u64) -> Forge {
    let (forge, vocab) = start(seed, "olmo2", DIMS);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(5e5));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[DIMS.hidden, vocab], 0.0, 1.0);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}")));
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.matrix("output.weight", &[DIMS.hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.qkv(layer, DIMS, Qkv { fused: false, bias: false });
    weights.head_norm(&name("attn_q_norm.weight"), DIMS.heads * DIMS.head_dim);
    weights.head_norm(&name("attn_k_norm.weight"), DIMS.kv_heads * DIMS.head_dim);
    weights.linear(&name("attn_output"), [DIMS.heads * DIMS.head_dim, DIMS.hidden], 1.0, false);
    weights.post_norm(&name("post_attention_norm.weight"), DIMS.hidden, DIMS.layers);
    weights.linear(&name("ffn_gate"), [DIMS.hidden, DIMS.ffn], 1.5, false);
    weights.linear(&name("ffn_up"), [DIMS.hidden, DIMS.ffn], 1.5, false);
    weights.linear(&name("ffn_down"), [DIMS.ffn, DIMS.hidden], 1.5, false);
    weights.post_norm(&name("post_ffw_norm.weight"), DIMS.hidden, DIMS.layers);
}
