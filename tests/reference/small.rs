//! Random decoders: their tensors in a mapped file, as a backend takes them, and the same weights as f64.

use std::io::Write;
use std::sync::Arc;

use half::f16;
use rocmforge::backend::cpu::quant;
use rocmforge::program::{
    Activation, Builder, ExpertRange, Gating, NormKind, Op, Output, PartKind, Program, Residence, RopeLayout,
    RopeScaling, RopeSpec, State, TensorId, ValueId,
};
use rocmforge::tensor::{DType, LazyTensor, MappedFile, Shape};

/// xorshift64*: the same numbers in every run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// A matrix as the reference reads it.
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f64>,
}

impl Matrix {
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.cols..][..self.cols]
    }
}

/// A tensor twice: in the file and as f64.
pub struct Weight {
    pub lazy: LazyTensor,
    pub exact: Matrix,
}

/// A projection, in both forms.
pub struct Linear {
    pub weight: Weight,
    pub bias: Option<Weight>,
}

/// One layer.
pub struct Layer {
    pub attn_norm: Weight,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub q_norm: Option<Weight>,
    pub k_norm: Option<Weight>,
    pub attn_output: Linear,
    pub ffn_norm: Weight,
    pub ffn: Ffn,
}

/// The feed-forward half of a layer.
#[allow(clippy::large_enum_variant)] // a handful in a test
pub enum Ffn {
    Dense { gate: Linear, up: Linear, down: Linear },
    Experts { router: Linear, experts: Vec<[Weight; 3]> },
}

/// A model.
pub struct Small {
    pub recipe: Recipe,
    pub embedding: Weight,
    pub layers: Vec<Layer>,
    pub rope_factors: Option<Weight>,
    pub output_norm: Weight,
    pub output: Weight,
}

/// Parameters of a random model.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub seed: u64,
    /// Type of all matrices but the embedding, which is F32.
    pub dtype: DType,
    /// Type of the matrices of values and downs instead, as files of mixed types have it.
    pub second: Option<DType>,
    pub hidden: usize,
    pub ffn: usize,
    pub n_layers: usize,
    pub n_kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub rope_dims: usize,
    pub layout: RopeLayout,
    pub biases: bool,
    pub head_norms: bool,
    pub rope_factors: bool,
    pub scaling: RopeScaling,
    /// Experts in every layer, `ffn` wide each.
    pub experts: Option<Experts>,
}

/// Parameters of the expert layers.
#[derive(Clone, Debug)]
pub struct Experts {
    pub count: usize,
    pub used: usize,
    pub normalise: bool,
    pub scale: f32,
}

/// Added to the mean square in every norm.
pub const EPS: f32 = 1e-5;

impl Recipe {
    pub fn plain(dtype: DType) -> Self {
        Self {
            seed: 1,
            dtype,
            second: None,
            hidden: 256,
            ffn: 512,
            n_layers: 2,
            n_kv_heads: 2,
            group: 2,
            head_dim: 64,
            rope_dims: 64,
            layout: RopeLayout::Interleaved,
            biases: false,
            head_norms: false,
            rope_factors: false,
            scaling: RopeScaling::Linear { factor: 2.0 },
            experts: None,
        }
    }

    /// A narrow model with heads of this shape; `group` also decides on biases, head norms and rope factors.
    pub fn of_heads(group: usize, head_dim: usize, rope_dims: usize, layout: RopeLayout) -> Self {
        let n_kv_heads = 1 + group % 3;
        let has_whole_blocks = (n_kv_heads * group * head_dim).is_multiple_of(32);
        Self {
            hidden: 96,
            ffn: 160,
            n_kv_heads,
            group,
            head_dim,
            rope_dims,
            layout,
            biases: group.is_multiple_of(2),
            head_norms: group % 3 == 1,
            rope_factors: group % 4 == 3,
            ..Self::plain(if has_whole_blocks { DType::Q8_0 } else { DType::F16 })
        }
    }

