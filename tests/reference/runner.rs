//! Carries one sequence down a model's layers, unit by unit, and hands its logits out.

use std::fs::File;
use std::path::Path;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa};
use rocmforge::backend::{
    Activations, AttentionInput, Backend, DeviceTensor, Expert, Experts, FfnInput, KV_PAGE_TOKENS, KvType,
    ModelSlot, Projection, Router, StepBatch,
};
use rocmforge::model::plan::{ExpertPlan, FfnPlan, LayerPlan, LazyProjection};
use rocmforge::model::{Model, ModelId};
use rocmforge::tensor::LazyTensor;

/// Rows of a step: less than the longest prompt, so that prompts are taken in chunks, and no multiple of a page.
const ROWS_MAX: usize = 100;

/// Positions a sequence may fill.
const CONTEXT: usize = 512;

/// A model, a backend, one sequence.
pub struct Runner {
    pub model: Model,
    backend: Box<dyn Backend>,
    slot: ModelSlot,
    weights: Weights,
    pages: Vec<u32>,
    position: usize,
}

struct Weights {
    embedding: DeviceTensor,
    layers: Vec<LayerWeights>,
    norm: DeviceTensor,
    output: DeviceTensor,
    rope_factors: Option<DeviceTensor>,
}

struct LayerWeights {
    attn_norm: DeviceTensor,
    q: LoadedProjection,
    k: LoadedProjection,
    v: LoadedProjection,
    q_norm: Option<DeviceTensor>,
    k_norm: Option<DeviceTensor>,
    attn_output: LoadedProjection,
    ffn_norm: DeviceTensor,
    ffn: LoadedFfn,
}

enum LoadedFfn {
    Dense { gate: LoadedProjection, up: LoadedProjection, down: LoadedProjection },
    Experts { router: LoadedProjection, experts: Vec<Option<Expert>> },
}

impl LoadedFfn {
    fn load(backend: &mut dyn Backend, plan: &FfnPlan) -> Self {
        match plan {
            FfnPlan::Dense { gate, up, down } => Self::Dense {
                gate: LoadedProjection::load(backend, gate),
                up: LoadedProjection::load(backend, up),
                down: LoadedProjection::load(backend, down),
            },
            FfnPlan::Experts { router, experts } => {
                let mut expert = |plan: &ExpertPlan| Expert {
                    gate: load(backend, &plan.gate),
                    up: load(backend, &plan.up),
                    down: load(backend, &plan.down),
                };
                let experts = experts.iter().map(|plan| Some(expert(plan))).collect();
                Self::Experts { router: LoadedProjection::load(backend, router), experts }
            }
        }
    }
}

struct LoadedProjection {
    weight: DeviceTensor,
    bias: Option<DeviceTensor>,
}

impl LoadedProjection {
    fn load(backend: &mut dyn Backend, lazy: &LazyProjection) -> Self {
        Self { weight: load(backend, &lazy.weight), bias: lazy.bias.as_ref().map(|bias| load(backend, bias)) }
    }

    fn get(&self) -> Projection<'_> {
        Projection { weight: &self.weight, bias: self.bias.as_ref() }
    }
}

fn load(backend: &mut dyn Backend, tensor: &LazyTensor) -> DeviceTensor {
    backend.load_tensor(tensor).expect("a tensor of a supported type loads")
}

impl LayerWeights {
    fn load(backend: &mut dyn Backend, plan: &LayerPlan) -> Self {
        Self {
            attn_norm: load(backend, &plan.attn_norm),
            q: LoadedProjection::load(backend, &plan.q),
            k: LoadedProjection::load(backend, &plan.k),
            v: LoadedProjection::load(backend, &plan.v),
            q_norm: plan.q_norm.as_ref().map(|norm| load(backend, norm)),
            k_norm: plan.k_norm.as_ref().map(|norm| load(backend, norm)),
            attn_output: LoadedProjection::load(backend, &plan.attn_output),
            ffn_norm: load(backend, &plan.ffn_norm),
            ffn: LoadedFfn::load(backend, &plan.ffn),
        }
    }
}

