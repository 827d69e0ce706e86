//! Small random decoders and encoders of every architecture and position scaling: F32, most with two layers of width 64.
//!
//! The spread of the weights makes attention look far back and logits differ by several nats. So a wrong computation
//! shows. tests/reference/expected holds another engine's answers for these exact bytes.

use super::llama::with_vocabulary;
use super::{Forge, Random, Tensor, Value, ggml, kind};

mod biased_experts;
mod command_r;
mod deepseek2;
mod encoders;
mod ernie4_5;
mod exaone4;
mod gemma2;
mod gemma3;
mod gemma3n;
mod glm4;
mod gpt_oss;
mod granite;
mod granitemoe;
mod hunyuan;
mod lfm2;
mod llama;
mod mamba2;
mod mistral3;
mod olmo2;
mod phi2;
mod phi3;
mod qwen2moe;
mod qwen3next;
mod smollm3;
mod starcoder2;

const HIDDEN: u64 = 64;
const LAYERS: u32 = 2;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const FFN: u64 = 96;
/// Trained context length that the files state, in tokens.
const TRAINED: u32 = 64;

/// The decoders of tests/reference/expected/decoders.json, by name.
pub fn decoders() -> Vec<(&'static str, Forge)> {
    llama::decoders()
}

/// The decoders of tests/reference/expected/newer.json, by name.
pub fn newer_decoders() -> Vec<(&'static str, Forge)> {
    [
        gemma3::decoders(),
        starcoder2::decoders(),
        phi2::decoders(),
        glm4::decoders(),
        olmo2::decoders(),
        qwen2moe::decoders(),
        granite::decoders(),
        smollm3::decoders(),
        phi3::decoders(),
        command_r::decoders(),
        exaone4::decoders(),
        ernie4_5::decoders(),
        hunyuan::decoders(),
        mistral3::decoders(),
        granitemoe::decoders(),
        biased_experts::decoders(),
        gpt_oss::decoders(),
        gemma2::decoders(),
        deepseek2::decoders(),
        lfm2::decoders(),
        mamba2::decoders(),
        qwen3next::decoders(),
        gemma3n::decoders(),
    ]
    .concat()
}

/// A decoder whose latent attention has heads as wide as real models have.
pub fn wide_latent() -> Forge {
    deepseek2::wide()
}

/// The encoders of tests/reference/expected/encoders.json, by name.
pub fn encoders() -> Vec<(&'static str, Forge)> {
    encoders::encoders()
}

/// The models that score, of the same file, by name.
pub fn rankers() -> Vec<(&'static str, Forge)> {
    let mut all = encoders::rankers();
    all.push(("qwen3-ranker", llama::ranker()));
    all
}

/// Large enough that a norm without it is wrong by a percent.
const EPSILON: f32 = 1e-2;

/// Widths and counts of a decoder.
#[derive(Clone, Copy)]
struct Dims {
    layers: u32,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    /// Values of each head that the position embedding rotates.
    rotated: u64,
    ffn: u64,
}

const DIMS: Dims = Dims {
    layers: LAYERS,
    hidden: HIDDEN,
    heads: HEADS,
    kv_heads: KV_HEADS,
    head_dim: 16,
    rotated: 16,
    ffn: FFN,
};

/// Layout of the query, key and value weights in the file.
#[derive(Clone, Copy)]
struct Qkv {
    fused: bool,
    bias: bool,
}

