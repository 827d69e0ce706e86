//! Shapes of real models, and the tensors and types in their files.

use rocmforge::tensor::DType;
use rocmforge_test_support::forge::{Forge, Tensor as Row, Value, kind};

/// Offsets of tensors are multiples of this.
const ALIGNMENT: u64 = 32;

/// Dimensions of a model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub name: &'static str,
    architecture: &'static str,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    /// Values per head.
    head: u64,
    ffn: u64,
    vocab: u64,
    rope_base: f32,
    /// Whether q and k of each head are normed.
    has_head_norms: bool,
    experts: Option<Experts>,
    delta: Option<Delta>,
    streams: Option<Streams>,
    /// So many layers more that change nothing: the same answers at a higher price.
    silent: u64,
}

impl Shape {
    /// The same with so many layers more that change nothing.
    pub fn with_silent(self, silent: u64) -> Self {
        Self { silent, ..self }
    }

    /// Whether a layer can change nothing.
    pub fn may_be_silent(&self) -> bool {
        self.streams.is_none()
    }
}

/// Gated delta rules in all but each `interval`-th layer, whose attention then has a gate.
#[derive(Clone, Copy, Debug)]
struct Delta {
    interval: u64,
    taps: u64,
    /// Heads of keys and of values, and the values of each.
    keys: u64,
    values: u64,
    dim: u64,
}

impl Delta {
    fn width(self) -> u64 {
        self.values * self.dim
    }

    /// Values of all queries, keys and values.
    fn mixed(self) -> u64 {
        2 * self.keys * self.dim + self.width()
    }
}

/// Residual streams beside each other, and an input of each layer from the token (Gemma 3n).
#[derive(Clone, Copy, Debug)]
struct Streams {
    count: u64,
    /// Width of each layer's own input.
    input: u64,
    /// Rank of the path beside attention.
    rank: u64,
}

/// Expert layers.
#[derive(Clone, Copy, Debug)]
struct Experts {
    count: u64,
    used: u64,
    ffn: u64,
}

/// Llama 3.1 8B.
pub const LARGE: Shape = Shape {
    name: "8B",
    architecture: "llama",
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head: 128,
    ffn: 14_336,
    vocab: 128_256,
    rope_base: 500_000.0,
    has_head_norms: false,
    experts: None,
    delta: None,
    streams: None,
    silent: 0,
};

/// Llama 3.2 1B.
pub const SMALL: Shape = Shape { name: "1B", hidden: 2048, layers: 16, head: 64, ffn: 8192, ..LARGE };

/// Llama 3.1 70B.
const LARGEST: Shape = Shape { name: "70B", hidden: 8192, layers: 80, heads: 64, ffn: 28_672, ..LARGE };

/// Qwen3 30B-A3B: 128 experts, 8 for each token.
const EXPERTS: Shape = Shape {
    name: "30B-A3B",
    architecture: "qwen3moe",
    hidden: 2048,
    layers: 48,
    heads: 32,
    kv_heads: 4,
    head: 128,
    ffn: 6144,
    vocab: 151_936,
    rope_base: 1e6,
    has_head_norms: true,
    experts: Some(Experts { count: 128, used: 8, ffn: 768 }),
    delta: None,
    streams: None,
    silent: 0,
};

/// Qwen3.5 4B: three of four layers have a gated delta rule.
const RECURRENT: Shape = Shape {
    name: "3.5-4B",
    architecture: "qwen35",
    hidden: 2560,
    layers: 32,
    heads: 16,
    kv_heads: 4,
    head: 256,
    ffn: 9216,
    vocab: 248_320,
    rope_base: 1e7,
    has_head_norms: true,
    experts: None,
    delta: Some(Delta { interval: 4, taps: 4, keys: 16, values: 32, dim: 128 }),
    streams: None,
    silent: 0,
};

/// Gemma 3n E2B: four streams. The last ten layers share keys and values.
const STREAMS: Shape = Shape {
    name: "E2B",
    architecture: "gemma3n",
    hidden: 2048,
    layers: 30,
    heads: 8,
    kv_heads: 2,
    head: 256,
    ffn: 8192,
    vocab: 262_144,
    rope_base: 1e6,
    has_head_norms: true,
    experts: None,
    delta: None,
    streams: Some(Streams { count: 4, input: 256, rank: 64 }),
    silent: 0,
};

/// For a CPU look-alike of a GPU.
pub const TINY: Shape = Shape {
    name: "tiny",
    hidden: 256,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head: 64,
    ffn: 512,
    vocab: 512,
    ..LARGE
};

