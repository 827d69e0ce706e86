//! `llama`: Llama 1 to 3, Mistral, SmolLM2, TinyLlama and all that is converted under that name.
//!
//! Keys and tensor names: ggml `docs/gguf.md` and llama.cpp `src/llama-arch.cpp`. q and k rows are permuted by the
//! converter so that rotary pairs are neighbours.

use std::sync::Arc;

use super::metadata::Metadata;
use super::tensors::{Tensors, Want};
use crate::backend::{ModelDims, RopeLayout, RopeScaling, RopeSpec};
use crate::model::gguf::Gguf;
use crate::model::plan::{ExecutionPlan, FfnPlan, LayerPlan, PlanError, excerpt};
use crate::tensor::MappedFile;

const NAME: &str = "llama";

// Limits: each a few times what any published model has. Their products stay far below 2^63: the largest, a KV page's
// values (layers * kv heads * head_dim * 64), below 2^37.
const LAYERS_MAX: u64 = 512;
const WIDTH_MAX: u64 = 1 << 17; // Llama 3 405B: 16,384
const FFN_MAX: u64 = 1 << 19; // Llama 3 405B: 53,248
const HEADS_MAX: u64 = 1024; // Llama 3 405B: 128
const HEAD_DIM_MAX: u64 = 1024; // 256 in the widest
const VOCAB_MAX: u64 = 1 << 22; // 262,144 in the widest
const CONTEXT_MAX: u64 = 1 << 30; // positions are u32

