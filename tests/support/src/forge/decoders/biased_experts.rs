//! glm4moe, minimax-m2 and ernie4_5-moe: experts chosen by their chances plus a bias.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED_FFN: u64 = 64;

/// Features of a decoder.
#[derive(Clone, Copy)]
struct Shape {
    architecture: &'static str,
    dims: Dims,
    /// Layers at the start that have no experts.
    dense: u32,
    shared: bool,
    qkv_bias: bool,
    /// Widths of the norms of queries and keys, if there are any.
    norms: Option<[u64; 2]>,
    /// Name of the norm before the feed-forward half.
    second_norm: &'static str,
}

const GLM: Shape = Shape {
    architecture: "glm4moe",
    dims: Dims { layers: 3, rotated: 8, ..DIMS },
    dense: 1,
    shared: true,
    qkv_bias: true,
    norms: None,
    second_norm: "post_attention_norm",
};
const MINIMAX: Shape = Shape {
    architecture: "minimax-m2",
    dims: Dims { head_dim: 32, rotated: 16, ..DIMS },
    dense: 0,
    shared: false,
    qkv_bias: false,
    norms: Some([4 * 32, 2 * 32]),
    second_norm: "ffn_norm",
};
const ERNIE: Shape = Shape {
    architecture: "ernie4_5-moe",
    dims: Dims { layers: 3, ..DIMS },
    qkv_bias: false,
    second_norm: "ffn_norm",
    ..GLM
};

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let normed = Shape { norms: Some([16, 16]), dense: 0, ..GLM };
    let sigmoid = |forge| with(forge, "expert_gating_func", Value::u32(2));
    let glm = with(sigmoid(decoder(171, GLM)), "expert_shared_count", Value::u32(2));
    let glm = with(glm, "expert_weights_norm", Value::bool(true));
    let glm = with(glm, "expert_weights_scale", Value::f32(1.5));
    let plain = with(decoder(172, normed), "expert_shared_count", Value::u32(2));
    let ernie = with(decoder(174, ERNIE), "interleave_moe_layer_step", Value::u32(1));
    let ernie = with(ernie, "expert_shared_feed_forward_length", Value::u32(SHARED_FFN as u32));
    vec![
        ("glm4moe", glm),
        ("glm4moe-norms", plain),
        ("minimax-m2", sigmoid(decoder(173, MINIMAX))),
        ("ernie4_5-moe", ernie),
    ]
}

fn decoder(seed: u64, shape: Shape) -> Forge {
    let (mut forge, vocab) = start(seed, shape.architecture, shape.dims);
    // MiniMax's experts have the width of the feed-forward layers.
    let ffn = if shape.architecture == "minimax-m2" { EXPERT_FFN } else { shape.dims.ffn };
    for (name, value) in [
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", EXPERT_FFN),
        ("feed_forward_length", ffn),
        ("leading_dense_block_count", shape.dense.into()),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    let forge = with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON));
    let forge = with(forge, "rope.freq_base", Value::f32(1e6));
    let hidden = shape.dims.hidden;
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(hidden, vocab, false);
    (0..shape.dims.layers).for_each(|index| layer(&mut weights, index, shape));
    weights.norm("output_norm.weight", hidden);
    weights.matrix("output.weight", &[hidden, vocab], 2.5);
    weights.forge
}

fn layer(weights: &mut Weights, index: u32, shape: Shape) {
    let layer = format!("blk.{index}");
    let name = |part: &str| format!("{layer}.{part}.weight");
    let dims = shape.dims;
    weights.norm(&name("attn_norm"), dims.hidden);
    weights.qkv(&layer, dims, Qkv { fused: false, bias: shape.qkv_bias });
    if let Some([queries, keys]) = shape.norms {
        weights.head_norm(&name("attn_q_norm"), queries);
        weights.head_norm(&name("attn_k_norm"), keys);
    }
    weights.attention_output(&layer, dims);
    weights.norm(&name(shape.second_norm), dims.hidden);
    if index < shape.dense {
        return weights.gated(&layer, dims, false);
    }
    weights.experts(&layer, dims.hidden, EXPERT_FFN, EXPERTS);
    // As wide as chances differ, so that many choices are others than without it.
    weights.add(&format!("{layer}.exp_probs_b.bias"), &[EXPERTS], 0.0, 0.5);
    if shape.shared {
        weights.shared_expert(&layer, dims.hidden, SHARED_FFN);
    }
}
