//! Model files of real shapes with weights made up here: what a GPU takes to run a model depends on its shape, and a real
//! one's bytes would have to be fetched.
//!
//! The architecture is `llama`, the mixture of types that of files called Q4_K_M or Q8_0. Weights are random and spread as
//! trained ones are, so that values in the model stay as large as in a real one. What such a model answers means nothing.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::error::{Error, Result};

/// Offsets of tensors are multiples of this.
const ALIGNMENT: u64 = 32;

/// Random blocks of a type, repeated from another place in each tensor.
const POOL_BYTES: usize = 8 << 20;

/// ggml's numbers of types.
const F32: u32 = 0;
const Q8_0: u32 = 8;
const Q4_K: u32 = 12;
const Q6_K: u32 = 14;

/// Type numbers of metadata values.
const U32: u32 = 4;
const I32: u32 = 5;
const FLOAT: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// What a model looks like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub name: &'static str,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
    ffn: u64,
    vocab: u64,
}

/// Llama 3.1 8B.
pub const LARGE: Shape = Shape {
    name: "8B",
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head: 128,
    ffn: 14_336,
    vocab: 128_256,
};

/// Llama 3.2 1B.
pub const SMALL: Shape =
    Shape { name: "1B", hidden: 2048, layers: 16, heads: 32, kv_heads: 8, head: 64, ffn: 8192, ..LARGE };

/// For a processor that plays a GPU.
pub const TINY: Shape =
    Shape { name: "tiny", hidden: 256, layers: 2, heads: 4, kv_heads: 2, head: 64, ffn: 512, vocab: 512 };

/// Which types a file's tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixture {
    /// Four bits, six where they matter most.
    Q4KM,
    /// Eight bits.
    Q8,
}

impl Mixture {
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4KM => "Q4_K_M",
            Self::Q8 => "Q8_0",
        }
    }
}

struct Tensor {
    name: String,
    dims: Vec<u64>,
    dtype: u32,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        let (values, bytes) = block(self.dtype);
        self.dims.iter().product::<u64>() / values * bytes
    }
}

/// Values and bytes of a block.
fn block(dtype: u32) -> (u64, u64) {
    match dtype {
        Q8_0 => (32, 34),
        Q4_K => (256, 144),
        Q6_K => (256, 210),
        _ => (1, 4),
    }
}

/// Bytes of the file without its header.
pub fn bytes(shape: &Shape, mixture: Mixture) -> u64 {
    tensors(shape, mixture).iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGNMENT)).sum()
}

/// Writes the file.
///
/// # Errors
/// [`Error::Io`].
pub fn write(path: &Path, shape: &Shape, mixture: Mixture) -> Result<()> {
    let file = File::create(path).map_err(Error::at(path))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let tensors = tensors(shape, mixture);
    let mut header = header(shape, &tensors);
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    out.write_all(&header).map_err(Error::at(path))?;
    let pools = [F32, Q8_0, Q4_K, Q6_K].map(|dtype| (dtype, pool(dtype)));
    for (index, tensor) in tensors.iter().enumerate() {
        let pool = pools.iter().find(|(dtype, _)| *dtype == tensor.dtype).map_or(&[][..], |(_, pool)| pool);
        data(&mut out, tensor, pool, index).map_err(Error::at(path))?;
    }
    out.flush().map_err(Error::at(path))
}

fn data(out: &mut impl Write, tensor: &Tensor, pool: &[u8], index: usize) -> std::io::Result<()> {
    let (_, block) = block(tensor.dtype);
    let blocks = pool.len() / block as usize;
    // Another place in the pool for each tensor; a prime, so that few begin alike.
    let mut at = index * 7919 % blocks * block as usize;
    let mut left = tensor.bytes();
    while left > 0 {
        let piece = left.min((pool.len() - at) as u64) as usize;
        out.write_all(&pool[at..at + piece])?;
        left -= piece as u64;
        at = 0;
    }
    let padding = tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes();
    out.write_all(&[0; ALIGNMENT as usize][..padding as usize])
}

