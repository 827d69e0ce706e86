//! smollm3: llama whose every fourth layer uses no positions.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, TRAINED, Value, Weights, scaled, start, with};

/// Layer 3 uses no positions; layer 4 does again.
const SMOLLM3: Dims = Dims { layers: 5, ..DIMS };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let yarn = [
        ("type", Value::string("yarn")),
        ("factor", Value::f32(4.0)),
        ("original_context_length", Value::u32(TRAINED)),
    ];
    vec![("smollm3", decoder(91, false)), ("smollm3-yarn", scaled(decoder(92, true), yarn))]
}

fn decoder(seed: u64, tied: bool) -> Forge {
    let (forge, vocab) = start(seed, "smollm3", SMOLLM3);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(5e5));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(SMOLLM3.hidden, vocab, tied);
    (0..SMOLLM3.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}")));
    weights.norm("output_norm.weight", SMOLLM3.hidden);
    if !tied {
        weights.matrix("output.weight", &[SMOLLM3.hidden, vocab], 2.5);
    }
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str) {
    weights.norm(&format!("{layer}.attn_norm.weight"), SMOLLM3.hidden);
    weights.qkv(layer, SMOLLM3, Qkv { fused: false, bias: false });
    weights.attention_output(layer, SMOLLM3);
    weights.norm(&format!("{layer}.ffn_norm.weight"), SMOLLM3.hidden);
    weights.gated(layer, SMOLLM3, false);
}
