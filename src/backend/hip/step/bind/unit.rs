//! Units: the stretches of operations that a few launches compute, with all that is known of them before a step.

use super::forms::Wanted;
use super::planes::PlaneId;
use crate::program::{Activation, ExpertRange, RopeId, RopeLayout, Rows};
use crate::tensor::DType;

/// Number of a tensor among those of its part that have to be on the device, in the order in which units use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand(pub u32);

/// A unit and what it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// What it computes.
    pub work: Work,
    /// For which rows.
    pub rows: Rows,
    /// It uses operands of its part below this number, and so does no unit before it.
    pub operands: u32,
}

/// f32 rows in a plane, or some of its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which plane.
    pub plane: PlaneId,
    /// First column.
    pub column: u32,
    /// Values from row to row.
    pub stride: u32,
}

/// Where a value lies, in each form that its readers want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// f32.
    pub float: Option<View>,
    /// Codes, scales, sums.
    pub a8: Option<[PlaneId; 3]>,
    /// f16, and a scale for each row.
    pub half: Option<[PlaneId; 2]>,
}

impl Home {
    fn planes(&self) -> impl Iterator<Item = PlaneId> {
        let a8 = self.a8.into_iter().flatten();
        self.float.map(|view| view.plane).into_iter().chain(a8).chain(self.half.into_iter().flatten())
    }
}

/// A matrix and its bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The matrix.
    pub weight: Operand,
    /// Its bias.
    pub bias: Option<Operand>,
    /// Element type.
    pub dtype: DType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
}

/// Numbers of experts, `u32[rows][used]`, and their weights, `f32[rows][used]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub chosen: PlaneId,
    /// With what weights.
    pub weights: PlaneId,
    /// Experts of a row.
    pub used: u32,
}

/// What a unit computes.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Rows of the embedding table.
    Embed(Embed),
    /// The rows whose logits are wanted.
    Take(Take),
    /// A norm.
    Norm(Norm),
    /// Other forms of rows that a kernel left in f32.
    Convert(Convert),
    /// Products of matrices that share an input.
    Products(Products),
    /// Norms of heads, rotation, keys and values to their pages.
    Heads(Heads),
    /// Attention.
    Attend(Attend),
    /// Two products and the gate over them.
    GatedProducts(GatedProducts),
    /// A gate over values that are there, or an activation.
    Gate(Gate),
    /// The choice of experts.
    Route(Route),
    /// What chosen experts add.
    Experts(Experts),
    /// `out = scale * from`, or `out += scale * from`.
    Add(Add),
    /// `rows = cap * tanh(rows / cap)`.
    Cap(Cap),
}

/// `out = scale * rows of the table`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embed {
    /// Type of the table.
    pub dtype: DType,
    /// Values of a row.
    pub cols: u32,
    /// Factor.
    pub scale: f32,
    /// Written.
    pub out: View,
}

/// Copies rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// Read.
    pub from: View,
    /// Written.
    pub out: View,
    /// Values of a row.
    pub cols: u32,
}

/// A norm of each group of neighbouring values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// The mean is taken away first.
    pub centre: bool,
    /// Added to the mean square, or to the variance.
    pub eps: f32,
    /// `[group]`.
    pub weight: Operand,
    /// `[group]`, added at the end.
    pub bias: Option<Operand>,
    /// Read.
    pub from: View,
    /// `from` has all rows, and those whose logits are wanted are read.
    pub takes: bool,
    /// Values of a group.
    pub group: u32,
    /// Groups of a row.
    pub groups: u32,
    /// Written.
    pub out: Home,
    /// In these forms; those but f32 are of whole rows without gaps.
    pub forms: Wanted,
    /// The result is added to `out`, in f32.
    pub add: bool,
}

/// Makes other forms of f32 rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convert {
    /// Values of a row.
    pub cols: u32,
    /// `float` is read, the others are written.
    pub home: Home,
    /// As far as they are wanted.
    pub forms: Wanted,
}

/// `out = [W0 x, W1 x, ...]`, or added to what is there.
#[derive(Clone, Debug, PartialEq)]
pub struct Products {
    /// x.
    pub from: Home,
    /// In the order of their outputs.
    pub matrices: Vec<Product>,
    /// Written from here on.
    pub out: View,
    /// The result is added.
    pub add: bool,
}

/// Heads of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Rows of `[queries | keys | values]`, without gaps.
    pub from: View,
    /// Values of a head.
    pub head_dim: u32,
    /// By which angles they turn.
    pub rope: Option<Turn>,
    /// Query heads, and where they are written.
    pub queries: Option<(u32, View)>,
    /// Keys and values.
    pub kv: Option<Kv>,
    /// Norms of query heads and of key heads, before they turn.
    pub norms: [Option<Operand>; 2],
    /// Of these norms.
    pub eps: f32,
}

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// By which table.
    pub rope: RopeId,
    /// Values of a head that turn.
    pub dims: u32,
    /// Which form pairs.
    pub layout: RopeLayout,
}

