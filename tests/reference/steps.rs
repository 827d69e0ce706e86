//! Steps of a small model on a backend, unit by unit or whole.

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa};
use rocmforge::backend::{
    Activations, AttentionInput, Backend, Expert, Experts, FfnInput, KvType, ModelSlot, Projection, Router,
    StepBatch,
};
use rocmforge::tensor::DType;

use crate::forward::Rows;
use crate::small::{Ffn, Linear, Random, Recipe, Small, VOCAB};

pub const FLOAT: CpuOptions =
    CpuOptions { threads: None, isa: None, activations: Activations::F32, kv: KvType::F32 };

pub fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

pub fn projection(part: &Linear) -> Projection<'_> {
    Projection { weight: &part.weight.device, bias: part.bias.as_ref().map(|b| &b.device) }
}

/// A backend with one small model open.
pub struct Runner<'a, B = CpuBackend> {
    pub backend: B,
    pub slot: ModelSlot,
    pub model: &'a Small,
    /// Each step has other experts.
    version: u64,
}

/// Rows of one step.
#[derive(Clone, Default)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    pub sequences: Vec<u32>,
    pub logits: Vec<u32>,
}

impl<'a> Runner<'a> {
    pub fn new(model: &'a Small, options: CpuOptions, threads: usize) -> Self {
        Self::on(model, CpuBackend::with_exact_threads(options, threads).unwrap())
    }

    pub fn residual(&self, rows: usize) -> Rows {
        let row = |row| self.backend.residual(row).unwrap().into_iter().map(f64::from).collect();
        (0..rows).map(row).collect()
    }
}

impl<'a, B: Backend> Runner<'a, B> {
    /// On the backend that has the model's tensors.
    pub fn on(model: &'a Small, mut backend: B) -> Self {
        let slot = backend.open_model(&model.dims, 256).unwrap();
        Self { backend, slot, model, version: 0 }
    }

    pub fn begin(&mut self, batch: &Batch, tables: &[Vec<u32>]) {
        let stride = tables[0].len();
        let step = StepBatch {
            token_ids: &batch.tokens,
            positions: &batch.positions,
            row_sequences: &batch.sequences,
            page_tables: &tables.concat(),
            page_table_stride: stride,
            logits_rows: &batch.logits,
        };
        self.backend.begin_step(self.slot, &step).unwrap();
        self.backend.embed(&self.model.embedding.device).unwrap();
    }

    pub fn attention(&mut self, layer: usize) {
        let weights = &self.model.layers[layer];
        let input = AttentionInput {
            norm: &weights.attn_norm.device,
            q: projection(&weights.q),
            k: projection(&weights.k),
            v: projection(&weights.v),
            q_norm: weights.q_norm.as_ref().map(|n| &n.device),
            k_norm: weights.k_norm.as_ref().map(|n| &n.device),
            rope_factors: self.model.rope_factors.as_ref().map(|f| &f.device),
        };
        self.backend.attention_input(layer as u32, &input).unwrap();
        self.backend.attention(layer as u32).unwrap();
        self.backend.attention_output(&projection(&weights.attn_output)).unwrap();
    }

    pub fn ffn(&mut self, layer: usize) {
        let weights = &self.model.layers[layer];
        let norm = &weights.ffn_norm.device;
        match &weights.ffn {
            Ffn::Dense { gate, up, down } => {
                let (gate, up) = (projection(gate), projection(up));
                self.backend.ffn_input(&FfnInput { norm, gate, up }).unwrap();
                self.backend.ffn_output(&projection(down)).unwrap();
            }
            Ffn::Experts { router, experts } => {
                self.backend.route(layer as u32, &Router { norm, logits: projection(router) }).unwrap();
                // Only what was chosen is given.
                let mut loaded = vec![None; experts.len()];
                for number in self.backend.routed().unwrap() {
                    let [gate, up, down] = experts[number as usize].each_ref().map(|w| w.device.clone());
                    loaded[number as usize] = Some(Expert { gate, up, down });
                }
                self.version += 1;
                let experts = Experts { loaded: &loaded, version: self.version };
                self.backend.experts(layer as u32, &experts).unwrap();
            }
        }
    }

    pub fn head(&mut self) {
        self.backend.head(&self.model.output_norm.device, &self.model.output.device).unwrap();
    }

    /// One whole step; logits of its `logits` rows.
    pub fn step(&mut self, batch: &Batch, tables: &[Vec<u32>]) -> Vec<Vec<f32>> {
        self.begin(batch, tables);
        for layer in 0..self.model.layers.len() {
            self.attention(layer);
            self.ffn(layer);
        }
        self.head();
        (0..batch.logits.len()).map(|i| self.backend.logits(i).unwrap()).collect()
    }
}

/// Rows `start..end` of a sequence, logits of all of them.
pub fn rows(tokens: &[u32], start: usize, end: usize) -> Batch {
    Batch {
        tokens: tokens[start..end].to_vec(),
        positions: (start as u32..end as u32).collect(),
        sequences: vec![0; end - start],
        logits: (0..(end - start) as u32).collect(),
    }
}

pub fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.below(VOCAB) as u32).collect()
}

/// A page table with its pages in no order.
pub fn table(pages: u32) -> Vec<u32> {
    (0..pages).map(|page| (page * 7 + 3) % 256).collect()
}

/// A small model that reaches past the first change of split length (1024 tokens) quickly.
pub fn long_recipe(dtype: DType) -> Recipe {
    Recipe {
        seed: 77,
        hidden: 64,
        ffn: 96,
        n_layers: 2,
        n_kv_heads: 2,
        group: 3,
        head_dim: 16,
        rope_dims: 16,
        ..Recipe::plain(dtype)
    }
}
