//! Steps of a small model on a backend, part by part or whole.

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa};
use rocmforge::backend::{ActivationType, KvType, StepBatch, StepLimits};
use rocmforge::program::ValueId;
use rocmforge::tensor::DType;

use crate::forward::Rows;
use crate::loaded::{Device, Loaded};
use crate::small::{Random, Recipe, Small, VOCAB};

pub const FLOAT: CpuOptions = CpuOptions {
    threads: None,
    isa: None,
    activations: ActivationType::F32,
    kv: KvType::F32,
    unfused: false,
};

/// Maximum rows of a step.
const LIMITS: StepLimits = StepLimits { rows: 128, wanted_rows: 128 };

pub fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

/// A backend with one small model open.
pub struct Runner<'a, B = CpuBackend> {
    pub loaded: Loaded<B>,
    pub model: &'a Small,
    residual: ValueId,
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
        let row = |row| self.loaded.backend.value(self.residual, row).unwrap();
        (0..rows).map(|at| row(at).into_iter().map(f64::from).collect()).collect()
    }
}

impl<'a, B: Device> Runner<'a, B> {
    pub fn on(model: &'a Small, backend: B) -> Self {
        let (program, residual) = model.program();
        Self { loaded: Loaded::new(program, backend, LIMITS, 256), model, residual }
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
            recurrent: &[],
        };
        self.loaded.backend.get().begin_step(self.loaded.slot, &step).unwrap();
        self.loaded.run(0);
    }

    pub fn attention(&mut self, layer: usize) {
        self.loaded.run(1 + 2 * layer as u32);
    }

    /// Runs a feed-forward part with only the experts that this step chose loaded.
    pub fn ffn(&mut self, layer: usize) {
        self.loaded.forget_chosen();
        self.loaded.run(2 + 2 * layer as u32);
    }

    pub fn head(&mut self) {
        self.loaded.run(self.loaded.program.head_part());
    }

    /// Runs one whole step; returns the logits of its `logits` rows.
    pub fn step(&mut self, batch: &Batch, tables: &[Vec<u32>]) -> Vec<Vec<f32>> {
        self.begin(batch, tables);
        for layer in 0..self.model.layers.len() {
            self.attention(layer);
            self.ffn(layer);
        }
        self.head();
        (0..batch.logits.len()).map(|i| self.loaded.backend.get().logits(i).unwrap()).collect()
    }
}

/// Rows `start..end` of a sequence, with logits of all of them.
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

/// A page table with scattered pages.
pub fn table(pages: u32) -> Vec<u32> {
    (0..pages).map(|page| (page * 7 + 3) % 256).collect()
}

/// A small model that quickly reaches past the first change of split length (1024 tokens).
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