    /// 6 experts, of which each row uses 3.
    pub fn with_experts(self) -> Self {
        let experts = Experts { count: 6, used: 3, normalise: true, scale: 1.0 };
        Self { experts: Some(experts), ..self }
    }
}

pub const VOCAB: usize = 97;

/// Collects tensors in one file image; ranges become handles once the file is mapped.
struct Image {
    random: Random,
    image: Vec<u8>,
    made: Vec<(DType, usize, usize, std::ops::Range<u64>)>,
}

impl Image {
    /// Adds a random tensor with values of about `scale` around `center`; returns its number.
    fn add(&mut self, dtype: DType, rows: usize, cols: usize, center: f32, scale: f32) -> usize {
        // An odd start, which files may have: nothing may rely on alignment.
        self.image.push(0);
        let start = self.image.len() as u64;
        for _ in 0..rows * cols / dtype.block_len() {
            let block = random_block(dtype, &mut self.random, center, scale);
            self.image.extend_from_slice(&block);
        }
        self.made.push((dtype, rows, cols, start..self.image.len() as u64));
        self.made.len() - 1
    }
}

/// A quant block of values in about `-scale..scale`. All fields except scales and offsets are random.
fn random_block(dtype: DType, random: &mut Random, center: f32, scale: f32) -> Vec<u8> {
    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.bits() as u8).collect();
    let mut put = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
    match dtype {
        DType::F32 => block = (center + scale * random.value()).to_le_bytes().to_vec(),
        DType::F16 => put(0, center + scale * random.value()),
        DType::BF16 => {
            let value = half::bf16::from_f32(center + scale * random.value());
            block.copy_from_slice(&value.to_le_bytes());
        }
        DType::Q8_0 => put(0, scale / 127.0),
        DType::Q4_0 => put(0, scale / 8.0),
        DType::Q4_1 => {
            put(0, scale / 7.5);
            put(2, -scale);
        }
        DType::Q5_0 => put(0, scale / 16.0),
        DType::Q5_1 => {
            put(0, scale / 15.5);
            put(2, -scale);
        }
        // No backend computes it.
        DType::Q1_0 => {}
        // A power of two, times codes up to 6.
        DType::MXFP4 => block[0] = (127.0 + (scale / 6.0).log2().floor()) as u8,
        // The same, times values up to 7.5 or 28.
        DType::MXFP6_E2M3 => block[0] = (127.0 + (scale / 7.5).log2().floor()) as u8,
        DType::MXFP6_E3M2 => block[0] = (127.0 + (scale / 28.0).log2().floor()) as u8,
        // A float of eight bits, with random mantissas, times codes up to 6.
        DType::NVFP4 => {
            let exponent = (7.0 + (scale / 6.0).log2().floor()).clamp(0.0, 14.0) as u8;
            block[..4].iter_mut().for_each(|scale| *scale = exponent << 3 | *scale & 7);
        }
        DType::Q5_K => {
            put(0, scale / 992.0);
            put(2, scale / 64.0);
        }
        // Scales and minima are 6 bits: 63 * 15 steps, centred by an equally large minimum.
        DType::Q4_K => {
            put(0, scale / 480.0);
            put(2, scale / 64.0);
        }
        // Scales are signed 8 bits, codes -32..32.
        DType::Q6_K => put(208, scale / 2048.0),
        // Scales and minima are 4 bits: 15 * 3 steps, centred by an equally large minimum.
        DType::Q2_K => {
            put(80, scale / 22.5);
            put(82, scale / 15.0);
        }
        // Scales are signed 6 bits, codes -4..3.
        DType::Q3_K => put(108, scale / 128.0),
        // Codes of the table are up to 127.
        DType::IQ4_NL => put(0, scale / 127.0),
        DType::IQ4_XS => put(0, scale / 127.0 / 32.0),
        // Scales are up to 31 / 4, 31 or 31 / 8, the codebook's magnitudes up to 62, 15 and 43.
        DType::IQ3_XXS => put(0, scale / 62.0 / 7.75),
        DType::IQ3_S => put(0, scale / 15.0 / 31.0),
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => put(0, scale / 43.0 / 3.875),
        // Scales are up to 15, values near -1, 0 and 1.
        DType::IQ1_S => put(0, scale / 15.0),
        DType::IQ1_M => {
            let bits = f16::from_f32(scale / 15.0).to_bits();
            (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | (bits >> (4 * i) << 4) as u8);
        }
        DType::TQ1_0 => put(52, scale),
        DType::TQ2_0 => {
            put(64, scale);
            // No file has a code of 3; it becomes 1, so that values stay centred.
            block[..64].iter_mut().for_each(|b| *b &= !(*b & *b << 1 & 0xaa));
        }
        other => panic!("cannot make random blocks of {other}"),
    }
    block
}

