//! What a model computes, as a program: numbered tensors, values and states, and typed operations in parts.
//!
//! An architecture (`model/arch`) writes a program from the header alone; nothing in it has been read. A backend binds it: it
//! chooses kernels for stretches of operations, places values in memory, and refuses what it cannot run. A part is the unit of
//! residency: its tensors come when a step reaches it and leave together.

mod builder;
mod check;
mod op;
mod rope;

use std::ops::Range;

pub use builder::Builder;
pub use check::ProgramError;
pub use op::{Access, Activation, ExpertRange, NormKind, Op};
pub use rope::{RopeAngles, RopeLayout, RopeScaling, RopeSpec, Yarn};

use crate::tensor::{DType, LazyTensor};

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

/// Number of the part that a step runs first: the embedding, and the factors of rotary embeddings.
pub const FIRST_PART: u32 = 0;

/// A tensor of a program.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, type, shape, file range.
    pub lazy: LazyTensor,
    /// How steps use it.
    pub residence: Residence,
}

/// Where a tensor has to be while its part runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// On the device.
    Device,
    /// On the device as soon as a row's choice of experts falls on it.
    Chosen,
    /// In the file mapping: the host reads a few rows of it.
    Host,
}

/// An intermediate result: `width` numbers for each row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// Numbers of a row.
    pub width: u32,
    /// For which rows.
    pub rows: Rows,
    /// What the numbers are.
    pub content: Content,
}

/// Which rows of a step a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// All.
    All,
    /// Those whose logits are wanted.
    Wanted,
}

/// What a value's numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Real numbers.
    Real,
    /// Numbers of experts and their weights, from [`Op::Route`].
    Choice,
}

/// What a sequence keeps from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Keys and values of every position.
    Kv {
        /// Heads of keys, and of values.
        heads: u32,
        /// Values of a head.
        head_dim: u32,
    },
}

/// Angles by which heads turn.
#[derive(Clone, Debug)]
pub struct Rope {
    /// How they follow from the position.
    pub spec: RopeSpec,
    /// Divisors of the frequencies, `[dims / 2]` f32, of the first part.
    pub factors: Option<TensorId>,
}

/// What a part is to a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// What a step begins with.
    Embedding,
    /// A decoder layer, by number.
    Layer(u32),
    /// What makes logits of the last layer's rows.
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

/// A stretch of operations and the tensors that only they use.
#[derive(Clone, Debug)]
pub struct Part {
    /// What it is.
    pub kind: PartKind,
    /// Numbers of its tensors, in the order in which a step first needs them.
    pub tensors: Range<u32>,
    /// In the order in which they run.
    pub ops: Vec<Op>,
}

/// A model's computation; see the [module](self). Made by [`Builder::finish`], which checks it.
#[derive(Clone, Debug)]
pub struct Program {
    tensors: Vec<Tensor>,
    values: Vec<Value>,
    states: Vec<State>,
    ropes: Vec<Rope>,
    parts: Vec<Part>,
    vocab: u32,
    logits: ValueId,
}

impl Program {
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

    /// All rotary embeddings by number.
    pub fn ropes(&self) -> &[Rope] {
        &self.ropes
    }

    /// Parts in the order in which a step runs them: [`FIRST_PART`], each layer, the head.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// How many parts there are.
    pub fn part_count(&self) -> u32 {
        self.parts.len() as u32 // layers: at most `LAYERS_MAX` of `model/arch`, 512
    }

    /// Number of the last part: the head. Steps that want no logits leave it out.
    pub fn head_part(&self) -> u32 {
        self.part_count().saturating_sub(1)
    }

    /// Decoder layers.
    pub fn layer_count(&self) -> u32 {
        self.part_count().saturating_sub(2)
    }

    /// Number of the part that is a layer.
    pub fn layer_part(&self, layer: u32) -> u32 {
        layer + 1
    }

    /// Tensors of a part with their numbers, all experts among them; none past the last part.
    pub fn part_tensors(&self, part: u32) -> impl Iterator<Item = (TensorId, &Tensor)> {
        let range = self.parts.get(part as usize).map_or(0..0, |part| part.tensors.clone());
        range.filter_map(|number| Some((TensorId(number), self.tensor(TensorId(number))?)))
    }

    /// Tokens in the vocabulary: ids are below it, and logits are as many.
    pub fn vocab(&self) -> usize {
        self.vocab as usize
    }

    /// The value that tokens are drawn from.
    pub fn logits(&self) -> ValueId {
        self.logits
    }

    /// Every tensor type used, each with the first tensor of it.
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