/// A step of its 9 million weights takes the CPU look-alike about as long as one of [`LARGE`] takes a GPU with many rows.
pub const MODEST: Shape = Shape { name: "9M", layers: 8, ffn: 1024, vocab: 4096, ..TINY };

/// As [`TINY`], with as many tokens as take a second to read.
pub const WORDY: Shape = Shape { name: "wordy", vocab: 1_500_000, ..TINY };

/// As [`TINY`], with experts.
const TINY_EXPERTS: Shape = Shape {
    name: "tiny-experts",
    architecture: "qwen3moe",
    has_head_norms: true,
    experts: Some(Experts { count: 8, used: 2, ffn: 256 }),
    ..TINY
};

/// As [`TINY`], with a delta rule and an attention.
const TINY_RECURRENT: Shape = Shape {
    name: "tiny-recurrent",
    architecture: "qwen35",
    has_head_norms: true,
    delta: Some(Delta { interval: 2, taps: 4, keys: 2, values: 4, dim: 64 }),
    silent: 0,
    ..TINY
};

/// As [`TINY`], with streams.
const TINY_STREAMS: Shape = Shape {
    name: "tiny-streams",
    architecture: "gemma3n",
    has_head_norms: true,
    streams: Some(Streams { count: 4, input: 256, rank: 64 }),
    ..TINY
};

/// All shapes.
pub const SHAPES: [Shape; 10] =
    [TINY, TINY_EXPERTS, TINY_RECURRENT, TINY_STREAMS, SMALL, STREAMS, RECURRENT, LARGE, EXPERTS, LARGEST];

/// Types of a file's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mixture {
    /// Four bits, and six bits for the matrices that matter most
    #[value(name = "Q4_K_M")]
    Q4KM,
    /// Eight bits
    #[value(name = "Q8_0")]
    Q8,
    /// Half precision
    #[value(name = "F16")]
    F16,
}

impl Mixture {
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4KM => "Q4_K_M",
            Self::Q8 => "Q8_0",
            Self::F16 => "F16",
        }
    }

    /// The type of most matrices, and the type of those that matter most.
    fn types(self) -> (DType, DType) {
        match self {
            Self::Q4KM => (DType::Q4_K, DType::Q6_K),
            Self::Q8 => (DType::Q8_0, DType::Q8_0),
            Self::F16 => (DType::F16, DType::F16),
        }
    }
}

/// A tensor in the file.
pub struct Tensor {
    name: String,
    dims: Vec<u64>,
    pub dtype: DType,
    pub fill: Fill,
}

/// Values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// As those of trained matrices.
    Random,
    /// Of norms.
    Ones,
    /// Of the rates of delta rules: a state must decay.
    Negative,
    /// Of what a layer adds, if it changes nothing.
    Zeros,
}

impl Tensor {
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<u64>() / self.dtype.block_len() as u64 * self.dtype.block_bytes() as u64
    }

    /// Zero bytes after the tensor.
    pub fn padding(&self) -> u64 {
        self.bytes().next_multiple_of(ALIGNMENT) - self.bytes()
    }

    /// Norms are vectors, and most other tensors matrices.
    fn new(name: String, dims: Vec<u64>, dtype: DType) -> Self {
        let fill = match dims.len() {
            1 if name.ends_with("ssm_a") => Fill::Negative,
            1 => Fill::Ones,
            _ => Fill::Random,
        };
        Self { name, dims, dtype, fill }
    }
}

/// The tensors of a file, in file order.
pub fn tensors(shape: &Shape, mixture: Mixture) -> Vec<Tensor> {
    let Shape { hidden, layers, vocab, .. } = *shape;
    let (most, finer) = mixture.types();
    let tensor = |name: &str, dims: &[u64], dtype| Tensor::new(name.into(), dims.into(), dtype);
    let mut all = vec![
        tensor("token_embd.weight", &[hidden, vocab], most),
        tensor("output_norm.weight", &[hidden], DType::F32),
        tensor("output.weight", &[hidden, vocab], finer),
    ];
    if let Some(Streams { count, input, .. }) = shape.streams {
        let inputs = input * (layers + shape.silent);
        all.extend([
            tensor("per_layer_token_embd.weight", &[inputs, vocab], most),
            tensor("per_layer_model_proj.weight", &[hidden, inputs], DType::F16),
            tensor("per_layer_proj_norm.weight", &[input], DType::F32),
            tensor("altup_proj.weight", &[hidden, hidden, count - 1], DType::F16),
            tensor("altup_unembd_proj.weight", &[hidden, hidden, count - 1], DType::F16),
        ]);
    }
    for layer in 0..layers + shape.silent {
        // As llama.cpp: finer types in the first eighth, the last eighth, and every third layer between.
        let is_finer = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let some = if is_finer { finer } else { most };
        let rows = roles(shape, layer, most, some);
        all.extend(rows.iter().map(|(role, dims, dtype)| {
            let suffix = if ["ssm_a", "ssm_dt.bias"].contains(role) { "" } else { ".weight" };
            let row = tensor(&format!("blk.{layer}.{role}{suffix}"), dims, *dtype);
            let silent = layer >= layers && ADDING.contains(role);
            if silent { Tensor { fill: Fill::Zeros, ..row } } else { row }
        }));
    }
    all
}