/// Numbers of a projection's tensors: weight and bias.
type Parts = (usize, Option<usize>);

impl Small {
    pub fn new(recipe: &Recipe) -> Self {
        let r = recipe;
        let mut b = Image { random: Random::new(r.seed), image: Vec::new(), made: Vec::new() };
        let norm = |b: &mut Image, cols| b.add(DType::F32, 1, cols, 1.0, 0.3);
        let linear = |b: &mut Image, dtype: DType, rows: usize, cols: usize| -> Parts {
            let weight = b.add(dtype, rows, cols, 0.0, (3.0 / cols as f32).sqrt());
            (weight, r.biases.then(|| b.add(DType::F32, 1, rows, 0.0, 0.2)))
        };
        let (first, second) = (r.dtype, r.second.unwrap_or(r.dtype));
        let (q_cols, kv_cols) = (r.n_kv_heads * r.group * r.head_dim, r.n_kv_heads * r.head_dim);
        let embedding = b.add(DType::F32, VOCAB, r.hidden, 0.0, 1.0);
        let mut layers = Vec::new();
        for _ in 0..r.n_layers {
            let attn_norm = norm(&mut b, r.hidden);
            let qkv = [(first, q_cols), (first, kv_cols), (second, kv_cols)]
                .map(|(dtype, rows)| linear(&mut b, dtype, rows, r.hidden));
            let head_norms = r.head_norms.then(|| [norm(&mut b, r.head_dim), norm(&mut b, r.head_dim)]);
            let attn_output = linear(&mut b, first, r.hidden, q_cols);
            let ffn_norm = norm(&mut b, r.hidden);
            let count = r.experts.as_ref().map_or(0, |e| e.count);
            // A router in single precision, as files have it, with logits far apart.
            let router = (count > 0).then(|| b.add(DType::F32, count, r.hidden, 0.0, 0.3));
            let ffn: Vec<[Parts; 3]> = (0..count.max(1))
                .map(|_| {
                    [(first, r.ffn, r.hidden), (first, r.ffn, r.hidden), (second, r.hidden, r.ffn)]
                        .map(|(dtype, rows, cols)| linear(&mut b, dtype, rows, cols))
                })
                .collect();
            layers.push((attn_norm, qkv, head_norms, attn_output, ffn_norm, router, ffn));
        }
        let factors = r.rope_factors.then(|| b.add(DType::F32, 1, r.rope_dims / 2, 2.0, 1.0));
        let output_norm = norm(&mut b, r.hidden);
        let output = b.add(r.dtype, VOCAB, r.hidden, 0.0, 3.0 * (3.0 / r.hidden as f32).sqrt());

        let file = mapped(&b.image);
        let weight = |number: usize| {
            let (dtype, rows, cols, range) = b.made[number].clone();
            weight_in(&file, dtype, [rows, cols], range)
        };
        let pair = |parts: Parts| Linear { weight: weight(parts.0), bias: parts.1.map(weight) };
        let layers = layers
            .into_iter()
            .map(|(attn_norm, [q, k, v], head_norms, attn_output, ffn_norm, router, ffn)| Layer {
                attn_norm: weight(attn_norm),
                q: pair(q),
                k: pair(k),
                v: pair(v),
                q_norm: head_norms.map(|n| weight(n[0])),
                k_norm: head_norms.map(|n| weight(n[1])),
                attn_output: pair(attn_output),
                ffn_norm: weight(ffn_norm),
                ffn: match router {
                    None => {
                        let [gate, up, down] = ffn[0].map(pair);
                        Ffn::Dense { gate, up, down }
                    }
                    Some(router) => Ffn::Experts {
                        router: Linear { weight: weight(router), bias: None },
                        experts: ffn.iter().map(|parts| parts.map(|(number, _)| weight(number))).collect(),
                    },
                },
            })
            .collect();
        Self {
            recipe: r.clone(),
            embedding: weight(embedding),
            layers,
            rope_factors: factors.map(weight),
            output_norm: weight(output_norm),
            output: weight(output),
        }
    }
}

