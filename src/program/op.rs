//! The operations of a program, each with all its attributes.
//!
//! A row of a step depends only on its own values and its own sequence's state. Unless an operation says otherwise, all
//! its values have the same rows. `x[r]` is row r of the value x. All arithmetic is on reals; a backend chooses the
//! precision.

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
    /// `out[r] += table[row]`.
    AddRow {
        /// As wide as `out`.
        table: TensorId,
        /// Number of the table's row.
        row: TableRow,
        /// Read and written; has all rows.
        out: ValueId,
    },
    /// Copies the rows whose logits are wanted.
    Take {
        /// A value of all rows.
        from: ValueId,
        /// A value of the wanted rows, as wide.
        out: ValueId,
    },
    /// Normalises each group of neighbouring values of a row separately: whole rows, or heads.
    Norm {
        /// RMSNorm or LayerNorm.
        kind: NormKind,
        /// Added to the mean square, or to the variance.
        eps: f32,
        /// `[group]` f32; its length is the group's size. Or `[group, groups]`: a row for each group of a value's row.
        weight: TensorId,
        /// As the weight, added at the end.
        bias: Option<TensorId>,
        /// Read.
        from: ValueId,
        /// Written; may be `from`.
        out: ValueId,
        /// Adds the result to `out`, which must then differ from `from`.
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
        /// Adds the result to `out`.
        add: bool,
    },
    /// Of each head h of r: `out[h] = weight[h] * part of from[h]`, a matrix for each head.
    ProjectHeads {
        /// `[heads * outputs, part.width]`: the matrices of all heads, one after the other.
        weight: TensorId,
        /// Read.
        from: ValueId,
        /// The part of each of its heads.
        part: HeadPart,
        /// Written: `outputs` values of each head.
        out: ValueId,
    },
    /// Of each head h of r: `out[h]` is a part of `first[h]`, then a part of `second[h]`.
    JoinHeads {
        /// Read.
        first: ValueId,
        /// The part of each of its heads.
        first_part: HeadPart,
        /// Read; of as many heads as `first`.
        second: ValueId,
        /// The part of each of its heads.
        second_part: HeadPart,
        /// Written.
        out: ValueId,
    },
    /// Rotates the first [`RopeSpec::dims`](super::RopeSpec::dims) values of each head by the row's position.
    Rope {
        /// The rotary embedding.
        rope: RopeId,
        /// Values of a head; a divisor of the value's width.
        head_dim: u32,
        /// Read and written.
        value: ValueId,
    },
    /// Stores the row's keys and values at its position.
    Store {
        /// State that receives them.
        state: StateId,
        /// Keys; `heads * head_dim` of the state wide.
        keys: ValueId,
        /// Values; as wide as the keys.
        values: ValueId,
    },
    /// `out` head h of row r = the sum over visible positions p of `softmax(scale * query . key[p]) * value[p]`. Each
    /// head of the state serves an equal number of neighbouring query heads.
    Attend {
        /// Keys and values, including those of this step's rows.
        state: StateId,
        /// Queries; their width is a multiple of `heads * head_dim` of the state.
        queries: ValueId,
        /// Factor of the query-key products.
        scale: f32,
        /// A row at position p sees positions above `p - window`, up to its own; without a window, all up to its own.
        window: Option<u32>,
        /// A row sees the later positions too that its sequence has in the step. A window then reaches `window / 2` positions
        /// before the row's own, and as many after it. A step must have all rows of a sequence.
        both_ways: bool,
        /// Scores x become `cap * tanh(x / cap)`; above 0.
        cap: Option<f32>,
        /// Subtracts [`alibi_slope`] times the distance of the positions from each score, after the cap.
        alibi: bool,
        /// `[query heads]` f32. The softmax of a head counts its sink as one more score, whose value is 0.
        sinks: Option<TensorId>,
        /// Written; as wide as the queries.
        out: ValueId,
    },
    /// `out = activation(gate) * up`; see [`Activation::Clamped`] for its own formula.
    Gate {
        /// Activation of the gate.
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
        /// The function.
        activation: Activation,
        /// Read.
        from: ValueId,
        /// Written.
        out: ValueId,
    },
    /// Chooses the `width of out` experts with the largest chances, and their weights, which are their chances. Of equal
    /// experts, the lower number wins. With groups, only experts of the best groups are chosen.
    Route {
        /// One logit per expert.
        logits: ValueId,
        /// Makes chances of logits.
        gating: Gating,
        /// `[width of logits]` f32, added to the chances for the choice, but not for the weights.
        bias: Option<TensorId>,
        /// Runs of neighbouring experts.
        groups: Option<ExpertGroups>,
        /// Divides the weights of a row's experts by their sum.
        normalise: bool,
        /// Factor of the weights, after normalisation.
        scale: f32,
        /// Written: a [choice](super::Content::Choice).
        out: ValueId,
    },
    /// `out[r] +=` the weighted sum over r's chosen experts of `down * (activation(gate * from[r]) * (up * from[r]))`.
    /// Each of the three products is multiplied by its factor, if it has one. Then a bias is added to it, if there are `biases`.
    /// Experts without gates have `down * activation(up * from[r])`, and no biases.
    Experts {
        /// All experts of the layer.
        experts: ExpertRange,
        /// Factors of gate, up and down: `[experts]` f32.
        factors: [Option<TensorId>; 3],
        /// Biases of gate, up and down, f32: row e of `[experts, outputs]` belongs to expert e.
        biases: Option<[TensorId; 3]>,
        /// The experts of each row, and their weights.
        choice: ValueId,
        /// Activation of the gate, or of the up where there is no gate.
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
    /// `value[r] *= 1 / (1 + e^-gate[r])`.
    Open {
        /// One number per row.
        gate: ValueId,
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
    /// `out[r]` is as many neighbouring values of `from[r]` as it is wide, from `first` on.
    Slice {
        /// Read.
        from: ValueId,
        /// The first of the values.
        first: u32,
        /// Written.
        out: ValueId,
    },
    /// `value[r][c] *= weight[c]`.
    Multiply {
        /// `[width of value]` f32.
        weight: TensorId,
        /// Read and written.
        value: ValueId,
    },
    /// `value[g] *= m / sqrt(mean(value[g]^2) + eps)` for each group g of neighbouring values of r. Here m is 1, or the root
    /// of the mean square of `like[r]`.
    Rescale {
        /// Values of a group; a divisor of the value's width.
        group: u32,
        /// Added to the mean square of a group; above 0.
        eps: f32,
        /// Read.
        like: Option<ValueId>,
        /// Read and written.
        value: ValueId,
    },
    /// `value[r] = max(0, value[r] - mean - deviations * deviation)`, with the mean and the standard deviation of the row's
    /// values. Of n values, the variance is the sum of squares divided by n - 1.
    Sparsify {
        /// Finite.
        deviations: f32,
        /// Read and written; at least two values wide.
        value: ValueId,
    },
    /// Streams lie one after the other in a row. Of n streams: `out[s] = from[s] + sum over i of amounts[r][n * s + i] * from[i]`.
    MixStreams {
        /// n * n numbers.
        amounts: ValueId,
        /// Read.
        from: ValueId,
        /// Written; as wide.
        out: ValueId,
    },
    /// `out[s] += (1 + amounts[r][s]) * from[r]` of each stream s from `first` on, and without amounts `out[s] += from[r]`.
    AddToStreams {
        /// Read; as wide as a stream.
        from: ValueId,
        /// One number for each stream.
        amounts: Option<ValueId>,
        /// The first stream that is changed.
        first: u32,
        /// Read and written.
        out: ValueId,
    },
    /// `out[r][c] = activation(bias[c] + sum over j of weight[c][j] * from[r - (taps - 1) + j][c])`. Rows before r are those of
    /// its sequence, also of earlier steps; before the first one all values are 0.
    Convolve {
        /// Keeps `[taps - 1][width]`: the last rows of `from`, the oldest first.
        state: StateId,
        /// `[width, taps]` f32.
        weight: TensorId,
        /// `[width]` f32.
        bias: Option<TensorId>,
        /// Of the sum.
        activation: Option<Activation>,
        /// Read.
        from: ValueId,
        /// Written; as wide.
        out: ValueId,
    },
    /// The recurrence of Mamba 2. For each head h of r, and its group g of neighbouring heads, with `x` a head's values:
    /// `t = softplus(steps[r][h] + step_bias[h])`, `S = e^(t * rate[h]) * S + t * x[h] * b[g]^T`,
    /// `out[h] = S * c[g] + skip[h] * x[h]`. S is 0 before the first row of a sequence.
    SelectiveScan {
        /// Keeps S of each head: `[heads][head_dim][columns]`.
        state: StateId,
        /// Heads, of `width of out / heads` values each.
        heads: u32,
        /// Groups of heads.
        groups: u32,
        /// `x` of all heads, `b` of all groups, `c` of all groups; b and c have `columns` values.
        from: ValueId,
        /// One number per head.
        steps: ValueId,
        /// `[heads]` f32, as are the next two; a column counts as a row.
        step_bias: TensorId,
        /// `[heads]` f32.
        rate: TensorId,
        /// `[heads]` f32.
        skip: TensorId,
        /// Written.
        out: ValueId,
    },
    /// The gated delta rule. For each value head h of r, with its own v, and its key head's q and k, each x divided by
    /// `sqrt(|x|^2 + eps)`:
    /// `S = e^(rate[h] * softplus(decay[r][h] + decay_bias[h])) * S`, `S += k * ((v - S^T * k) / (1 + e^-amount[r][h]))^T`,
    /// `out[h] = S^T * q / sqrt(key_dim)`. S is 0 before the first row of a sequence.
    DeltaRule {
        /// Keeps S of each value head: `[value heads][key_dim][value_dim]`.
        state: StateId,
        /// Where the heads lie in `from`.
        heads: DeltaHeads,
        /// Queries of all key heads, then their keys, then values of all value heads.
        from: ValueId,
        /// Added to the squared lengths of q and k; above 0.
        eps: f32,
        /// One number per value head.
        decay: ValueId,
        /// `[value heads]` f32.
        decay_bias: TensorId,
        /// `[value heads]` f32.
        rate: TensorId,
        /// One number per value head.
        amount: ValueId,
        /// Written: `value_dim` values of each value head.
        out: ValueId,
    },
}

/// Heads of [`Op::DeltaRule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and keys.
    pub keys: u32,
    /// Values of a query and of a key.
    pub key_dim: u32,
    /// Heads of values: a multiple of the key heads.
    pub values: u32,
    /// Values of a value head.
    pub value_dim: u32,
    /// Value head h has the key head `h % keys`; else neighbouring value heads share one.
    pub in_turn: bool,
}

