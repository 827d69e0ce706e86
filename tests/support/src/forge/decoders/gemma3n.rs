//! gemma3n: four residual streams, a low-rank path beside attention, and an input of each layer from the token. Gates are
//! sparse, and the last layers share keys and values. The other engine's widths of two of them are fixed.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const STREAMS: u64 = 4;
/// Width of each layer's own input.
const INPUT: u64 = 256;
const RANK: u64 = 64;
/// Layers before those that share keys and values.
const OWN_KV: u32 = 20;
const SPARSE: f32 = 1.644_853_6;

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    // Layers 20 to 23 have a window, 24 has none: both kinds share keys and values.
    let deep = Dims { layers: 25, hidden: 48, ffn: 64, ..DIMS };
    let mut stated = decoder(31, deep);
    let sparse = |layer| if layer < 10 { SPARSE } else { f32::NEG_INFINITY };
    let sparse: Vec<f32> = (0..deep.layers).map(sparse).collect();
    for (key, value) in [
        ("altup.num_inputs", Value::u32(STREAMS as u32)),
        ("altup.active_idx", Value::u32(0)),
        ("embedding_length_per_layer_input", Value::u32(INPUT as u32)),
        ("attention.shared_kv_layers", Value::u32(deep.layers - OWN_KV)),
        ("final_logit_softcapping", Value::f32(30.0)),
        ("activation_sparsity_scale", Value::f32s(&sparse)),
    ] {
        stated = with(stated, key, value);
    }
    vec![("gemma3n", stated), ("gemma3n-shallow", decoder(32, DIMS))]
}

fn decoder(seed: u64, dims: Dims) -> Forge {
    let (forge, vocab) = start(seed, "gemma3n", dims);
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "attention.sliding_window", Value::u32(10));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let mut weights = Weights { forge, random: Random(seed) };
    let (hidden, inputs) = (dims.hidden, INPUT * u64::from(dims.layers));
    weights.add("token_embd.weight", &[hidden, vocab], 0.0, 0.5);
    weights.add("per_layer_token_embd.weight", &[inputs, vocab], 0.0, 0.1);
    weights.matrix("per_layer_model_proj.weight", &[hidden, inputs], 1.0);
    weights.norm("per_layer_proj_norm.weight", INPUT);
    weights.matrix("altup_proj.weight", &[hidden, hidden, STREAMS - 1], 1.0);
    weights.matrix("altup_unembd_proj.weight", &[hidden, hidden, STREAMS - 1], 1.0);
    (0..dims.layers).for_each(|index| layer(&mut weights, &format!("blk.{index}"), dims));
    weights.norm("output_norm.weight", hidden);
    weights.forge
}

fn layer(weights: &mut Weights, layer: &str, dims: Dims) {
    let (name, hidden) = (|part: &str| format!("{layer}.{part}"), dims.hidden);
    weights.norm(&name("attn_norm.weight"), hidden);
    weights.qkv(layer, dims, Qkv { fused: false, bias: false });
    // Scores are not divided by the root of the heads' width: these norms keep them as large as elsewhere.
    weights.add(&name("attn_q_norm.weight"), &[dims.head_dim], 0.8, 0.25);
    weights.add(&name("attn_k_norm.weight"), &[dims.head_dim], 0.8, 0.25);
    weights.attention_output(layer, dims);
    weights.post_norm(&name("post_attention_norm.weight"), hidden, dims.layers);
    weights.norm(&name("ffn_norm.weight"), hidden);
    weights.gated(layer, dims, false);
    weights.post_norm(&name("post_ffw_norm.weight"), hidden, 2 * dims.layers);
    weights.linear(&name("laurel_l"), [hidden, RANK], 1.0, false);
    weights.linear(&name("laurel_r"), [RANK, hidden], 1.0, false);
    weights.post_norm(&name("laurel_post_norm.weight"), hidden, dims.layers);
    // The router divides by the width: larger weights than elsewhere give it something to say.
    weights.linear(&name("altup_router"), [hidden, STREAMS], 0.7 * (hidden as f32), false);
    weights.norm(&name("altup_router_norm.weight"), hidden);
    weights.linear(&name("altup_predict_coef"), [STREAMS, STREAMS * STREAMS], 0.15, false);
    weights.linear(&name("altup_correct_coef"), [STREAMS, STREAMS], 0.3, false);
    weights.norm(&name("altup_correct_scale.weight"), hidden);
    weights.linear(&name("inp_gate"), [hidden, INPUT], 1.0, false);
    weights.linear(&name("proj"), [INPUT, hidden], 1.0, false);
    weights.post_norm(&name("post_norm.weight"), hidden, 2 * dims.layers);
}
