//! What to run: a model's layers as lists of lazy tensor handles, built from the header alone.

use std::sync::Arc;

use super::gguf::Gguf;
use crate::backend::ModelDims;
use crate::tensor::{LazyTensor, MappedFile};

/// A model ready to be run, layer by layer; nothing in it has been read.
#[derive(Clone, Debug)]
pub struct ExecutionPlan {
    /// Architecture name, as `llama`.
    pub architecture: String,
    /// Sizes; `rows_max` and `logits_rows_max` are set by the engine.
    pub dims: ModelDims,
    /// Context length the file states, in tokens.
    pub context_length: u32,
    /// Token embedding, `[vocab, hidden]`.
    pub embedding: LazyTensor,
    /// Layers in order.
    pub layers: Vec<LayerPlan>,
    /// Final norm, `[hidden]`.
    pub output_norm: LazyTensor,
    /// Output matrix, `[vocab, hidden]`; the embedding where the file has no other.
    pub output: LazyTensor,
    /// Divisors of the rotary frequencies, where the file has them.
    pub rope_factors: Option<LazyTensor>,
}

/// A matrix and its bias as lazy handles.
#[derive(Clone, Debug)]
pub struct LazyProjection {
    /// The matrix.
    pub weight: LazyTensor,
    /// The bias.
    pub bias: Option<LazyTensor>,
}

/// One dense decoder layer.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each is the tensor of that role, shapes as in `backend::AttentionInput` and `FfnInput`
pub struct LayerPlan {
    pub attn_norm: LazyTensor,
    pub q: LazyProjection,
    pub k: LazyProjection,
    pub v: LazyProjection,
    pub q_norm: Option<LazyTensor>,
    pub k_norm: Option<LazyTensor>,
    pub attn_output: LazyProjection,
    pub ffn_norm: LazyTensor,
    pub gate: LazyProjection,
    pub up: LazyProjection,
    pub down: LazyProjection,
}

/// Why no plan could be built.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The architecture is not one we run.
    #[error("architecture {found:?} is not supported; supported: {}", supported.join(", "))]
    Architecture {
        /// What the file says.
        found: String,
        /// What could be run.
        supported: &'static [&'static str],
    },
}

impl ExecutionPlan {
    /// Builds the plan of a file whose vocabulary has `vocab` tokens.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn build(_gguf: &Gguf, _file: &Arc<MappedFile>, _vocab: usize) -> Result<Self, PlanError> {
        Err(PlanError::Architecture { found: String::new(), supported: &["llama"] })
    }
}