/// A file with a vocabulary and as few width keys as real files have. Also returns the number of tokens.
fn start(seed: u64, architecture: &str, dims: Dims) -> (Forge, u64) {
    let mut forge = Forge::new(seed).set("general.architecture", Value::string(architecture));
    for (name, value) in [
        ("context_length", 512),
        ("embedding_length", dims.hidden as u32),
        ("block_count", dims.layers),
        ("feed_forward_length", dims.ffn as u32),
        ("attention.head_count", dims.heads as u32),
        ("attention.head_count_kv", dims.kv_heads as u32),
    ] {
        forge = with(forge, name, Value::u32(value));
    }
    if dims.head_dim != dims.hidden / dims.heads {
        forge = with(forge, "attention.key_length", Value::u32(dims.head_dim as u32));
        forge = with(forge, "attention.value_length", Value::u32(dims.head_dim as u32));
    }
    if dims.rotated != dims.head_dim {
        forge = with(forge, "rope.dimension_count", Value::u32(dims.rotated as u32));
    }
    with_vocabulary(forge)
}

/// The same file with gates and ups of each layer's experts in one tensor.
fn with_merged_experts(mut forge: Forge, experts: u64) -> Forge {
    let gates = |tensor: &Tensor| tensor.name.ends_with(b"ffn_gate_exps.weight");
    while let Some(at) = forge.tensors.iter().position(gates) {
        let [gates, ups] = [forge.tensors.remove(at), forge.tensors.remove(at)];
        assert!(ups.name.ends_with(b"ffn_up_exps.weight") && ups.dims == gates.dims);
        let (gate_bytes, up_bytes) = (gates.data.clone().unwrap(), ups.data.unwrap());
        let each = gate_bytes.len() / experts as usize;
        let pairs = gate_bytes.chunks_exact(each).zip(up_bytes.chunks_exact(each));
        let data = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let name = String::from_utf8(gates.name).unwrap().replace("gate", "gate_up").into();
        let dims = vec![gates.dims[0], 2 * gates.dims[1], gates.dims[2]];
        forge
            .tensors
            .insert(at, Tensor { name, dims, n_dims: None, ggml: ggml::F32, offset: None, data: Some(data) });
    }
    forge
}

/// Sets a key of the file's architecture.
fn with(forge: Forge, key: &str, value: Value) -> Forge {
    let name = forge.architecture();
    forge.set(&format!("{name}.{key}"), value)
}