/// Keys and values in their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kv {
    /// Bytes from a page's start.
    pub offset: u64,
    /// Heads of keys, and of values.
    pub heads: u32,
}

/// Attention of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attend {
    /// Query heads, without gaps.
    pub queries: View,
    /// How many.
    pub heads: u32,
    /// Values of a head.
    pub head_dim: u32,
    /// What they attend to.
    pub kv: Kv,
    /// Factor of scores in units of log2.
    pub scale: f32,
    /// Tokens that a row sees at most; 0 for all.
    pub window: u32,
    /// Number of the window among those of the program.
    pub windows_at: usize,
    /// Written; where `float` is there and not wanted, kernels of which none writes the wanted form write there.
    pub out: Home,
    /// One form.
    pub forms: Wanted,
}

/// `activation(gate x) * (up x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedProducts {
    /// x.
    pub from: Home,
    /// Of the gate.
    pub activation: Activation,
    /// The gate's matrix.
    pub gate: Product,
    /// The other.
    pub up: Product,
    /// Rows of `[gate | up]`, for where no kernel does all of it.
    pub both: Option<View>,
    /// Written.
    pub out: Home,
    /// One form.
    pub forms: Wanted,
}

/// `activation(gate) * up`, or without `up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gate {
    /// Of the gate.
    pub activation: Activation,
    /// Read.
    pub gate: View,
    /// Read; of the same stride.
    pub up: Option<View>,
    /// Values of a row.
    pub cols: u32,
    /// Written.
    pub out: Home,
    /// One form.
    pub forms: Wanted,
}

/// Chooses experts by their logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// `f32[rows][count]`.
    pub logits: View,
    /// Experts.
    pub count: u32,
    /// Weights are divided by their sum.
    pub normalise: bool,
    /// Then they are multiplied by this.
    pub scale: f32,
    /// Written.
    pub out: Choice,
    /// Numbers of the sets, in the part, that use the choice.
    pub sets: Vec<usize>,
}

/// Work of the chosen experts on pairs of a row and an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Number of the set in the part.
    pub set: usize,
    /// Which of them.
    pub choice: Choice,
    /// x.
    pub from: Home,
    /// Of the gate.
    pub activation: Activation,
    /// Read and written.
    pub out: View,
    /// `activation(gate x) * (up x)` of each pair, in the form that downs want.
    pub gated: Home,
    /// `f32[pairs][cols of out]`.
    pub results: PlaneId,
}

/// Adds rows, or copies them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Add {
    /// Read.
    pub from: View,
    /// Written.
    pub out: View,
    /// Factor of `from`.
    pub scale: f32,
    /// What is in `out` stays in the sum.
    pub keep: bool,
    /// Values of a row.
    pub cols: u32,
}

/// Caps rows in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cap {
    /// Read and written.
    pub rows: View,
    /// Above 0.
    pub cap: f32,
    /// Values of a row.
    pub cols: u32,
}

/// All experts of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSet {
    /// Their tensors.
    pub range: ExpertRange,
    /// Type of gates and ups, and of downs.
    pub dtypes: [DType; 2],
    /// Width of an expert.
    pub ffn: u32,
    /// Values of a row.
    pub cols: u32,
    /// Values of a row of the result.
    pub out_cols: u32,
}

impl Work {
    /// The planes that it reads or writes.
    pub fn planes(&self) -> Vec<PlaneId> {
        let of = |homes: &[Home], views: &[Option<View>], more: &[PlaneId]| {
            let views = views.iter().flatten().map(|view| view.plane);
            homes.iter().flat_map(Home::planes).chain(views).chain(more.iter().copied()).collect()
        };
        match self {
            Self::Embed(embed) => of(&[], &[Some(embed.out)], &[]),
            Self::Take(take) => of(&[], &[Some(take.from), Some(take.out)], &[]),
            Self::Norm(norm) => of(&[norm.out], &[Some(norm.from)], &[]),
            Self::Convert(convert) => of(&[convert.home], &[], &[]),
            Self::Products(products) => of(&[products.from], &[Some(products.out)], &[]),
            Self::Heads(heads) => of(&[], &[Some(heads.from), heads.queries.map(|(_, view)| view)], &[]),
            Self::Attend(attend) => of(&[attend.out], &[Some(attend.queries)], &[]),
            Self::GatedProducts(gated) => of(&[gated.from, gated.out], &[gated.both], &[]),
            Self::Gate(gate) => of(&[gate.out], &[Some(gate.gate), gate.up], &[]),
            Self::Route(Route { logits, out, .. }) => of(&[], &[Some(*logits)], &[out.chosen, out.weights]),
            Self::Experts(Experts { choice, from, out, gated, results, .. }) => {
                of(&[*from, *gated], &[Some(*out)], &[choice.chosen, choice.weights, *results])
            }
            Self::Add(add) => of(&[], &[Some(add.from), Some(add.out)], &[]),
            Self::Cap(cap) => of(&[], &[Some(cap.rows)], &[]),
        }
    }
}
