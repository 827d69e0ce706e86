//! A model's computation as a program: numbered tensors, values and states, and typed operations in parts.
//!
//! An architecture (`model/arch`) writes a program from the header alone, without reading a tensor. A backend binds the
//! program: it chooses kernels for runs of operations, places values in memory, and refuses unsupported operations. A
//! part is the unit of residency: its tensors are loaded when a step reaches it, and evicted together.

mod builder;
mod check;
mod op;
mod rope;

use std::ops::Range;
use std::sync::OnceLock;

pub use builder::Builder;
pub use check::ProgramError;
pub use op::{
    Access, Activation, DeltaHeads, ExpertGroups, ExpertRange, Gating, HeadPart, NormKind, Op, TableRow,
    alibi_slope,
};
pub use rope::{Growth, RopeAngles, RopeLayout, RopeScaling, RopeSpec, Yarn};

use crate::tensor::{DType, LazyTensor};

/// Number of a mapped model, unique during the daemon's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u64);

/// A part of a mapped model's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartId {
    /// The model.
    pub model: ModelId,
    /// The part's number: the order in which a step uses parts.
    pub part: u32,
}

/// Number of a tensor in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

/// Number of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// Number of a state in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateId(pub u32);

/// Number of a rotary embedding in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RopeId(pub u32);

/// Number of the part that a step runs first: the embedding, and the frequency divisors of rotary embeddings.
pub const FIRST_PART: u32 = 0;

/// The value that the last layer leaves: an embedding is made of its rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LastRows {
    /// A value of all rows.
    pub value: ValueId,
    /// The norm of its rows; an encoder's layers end with theirs.
    pub norm: Option<RowNorm>,
}

/// A norm of whole rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Kind of norm.
    pub kind: NormKind,
    /// See [`Op::Norm`].
    pub eps: f32,
    /// `[width of a row]`.
    pub weight: TensorId,
    /// `[width of a row]`.
    pub bias: Option<TensorId>,
}

/// The result of a program without logits, whose rows see the whole of their text. A step has all rows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    /// The value that the last layer leaves, of all rows.
    pub rows: ValueId,
    /// Most rows of a text: the context length.
    pub text_rows: u32,
}

/// Scores texts, on the host, by one row of each: an encoder's first, a decoder's last after its norm, or the mean of an encoder's.
/// It computes `squash(output * norm(squash(dense * row)))`, where all but the products of `output` may be missing. Its tensors are
/// the host's, and belong to the last part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Classifier {
    /// Scores the mean of an encoder's rows.
    pub of_mean: bool,
    /// Its first layer.
    pub dense: Option<Dense>,
    /// Its outputs, one for each label.
    pub output: Linear,
    /// Follows the outputs' products.
    pub squash: Option<Squash>,
    /// The only label's output is the score. Of several, the score is the first one's share of a softmax.
    pub labels: u32,
}

/// The first layer of a classifier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dense {
    /// As many outputs as inputs.
    pub linear: Linear,
    /// Follows the products.
    pub squash: Squash,
    /// Of the squashed values.
    pub norm: Option<RowNorm>,
}

/// An activation of a classifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Squash {
    /// Hyperbolic tangent.
    Tanh,
    /// GELU by tanh, as [`Activation::Gelu`].
    Gelu,
}

/// A matrix, and what is added to its products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: TensorId,
    /// `[outputs]`.
    pub bias: Option<TensorId>,
}

/// A tensor of a program.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, type, shape, file range.
    pub lazy: LazyTensor,
    /// Place of the tensor while its part runs.
    pub residence: Residence,
}

/// Required place of a tensor while its part runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// On the device.
    Device,
    /// On the device, loaded when a row chooses its expert.
    Chosen,
    /// In the file mapping; the host reads a few rows of it.
    Host,
}

/// An intermediate result: `width` numbers for each row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// Numbers per row.
    pub width: u32,
    /// The rows it covers.
    pub rows: Rows,
    /// Kind of its numbers.
    pub content: Content,
}

/// The rows of a step that a value covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// All rows.
    All,
    /// The rows whose logits are wanted.
    Wanted,
}

/// Kind of a value's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Real numbers.
    Real,
    /// Expert numbers and their weights, from [`Op::Route`].
    Choice,
}

/// State that a sequence keeps from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Keys and values of every position.
    Kv {
        /// Number of key heads, equal to that of value heads.
        heads: u32,
        /// Values of a head.
        head_dim: u32,
    },
    /// All that an operation keeps of the rows so far: one f32 array for a sequence, whose layout the operation says.
    Recurrent {
        /// Length of the array.
        values: u32,
    },
}

/// A rotary embedding of the program.
#[derive(Clone, Debug)]
pub struct Rope {
    /// How the angles follow from the position.
    pub spec: RopeSpec,
    /// Frequency divisors, `[dims / 2]` f32. Belong to the first part.
    pub factors: Option<TensorId>,
}

/// Kind of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// The first part of a step.
    Embedding,
    /// The decoder layer of this number.
    Layer(u32),
    /// Computes logits from the last layer's rows.
    Head,
}

impl std::fmt::Display for PartKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Layer(number) => write!(f, "layer {number}"),
            Self::Head => f.write_str("head"),
        }
    }
}

/// A run of operations, and the tensors that only they use.
#[derive(Clone, Debug)]
pub struct Part {
    /// Embedding, layer or head.
    pub kind: PartKind,
    /// Numbers of its tensors, in the order in which a step first needs them.
    pub tensors: Range<u32>,
    /// Operations in execution order.
    pub ops: Vec<Op>,
}

