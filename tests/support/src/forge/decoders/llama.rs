//! The llama, qwen2, qwen3 and qwen3moe architectures, and llama's position scalings.

use super::{
    FFN, Forge, HEADS, HIDDEN, KV_HEADS, LAYERS, Random, TRAINED, Value, Weights, push, scaled,
    with_vocabulary,
};

const EXPERTS: u64 = 8;
const EXPERT_FFN: u64 = 32;

/// Features of a decoder.
#[derive(Clone, Copy)]
struct Shape {
    architecture: &'static str,
    head_dim: u64,
    qkv_bias: bool,
    other_bias: bool,
    head_norms: bool,
    experts: bool,
    tied: bool,
}

const LLAMA: Shape = Shape {
    architecture: "llama",
    head_dim: 16,
    qkv_bias: false,
    other_bias: false,
    head_norms: false,
    experts: false,
    tied: false,
};
const QWEN2: Shape = Shape { architecture: "qwen2", qkv_bias: true, tied: true, ..LLAMA };
const QWEN3: Shape = Shape { architecture: "qwen3", head_dim: 32, head_norms: true, ..LLAMA };
const QWEN3MOE: Shape = Shape { architecture: "qwen3moe", experts: true, ..QWEN3 };

pub(super) fn decoders() -> Vec<(&'static str, Forge)> {
    let yarn = [("type", Value::string("yarn")), ("factor", Value::f32(4.0))];
    let yarn = yarn.into_iter().chain([("original_context_length", Value::u32(TRAINED))]);
    let linear = [("type", Value::string("linear")), ("factor", Value::f32(4.0))];
    let longrope = [
        ("type", Value::string("longrope")),
        ("attn_factor", Value::f32(1.19)),
        ("original_context_length", Value::u32(TRAINED)),
    ];
    vec![
        ("llama", decoder(1, LLAMA)),
        ("llama-biases", decoder(2, Shape { qkv_bias: true, other_bias: true, ..LLAMA })),
        ("llama-linear", scaled(decoder(3, LLAMA), linear)),
        ("llama-yarn", scaled(decoder(4, LLAMA), yarn.clone())),
        ("llama-factors", with_factors(decoder(5, LLAMA), "rope_freqs", 16.0)),
        (
            "llama-longrope",
            with_factors(
                with_factors(scaled(decoder(6, LLAMA), longrope), "rope_factors_long", 8.0),
                "rope_factors_short",
                1.5,
            ),
        ),
        ("llama-experts", decoder(7, Shape { experts: true, ..LLAMA })),
        ("qwen2", decoder(8, QWEN2)),
        ("qwen2-yarn", scaled(decoder(9, QWEN2), yarn.clone())),
        ("qwen3", decoder(10, QWEN3)),
        ("qwen3-yarn", scaled(decoder(11, QWEN3), yarn.clone())),
        ("qwen3moe", decoder(12, QWEN3MOE)),
        ("qwen3moe-yarn", scaled(decoder(13, QWEN3MOE), yarn)),
    ]
}

/// A qwen3 whose file has a classifier of yes and no, and the text in which it reads pairs.
pub(super) fn ranker() -> Forge {
    let forge = decoder(14, Shape { tied: true, ..QWEN3 })
        .set("qwen3.pooling_type", Value::u32(4))
        .set("qwen3.classifier.output_labels", Value::strings(&["yes", "no"]))
        .set("tokenizer.chat_templates", Value::strings(&["rerank"]))
        .set("tokenizer.chat_template.rerank", Value::string("<s>Q: {query}\nD: {document}</s>\n"));
    let mut weights = Weights { forge, random: Random(114) };
    weights.matrix("cls.output.weight", &[HIDDEN, 2], 2.0);
    weights.forge
}

/// Adds divisors of the rope frequencies, from 1 for the fastest pair to `last` for the slowest.
fn with_factors(mut forge: Forge, name: &str, last: f32) -> Forge {
    let pairs = LLAMA.head_dim / 2;
    let factor = |pair: u64| 1.0 + (last - 1.0) * pair as f32 / (pairs - 1) as f32;
    push(&mut forge, &format!("{name}.weight"), &[pairs], (0..pairs).map(factor));
    forge
}

