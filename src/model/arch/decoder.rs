//! The usual decoder: what its architectures share, and the few things in which they differ.

use super::experts;
use super::metadata::Metadata;
use super::rope::{self, Rope};
use super::tensors::{Tensors, Want};
use crate::backend::{ModelDims, RopeLayout};
use crate::model::files::ModelFiles;
use crate::model::plan::{ExecutionPlan, FfnPlan, LayerPlan, LazyProjection, PlanError};

// Limits: each a few times what any published model has. Their products stay far below 2^63: the largest, a KV page's
// values (layers * kv heads * head_dim * 64), below 2^37.
const LAYERS_MAX: u64 = 512;
const WIDTH_MAX: u64 = 1 << 17; // Llama 3 405B: 16,384
pub(super) const FFN_MAX: u64 = 1 << 19; // Llama 3 405B: 53,248
const HEADS_MAX: u64 = 1024; // Llama 3 405B: 128
pub(super) const HEAD_DIM_MAX: u64 = 1024; // 256 in the widest
const VOCAB_MAX: u64 = 1 << 22; // 262,144 in the widest
const CONTEXT_MAX: u64 = 1 << 30; // positions are u32

/// Whether files of an architecture have a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// One that has it is of another kind, and refused.
    Never,
    /// Some.
    Optional,
    /// All.
    Required,
}

/// A decoder with RMS norms, rotary embedding and gated feed-forward layers.
pub(super) struct Decoder {
    /// `general.architecture` of its files, and the prefix of its keys.
    pub name: &'static str,
    /// Which values of a head turn together.
    pub layout: RopeLayout,
    /// Biases of the query, key and value projections.
    pub qkv_bias: Presence,
    /// Bias of the attention's output projection.
    pub output_bias: Presence,
    /// Biases of the dense feed-forward projections.
    pub ffn_bias: Presence,
    /// Norms of each query and key head.
    pub head_norms: Presence,
    /// Layers may have experts.
    pub experts: bool,
}

impl Decoder {
    /// The plan of a model whose vocabulary has `vocab` tokens.
    pub fn plan(&self, files: &ModelFiles, vocab: usize) -> Result<ExecutionPlan, PlanError> {
        let metadata = Metadata::new(files.header(), self.name);
        let context_length = metadata.count("context_length", 1..=CONTEXT_MAX)? as u32;
        let blocks = blocks(&metadata)?;
        let (mut dims, rope) = self.dims(&metadata, blocks.run, vocab, context_length)?;

        let mut tensors = Tensors::new(files);
        let table = Want::Matrix { rows: dims.vocab, cols: dims.hidden };
        let embedding = tensors.required("token embedding", "token_embd.weight", table);
        let rope_factors = rope.factors(&mut tensors);
        let layers: Vec<_> = (0..dims.n_layers).map(|i| self.layer(&mut tensors, &dims, i)).collect();
        let output_norm = tensors.required("output norm", "output_norm.weight", Want::Vector(dims.hidden));
        let output = tensors.optional("output", "output.weight", table).or_else(|| embedding.clone());
        for unused in blocks.run..blocks.all {
            tensors.unused_prefix(&format!("blk.{unused}."));
        }
        tensors.finish(self.name)?;
        if layers.iter().flatten().all(|layer| matches!(layer.ffn, FfnPlan::Experts { .. })) {
            dims.ffn = 0;
        }

        // `finish` has reported anything that is missing: nothing below is `None`.
        let plan = || {
            Some(ExecutionPlan {
                architecture: self.name.to_owned(),
                dims,
                context_length,
                embedding: embedding?,
                layers: layers.into_iter().collect::<Option<_>>()?,
                output_norm: output_norm?,
                output: output?,
                rope_factors,
            })
        };
        plan().ok_or(PlanError::MissingTensors { missing: Vec::new() })
    }

    fn dims(
        &self,
        metadata: &Metadata<'_>,
        n_layers: usize,
        vocab: usize,
        context: u32,
    ) -> Result<(ModelDims, Rope), PlanError> {
        let hidden = metadata.count("embedding_length", 1..=WIDTH_MAX)?;
        let ffn = metadata.count("feed_forward_length", 1..=FFN_MAX)?;
        let n_heads = metadata.count("attention.head_count", 1..=HEADS_MAX)?;
        let n_kv_heads =
            metadata.count_if_there("attention.head_count_kv", 1..=HEADS_MAX)?.unwrap_or(n_heads);
        if !n_heads.is_multiple_of(n_kv_heads) {
            return Err(PlanError::HeadGroups { heads: n_heads, kv_heads: n_kv_heads });
        }
        if metadata.flag_if_there("attention.causal")? == Some(false) {
            return Err(metadata.unsupported("attention to later tokens (attention.causal)"));
        }
        let head_dim = head_dim(metadata, hidden, n_heads)?;
        let norm_eps = norm_eps(metadata)?;
        if !(1..=VOCAB_MAX).contains(&(vocab as u64)) {
            let key = "tokenizer.ggml.tokens".to_owned();
            return Err(PlanError::Range { key, value: vocab as u64, min: 1, max: VOCAB_MAX });
        }
        let rope = rope::rope(metadata, self.layout, head_dim, context)?;
        let experts = experts::dims(metadata, self.experts)?;
        let dims = ModelDims {
            hidden,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            ffn,
            experts,
            vocab,
            norm_eps,
            rope: rope.spec.clone(),
            rows_max: 0,
            logits_rows_max: 0,
        };
        Ok((dims, rope))
    }