/// The tensors of a layer; `some` is the type of its finer ones.
fn roles(shape: &Shape, layer: u64, most: DType, some: DType) -> Vec<Role> {
    let Shape { hidden, ffn, .. } = *shape;
    let ffn_norm = if shape.delta.is_some() { "post_attention_norm" } else { "ffn_norm" };
    let mut rows = vec![("attn_norm", vec![hidden], DType::F32), (ffn_norm, vec![hidden], DType::F32)];
    match shape.delta {
        Some(delta) if !(layer + 1).is_multiple_of(delta.interval) => {
            rows.extend(delta_roles(hidden, delta, most, some))
        }
        _ => rows.extend(attention_roles(shape, most, some)),
    }
    match shape.experts {
        None => rows.extend([
            ("ffn_gate", vec![hidden, ffn], most),
            ("ffn_up", vec![hidden, ffn], most),
            ("ffn_down", vec![ffn, hidden], some),
        ]),
        Some(Experts { count, ffn, .. }) => rows.extend([
            ("ffn_gate_inp", vec![hidden, count], DType::F32),
            ("ffn_gate_exps", vec![hidden, ffn, count], most),
            ("ffn_up_exps", vec![hidden, ffn, count], most),
            ("ffn_down_exps", vec![ffn, hidden, count], some),
        ]),
    }
    if let Some(streams) = shape.streams {
        rows.extend(stream_roles(hidden, streams, most));
    }
    rows
}

fn stream_roles(hidden: u64, Streams { count, input, rank }: Streams, most: DType) -> Vec<Role> {
    let vector = |role| (role, vec![hidden], DType::F32);
    let norms = ["post_attention_norm", "post_ffw_norm", "laurel_post_norm", "post_norm"];
    let mut rows: Vec<Role> =
        norms.into_iter().chain(["altup_router_norm", "altup_correct_scale"]).map(vector).collect();
    rows.extend([
        ("laurel_l", vec![hidden, rank], most),
        // Too short for blocks of 256.
        ("laurel_r", vec![rank, hidden], DType::Q8_0),
        ("inp_gate", vec![hidden, input], most),
        ("proj", vec![input, hidden], most),
        ("altup_router", vec![hidden, count], DType::F32),
        ("altup_predict_coef", vec![count, count * count], DType::F32),
        ("altup_correct_coef", vec![count, count], DType::F32),
    ]);
    rows
}

/// The tensors that make what a layer adds.
const ADDING: [&str; 4] = ["attn_output", "ssm_out", "ffn_down", "ffn_down_exps"];

