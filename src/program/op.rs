//! The operations of a program, each with all its attributes.
//!
//! A row of a step is computed from its own values and its own sequence's state alone. Unless an operation says otherwise, all
//! its values have the same rows. `x[r]` is row r of the value x; all arithmetic is real, a backend chooses its precision.

use super::{RopeId, StateId, TensorId, ValueId};

/// One operation of a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// `out[r] = scale * table[token of r]`.
    Embed {
        /// `[vocab, width of out]`.
        table: TensorId,
        /// Factor of every value; 1 for most models.
        scale: f32,
        /// Written.
        out: ValueId,
    },
    /// Copies the rows whose logits are wanted.
    Take {
        /// A value of all rows.
        from: ValueId,
        /// A value of the wanted rows, as wide.
        out: ValueId,
    },
    /// Normalises each group of neighbouring values of a row by itself: whole rows, or heads.
    Norm {
        /// How.
        kind: NormKind,
        /// Added to the mean square, or to the variance.
        eps: f32,
        /// `[group]` f32: a group has as many values.
        weight: TensorId,
        /// `[group]` f32, added at the end.
        bias: Option<TensorId>,
        /// Read.
        from: ValueId,
        /// Written; may be `from`.
        out: ValueId,
        /// The result is added to `out`, which is another value than `from` then.
        add: bool,
    },
    /// `out[r] = weight * from[r] + bias`.
    Project {
        /// `[width of out, width of from]`.
        weight: TensorId,
        /// `[width of out]` f32.
        bias: Option<TensorId>,
        /// Read.
        from: ValueId,
        /// Written.
        out: ValueId,
        /// The result is added to `out`.
        add: bool,
    },
    /// Rotates the first [`RopeSpec::dims`](super::RopeSpec::dims) values of each head by the row's position.
    Rope {
        /// By which angles.
        rope: RopeId,
        /// Values of a head; divides the value's width.
        head_dim: u32,
        /// Read and written.
        value: ValueId,
    },
    /// Keeps the row's keys and values at its position.
    Store {
        /// Where.
        state: StateId,
        /// `heads * head_dim` of the state.
        keys: ValueId,
        /// As wide.
        values: ValueId,
    },
    /// `out` head h of row r = the sum over visible positions p of `softmax(scale * query . key[p]) * value[p]`. Each head of the
    /// state serves as many neighbouring query heads.
    Attend {
        /// Keys and values, those of this step's rows among them.
        state: StateId,
        /// A multiple of `heads * head_dim` of the state.
        queries: ValueId,
        /// Factor of the products of queries and keys.
        scale: f32,
        /// A row at position p sees positions above `p - window`, up to its own; all up to its own where there is none.
        window: Option<u32>,
        /// Written; as wide as the queries.
        out: ValueId,
    },
    /// `out = activation(gate) * up`.
    Gate {
        /// Of the gate.
        activation: Activation,
        /// Read.
        gate: ValueId,
        /// Read.
        up: ValueId,
        /// Written.
        out: ValueId,
    },
    /// `out = activation(from)`.
    Activate {
        /// Which.
        activation: Activation,
        /// Read.
        from: ValueId,
        /// Written.
        out: ValueId,
    },
    /// Chooses the `width of out` experts with the largest logits, the lower number of equals, and their weights:
    /// `softmax(logits)`.
    Route {
        /// One for each expert.
        logits: ValueId,
        /// The weights of a row's experts are divided by their sum.
        normalise: bool,
        /// Then they are multiplied by this.
        scale: f32,
        /// Written: a [choice](super::Content::Choice).
        out: ValueId,
    },
    /// `out[r] +=` the weighted sum over r's chosen experts of `down * (activation(gate * from[r]) * (up * from[r]))`.
    Experts {
        /// All experts of the layer.
        experts: ExpertRange,
        /// Which of them each row uses, and their weights.
        choice: ValueId,
        /// Of the gate.
        activation: Activation,
        /// Read.
        from: ValueId,
        /// Read and written.
        out: ValueId,
    },
    /// `out += scale * from`.
    Add {
        /// Read.
        from: ValueId,
        /// Factor.
        scale: f32,
        /// Read and written.
        out: ValueId,
    },
    /// `value = cap * tanh(value / cap)`.
    Cap {
        /// Above 0.
        cap: f32,
        /// Read and written.
        value: ValueId,
    },
    /// `value *= by`.
    Scale {
        /// Factor.
        by: f32,
        /// Read and written.
        value: ValueId,
    },
}