/// Sets these values of `rope.scaling.*`.
fn scaled(forge: Forge, values: impl IntoIterator<Item = (&'static str, Value)>) -> Forge {
    let name = forge.architecture();
    let set = |forge: Forge, (key, value)| forge.set(&format!("{name}.rope.scaling.{key}"), value);
    values.into_iter().fold(forge, set)
}

fn push(forge: &mut Forge, name: &str, dims: &[u64], values: impl Iterator<Item = f32>) {
    let data = values.flat_map(f32::to_le_bytes).collect();
    forge.tensors.push(Tensor {
        name: name.into(),
        dims: dims.into(),
        n_dims: None,
        ggml: ggml::F32,
        offset: None,
        data: Some(data),
    });
}

/// Adds random tensors to a forge.
struct Weights {
    forge: Forge,
    random: Random,
}

impl Weights {
    /// Adds a tensor of values in `center` +- `spread`.
    fn add(&mut self, name: &str, dims: &[u64], center: f32, spread: f32) {
        let random = &mut self.random;
        let mut value = || center + spread * ((random.draw() >> 40) as f32 / (1u32 << 23) as f32 - 1.0);
        let values: Vec<f32> = (0..dims.iter().product::<u64>()).map(|_| value()).collect();
        push(&mut self.forge, name, dims, values.into_iter());
    }

    /// Adds one or more matrices whose products are about `gain` times as large as their inputs.
    fn matrix(&mut self, name: &str, dims: &[u64], gain: f32) {
        self.add(name, dims, 0.0, gain * (3.0 / dims[0] as f32).sqrt());
    }

    fn norm(&mut self, name: &str, len: u64) {
        self.add(name, &[len], 1.0, 0.3);
    }

    /// Adds `STEM.weight` and, if `bias`, `STEM.bias`.
    fn linear(&mut self, stem: &str, [cols, rows]: [u64; 2], gain: f32, bias: bool) {
        self.matrix(&format!("{stem}.weight"), &[cols, rows], gain);
        if bias {
            self.add(&format!("{stem}.bias"), &[rows], 0.0, 0.3);
        }
    }

    fn layer_norm(&mut self, stem: &str, len: u64) {
        self.norm(&format!("{stem}.weight"), len);
        self.add(&format!("{stem}.bias"), &[len], 0.0, 0.3);
    }

    /// Adds a norm of what a block adds to the stream. The blocks together outweigh the token's embedding.
    fn post_norm(&mut self, name: &str, len: u64, layers: u32) {
        // Shrinks with the number of layers, so that rounding of the other engine does not grow. A square root is exact
        // everywhere.
        let layers = layers as f32;
        let size = 4.0 / (layers * layers.sqrt()).sqrt();
        self.add(name, &[len], size, 0.3 * size);
    }

    /// Adds a norm of queries or keys that makes some positions weigh much more than others.
    fn head_norm(&mut self, name: &str, len: u64) {
        self.add(name, &[len], 1.6, 0.5);
    }

    /// Adds a gate, up and down, with biases if `bias`.
    fn gated(&mut self, layer: &str, dims: Dims, bias: bool) {
        self.linear(&format!("{layer}.ffn_gate"), [dims.hidden, dims.ffn], 1.5, bias);
        self.linear(&format!("{layer}.ffn_up"), [dims.hidden, dims.ffn], 1.5, bias);
        self.linear(&format!("{layer}.ffn_down"), [dims.ffn, dims.hidden], 1.5, bias);
    }

    /// Adds a router and `count` experts of width `ffn`.
    fn experts(&mut self, layer: &str, hidden: u64, ffn: u64, count: u64) {
        self.matrix(&format!("{layer}.ffn_gate_inp.weight"), &[hidden, count], 1.5);
        self.matrix(&format!("{layer}.ffn_gate_exps.weight"), &[hidden, ffn, count], 1.5);
        self.matrix(&format!("{layer}.ffn_up_exps.weight"), &[hidden, ffn, count], 1.5);
        self.matrix(&format!("{layer}.ffn_down_exps.weight"), &[ffn, hidden, count], 1.5);
    }

    /// Adds an expert of width `ffn` for all tokens.
    fn shared_expert(&mut self, layer: &str, hidden: u64, ffn: u64) {
        self.linear(&format!("{layer}.ffn_gate_shexp"), [hidden, ffn], 1.5, false);
        self.linear(&format!("{layer}.ffn_up_shexp"), [hidden, ffn], 1.5, false);
        self.linear(&format!("{layer}.ffn_down_shexp"), [ffn, hidden], 1.5, false);
    }

    /// Adds the attention's output matrix.
    fn attention_output(&mut self, layer: &str, dims: Dims) {
        self.linear(&format!("{layer}.attn_output"), [dims.heads * dims.head_dim, dims.hidden], 1.0, false);
    }

    /// Adds the token embedding of a decoder whose output matrix, if not `tied`, follows its layers. A tied one gets a
    /// smaller spread, so that logits differ as much as elsewhere.
    fn embedding(&mut self, hidden: u64, vocab: u64, tied: bool) {
        self.add("token_embd.weight", &[hidden, vocab], 0.0, if tied { 0.5 } else { 1.0 });
    }

    /// Adds queries, keys and values of the layer whose tensors are called `layer.*`.
    fn qkv(&mut self, layer: &str, dims: Dims, how: Qkv) {
        let (q, kv) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        if how.fused {
            self.linear(&format!("{layer}.attn_qkv"), [dims.hidden, q + 2 * kv], 1.6, how.bias);
        } else {
            self.linear(&format!("{layer}.attn_q"), [dims.hidden, q], 2.0, how.bias);
            self.linear(&format!("{layer}.attn_k"), [dims.hidden, kv], 2.0, how.bias);
            self.linear(&format!("{layer}.attn_v"), [dims.hidden, kv], 1.0, how.bias);
        }
    }
}
