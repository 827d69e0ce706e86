//! What to run: a model's layers as lists of lazy tensor handles, built from the header alone.

use super::arch;
use super::files::ModelFiles;
use crate::backend::ModelDims;
use crate::tensor::{DType, LazyTensor};

/// The part of a plan that a step uses first: the embedding, and the divisors of the rotary frequencies.
pub const FIRST_PART: u32 = 0;

/// A model ready to be run, layer by layer; nothing in it has been read.
#[derive(Clone, Debug)]
pub struct ExecutionPlan {
    /// Architecture name, as `llama`.
    pub architecture: String,
    /// Sizes; `rows_max` and `logits_rows_max` are 0 here, the engine sets them.
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

/// One decoder layer.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each is the tensor of that role, shapes as in `backend::AttentionInput`
pub struct LayerPlan {
    pub attn_norm: LazyTensor,
    pub q: LazyProjection,
    pub k: LazyProjection,
    pub v: LazyProjection,
    pub q_norm: Option<LazyTensor>,
    pub k_norm: Option<LazyTensor>,
    pub attn_output: LazyProjection,
    pub ffn_norm: LazyTensor,
    pub ffn: FfnPlan,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // shapes as in `backend::FfnInput` and `Router`
pub enum FfnPlan {
    /// Every row goes through all of it.
    Dense { gate: LazyProjection, up: LazyProjection, down: LazyProjection },
    /// Every row goes through the experts that the router chooses for it.
    Experts { router: LazyProjection, experts: Vec<ExpertPlan> },
}

/// One expert; shapes as in `backend::Expert`. Loaded when a row first uses it.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct ExpertPlan {
    pub gate: LazyTensor,
    pub up: LazyTensor,
    pub down: LazyTensor,
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

    /// All tensors in the order a step first needs them. A tied output appears twice.
    pub fn tensors(&self) -> impl Iterator<Item = &LazyTensor> {
        let head = [&self.output_norm, &self.output];
        std::iter::once(&self.embedding)
            .chain(&self.rope_factors)
            .chain(self.layers.iter().flat_map(LayerPlan::tensors))
            .chain(head)
    }

    /// Parts that a step uses one after the other: [`FIRST_PART`], each layer, the head.
    pub fn part_count(&self) -> u32 {
        self.layers.len() as u32 + 2 // layers: at most `LAYERS_MAX`, 512
    }

    /// Number of the part that is a layer.
    pub fn layer_part(&self, layer: usize) -> u32 {
        layer as u32 + 1
    }

    /// Number of the last part: the final norm and the output matrix.
    pub fn head_part(&self) -> u32 {
        self.layers.len() as u32 + 1
    }

    /// What people call a part.
    pub fn part_name(&self, part: u32) -> String {
        match part {
            FIRST_PART => "embedding".to_owned(),
            _ if part == self.head_part() => "head".to_owned(),
            _ => format!("layer {}", part - 1),
        }
    }

    /// Tensors of a part in the order a step first needs them, all experts among them; none past the last part.
    pub fn part_tensors(&self, part: u32) -> impl Iterator<Item = &LazyTensor> {
        let first = (part == FIRST_PART).then(|| std::iter::once(&self.embedding).chain(&self.rope_factors));
        let layer = (part as usize).checked_sub(1).and_then(|layer| self.layers.get(layer));
        let head = (part == self.head_part()).then_some([&self.output_norm, &self.output]);
        let first = first.into_iter().flatten();
        first.chain(layer.into_iter().flat_map(LayerPlan::tensors)).chain(head.into_iter().flatten())
    }

    /// Every tensor type used, each with the name of the first tensor of it: for a backend's refusal by name.
    pub fn dtypes(&self) -> Vec<(DType, String)> {
        let mut found: Vec<(DType, String)> = Vec::new();
        // A layer's experts are parts of the same tensors: the first stands for all.
        let head = [&self.output_norm, &self.output];
        let first = std::iter::once(&self.embedding).chain(&self.rope_factors);
        let layers = self.layers.iter().flat_map(|layer| layer.tensors_of(1));
        for tensor in first.chain(layers).chain(head) {
            if !found.iter().any(|(dtype, _)| *dtype == tensor.dtype()) {
                found.push((tensor.dtype(), tensor.name().to_owned()));
            }
        }
        found
    }

    /// Bytes of all weights, a tied output counted once.
    pub fn weight_bytes(&self) -> u64 {
        let all: u64 = self.tensors().map(LazyTensor::byte_len).sum();
        let tied = self.output.same_bytes(&self.embedding);
        if tied { all - self.output.byte_len() } else { all }
    }
}

impl LayerPlan {
    /// The layer's tensors in the order a step first needs them, all experts among them.
    pub fn tensors(&self) -> impl Iterator<Item = &LazyTensor> {
        self.tensors_of(usize::MAX)
    }

    /// With so many experts of a layer.
    fn tensors_of(&self, experts: usize) -> impl Iterator<Item = &LazyTensor> {
        std::iter::once(&self.attn_norm)
            .chain([&self.q, &self.k, &self.v].into_iter().flat_map(LazyProjection::tensors))
            .chain(&self.q_norm)
            .chain(&self.k_norm)
            .chain(self.attn_output.tensors())
            .chain(std::iter::once(&self.ffn_norm))
            .chain(self.ffn.tensors_of(experts))
    }
}

impl FfnPlan {
    fn tensors_of(&self, count: usize) -> impl Iterator<Item = &LazyTensor> {
        let (dense, router, experts) = match self {
            Self::Dense { gate, up, down } => (Some([gate, up, down]), None, &[][..]),
            Self::Experts { router, experts } => (None, Some(router), experts.as_slice()),
        };
        dense
            .into_iter()
            .flatten()
            .chain(router)
            .flat_map(LazyProjection::tensors)
            .chain(experts.iter().take(count).flat_map(|e| [&e.gate, &e.up, &e.down]))
    }
}

impl LazyProjection {
    fn tensors(&self) -> impl Iterator<Item = &LazyTensor> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

/// At most 64 characters of a file's text, for an error message.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(64).collect()
}