impl Runner {
    /// Maps the file and opens a CPU backend of its own for it.
    pub fn open(path: &Path, isa: Isa, activations: Activations, kv: KvType) -> Self {
        let options = CpuOptions { threads: None, isa: Some(isa), activations, kv };
        Self::on(path, Box::new(CpuBackend::new(options).expect("a CPU backend starts")))
    }

    /// Maps the file for this backend.
    pub fn on(path: &Path, mut backend: Box<dyn Backend>) -> Self {
        let file = File::open(path).expect("the model's file opens");
        let model = Model::open(ModelId(1), "reference", vec![file]).expect("the model is valid");
        let mut dims = model.plan.dims.clone();
        (dims.rows_max, dims.logits_rows_max) = (ROWS_MAX, 1);
        let pages = CONTEXT.div_ceil(KV_PAGE_TOKENS) as u32;
        let slot = backend.open_model(&dims, pages).expect("there is room for a small model");
        let plan = &model.plan;
        let loaded = backend.as_mut();
        let weights = Weights {
            embedding: loaded.load_table(&plan.embedding).expect("a table of a supported type loads"),
            layers: plan.layers.iter().map(|layer| LayerWeights::load(loaded, layer)).collect(),
            norm: load(loaded, &plan.output_norm),
            output: load(loaded, &plan.output),
            rope_factors: plan.rope_factors.as_ref().map(|factors| load(loaded, factors)),
        };
        // Pages in falling order: their numbers must not matter.
        Self { model, backend, slot, weights, pages: (0..pages).rev().collect(), position: 0 }
    }

    /// What runs, for messages.
    pub fn describe(&self) -> String {
        let info = self.backend.info();
        format!("{} {}, {:?} activations, {:?} cache", info.kind, info.isa, info.activations, info.kv)
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.backend.release_pages(self.slot, &self.pages);
        self.position = 0;
    }

    /// Takes `ids` in after what came before, in chunks; returns the logits after the last.
    pub fn feed(&mut self, ids: &[u32]) -> Vec<f32> {
        let chunks: Vec<&[u32]> = ids.chunks(ROWS_MAX).collect();
        let (last, before) = chunks.split_last().expect("there is something to feed");
        before.iter().for_each(|chunk| {
            self.step(chunk, &[]);
        });
        self.step(last, &[last.len() as u32 - 1]).expect("logits were asked for")
    }

    fn step(&mut self, ids: &[u32], logits_rows: &[u32]) -> Option<Vec<f32>> {
        let positions: Vec<u32> = (self.position..self.position + ids.len()).map(|p| p as u32).collect();
        let batch = StepBatch {
            token_ids: ids,
            positions: &positions,
            row_sequences: &vec![0; ids.len()],
            page_tables: &self.pages,
            page_table_stride: self.pages.len(),
            logits_rows,
        };
        let Self { backend, weights, .. } = self;
        backend.begin_step(self.slot, &batch).expect("the batch is valid");
        backend.embed(&weights.embedding).expect("embedding");
        for (number, layer) in (0..).zip(&weights.layers) {
            let input = AttentionInput {
                norm: &layer.attn_norm,
                q: layer.q.get(),
                k: layer.k.get(),
                v: layer.v.get(),
                q_norm: layer.q_norm.as_ref(),
                k_norm: layer.k_norm.as_ref(),
                rope_factors: weights.rope_factors.as_ref(),
            };
            backend.attention_input(number, &input).expect("attention input");
            backend.attention(number).expect("attention");
            backend.attention_output(&layer.attn_output.get()).expect("attention output");
            let norm = &layer.ffn_norm;
            match &layer.ffn {
                LoadedFfn::Dense { gate, up, down } => {
                    let input = FfnInput { norm, gate: gate.get(), up: up.get() };
                    backend.ffn_input(&input).expect("feed-forward input");
                    backend.ffn_output(&down.get()).expect("feed-forward output");
                }
                LoadedFfn::Experts { router, experts } => {
                    backend.route(number, &Router { norm, logits: router.get() }).expect("choice of experts");
                    let experts = Experts { loaded: experts, version: u64::from(number) };
                    backend.experts(number, &experts).expect("experts");
                }
            }
        }
        self.position += ids.len();
        if logits_rows.is_empty() {
            return None;
        }
        backend.head(&weights.norm, &weights.output).expect("head");
        Some(backend.logits(0).expect("finite logits"))
    }
}
