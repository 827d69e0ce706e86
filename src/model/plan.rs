//! A model's program, built from the header alone, and the errors of building it.

use std::sync::Arc;

use super::arch;
use super::embedding::Pooling;
use super::files::ModelFiles;
use crate::program::{Program, ProgramError};
use crate::tensor::DType;

/// A model ready to run, part by part. No tensor has been read.
#[derive(Clone, Debug)]
pub struct ExecutionPlan {
    /// Architecture name, such as `llama`.
    pub architecture: String,
    /// The computation.
    pub program: Arc<Program>,
    /// Sizes for display; the program has all that a backend needs.
    pub shape: Shape,
    /// Context length in tokens, as stated in the file.
    pub context_length: u32,
    /// How the file wants the rows of a text to become its embedding.
    pub pooling: Option<Pooling>,
}

/// Sizes of a decoder or an encoder, as stated in the file.
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
    /// Sizes of the expert layers; `None` for a dense model.
    pub experts: Option<ExpertShape>,
}

/// Sizes of expert layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts per layer.
    pub count: usize,
    /// Experts per row.
    pub used: usize,
    /// Width of one expert's hidden layer.
    pub ffn: usize,
}

/// A required tensor that the file lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingTensor {
    /// Role of the tensor, such as `query projection`.
    pub role: &'static str,
    /// Names that the lookup tried.
    pub tried: Vec<String>,
}

/// Why a plan could not be built. Every variant names the metadata key or tensor at fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The file does not name its architecture.
    #[error("general.architecture is missing: the file is not a language model, or its converter was broken")]
    NoArchitecture,
    /// The architecture is not supported.
    #[error("architecture {found:?} is not supported; supported: {}", supported.join(", "))]
    Architecture {
        /// Architecture in the file.
        found: String,
        /// Supported architectures.
        supported: Vec<&'static str>,
    },
    /// An unsupported variant of a known architecture.
    #[error("architecture {architecture:?} with {feature} is not supported")]
    Feature {
        /// Name of the architecture.
        architecture: String,
        /// The unsupported feature, with its key and value.
        feature: String,
    },
    /// A required key is absent or has another type.
    #[error("metadata {key} is missing or not {want}")]
    Key {
        /// Metadata key.
        key: String,
        /// Required type, such as `a string`.
        want: &'static str,
    },
    /// A number outside the supported range.
    #[error("metadata {key} is {value}; allowed: {min} to {max}")]
    Range {
        /// Metadata key.
        key: String,
        /// Value in the file.
        value: u64,
        /// Smallest allowed value.
        min: u64,
        /// Largest allowed value.
        max: u64,
    },
    /// A real number outside the supported range.
    #[error("metadata {key} is {value}; it must be {want}")]
    Float {
        /// Metadata key.
        key: String,
        /// Value in the file.
        value: f32,
        /// The requirement, such as `above 0`.
        want: &'static str,
    },
    /// A number that differs between layers.
    #[error("metadata {key} differs between layers, which is not supported")]
    PerLayer {
        /// Metadata key.
        key: String,
    },
    /// The head width is missing and does not follow from the other numbers.
    #[error(
        "embedding_length {hidden} is not a multiple of {heads} heads, and attention.key_length is missing"
    )]
    HeadWidth {
        /// `embedding_length`.
        hidden: usize,
        /// `attention.head_count`.
        heads: usize,
    },
    /// The query heads cannot be shared evenly among the key/value heads.
    #[error("{heads} query heads cannot be shared evenly among {kv_heads} key/value heads")]
    HeadGroups {
        /// `attention.head_count`.
        heads: usize,
        /// `attention.head_count_kv`.
        kv_heads: usize,
    },
    /// The rotary embedding does not fit the heads.
    #[error("rope.dimension_count is {dims}; it must be even and at most the head width {head_dim}")]
    RopeDims {
        /// Rotated values.
        dims: usize,
        /// Values of a head.
        head_dim: usize,
    },
    /// A token uses no experts, or more than the model has.
    #[error("expert_used_count is {used}; it must be 1 to expert_count, which is {count}")]
    Experts {
        /// `expert_used_count`.
        used: usize,
        /// `expert_count`.
        count: usize,
    },
    /// The file lacks required tensors. The text names the first ones: a file without weights lacks hundreds.
    #[error("{} required tensors are missing: {}", missing.len(), list(missing))]
    MissingTensors {
        /// All missing tensors.
        missing: Vec<MissingTensor>,
    },
    /// A tensor's shape disagrees with the metadata.
    #[error("tensor {tensor} ({role}) has shape {shape}; the metadata require {want}")]
    Shape {
        /// Name of the tensor.
        tensor: String,
        /// Role of the tensor.
        role: &'static str,
        /// Shape in the file, fastest dimension first.
        shape: String,
        /// Required shape.
        want: String,
    },
    /// A norm weight, bias or frequency factor that is not F32.
    #[error("tensor {tensor} ({role}) is {dtype}; it must be F32")]
    VectorType {
        /// Name of the tensor.
        tensor: String,
        /// Role of the tensor.
        role: &'static str,
        /// Type in the file.
        dtype: DType,
    },
    /// An internal error: the architecture wrote an inconsistent program.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// Tensors unknown to this architecture. Computing without them would give wrong answers.
    #[error("{count} tensors are unknown to architecture {architecture:?}; the first is {first}")]
    UnknownTensors {
        /// Name of the architecture.
        architecture: String,
        /// Number of unknown tensors.
        count: usize,
        /// Name of the first such tensor in the file.
        first: String,
    },
}

/// Most missing tensors that a text names.
const NAMED_MAX: usize = 4;

fn list(missing: &[MissingTensor]) -> String {
    let named = missing.iter().take(NAMED_MAX);
    let texts: Vec<String> = named.map(|m| format!("{} (tried {})", m.role, m.tried.join(", "))).collect();
    match missing.len().saturating_sub(NAMED_MAX) {
        0 => texts.join("; "),
        more => format!("{}; and {more} more", texts.join("; ")),
    }
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
