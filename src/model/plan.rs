//! What to run: a model's program, built from the header alone, and why none could be built.

use std::sync::Arc;

use super::arch;
use super::files::ModelFiles;
use crate::program::{Program, ProgramError};
use crate::tensor::DType;

/// A model ready to be run, part by part; nothing in it has been read.
#[derive(Clone, Debug)]
pub struct ExecutionPlan {
    /// Architecture name, as `llama`.
    pub architecture: String,
    /// What it computes.
    pub program: Arc<Program>,
    /// Its sizes, for people: the program says all that computing needs.
    pub shape: Shape,
    /// Context length the file states, in tokens.
    pub context_length: u32,
}

/// Sizes of a decoder as its file states them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Width of the feed-forward hidden layer in layers without experts; 0 when all have experts.
    pub ffn: usize,
    /// Layers with experts, where there are any.
    pub experts: Option<ExpertShape>,
}

/// Sizes of layers of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a row uses.
    pub used: usize,
    /// Width of one expert's hidden layer.
    pub ffn: usize,
}

/// A tensor that the architecture needs and the file does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingTensor {
    /// What it would be, as `query projection`.
    pub role: &'static str,
    /// Names that were looked for.
    pub tried: Vec<String>,
}

/// Why no plan could be built. Every variant names the metadata key or tensor at fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The file does not say what it is.
    #[error("general.architecture is missing: this is no language model file, or its converter was broken")]
    NoArchitecture,
    /// The architecture is not one we run.
    #[error("architecture {found:?} is not supported; supported: {}", supported.join(", "))]
    Architecture {
        /// What the file says.
        found: String,
        /// What could be run.
        supported: Vec<&'static str>,
    },
    /// A variant of a known architecture that we do not run.
    #[error("architecture {architecture:?} with {feature} is not supported")]
    Feature {
        /// The architecture.
        architecture: String,
        /// What makes it another model, with its key and value.
        feature: String,
    },
    /// A required key is absent or has another type.
    #[error("metadata {key} is missing or not {want}")]
    Key {
        /// The key.
        key: String,
        /// Its type.
        want: &'static str,
    },
    /// A number that no model of this kind has.
    #[error("metadata {key} is {value}; possible: {min} to {max}")]
    Range {
        /// The key.
        key: String,
        /// Its value.
        value: u64,
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A real number that no model of this kind has.
    #[error("metadata {key} is {value}, which is not {want}")]
    Float {
        /// The key.
        key: String,
        /// Its value.
        value: f32,
        /// What it has to be.
        want: &'static str,
    },
    /// A number that is not the same in all layers.
    #[error("metadata {key} differs between layers, which is not supported")]
    PerLayer {
        /// The key.
        key: String,
    },
    /// The width of a head cannot be had from the other numbers.
    #[error("{hidden} values cannot be split among {heads} heads, and attention.key_length is not given")]
    HeadWidth {
        /// `embedding_length`.
        hidden: usize,
        /// `attention.head_count`.
        heads: usize,
    },
    /// Query heads cannot be grouped.
    #[error("{heads} query heads cannot be shared among {kv_heads} key/value heads")]
    HeadGroups {
        /// `attention.head_count`.
        heads: usize,
        /// `attention.head_count_kv`.
        kv_heads: usize,
    },
    /// The rotary embedding does not fit the heads.
    #[error("rope.dimension_count is {dims}; it has to be even and at most the head width {head_dim}")]
    RopeDims {
        /// Rotated values.
        dims: usize,
        /// Values of a head.
        head_dim: usize,
    },
    /// More experts are used than there are, or none.
    #[error("{used} experts of {count} are to be used for each token (expert_used_count, expert_count)")]
    Experts {
        /// `expert_used_count`.
        used: usize,
        /// `expert_count`.
        count: usize,
    },
    /// Required tensors are not in the file: all of them, with every name that was tried.
    #[error("{} required tensors are missing: {}", missing.len(), list(missing))]
    MissingTensors {
        /// All that is missing.
        missing: Vec<MissingTensor>,
    },
    /// A tensor has another shape than the metadata says.
    #[error("tensor {tensor} ({role}) has shape {shape}, the metadata say {want}")]
    Shape {
        /// Its name.
        tensor: String,
        /// What it is for.
        role: &'static str,
        /// Its shape, fastest dimension first.
        shape: String,
        /// The shape it has to have.
        want: String,
    },
    /// A norm weight, bias or frequency factor in another type than F32.
    #[error("tensor {tensor} ({role}) is {dtype}; it has to be F32")]
    VectorType {
        /// Its name.
        tensor: String,
        /// What it is for.
        role: &'static str,
        /// Its type.
        dtype: DType,
    },
    /// A fault of ours in what was written for the file.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// Tensors that this architecture gives no meaning to: computing without them would answer wrongly.
    #[error("{count} tensors have no place in architecture {architecture:?}, the first is {first}")]
    UnknownTensors {
        /// The architecture.
        architecture: String,
        /// How many.
        count: usize,
        /// Name of the first in the file.
        first: String,
    },
}

fn list(missing: &[MissingTensor]) -> String {
    let texts: Vec<String> =
        missing.iter().map(|m| format!("{} (tried {})", m.role, m.tried.join(", "))).collect();
    texts.join("; ")
}

impl ExecutionPlan {
    /// Builds the plan of a model whose vocabulary has `vocab` tokens. Reads headers only.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn build(files: &ModelFiles, vocab: usize) -> Result<Self, PlanError> {
        arch::plan(files, vocab)
    }
}

/// At most 64 characters of a file's text, for an error message.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(64).collect()
}