/// A model's computation; see the [module](self). Created and checked by [`Builder::finish`].
#[derive(Clone, Debug)]
pub struct Program {
    tensors: Vec<Tensor>,
    values: Vec<Value>,
    states: Vec<State>,
    ropes: Vec<Rope>,
    parts: Vec<Part>,
    vocab: u32,
    result: Output,
    classifier: Option<Classifier>,
    /// Host memory of a step's row; see [`Program::row_bytes`].
    row_bytes: OnceLock<u64>,
}

/// The result of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// One number per token for each wanted row: tokens are sampled from this value.
    Logits(ValueId),
    /// Rows of an encoder.
    Rows(Encoder),
}

impl Program {
    /// Host memory of each row of a step, as a backend that computes on the host counts it; counted once.
    pub fn row_bytes(&self, count: impl FnOnce(&Self) -> u64) -> u64 {
        *self.row_bytes.get_or_init(|| count(self))
    }

    /// All tensors by number, part after part. A tied output appears twice.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// A tensor of this program.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.0 as usize)
    }

    /// All values by number.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// All states by number.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// Bytes of the recurrent states of one sequence; 0 for most programs.
    pub fn recurrent_bytes(&self) -> u64 {
        let values = self.states.iter().map(|state| match state {
            State::Kv { .. } => 0,
            State::Recurrent { values } => u64::from(*values),
        });
        values.sum::<u64>() * size_of::<f32>() as u64
    }

    /// True if rows depend on a state that only a step over all rows before them makes.
    pub fn is_recurrent(&self) -> bool {
        self.states.iter().any(|state| matches!(state, State::Recurrent { .. }))
    }

    /// All rotary embeddings by number.
    pub fn ropes(&self) -> &[Rope] {
        &self.ropes
    }

    /// Parts in execution order: [`FIRST_PART`], each layer, the head.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Number of parts.
    pub fn part_count(&self) -> u32 {
        self.parts.len() as u32 // layers: at most `LAYERS_MAX` of `model/arch`, 512
    }

    /// Number of the last part: the head. Steps that want no logits leave it out. An encoder's has no operations.
    pub fn head_part(&self) -> u32 {
        self.part_count().saturating_sub(1)
    }

    /// Number of decoder layers.
    pub fn layer_count(&self) -> u32 {
        self.part_count().saturating_sub(2)
    }

    /// Part number of a layer.
    pub fn layer_part(&self, layer: u32) -> u32 {
        layer + 1
    }

    /// Tensors of a part with their numbers, including all experts. Empty past the last part.
    pub fn part_tensors(&self, part: u32) -> impl Iterator<Item = (TensorId, &Tensor)> {
        let range = self.parts.get(part as usize).map_or(0..0, |part| part.tensors.clone());
        range.filter_map(|number| Some((TensorId(number), self.tensor(TensorId(number))?)))
    }

    /// Tokens in the vocabulary: the upper bound of ids, and the number of logits if there are any.
    pub fn vocab(&self) -> usize {
        self.vocab as usize
    }

    /// The value that tokens are sampled from; `None` for an encoder.
    pub fn logits(&self) -> Option<ValueId> {
        match self.result {
            Output::Logits(value) => Some(value),
            Output::Rows(_) => None,
        }
    }

    /// The result of an encoder; `None` for a decoder.
    pub fn encoder(&self) -> Option<Encoder> {
        match self.result {
            Output::Logits(_) => None,
            Output::Rows(encoder) => Some(encoder),
        }
    }

    /// The classifier of a model that scores texts.
    pub fn classifier(&self) -> Option<Classifier> {
        self.classifier
    }

    /// The rows of the last layer, and the norm that a decoder's head begins with; `None` for another head.
    pub fn last_rows(&self) -> Option<LastRows> {
        if let Output::Rows(encoder) = self.result {
            return Some(LastRows { value: encoder.rows, norm: None });
        }
        let ops = &self.parts.last()?.ops;
        let [Op::Take { from: value, out }, Op::Norm { kind, eps, weight, bias, from, add: false, .. }, ..] =
            ops.as_slice()
        else {
            return None;
        };
        let norm = RowNorm { kind: *kind, eps: *eps, weight: *weight, bias: *bias };
        (out == from).then_some(LastRows { value: *value, norm: Some(norm) })
    }

    /// Every tensor type in use, each with its first tensor.
    pub fn dtypes(&self) -> Vec<(DType, &LazyTensor)> {
        let mut found: Vec<(DType, &LazyTensor)> = Vec::new();
        for Tensor { lazy, .. } in &self.tensors {
            if !found.iter().any(|(dtype, _)| *dtype == lazy.dtype()) {
                found.push((lazy.dtype(), lazy));
            }
        }
        found
    }

    /// Bytes of all weights in the file, a tied output counted once.
    pub fn weight_bytes(&self) -> u64 {
        let all: u64 = self.tensors.iter().map(|tensor| tensor.lazy.byte_len()).sum();
        let head = self.part_tensors(self.head_part()).map(|(_, tensor)| &tensor.lazy);
        let first = || self.part_tensors(FIRST_PART).map(|(_, tensor)| &tensor.lazy);
        let tied = head.filter(|tensor| first().any(|other| other.same_bytes(tensor)));
        all - tied.map(LazyTensor::byte_len).sum::<u64>()
    }
}

#[cfg(test)]
mod tests;