impl Small {
    /// The model as a program in which each half of a layer is a separate part, so that its result can be read. Also
    /// returns the residual value, to which the parts add.
    pub fn program(&self) -> (Program, ValueId) {
        let r = &self.recipe;
        let mut w = Writer { program: Builder::new(VOCAB), small: self };
        w.program.part(PartKind::Embedding);
        let table = w.program.tensor(self.embedding.lazy.clone(), Residence::Host);
        let factors =
            self.rope_factors.as_ref().map(|factors| w.program.tensor(factors.lazy.clone(), Residence::Host));
        let (layout, dims, scaling) = (r.layout, r.rope_dims, r.scaling);
        let spec = RopeSpec { layout, dims, theta: 1e4, scaling, magnitude: 1.0, growth: None };
        let rope = w.program.rope(spec, factors);
        let x = w.program.value(r.hidden);
        w.program.push(Op::Embed { table, scale: 1.0, out: x });
        for (index, layer) in (0..).zip(&self.layers) {
            w.program.part(PartKind::Layer(2 * index));
            w.attention(layer, rope, x);
            w.program.part(PartKind::Layer(2 * index + 1));
            w.ffn(layer, x);
        }
        w.program.part(PartKind::Head);
        let (last, normed, logits) = (
            w.program.wanted_value(r.hidden),
            w.program.wanted_value(r.hidden),
            w.program.wanted_value(VOCAB),
        );
        w.program.push(Op::Take { from: x, out: last });
        w.norm(&self.output_norm, last, normed);
        let weight = w.tensor(&self.output);
        w.program.push(Op::Project { weight, bias: None, from: normed, out: logits, add: false });
        (w.program.finish(Output::Logits(logits)).expect("the program was refused"), x)
    }
}

/// Writes a small model's program.
struct Writer<'a> {
    program: Builder,
    small: &'a Small,
}

