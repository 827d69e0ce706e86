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

/// All shapes.
pub const SHAPES: [Shape; 6] = [TINY, TINY_EXPERTS, SMALL, LARGE, EXPERTS, LARGEST];

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
}

impl Tensor {
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<u64>() / self.dtype.block_len() as u64 * self.dtype.block_bytes() as u64
    }

    /// Zero bytes after the tensor.
    pub fn padding(&self) -> u64 {
        self.bytes().next_multiple_of(ALIGNMENT) - self.bytes()
    }

    /// Whether this is a norm: norms are vectors, all other tensors are matrices.
    pub fn is_norm(&self) -> bool {
        self.dims.len() == 1
    }
}

/// The tensors of a file, in file order.
pub fn tensors(shape: &Shape, mixture: Mixture) -> Vec<Tensor> {
    let Shape { hidden, layers, vocab, .. } = *shape;
    let (most, finer) = mixture.types();
    let tensor = |name: &str, dims: &[u64], dtype| Tensor { name: name.into(), dims: dims.into(), dtype };
    let mut all = vec![
        tensor("token_embd.weight", &[hidden, vocab], most),
        tensor("output_norm.weight", &[hidden], DType::F32),
        tensor("output.weight", &[hidden, vocab], finer),
    ];
    for layer in 0..layers {
        // As llama.cpp: finer types in the first eighth, the last eighth, and every third layer between.
        let is_finer = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let some = if is_finer { finer } else { most };
        let rows = roles(shape, most, some);
        all.extend(
            rows.iter()
                .map(|(role, dims, dtype)| tensor(&format!("blk.{layer}.{role}.weight"), dims, *dtype)),
        );
    }
    all
}

/// The tensors of a layer; `some` is the type of its finer ones.
fn roles(shape: &Shape, most: DType, some: DType) -> Vec<(&'static str, Vec<u64>, DType)> {
    let Shape { hidden, ffn, head, .. } = *shape;
    let (q, kv) = (shape.heads * head, shape.kv_heads * head);
    let mut rows = vec![
        ("attn_norm", vec![hidden], DType::F32),
        ("attn_q", vec![hidden, q], most),
        ("attn_k", vec![hidden, kv], most),
        ("attn_v", vec![hidden, kv], some),
        ("attn_output", vec![q, hidden], most),
        ("ffn_norm", vec![hidden], DType::F32),
    ];
    if shape.has_head_norms {
        rows.extend(["attn_q_norm", "attn_k_norm"].map(|role| (role, vec![head], DType::F32)));
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
    rows
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
    let numbers = [
        ("context_length", 131_072),
        ("embedding_length", shape.hidden),
        ("block_count", shape.layers),
        ("feed_forward_length", shape.ffn),
        ("rope.dimension_count", shape.head),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head),
        ("attention.value_length", shape.head),
        ("vocab_size", shape.vocab),
    ];
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    for (name, value) in numbers.into_iter().chain(experts) {
        forge = forge.set(&key(name), Value::u32(value as u32));
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