/// A tensor's name in its layer, its dimensions and its type.
type Role = (&'static str, Vec<u64>, DType);

fn attention_roles(shape: &Shape, most: DType, some: DType) -> Vec<Role> {
    let Shape { hidden, head, .. } = *shape;
    let (q, kv) = (shape.heads * head, shape.kv_heads * head);
    let gated = if shape.delta.is_some() { 2 } else { 1 };
    let mut rows = vec![
        ("attn_q", vec![hidden, q * gated], most),
        ("attn_k", vec![hidden, kv], most),
        ("attn_v", vec![hidden, kv], some),
        ("attn_output", vec![q, hidden], most),
    ];
    if shape.has_head_norms {
        rows.extend(["attn_q_norm", "attn_k_norm"].map(|role| (role, vec![head], DType::F32)));
    }
    rows
}

fn delta_roles(hidden: u64, delta: Delta, most: DType, some: DType) -> Vec<Role> {
    let Delta { taps, values, dim, .. } = delta;
    vec![
        ("attn_qkv", vec![hidden, delta.mixed()], some),
        ("attn_gate", vec![hidden, delta.width()], most),
        ("ssm_conv1d", vec![taps, delta.mixed()], DType::F32),
        ("ssm_dt.bias", vec![values], DType::F32),
        ("ssm_a", vec![values], DType::F32),
        ("ssm_beta", vec![hidden, values], DType::Q8_0),
        ("ssm_alpha", vec![hidden, values], DType::Q8_0),
        ("ssm_norm", vec![dim], DType::F32),
        ("ssm_out", vec![delta.width(), hidden], most),
    ]
}

/// The file's bytes before the tensors' data.
pub fn header(shape: &Shape, tensors: &[Tensor]) -> Vec<u8> {
    let mut forge = Forge::new(0)
        .set("general.architecture", Value::string(shape.architecture))
        .set("general.name", Value::string(&format!("synthetic {}", shape.name)));
    let experts = shape.experts.iter().flat_map(|experts| {
        [
            ("expert_count", experts.count),
            ("expert_used_count", experts.used),
            ("expert_feed_forward_length", experts.ffn),
        ]
    });
    let delta = shape.delta.iter().flat_map(|delta| {
        [
            ("full_attention_interval", delta.interval),
            ("ssm.conv_kernel", delta.taps),
            ("ssm.inner_size", delta.width()),
            ("ssm.state_size", delta.dim),
            ("ssm.time_step_rank", delta.values),
            ("ssm.group_count", delta.keys),
        ]
    });
    // As in the published models: 1 of 5 layers has no window, and the last ten store no keys and values.
    let streams = shape.streams.iter().flat_map(|streams| {
        [
            ("altup.num_inputs", streams.count),
            ("altup.active_idx", 0),
            ("embedding_length_per_layer_input", streams.input),
            ("attention.sliding_window", 512),
        ]
    });
    // Recurrent models turn a quarter of each head.
    let turned = if shape.delta.is_some() { shape.head / 4 } else { shape.head };
    let numbers = [
        ("context_length", 131_072),
        ("embedding_length", shape.hidden),
        ("block_count", shape.layers + shape.silent),
        ("feed_forward_length", shape.ffn),
        ("rope.dimension_count", turned),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head),
        ("attention.value_length", shape.head),
        ("vocab_size", shape.vocab),
    ];
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    for (name, value) in numbers.into_iter().chain(experts).chain(delta).chain(streams) {
        forge = forge.set(&key(name), Value::u32(value as u32));
    }
    if shape.delta.is_some() {
        // Pairs turn by a position of text, height or width, one after the other.
        let pairs = turned / 2;
        let sections = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0].map(|count| count as i32);
        forge = forge.set(&key("rope.dimension_sections"), Value::i32s(&sections));
    }
    forge = forge
        .set(&key("attention.layer_norm_rms_epsilon"), Value::f32(1e-5))
        .set(&key("rope.freq_base"), Value::f32(shape.rope_base));
    forge = vocabulary(forge, shape.vocab);
    let mut offset = 0;
    for tensor in tensors {
        forge.tensors.push(Row {
            name: tensor.name.clone().into(),
            dims: tensor.dims.clone(),
            n_dims: None,
            ggml: tensor.dtype.ggml(),
            offset: Some(offset),
            data: Some(Vec::new()), // written after the header
        });
        offset += tensor.bytes() + tensor.padding();
    }
    forge.alignment = ALIGNMENT;
    forge.build().bytes
}

/// A SentencePiece vocabulary: 3 special tokens, 256 bytes, and meaningless words.
fn vocabulary(forge: Forge, vocab: u64) -> Forge {
    const SPECIAL: u64 = 3;
    const BYTES: u64 = 256;
    let token = |id: u64| match id {
        0 => "<unk>".into(),
        1 => "<s>".into(),
        2 => "</s>".into(),
        id if id < SPECIAL + BYTES => format!("<0x{:02X}>", id - SPECIAL),
        id => format!("\u{2581}w{id}"),
    };
    // 2 unknown, 3 control, 6 byte, 1 normal.
    let types: Vec<i32> = (0..vocab)
        .map(|id| match id {
            0 => 2,
            1 | 2 => 3,
            id if id < SPECIAL + BYTES => 6,
            _ => 1,
        })
        .collect();
    let mut tokens = Vec::new();
    for text in (0..vocab).map(token) {
        tokens.extend((text.len() as u64).to_le_bytes());
        tokens.extend(text.as_bytes());
    }
    let scores: Vec<f32> = (0..vocab).map(|id| -(id as f32)).collect();
    forge
        .set("tokenizer.ggml.model", Value::string("llama"))
        .set("tokenizer.ggml.tokens", Value::array(kind::STRING, vocab, &tokens))
        .set("tokenizer.ggml.scores", Value::f32s(&scores))
        .set("tokenizer.ggml.token_type", Value::i32s(&types))
        .set("tokenizer.ggml.bos_token_id", Value::u32(1))
        .set("tokenizer.ggml.eos_token_id", Value::u32(2))
        .set("tokenizer.ggml.unknown_token_id", Value::u32(0))
}