/// Blocks whose weights have a mean near 0 and a deviation near 0.015, one over the root of 4096.
fn pool(dtype: u32) -> Vec<u8> {
    /// Half-precision 2.0e-4: codes deviate by 74.
    const Q8_0_SCALE: [u8; 2] = 0x0a8e_u16.to_le_bytes();
    /// Half-precision 1.0e-4: codes deviate by 4.6, scales are 32 on average.
    const Q4_K_SCALE: [u8; 2] = 0x068e_u16.to_le_bytes();
    /// 7.5 times that: the mean code.
    const Q4_K_MIN: [u8; 2] = 0x1225_u16.to_le_bytes();
    /// Half-precision 1.1e-5: codes deviate by 18, scales by 74.
    const Q6_K_SCALE: [u8; 2] = 0x00b8_u16.to_le_bytes();
    let (_, block) = block(dtype);
    if dtype == F32 {
        // Only norms have this type.
        return 1f32.to_le_bytes().repeat(POOL_BYTES / 4);
    }
    let mut bytes = noise(POOL_BYTES / block as usize * block as usize);
    for one in bytes.chunks_exact_mut(block as usize) {
        match dtype {
            Q8_0 => one[..2].copy_from_slice(&Q8_0_SCALE),
            Q4_K => {
                one[..2].copy_from_slice(&Q4_K_SCALE);
                one[2..4].copy_from_slice(&Q4_K_MIN);
            }
            _ => one[208..].copy_from_slice(&Q6_K_SCALE),
        }
    }
    bytes
}

/// Bytes from xorshift64*.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| draw().to_le_bytes()).collect();
    bytes.truncate(count);
    bytes
}

fn tensors(shape: &Shape, mixture: Mixture) -> Vec<Tensor> {
    let Shape { hidden, layers, ffn, vocab, .. } = *shape;
    let (q, kv) = (shape.heads * shape.head, shape.kv_heads * shape.head);
    let (most, finer) = match mixture {
        Mixture::Q4KM => (Q4_K, Q6_K),
        Mixture::Q8 => (Q8_0, Q8_0),
    };
    let tensor = |name: String, dims: &[u64], dtype| Tensor { name, dims: dims.into(), dtype };
    let mut all = vec![
        tensor("token_embd.weight".into(), &[hidden, vocab], most),
        tensor("output_norm.weight".into(), &[hidden], F32),
        tensor("output.weight".into(), &[hidden, vocab], finer),
    ];
    for layer in 0..layers {
        // As llama.cpp spends its bits: the first eighth, the last, and every third between.
        let is_finer = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let some = if is_finer { finer } else { most };
        let rows: [(&str, &[u64], u32); 9] = [
            ("attn_norm", &[hidden], F32),
            ("attn_q", &[hidden, q], most),
            ("attn_k", &[hidden, kv], most),
            ("attn_v", &[hidden, kv], some),
            ("attn_output", &[q, hidden], most),
            ("ffn_norm", &[hidden], F32),
            ("ffn_gate", &[hidden, ffn], most),
            ("ffn_up", &[hidden, ffn], most),
            ("ffn_down", &[ffn, hidden], some),
        ];
        all.extend(rows.map(|(role, dims, dtype)| tensor(format!("blk.{layer}.{role}.weight"), dims, dtype)));
    }
    all
}

