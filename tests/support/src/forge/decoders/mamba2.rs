//! Mamba 2. It is alone in mamba2, instead of attention in some layers of granitehybrid, and beside it in each of falcon-h1.
//! Layers of nemotron_h have it, attention or a feed-forward, but only one of them.

use super::{DIMS, Dims, EPSILON, Forge, Qkv, Random, Value, Weights, start, with};

const HYBRID: Dims = Dims { layers: 3, ..DIMS };
const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;
const SHARED_FFN: u64 = 48;

/// Sizes of Mamba 2.
#[derive(Clone, Copy)]
struct Mamba {
    taps: u64,
    width: u64,
    heads: u64,
    groups: u64,
    columns: u64,
}

const MAMBA: Mamba = Mamba { taps: 3, width: 256, heads: 4, groups: 2, columns: 16 };
/// The other engine wants twice the width of the stream.
const GRANITE: Mamba = Mamba { width: 128, heads: 2, groups: 1, columns: 32, ..MAMBA };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let unrotated = |forge| with(forge, "rope.scaling.finetuned", Value::bool(false));
    vec![
        ("mamba2", alone(221)),
        ("granitehybrid", unrotated(granite(222, false))),
        ("granitehybrid-experts", granite(223, true)),
        ("falcon-h1", falcon(224, false)),
        ("falcon-h1-normed", falcon(225, true)),
        ("nemotron_h", nemotron(226, false)),
        ("nemotron_h_moe", in_groups(nemotron(227, true), 1, 1, true)),
        ("nemotron_h_moe-groups", in_groups(nemotron(228, true), 4, 2, false)),
    ]
}

fn begin(seed: u64, architecture: &str, mamba: Mamba) -> (Forge, u64) {
    let (mut forge, vocab) = start(seed, architecture, HYBRID);
    for (name, value) in [
        ("ssm.conv_kernel", mamba.taps),
        ("ssm.inner_size", mamba.width),
        ("ssm.state_size", mamba.columns),
        ("ssm.time_step_rank", mamba.heads),
        ("ssm.group_count", mamba.groups),
    ] {
        forge = with(forge, name, Value::u32(value as u32));
    }
    (with(forge, "attention.layer_norm_rms_epsilon", Value::f32(EPSILON)), vocab)
}

fn alone(seed: u64) -> Forge {
    let (mut forge, vocab) = begin(seed, "mamba2", MAMBA);
    for name in ["feed_forward_length", "attention.head_count", "attention.head_count_kv"] {
        forge = with(forge, name, Value::u32(0));
    }
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(HYBRID.hidden, vocab, false);
    for index in 0..HYBRID.layers {
        let layer = format!("blk.{index}");
        weights.norm(&format!("{layer}.attn_norm.weight"), HYBRID.hidden);
        mamba(&mut weights, &layer, MAMBA, true, true);
    }
    end(weights, vocab, 2.5)
}

fn granite(seed: u64, experts: bool) -> Forge {
    let (mut forge, vocab) = begin(seed, "granitehybrid", GRANITE);
    forge = with(forge, "attention.head_count_kv", Value::i32s(&[0, 2, 0]));
    for (key, value) in
        [("embedding_scale", 6.0), ("attention.scale", 0.45), ("residual_scale", 0.4), ("logit_scale", 3.0)]
    {
        forge = with(forge, key, Value::f32(value));
    }
    if experts {
        for (name, value) in [
            ("expert_count", EXPERTS),
            ("expert_used_count", 3),
            ("feed_forward_length", EXPERT_FFN),
            ("expert_shared_feed_forward_length", SHARED_FFN),
        ] {
            forge = with(forge, name, Value::u32(value as u32));
        }
    }
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(HYBRID.hidden, vocab, false);
    for index in 0..HYBRID.layers {
        let layer = format!("blk.{index}");
        weights.norm(&format!("{layer}.attn_norm.weight"), HYBRID.hidden);
        if index == 1 {
            weights.qkv(&layer, HYBRID, Qkv { fused: false, bias: false });
            weights.attention_output(&layer, HYBRID);
        } else {
            mamba(&mut weights, &layer, GRANITE, true, true);
        }
        weights.norm(&format!("{layer}.ffn_norm.weight"), HYBRID.hidden);
        if experts {
            weights.experts(&layer, HYBRID.hidden, EXPERT_FFN, EXPERTS);
            weights.shared_expert(&layer, HYBRID.hidden, SHARED_FFN);
        } else {
            weights.gated(&layer, HYBRID, false);
        }
    }
    end(weights, vocab, 10.0)
}

/// Published models have no norm behind the gate.
fn falcon(seed: u64, normed: bool) -> Forge {
    let (forge, vocab) = begin(seed, "falcon-h1", MAMBA);
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(HYBRID.hidden, vocab, false);
    for index in 0..HYBRID.layers {
        let layer = format!("blk.{index}");
        weights.norm(&format!("{layer}.attn_norm.weight"), HYBRID.hidden);
        weights.qkv(&layer, HYBRID, Qkv { fused: false, bias: false });
        weights.attention_output(&layer, HYBRID);
        mamba(&mut weights, &layer, MAMBA, true, normed);
        weights.norm(&format!("{layer}.ffn_norm"), HYBRID.hidden);
        weights.gated(&layer, HYBRID, false);
    }
    end(weights, vocab, 2.5)
}