impl Weights {
    fn layer(&mut self, shape: Shape, index: u32) {
        let name = |part: &str| format!("blk.{index}.{part}");
        let (q, kv) = (HEADS * shape.head_dim, KV_HEADS * shape.head_dim);
        self.norm(&name("attn_norm.weight"), HIDDEN);
        self.linear(&name("attn_q"), [HIDDEN, q], 2.0, shape.qkv_bias);
        self.linear(&name("attn_k"), [HIDDEN, kv], 2.0, shape.qkv_bias);
        self.linear(&name("attn_v"), [HIDDEN, kv], 1.0, shape.qkv_bias);
        if shape.head_norms {
            self.norm(&name("attn_q_norm.weight"), shape.head_dim);
            self.norm(&name("attn_k_norm.weight"), shape.head_dim);
        }
        self.linear(&name("attn_output"), [q, HIDDEN], 1.0, shape.other_bias);
        self.norm(&name("ffn_norm.weight"), HIDDEN);
        if shape.experts {
            self.matrix(&name("ffn_gate_inp.weight"), &[HIDDEN, EXPERTS], 1.5);
            self.matrix(&name("ffn_gate_exps.weight"), &[HIDDEN, EXPERT_FFN, EXPERTS], 1.5);
            self.matrix(&name("ffn_up_exps.weight"), &[HIDDEN, EXPERT_FFN, EXPERTS], 1.5);
            self.matrix(&name("ffn_down_exps.weight"), &[EXPERT_FFN, HIDDEN, EXPERTS], 1.5);
        } else {
            self.linear(&name("ffn_gate"), [HIDDEN, FFN], 1.5, shape.other_bias);
            self.linear(&name("ffn_up"), [HIDDEN, FFN], 1.5, shape.other_bias);
            self.linear(&name("ffn_down"), [FFN, HIDDEN], 1.5, shape.other_bias);
        }
    }
}

fn decoder(seed: u64, shape: Shape) -> Forge {
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    let mut forge = Forge::new(seed).set("general.architecture", Value::string(shape.architecture));
    // Mixtral's files have no separate width for experts.
    let ffn = if shape.experts && shape.architecture == "llama" { EXPERT_FFN } else { FFN };
    for (name, value) in [
        ("context_length", 512),
        ("embedding_length", HIDDEN as u32),
        ("block_count", LAYERS),
        ("feed_forward_length", ffn as u32),
        ("attention.head_count", HEADS as u32),
        ("attention.head_count_kv", KV_HEADS as u32),
        ("attention.key_length", shape.head_dim as u32),
        ("attention.value_length", shape.head_dim as u32),
        ("rope.dimension_count", shape.head_dim as u32),
    ] {
        forge = forge.set(&key(name), Value::u32(value));
    }
    forge = forge
        .set(&key("attention.layer_norm_rms_epsilon"), Value::f32(1e-6))
        .set(&key("rope.freq_base"), Value::f32(if shape.head_norms { 1e6 } else { 1e4 }));
    if shape.experts {
        forge = forge
            .set(&key("expert_count"), Value::u32(EXPERTS as u32))
            .set(&key("expert_used_count"), Value::u32(if shape.head_norms { 3 } else { 2 }));
        if shape.head_norms {
            forge = forge.set(&key("expert_feed_forward_length"), Value::u32(EXPERT_FFN as u32));
        }
    }
    let (forge, vocab) = with_vocabulary(forge);
    let mut weights = Weights { forge, random: Random(seed) };
    // A tied embedding is also the output, so it gets a smaller spread and logits differ as much as elsewhere. With a
    // larger spread the other engine's single precision alone would be off by 1e-4.
    weights.add("token_embd.weight", &[HIDDEN, vocab], 0.0, if shape.tied { 0.5 } else { 1.0 });
    (0..LAYERS).for_each(|index| weights.layer(shape, index));
    weights.norm("output_norm.weight", HIDDEN);
    if !shape.tied {
        weights.matrix("output.weight", &[HIDDEN, vocab], 2.5);
    }
    weights.forge
}