/// Everything before the tensors' bytes.
fn header(shape: &Shape, tensors: &[Tensor]) -> Vec<u8> {
    let mut out = Header { bytes: Vec::new(), values: 0 };
    out.text("general.architecture", "llama");
    out.text("general.name", &format!("synthetic {}", shape.name));
    for (key, value) in [
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
    ] {
        out.number(&format!("llama.{key}"), value);
    }
    out.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    out.float("llama.rope.freq_base", 500_000.0);
    vocabulary(&mut out, shape.vocab);
    let mut all = b"GGUF".to_vec();
    all.extend(3u32.to_le_bytes());
    all.extend((tensors.len() as u64).to_le_bytes());
    all.extend(out.values.to_le_bytes());
    all.extend(out.bytes);
    let mut offset = 0u64;
    for tensor in tensors {
        put_text(&mut all, &tensor.name);
        all.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| all.extend(dim.to_le_bytes()));
        all.extend(tensor.dtype.to_le_bytes());
        all.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    all
}

/// A SentencePiece vocabulary: 3 special tokens, 256 bytes, and words without meaning.
fn vocabulary(out: &mut Header, vocab: u64) {
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
    let kind = |id: u64| match id {
        0 => 2i32,
        1 | 2 => 3,
        id if id < SPECIAL + BYTES => 6,
        _ => 1,
    };
    out.text("tokenizer.ggml.model", "llama");
    out.array("tokenizer.ggml.tokens", STRING, vocab, |bytes, id| put_text(bytes, &token(id)));
    out.array("tokenizer.ggml.scores", FLOAT, vocab, |bytes, id| bytes.extend((-(id as f32)).to_le_bytes()));
    out.array("tokenizer.ggml.token_type", I32, vocab, |bytes, id| bytes.extend(kind(id).to_le_bytes()));
    out.number("tokenizer.ggml.bos_token_id", 1);
    out.number("tokenizer.ggml.eos_token_id", 2);
    out.number("tokenizer.ggml.unknown_token_id", 0);
}

/// Metadata under construction.
struct Header {
    bytes: Vec<u8>,
    values: u64,
}

impl Header {
    fn entry(&mut self, key: &str, kind: u32) {
        put_text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.values += 1;
    }

    fn text(&mut self, key: &str, value: &str) {
        self.entry(key, STRING);
        put_text(&mut self.bytes, value);
    }

    fn number(&mut self, key: &str, value: u64) {
        self.entry(key, U32);
        self.bytes.extend((value as u32).to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.entry(key, FLOAT);
        self.bytes.extend(value.to_le_bytes());
    }

    fn array(&mut self, key: &str, kind: u32, count: u64, put: impl Fn(&mut Vec<u8>, u64)) {
        self.entry(key, ARRAY);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(count.to_le_bytes());
        (0..count).for_each(|index| put(&mut self.bytes, index));
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // a test fails by panicking

    use rocmforge::model::{Model, ModelId};

    use super::*;

    #[test]
    fn what_is_written_is_a_model_of_that_shape() {
        for mixture in [Mixture::Q4KM, Mixture::Q8] {
            let dir = tempfile::tempdir().expect("a folder");
            let path = dir.path().join("model.gguf");
            write(&path, &TINY, mixture).expect("written");
            let file = File::open(&path).expect("written above");
            let header = file.metadata().expect("a file").len() - bytes(&TINY, mixture);
            assert!(header < 100_000, "{header}");
            let model = Model::open(ModelId(1), "synthetic", vec![file]).expect("a model");
            assert_eq!(model.plan.dims.vocab as u64, TINY.vocab);
            assert_eq!(model.plan.layers.len() as u64, TINY.layers);
        }
    }

    #[test]
    fn large_ones_are_as_large_as_real_files() {
        // Of files made by llama.cpp from models of these shapes, within a hundredth.
        let gb = |shape, mixture| bytes(shape, mixture) as f64 / 1e9;
        assert!((gb(&LARGE, Mixture::Q4KM) / 4.92 - 1.0).abs() < 0.01, "{}", gb(&LARGE, Mixture::Q4KM));
        assert!((gb(&LARGE, Mixture::Q8) / 8.54 - 1.0).abs() < 0.01, "{}", gb(&LARGE, Mixture::Q8));
    }
}