impl DeltaHeads {
    /// Width of [`Op::DeltaRule`]'s `from`; `None` beyond 2^32.
    pub fn width(&self) -> Option<u32> {
        let keys = self.keys.checked_mul(self.key_dim)?.checked_mul(2)?;
        keys.checked_add(self.values.checked_mul(self.value_dim)?)
    }

    /// The key head of a value head.
    pub fn key_of(&self, value: u32) -> u32 {
        if self.in_turn { value % self.keys.max(1) } else { value / (self.values / self.keys.max(1)).max(1) }
    }
}

/// Neighbouring values of each head of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadPart {
    /// Values of a head.
    pub head_dim: u32,
    /// The first value of the part.
    pub first: u32,
    /// Values of the part.
    pub width: u32,
}

impl HeadPart {
    /// All values of heads of `head_dim`.
    pub fn whole(head_dim: u32) -> Self {
        Self { head_dim, first: 0, width: head_dim }
    }
}

/// Slope of a query head, of `heads`, whose scores fall with the distance of positions (ALiBi, with the usual 8). The slopes are
/// powers of two if the number of heads is one, and those of other heads lie between them.
pub fn alibi_slope(head: u32, heads: u32) -> f32 {
    let whole = 1u32 << heads.max(1).ilog2();
    let power = if head < whole {
        f64::from(head + 1) / f64::from(whole)
    } else {
        f64::from(2 * (head - whole) + 1) / f64::from(2 * whole)
    };
    (-8.0 * power).exp2() as f32
}