pub(super) fn build(gguf: &Gguf, file: &Arc<MappedFile>, vocab: usize) -> Result<ExecutionPlan, PlanError> {
    let metadata = Metadata::new(gguf, NAME);
    refuse_variants(&metadata)?;
    let dims = dims(&metadata, vocab)?;
    let context_length = metadata.count("context_length", 1..=CONTEXT_MAX)? as u32;

    let mut tensors = Tensors::new(gguf, file);
    let table = Want::Matrix { rows: dims.vocab, cols: dims.hidden };
    let embedding = tensors.required("token embedding", "token_embd.weight", table);
    let rope_factors =
        tensors.optional("rope factors", "rope_freqs.weight", Want::Vector(dims.rope.dims / 2));
    let layers: Vec<_> = (0..dims.n_layers).map(|i| layer(&mut tensors, &dims, i)).collect();
    let output_norm = tensors.required("output norm", "output_norm.weight", Want::Vector(dims.hidden));
    let output = tensors.optional("output", "output.weight", table).or_else(|| embedding.clone());
    tensors.finish(NAME)?;

    // `finish` has reported anything that is missing: nothing below is `None`.
    let plan = || {
        Some(ExecutionPlan {
            architecture: NAME.to_owned(),
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

/// Models that share the name and need other arithmetic.
fn refuse_variants(metadata: &Metadata<'_>) -> Result<(), PlanError> {
    let experts = metadata.count_if_there("expert_count", 0..=u64::MAX)?.unwrap_or(0);
    if experts > 0 {
        let feature = format!("{experts} experts ({})", metadata.key("expert_count"));
        return Err(PlanError::Feature { architecture: NAME.to_owned(), feature });
    }
    Ok(())
}

fn dims(metadata: &Metadata<'_>, vocab: usize) -> Result<ModelDims, PlanError> {
    let hidden = metadata.count("embedding_length", 1..=WIDTH_MAX)?;
    let n_layers = metadata.count("block_count", 1..=LAYERS_MAX)?;
    let ffn = metadata.count("feed_forward_length", 1..=FFN_MAX)?;
    let n_heads = metadata.count("attention.head_count", 1..=HEADS_MAX)?;
    let n_kv_heads = metadata.count_if_there("attention.head_count_kv", 1..=HEADS_MAX)?.unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(PlanError::HeadGroups { heads: n_heads, kv_heads: n_kv_heads });
    }
    let head_dim = head_dim(metadata, hidden, n_heads)?;
    let key = metadata.key("attention.layer_norm_rms_epsilon");
    let norm_eps = metadata
        .float_if_there("attention.layer_norm_rms_epsilon")?
        .ok_or(PlanError::Key { key: key.clone(), want: "a real number" })?;
    if !(0.0..1.0).contains(&norm_eps) {
        return Err(PlanError::Float { key, value: norm_eps, want: "at least 0 and below 1" });
    }
    if !(1..=VOCAB_MAX).contains(&(vocab as u64)) {
        let key = "tokenizer.ggml.tokens".to_owned();
        return Err(PlanError::Range { key, value: vocab as u64, min: 1, max: VOCAB_MAX });
    }
    let rope = rope(metadata, head_dim)?;
    Ok(ModelDims {
        hidden,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        ffn,
        experts: None,
        vocab,
        norm_eps,
        rope,
        rows_max: 0,
        logits_rows_max: 0,
    })
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
        Some(width) if width != head_dim => Err(PlanError::Feature {
            architecture: NAME.to_owned(),
            feature: format!("keys of {head_dim} and values of {width} (attention.value_length)"),
        }),
        _ => Ok(head_dim),
    }
}

fn rope(metadata: &Metadata<'_>, head_dim: usize) -> Result<RopeSpec, PlanError> {
    let dims = metadata.count_if_there("rope.dimension_count", 1..=HEAD_DIM_MAX)?.unwrap_or(head_dim);
    if !dims.is_multiple_of(2) || dims > head_dim {
        return Err(PlanError::RopeDims { dims, head_dim });
    }
    let theta = metadata.float_if_there("rope.freq_base")?.unwrap_or(10_000.0);
    if theta <= 0.0 {
        let key = metadata.key("rope.freq_base");
        return Err(PlanError::Float { key, value: theta, want: "above 0" });
    }
    // A file without a type but with a factor means linear, and a factor of 0 none, as llama.cpp reads both.
    let kind = metadata.string_if_there("rope.scaling.type")?.unwrap_or("linear");
    let factor = match metadata.float_if_there("rope.scaling.factor")? {
        Some(factor) => factor,
        None => metadata.float_if_there("rope.scale_linear")?.unwrap_or(0.0), // the key's name before 2023-09
    };
    let scaling = match kind {
        "none" => RopeScaling::None,
        "linear" if factor == 0.0 => RopeScaling::None,
        "linear" if factor > 0.0 => RopeScaling::Linear { factor },
        "linear" => {
            let key = metadata.key("rope.scaling.factor");
            return Err(PlanError::Float { key, value: factor, want: "at least 0" });
        }
        other => {
            let feature = format!("rope scaling {:?} (rope.scaling.type)", excerpt(other));
            return Err(PlanError::Feature { architecture: NAME.to_owned(), feature });
        }
    };
    Ok(RopeSpec { layout: RopeLayout::Interleaved, dims, theta, scaling, magnitude: 1.0 })
}

fn layer(tensors: &mut Tensors<'_>, dims: &ModelDims, index: usize) -> Option<LayerPlan> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let (hidden, ffn) = (dims.hidden, dims.ffn);
    let (q_rows, kv_rows) = (dims.n_heads * dims.head_dim, dims.n_kv_heads * dims.head_dim);
    let (row, head) = (Want::Vector(hidden), Want::Vector(dims.head_dim));

    let attn_norm = tensors.required("attention norm", &name("attn_norm.weight"), row);
    let q = tensors.projection("query projection", &name("attn_q"), q_rows, hidden);
    let k = tensors.projection("key projection", &name("attn_k"), kv_rows, hidden);
    let v = tensors.projection("value projection", &name("attn_v"), kv_rows, hidden);
    let q_norm = tensors.optional("query norm", &name("attn_q_norm.weight"), head);
    let k_norm = tensors.optional("key norm", &name("attn_k_norm.weight"), head);
    let attn_output = tensors.projection("attention output", &name("attn_output"), hidden, q_rows);
    let ffn_norm = tensors.required("feed-forward norm", &name("ffn_norm.weight"), row);
    let gate = tensors.projection("feed-forward gate", &name("ffn_gate"), ffn, hidden);
    let up = tensors.projection("feed-forward up", &name("ffn_up"), ffn, hidden);
    let down = tensors.projection("feed-forward down", &name("ffn_down"), hidden, ffn);
    Some(LayerPlan {
        attn_norm: attn_norm?,
        q: q?,
        k: k?,
        v: v?,
        q_norm,
        k_norm,
        attn_output: attn_output?,
        ffn_norm: ffn_norm?,
        ffn: FfnPlan::Dense { gate: gate?, up: up?, down: down? },
    })
}