/// What a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x * weight / sqrt(mean(x^2) + eps)`.
    Rms,
    /// `(x - mean(x)) * weight / sqrt(variance(x) + eps)`.
    Layer,
}

/// A function of single values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: the approximation that models are trained with.
    Gelu,
}

/// The experts of a layer as tensors of the program: gate, up and down of the first, then those of the second, and so on.
///
/// Gates and ups are `[ffn, width of from]`, downs `[width of out, ffn]`; all of a role have one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRange {
    /// Gate of the first expert.
    pub first: TensorId,
    /// Experts.
    pub count: u32,
}

impl ExpertRange {
    /// Gate, up and down of an expert below `count`.
    pub fn tensors(&self, expert: u32) -> [TensorId; 3] {
        let first = self.first.0.saturating_add(expert.saturating_mul(3));
        [0, 1, 2].map(|role| TensorId(first.saturating_add(role)))
    }
}

/// How an operation uses a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes all of it.
    Write,
    /// Reads and writes it.
    Update,
}

impl Access {
    /// Whether what was there before matters.
    pub fn reads(self) -> bool {
        self != Self::Write
    }

    /// Whether another content is there afterwards.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

fn written(add: bool) -> Access {
    if add { Access::Update } else { Access::Write }
}

impl Op {
    /// The values that it uses, those it reads first.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, Access)> + use<> {
        use Access::{Read, Update, Write};
        let all = match *self {
            Self::Embed { out, .. } => [Some((out, Write)), None, None],
            Self::Take { from, out } | Self::Activate { from, out, .. } => {
                [Some((from, Read)), Some((out, Write)), None]
            }
            Self::Norm { from, out, .. } if from == out => [Some((out, Update)), None, None],
            Self::Norm { from, out, add, .. } | Self::Project { from, out, add, .. } => {
                [Some((from, Read)), Some((out, written(add))), None]
            }
            Self::Rope { value, .. } | Self::Cap { value, .. } | Self::Scale { value, .. } => {
                [Some((value, Update)), None, None]
            }
            Self::Store { keys, values, .. } => [Some((keys, Read)), Some((values, Read)), None],
            Self::Attend { queries, out, .. } => [Some((queries, Read)), Some((out, Write)), None],
            Self::Gate { gate, up, out, .. } => [Some((gate, Read)), Some((up, Read)), Some((out, Write))],
            Self::Route { logits, out, .. } => [Some((logits, Read)), Some((out, Write)), None],
            Self::Experts { choice, from, out, .. } => {
                [Some((choice, Read)), Some((from, Read)), Some((out, Update))]
            }
            Self::Add { from, out, .. } => [Some((from, Read)), Some((out, Update)), None],
        };
        all.into_iter().flatten()
    }

    /// Whether it reads this value.
    pub fn reads(&self, value: ValueId) -> bool {
        self.values().any(|(used, access)| used == value && access.reads())
    }

    /// What messages call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Take { .. } => "take",
            Self::Norm { .. } => "norm",
            Self::Project { .. } => "project",
            Self::Rope { .. } => "rope",
            Self::Store { .. } => "store",
            Self::Attend { .. } => "attend",
            Self::Gate { .. } => "gate",
            Self::Activate { .. } => "activate",
            Self::Route { .. } => "route",
            Self::Experts { .. } => "experts",
            Self::Add { .. } => "add",
            Self::Cap { .. } => "cap",
            Self::Scale { .. } => "scale",
        }
    }
}