impl Writer<'_> {
    fn tensor(&mut self, weight: &Weight) -> TensorId {
        self.program.tensor(weight.lazy.clone(), Residence::Device)
    }

    fn norm(&mut self, weight: &Weight, from: ValueId, out: ValueId) {
        let weight = self.tensor(weight);
        self.program.push(Op::Norm {
            kind: NormKind::Rms,
            eps: EPS,
            weight,
            bias: None,
            from,
            out,
            add: false,
        });
    }

    fn normed(&mut self, weight: &Weight, from: ValueId) -> ValueId {
        let out = self.program.value(self.program.width(from));
        self.norm(weight, from, out);
        out
    }

    fn project(&mut self, part: &Linear, from: ValueId) -> ValueId {
        let out = self.program.value(part.weight.exact.rows);
        self.push(part, from, out, false);
        out
    }

    fn push(&mut self, part: &Linear, from: ValueId, out: ValueId, add: bool) {
        let weight = self.tensor(&part.weight);
        let bias = part.bias.as_ref().map(|bias| self.tensor(bias));
        self.program.push(Op::Project { weight, bias, from, out, add });
    }

    fn attention(&mut self, layer: &Layer, rope: rocmforge::program::RopeId, x: ValueId) {
        let r = &self.small.recipe;
        let (heads, head_dim) = (r.n_kv_heads as u32, r.head_dim as u32);
        let normed = self.normed(&layer.attn_norm, x);
        let [q, k, v] = [&layer.q, &layer.k, &layer.v].map(|part| self.project(part, normed));
        for (norm, value) in [(&layer.q_norm, q), (&layer.k_norm, k)] {
            if let Some(norm) = norm {
                self.norm(norm, value, value);
            }
        }
        for value in [q, k] {
            self.program.push(Op::Rope { rope, head_dim, value });
        }
        let state = self.program.state(State::Kv { heads, head_dim });
        self.program.push(Op::Store { state, keys: k, values: v });
        let out = self.program.value(self.program.width(q));
        let scale = 1.0 / (head_dim as f32).sqrt();
        self.program.push(Op::Attend {
            state,
            queries: q,
            scale,
            window: None,
            both_ways: false,
            alibi: false,
            cap: None,
            sinks: None,
            out,
        });
        self.push(&layer.attn_output, out, x, true);
    }

    fn ffn(&mut self, layer: &Layer, x: ValueId) {
        let normed = self.normed(&layer.ffn_norm, x);
        let activation = Activation::Silu;
        match &layer.ffn {
            Ffn::Dense { gate, up, down } => {
                let [gate, up] = [gate, up].map(|part| self.project(part, normed));
                let out = self.program.value(self.program.width(gate));
                self.program.push(Op::Gate { activation, gate, up, out });
                self.push(down, out, x, true);
            }
            Ffn::Experts { router, experts } => {
                let dims = self.small.recipe.experts.as_ref().expect("the recipe has no experts");
                let logits = self.project(router, normed);
                let choice = self.program.choice(dims.used);
                let (normalise, scale) = (dims.normalise, dims.scale);
                self.program.push(Op::Route {
                    logits,
                    gating: Gating::Softmax,
                    bias: None,
                    groups: None,
                    normalise,
                    scale,
                    out: choice,
                });
                let first = self.program.next_tensor();
                for weight in experts.iter().flatten() {
                    self.program.tensor(weight.lazy.clone(), Residence::Chosen);
                }
                let experts = ExpertRange { first, count: experts.len() as u32, gated: true };
                self.program.push(Op::Experts {
                    experts,
                    factors: [None; 3],
                    biases: None,
                    choice,
                    activation,
                    from: normed,
                    out: x,
                });
            }
        }
    }
}

/// A tensor of given bytes, in a new file.
pub fn weight_of(dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> Weight {
    weight_in(&mapped(bytes), dtype, [rows, cols], 0..bytes.len() as u64)
}

fn weight_in(
    file: &Arc<MappedFile>,
    dtype: DType,
    [rows, cols]: [usize; 2],
    range: std::ops::Range<u64>,
) -> Weight {
    let shape = match rows {
        1 => Shape::new(&[cols as u64]),
        _ => Shape::new(&[cols as u64, rows as u64]),
    };
    let name = format!("{dtype} at {}", range.start);
    let tensor = LazyTensor::new(&name, dtype, shape.unwrap(), range, file.clone()).unwrap();
    let mut values = vec![0.0f32; rows * cols];
    // A type that no backend computes has no values here.
    if quant::is_supported(dtype) {
        quant::dequantize_row(dtype, tensor.bytes(), &mut values).unwrap();
    }
    let values = values.into_iter().map(f64::from).collect();
    Weight { lazy: tensor, exact: Matrix { rows, cols, values } }
}

fn mapped(image: &[u8]) -> Arc<MappedFile> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    // Mapped files are read-only from the start; the mapping outlives the name.
    MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap()
}
