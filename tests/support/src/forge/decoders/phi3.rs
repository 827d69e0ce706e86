//! phi3: queries, keys and values in one tensor, gate and up in another. Positions are in a part of each head, with
//! divisors of frequencies for short and long contexts. All layers may have a window.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, TRAINED, Value, Weights, push, scaled, start, with};

const PHI3: Dims = Dims { rotated: 12, ..DIMS };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // The converter writes no scaling type beside the divisors.
    let long = [("attn_factor", Value::f32(1.19)), ("original_context_length", Value::u32(TRAINED))];
    let short = [("attn_factor", Value::f32(1.07)), ("original_context_length", Value::u32(512))];
    vec![
        ("phi3", scaled(with_factors(decoder(101, PHI3, false)), long)),
        ("phi3-short", scaled(with_factors(decoder(102, PHI3, true)), short)),
        ("phi3-window", with(decoder(103, DIMS, false), "attention.sliding_window", Value::u32(10))),
    ]
}

/// Adds divisors of the rope frequencies, from 1 for the fastest pair.
fn with_factors(mut forge: Forge) -> Forge {
    let pairs = PHI3.rotated / 2;
    for (name, last) in [("rope_factors_long", 8.0), ("rope_factors_short", 1.5)] {
        let factor = |pair: u64| 1.0 + (last - 1.0) * pair as f32 / (pairs - 1) as f32;
        push(&mut forge, &format!("{name}.weight"), &[pairs], (0..pairs).map(factor));
    }
    forge
}

fn decoder(seed: u64, dims: Dims, tied: bool) -> Forge {
    let (forge, vocab) = start(seed, "phi3", dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(dims.hidden, vocab, tied);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", dims.hidden);
    if !tied {
        weights.matrix("output.weight", &[dims.hidden, vocab], 2.5);
    }
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    weights.norm(&format!("{layer}.attn_norm.weight"), dims.hidden);
    weights.qkv(layer, dims, Qkv { fused: true, bias: false });
    weights.attention_output(layer, dims);
    weights.norm(&format!("{layer}.ffn_norm.weight"), dims.hidden);
    weights.linear(&format!("{layer}.ffn_up"), [dims.hidden, 2 * dims.ffn], 1.5, false);
    weights.linear(&format!("{layer}.ffn_down"), [dims.ffn, dims.hidden], 1.5, false);
}