/// States how many groups a file's experts have, how many are used, and whether weights are normalised.
fn in_groups(forge: Forge, count: u32, used: u32, normalise: bool) -> Forge {
    let forge = with(forge, "expert_group_count", Value::u32(count));
    let forge = with(forge, "expert_group_used_count", Value::u32(used));
    with(forge, "expert_weights_norm", Value::bool(normalise))
}

fn nemotron(seed: u64, experts: bool) -> Forge {
    let (mut forge, vocab) = begin(seed, if experts { "nemotron_h_moe" } else { "nemotron_h" }, MAMBA);
    if experts {
        for (name, value) in [
            ("expert_count", EXPERTS),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", EXPERT_FFN),
            ("expert_shared_count", 1),
            ("expert_shared_feed_forward_length", SHARED_FFN),
        ] {
            forge = with(forge, name, Value::u32(value as u32));
        }
        forge = with(forge, "expert_weights_scale", Value::f32(2.5));
    }
    let forge = with(forge, "attention.head_count_kv", Value::i32s(&[0, 2, 0, 0]));
    let forge = with(forge, "feed_forward_length", Value::i32s(&[0, 0, 96, 0]));
    let forge = with(forge, "block_count", Value::u32(4));
    // The other engine wants it, for a part that does not run.
    let forge = with(forge, "attention.layer_norm_epsilon", Value::f32(1e-5));
    let mut weights = Weights { forge, random: Random(seed) };
    weights.embedding(HYBRID.hidden, vocab, false);
    for index in 0..4 {
        let layer = format!("blk.{index}");
        weights.norm(&format!("{layer}.attn_norm.weight"), HYBRID.hidden);
        match index {
            1 => {
                weights.qkv(&layer, HYBRID, Qkv { fused: false, bias: false });
                weights.attention_output(&layer, HYBRID);
            }
            2 if experts => experts_without_gates(&mut weights, &layer),
            2 => {
                weights.linear(&format!("{layer}.ffn_up"), [HYBRID.hidden, HYBRID.ffn], 1.5, false);
                weights.linear(&format!("{layer}.ffn_down"), [HYBRID.ffn, HYBRID.hidden], 1.0, false);
            }
            _ => mamba(&mut weights, &layer, MAMBA, true, true),
        }
    }
    end(weights, vocab, 2.5)
}

/// Adds a router with a bias of the choice, experts, and one for all tokens.
fn experts_without_gates(weights: &mut Weights, layer: &str) {
    let name = |part: &str| format!("{layer}.{part}");
    weights.matrix(&name("ffn_gate_inp.weight"), &[HYBRID.hidden, EXPERTS], 1.5);
    weights.add(&name("exp_probs_b.bias"), &[EXPERTS], 0.0, 0.3);
    weights.matrix(&name("ffn_up_exps.weight"), &[HYBRID.hidden, EXPERT_FFN, EXPERTS], 1.5);
    weights.matrix(&name("ffn_down_exps.weight"), &[EXPERT_FFN, HYBRID.hidden, EXPERTS], 1.0);
    weights.linear(&name("ffn_up_shexp"), [HYBRID.hidden, SHARED_FFN], 1.5, false);
    weights.linear(&name("ffn_down_shexp"), [SHARED_FFN, HYBRID.hidden], 1.0, false);
}

fn end(mut weights: Weights, vocab: u64, gain: f32) -> Forge {
    weights.norm("output_norm.weight", HYBRID.hidden);
    weights.matrix("output.weight", &[HYBRID.hidden, vocab], gain);
    weights.forge
}

/// Adds Mamba 2. Its steps and decays are such that heads remember between two and some fifty tokens.
fn mamba(weights: &mut Weights, layer: &str, of: Mamba, biased: bool, normed: bool) {
    let name = |part: &str| format!("{layer}.{part}");
    let Mamba { taps, width, heads, groups, columns } = of;
    let mixed = width + 2 * groups * columns;
    weights.linear(&name("ssm_in"), [DIMS.hidden, width + mixed + heads], 1.5, false);
    weights.add(&name("ssm_conv1d.weight"), &[taps, mixed], 0.0, 0.9);
    if biased {
        weights.add(&name("ssm_conv1d.bias"), &[mixed], 0.0, 0.3);
    }
    weights.add(&name("ssm_dt.bias"), &[heads], -1.5, 0.8);
    weights.add(&name("ssm_a"), &[1, heads], -0.4, 0.35);
    weights.add(&name("ssm_d"), &[1, heads], 1.0, 0.4);
    if normed {
        weights.add(&name("ssm_norm.weight"), &[width / groups, groups], 1.0, 0.3);
    }
    weights.linear(&name("ssm_out"), [width, DIMS.hidden], 1.0, false);
}