    fn layer(&self, tensors: &mut Tensors<'_>, dims: &ModelDims, index: usize) -> Option<LayerPlan> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let hidden = dims.hidden;
        let (q_rows, kv_rows) = (dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim);
        let row = Want::Vector(hidden);

        let attn_norm = tensors.required("attention norm", &name("attn_norm.weight"), row);
        let mut qkv = |role, part: &str, rows| {
            let matrix = Want::Matrix { rows, cols: hidden };
            tensors.projection(role, &name(part), matrix, self.qkv_bias)
        };
        let q = qkv("query projection", "attn_q", q_rows);
        let k = qkv("key projection", "attn_k", kv_rows);
        let v = qkv("value projection", "attn_v", kv_rows);
        let head = Want::Vector(dims.head_dim);
        let q_norm = tensors.present("query norm", &name("attn_q_norm.weight"), head, self.head_norms);
        let k_norm = tensors.present("key norm", &name("attn_k_norm.weight"), head, self.head_norms);
        let matrix = Want::Matrix { rows: hidden, cols: q_rows };
        let attn_output =
            tensors.projection("attention output", &name("attn_output"), matrix, self.output_bias);
        let ffn_norm = tensors.required("feed-forward norm", &name("ffn_norm.weight"), row);
        let ffn = self.ffn(tensors, dims, index);
        Some(LayerPlan {
            attn_norm: attn_norm?,
            q: q?,
            k: k?,
            v: v?,
            q_norm,
            k_norm,
            attn_output: attn_output?,
            ffn_norm: ffn_norm?,
            ffn: ffn?,
        })
    }

    /// Experts where the layer has a router, else dense: models may mix both.
    fn ffn(&self, tensors: &mut Tensors<'_>, dims: &ModelDims, index: usize) -> Option<FfnPlan> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let (hidden, ffn) = (dims.hidden, dims.ffn);
        if let Some(experts) = &dims.experts
            && !tensors.has(&name("ffn_gate.weight"))
        {
            let matrix = Want::Matrix { rows: experts.count, cols: hidden };
            let router = tensors.projection("router", &name("ffn_gate_inp"), matrix, Presence::Never);
            let experts = experts::of_layer(tensors, experts, hidden, index);
            return Some(FfnPlan::Experts { router: router?, experts: experts? });
        }
        let mut part = |role, part: &str, rows, cols| -> Option<LazyProjection> {
            tensors.projection(role, &name(part), Want::Matrix { rows, cols }, self.ffn_bias)
        };
        let gate = part("feed-forward gate", "ffn_gate", ffn, hidden);
        let up = part("feed-forward up", "ffn_up", ffn, hidden);
        let down = part("feed-forward down", "ffn_down", hidden, ffn);
        Some(FfnPlan::Dense { gate: gate?, up: up?, down: down? })
    }
}

/// Layers of a file: those that run, and with them those that only predict further tokens.
struct Blocks {
    run: usize,
    all: usize,
}

fn blocks(metadata: &Metadata<'_>) -> Result<Blocks, PlanError> {
    let all = metadata.count("block_count", 1..=LAYERS_MAX)?;
    let most = all as u64 - 1;
    let heads = metadata.count_if_there("nextn_predict_layers", 0..=most)?.unwrap_or(0);
    Ok(Blocks { run: all - heads, all })
}

/// Width of a head: stated, or the hidden width split among the heads.
fn head_dim(metadata: &Metadata<'_>, hidden: usize, n_heads: usize) -> Result<usize, PlanError> {
    let stated = metadata.count_if_there("attention.key_length", 1..=HEAD_DIM_MAX)?;
    let value = metadata.count_if_there("attention.value_length", 1..=HEAD_DIM_MAX)?;
    let head_dim = match stated {
        Some(width) => width,
        None if hidden.is_multiple_of(n_heads) && (hidden / n_heads) as u64 <= HEAD_DIM_MAX => {
            hidden / n_heads
        }
        None => return Err(PlanError::HeadWidth { hidden, heads: n_heads }),
    };
    match value {
        Some(width) if width != head_dim => {
            let feature = format!("keys of {head_dim} and values of {width} (attention.value_length)");
            Err(metadata.unsupported(&feature))
        }
        _ => Ok(head_dim),
    }
}

fn norm_eps(metadata: &Metadata<'_>) -> Result<f32, PlanError> {
    let name = "attention.layer_norm_rms_epsilon";
    let key = metadata.key(name);
    match metadata.float_if_there(name)? {
        None => Err(PlanError::Key { key, want: "a real number" }),
        Some(eps) if (0.0..1.0).contains(&eps) => Ok(eps),
        Some(value) => Err(PlanError::Float { key, value, want: "at least 0 and below 1" }),
    }
}
