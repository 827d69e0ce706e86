//! granite: llama with scales of the embedding, of attention, of what each block adds, and of logits.

use super::{DIMS, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let mut scales = decoder(81, false, 10.0, 3.0);
    for (key, value) in [("embedding_scale", 6.0), ("attention.scale", 0.45), ("residual_scale", 0.4)] {
        scales = with(scales, key, Value::f32(value));
    }
    let plain = with(decoder(82, true, 2.5, 1.25), "rope.scaling.finetuned", Value::bool(false));
    vec![("granite", scales), ("granite-unrotated", plain)]
}

/// `gain` is that of the output matrix, before logits are divided by `logits`.
fn decoder(seed: u64, biases: bool, gain: f32, logits: f32) -> Forge {
    let (forge, vocab) = start(seed, "granite", DIMS);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "logit_scale", Value::f32(logits));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.add("token_embd.weight", &[DIMS.hidden, vocab], 0.0, 1.0);
    (0..DIMS.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), biases));
    weights.norm("output_norm.weight", DIMS.hidden);
    weights.matrix("output.weight", &[DIMS.hidden, vocab], gain);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, bias: bool) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.norm(&name("attn_norm.weight"), DIMS.hidden);
    weights.qkv(layer, DIMS, Qkv { fused: false, bias });
    weights.linear(&name("attn_output"), [DIMS.heads * DIMS.head_dim, DIMS.hidden], 1.0, bias);
    weights.norm(&name("ffn_norm.weight"), DIMS.hidden);
    weights.linear(&name("ffn_gate"), [DIMS.hidden, DIMS.ffn], 1.5, bias);
    weights.linear(&name("ffn_up"), [DIMS.hidden, DIMS.ffn], 1.5, bias);
    weights.linear(&name("ffn_down"), [DIMS.ffn, DIMS.hidden], 1.5, bias);
}