/// The row of a table that [`Op::AddRow`] adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableRow {
    /// That of the row's position. The table has one for each position of the context.
    Position,
    /// The first one, for all rows.
    First,
}

/// Formula of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x * weight / sqrt(mean(x^2) + eps)`.
    Rms,
    /// `(x - mean(x)) * weight / sqrt(variance(x) + eps)`.
    Layer,
}

/// Chances of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// `softmax(logits)`.
    Softmax,
    /// `1 / (1 + e^-logit)`. The sum that normalises weights counts as at least 2^-14, as in llama.cpp.
    Sigmoid,
}

/// An elementwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: the approximation used in training.
    Gelu,
    /// Of a gate g and its u: `g' / (1 + e^(-1.702 g')) * (1 + u')`. Here g' is g, at most 7, and u' is u, clamped to -7
    /// and 7. Only of gates.
    Clamped,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x`. Only of gates: `out = gate * up`.
    Linear,
    /// `x^2`, of negative x 0.
    SquaredRelu,
}

/// Experts in groups of equal size. A group is as good as the sum of its two largest chances, with the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: u32,
    /// Groups of which a row's experts are chosen. Of equal groups, the lower number wins.
    pub used: u32,
}

/// The experts of a layer as consecutive tensors of the program: gate, up and down of the first, then of the second,
/// ... Without gates, up and down of each.
///
/// Gates and ups are `[ffn, width of from]`, downs `[width of out, ffn]`. All tensors of a role have one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRange {
    /// Gate of the first expert, or its up.
    pub first: TensorId,
    /// Number of experts.
    pub count: u32,
    /// Whether experts have gates.
    pub gated: bool,
}

impl ExpertRange {
    /// Gate, up and down of an expert below `count`. Where there is no gate, the up stands in its place too.
    pub fn tensors(&self, expert: u32) -> [TensorId; 3] {
        let (roles, each) = if self.gated { ([0, 1, 2], 3) } else { ([0, 0, 1], 2) };
        let first = self.first.0.saturating_add(expert.saturating_mul(each));
        roles.map(|role| TensorId(first.saturating_add(role)))
    }

    /// The tensors of an expert below `count`, each once.
    pub fn each(&self, expert: u32) -> impl Iterator<Item = TensorId> + use<> {
        self.tensors(expert).into_iter().skip(usize::from(!self.gated))
    }
}

/// How an operation uses a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The operation reads the value.
    Read,
    /// The operation writes the whole value.
    Write,
    /// The operation reads and writes the value.
    Update,
}

impl Access {
    /// True when the previous content matters.
    pub fn reads(self) -> bool {
        self != Self::Write
    }

    /// True when the content changes.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

fn written(add: bool) -> Access {
    if add { Access::Update } else { Access::Write }
}

impl Op {
    /// The values it uses, read ones first.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, Access)> + use<> {
        use Access::{Read, Update, Write};
        let all = match *self {
            Self::Embed { out, .. } => [Some((out, Write)), None, None, None],
            Self::AddRow { out, .. } => [Some((out, Update)), None, None, None],
            Self::Take { from, out }
            | Self::Activate { from, out, .. }
            | Self::ProjectHeads { from, out, .. } => [Some((from, Read)), Some((out, Write)), None, None],
            Self::Norm { from, out, .. } if from == out => [Some((out, Update)), None, None, None],
            Self::Norm { from, out, add, .. } | Self::Project { from, out, add, .. } => {
                [Some((from, Read)), Some((out, written(add))), None, None]
            }
            Self::JoinHeads { first, second, out, .. } => {
                [Some((first, Read)), Some((second, Read)), Some((out, Write)), None]
            }
            Self::Rope { value, .. } | Self::Cap { value, .. } | Self::Scale { value, .. } => {
                [Some((value, Update)), None, None, None]
            }
            Self::Open { gate, value } => [Some((gate, Read)), Some((value, Update)), None, None],
            Self::Store { keys, values, .. } => [Some((keys, Read)), Some((values, Read)), None, None],
            Self::Attend { queries, out, .. } => [Some((queries, Read)), Some((out, Write)), None, None],
            Self::Gate { gate, up, out, .. } => {
                [Some((gate, Read)), Some((up, Read)), Some((out, Write)), None]
            }
            Self::Route { logits, out, .. } => [Some((logits, Read)), Some((out, Write)), None, None],
            Self::Experts { choice, from, out, .. } => {
                [Some((choice, Read)), Some((from, Read)), Some((out, Update)), None]
            }
            Self::Convolve { from, out, .. } => [Some((from, Read)), Some((out, Write)), None, None],
            Self::SelectiveScan { from, steps, out, .. } => {
                [Some((from, Read)), Some((steps, Read)), Some((out, Write)), None]
            }
            Self::DeltaRule { from, decay, amount, out, .. } => {
                [Some((from, Read)), Some((decay, Read)), Some((amount, Read)), Some((out, Write))]
            }
            Self::Add { from, out, .. } => [Some((from, Read)), Some((out, Update)), None, None],
            Self::Slice { from, out, .. } => [Some((from, Read)), Some((out, Write)), None, None],
            Self::Multiply { value, .. } | Self::Sparsify { value, .. } => {
                [Some((value, Update)), None, None, None]
            }
            Self::Rescale { like, value, .. } => {
                [like.map(|like| (like, Read)), Some((value, Update)), None, None]
            }
            Self::MixStreams { amounts, from, out } => {
                [Some((amounts, Read)), Some((from, Read)), Some((out, Write)), None]
            }
            Self::AddToStreams { from, amounts, out, .. } => {
                [Some((from, Read)), amounts.map(|amounts| (amounts, Read)), Some((out, Update)), None]
            }
        };
        all.into_iter().flatten()
    }

    /// True when it reads this value.
    pub fn reads(&self, value: ValueId) -> bool {
        self.values().any(|(used, access)| used == value && access.reads())
    }

    /// Name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::AddRow { .. } => "add row",
            Self::Take { .. } => "take",
            Self::Norm { .. } => "norm",
            Self::Project { .. } => "project",
            Self::ProjectHeads { .. } => "project heads",
            Self::JoinHeads { .. } => "join heads",
            Self::Rope { .. } => "rope",
            Self::Store { .. } => "store",
            Self::Attend { .. } => "attend",
            Self::Gate { .. } => "gate",
            Self::Activate { .. } => "activate",
            Self::Route { .. } => "route",
            Self::Experts { .. } => "experts",
            Self::Add { .. } => "add",
            Self::Cap { .. } => "cap",
            Self::Open { .. } => "open",
            Self::Scale { .. } => "scale",
            Self::Slice { .. } => "slice",
            Self::Multiply { .. } => "multiply",
            Self::Rescale { .. } => "rescale",
            Self::Sparsify { .. } => "sparsify",
            Self::MixStreams { .. } => "mix streams",
            Self::AddToStreams { .. } => "add to streams",
            Self::Convolve { .. } => "convolve",
            Self::SelectiveScan { .. } => "selective scan",
            Self::DeltaRule { .. } => "delta rule",
        }
    }
}
