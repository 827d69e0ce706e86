//! Units: groups of operations that a few launches compute, with everything known about them before a step.

use super::forms::Wanted;
use super::planes::PlaneId;
use super::recurrent::{Convolve, DeltaRule, SelectiveScan};
use super::streams::{AddToStreams, MixStreams, Multiply, Rescale, Sparsify};
use crate::program::{
    Activation, ExpertGroups, ExpertRange, Gating, RopeId, RopeLayout, Rows, TableRow, TensorId,
};
use crate::tensor::DType;

/// Number of a resident tensor in its part, in order of first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand(pub u32);

/// A unit and what it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// The computation with its operands and planes.
    pub work: Work,
    /// All rows of a step, or only those with logits.
    pub rows: Rows,
    /// This unit and all units before it use only operands of the part below this number.
    pub operands: u32,
}

/// f32 rows in a plane, or some columns of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The plane.
    pub plane: PlaneId,
    /// First column.
    pub column: u32,
    /// Values from row to row.
    pub stride: u32,
}

/// Places of a value, one per form that its readers want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// f32.
    pub float: Option<View>,
    /// Codes, scales and sums.
    pub a8: Option<[PlaneId; 3]>,
    /// f16 values, and a scale per row.
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
    /// Added to the outputs.
    pub bias: Option<Operand>,
    /// Element type.
    pub dtype: DType,
    /// Number of outputs.
    pub rows: u32,
    /// Number of inputs.
    pub cols: u32,
}

/// Numbers of experts, `u32[rows][used]`, and their weights, `f32[rows][used]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Plane of the expert numbers.
    pub chosen: PlaneId,
    /// Plane of the expert weights.
    pub weights: PlaneId,
    /// Experts per row.
    pub used: u32,
}

/// The computation of a unit.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Rows of the embedding table.
    Embed(Embed),
    /// Gathers the rows with logits.
    Take(Take),
    /// A norm.
    Norm(Norm),
    /// Converts f32 rows to other forms.
    Convert(Convert),
    /// Products of matrices that share an input.
    Products(Products),
    /// Norms of heads, rotation, and the store to KV pages.
    Heads(Heads),
    /// Products of a matrix for each head.
    ProjectHeads(ProjectHeads),
    /// Heads of two parts.
    JoinHeads(JoinHeads),
    /// Attention.
    Attend(Attend),
    /// Two products and their gate.
    GatedProducts(GatedProducts),
    /// A gate over computed values, or an activation.
    Gate(Gate),
    /// The choice of experts.
    Route(Route),
    /// The chosen experts' contribution.
    Experts(Experts),
    /// `out = scale * from`, or `out += scale * from`.
    Add(Add),
    /// `rows = cap * tanh(rows / cap)`.
    Cap(Cap),
    /// See [`Open`].
    Open(Open),
    /// Short convolutions.
    Convolve(Convolve),
    /// The recurrence of Mamba 2.
    SelectiveScan(SelectiveScan),
    /// The gated delta rule.
    DeltaRule(DeltaRule),
    /// Products with a vector.
    Multiply(Multiply),
    /// Sizes of rows.
    Rescale(Rescale),
    /// The largest values of rows.
    Sparsify(Sparsify),
    /// Weighted sums of streams.
    MixStreams(MixStreams),
    /// Sums of rows and each stream.
    AddToStreams(AddToStreams),
}

/// `out = scale * rows of the table`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embed {
    /// Type of the table.
    pub dtype: DType,
    /// Values of a row.
    pub cols: u32,
    /// Factor of the rows.
    pub scale: f32,
    /// Byte of a row's tables where this one begins.
    pub first: u32,
    /// Rows to write.
    pub out: View,
}

/// Rows that the host makes for a step's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TableRows {
    /// The embedding table.
    pub table: TensorId,
    /// Bytes that are sent for a row: as in the file, or f32 if rows of other tables are added.
    pub row_bytes: usize,
    /// The first of them in the row's bytes of all tables, a multiple of 16.
    pub first: usize,
    /// Factor of the table's rows before others are added.
    pub scale: f32,
    /// Tables of which a row is added, in this order.
    pub added: Vec<(TensorId, TableRow)>,
}

/// Gathers the rows with logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// Input with all rows.
    pub from: View,
    /// The gathered rows.
    pub out: View,
    /// Values of a row.
    pub cols: u32,
}

/// A norm of each group of neighbouring values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Whether the mean is subtracted first.
    pub centre: bool,
    /// Epsilon added to the mean square or the variance.
    pub eps: f32,
    /// `[group]`, or a row for each group.
    pub weight: Operand,
    /// As the weight, added at the end.
    pub bias: Option<Operand>,
    /// Values from a group's weights to the next group's; 0 where all have the same.
    pub weight_stride: u32,
    /// Rows to read.
    pub from: View,
    /// `from` has all rows, and only the rows with logits are read.
    pub takes: bool,
    /// Values of a group.
    pub group: u32,
    /// Groups of a row.
    pub groups: u32,
    /// Rows to write, in each of `forms`.
    pub out: Home,
    /// Forms to write; forms except f32 need whole rows without gaps.
    pub forms: Wanted,
    /// The result is added to `out`, in f32.
    pub add: bool,
}

/// Converts f32 rows to other forms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convert {
    /// Values of a row.
    pub cols: u32,
    /// Reads `float`, writes the other forms.
    pub home: Home,
    /// Forms that readers want.
    pub forms: Wanted,
}

/// `out = [W0 x, W1 x, ...]`, or `out += [...]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Products {
    /// The input x.
    pub from: Home,
    /// Matrices in the order of their outputs.
    pub matrices: Vec<Product>,
    /// First output column.
    pub out: View,
    /// Adds to `out` instead of overwriting it.
    pub add: bool,
}

/// Heads of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Rows of `[queries | keys | values]`, without gaps.
    pub from: View,
    /// Values of a head.
    pub head_dim: u32,
    /// Rotary embedding, if the heads rotate.
    pub rope: Option<Turn>,
    /// Number of query heads, and their output.
    pub queries: Option<(u32, View)>,
    /// Target of keys and values.
    pub kv: Option<Kv>,
    /// Norms of query heads and of key heads, before they turn.
    pub norms: [Option<Operand>; 2],
    /// Epsilon of these norms.
    pub eps: f32,
}

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Number of the rotary table.
    pub rope: RopeId,
    /// Values of a head that rotate.
    pub dims: u32,
    /// Layout of the rotated pairs.
    pub layout: RopeLayout,
}

/// Keys and values in their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kv {
    /// Bytes from a page's start to the state.
    pub offset: u64,
    /// Heads of keys, and as many of values.
    pub heads: u32,
}

/// The same part of each head of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadsView {
    /// The part of the first head.
    pub rows: View,
    /// Values from head to head.
    pub head_dim: u32,
    /// Values of the part.
    pub width: u32,
}

/// `out[h] = W[h] (part of head h)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProjectHeads {
    /// The input.
    pub from: HeadsView,
    /// Number of heads.
    pub heads: u32,
    /// The matrices of all heads, one after the other.
    pub weight: Operand,
    /// Element type.
    pub dtype: DType,
    /// Outputs of a head.
    pub outputs: u32,
    /// Rows to write, without gaps.
    pub out: View,
}

/// `out[h] = (part of first[h], part of second[h])`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinHeads {
    /// The first part.
    pub first: HeadsView,
    /// The second part.
    pub second: HeadsView,
    /// Number of heads.
    pub heads: u32,
    /// Rows to write, without gaps.
    pub out: View,
}

/// Attention of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attend {
    /// Query heads, without gaps.
    pub queries: View,
    /// Number of query heads.
    pub heads: u32,
    /// Values of a head.
    pub head_dim: u32,
    /// Keys and values to attend to.
    pub kv: Kv,
    /// Factor of scores, in units of log2.
    pub scale: f32,
    /// Most tokens that a row sees; 0 for all. Half of them lie after its own if it sees later ones.
    pub window: u32,
    /// A row sees the later tokens of its sequence in the step too.
    pub both_ways: bool,
    /// Cap of scores, in units of log2; 0 for none.
    pub cap: f32,
    /// Scores fall with the distance of the tokens (ALiBi).
    pub falls: bool,
    /// A sink for each query head.
    pub sinks: Option<Operand>,
    /// Index of the window among the program's windows.
    pub windows_at: usize,
    /// Output. `float` is also set, though not wanted, when some kernel cannot write the wanted form.
    pub out: Home,
    /// Form that readers want, exactly one.
    pub forms: Wanted,
    /// Heads that it attends with, if no other unit makes or reads them. Where each row is alone in its sequence, attention
    /// makes them itself.
    pub source: Option<Heads>,
}

impl Attend {
    /// Whether its window looks both ways.
    pub fn is_around(&self) -> bool {
        self.both_ways && self.window > 0
    }
}

/// `activation(gate x) * (up x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedProducts {
    /// The input x.
    pub from: Home,
    /// Activation of the gate.
    pub activation: Activation,
    /// The gate's matrix.
    pub gate: Product,
    /// The up matrix.
    pub up: Product,
    /// Rows of `[gate | up]`, for row counts without a fused kernel.
    pub both: Option<View>,
    /// Rows to write, in the wanted form.
    pub out: Home,
    /// Form that readers want, exactly one.
    pub forms: Wanted,
}

/// `activation(gate) * up`, or `activation(gate)` without `up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gate {
    /// Activation of the gate.
    pub activation: Activation,
    /// Input of the activation.
    pub gate: View,
    /// Factor, with the same stride as `gate`.
    pub up: Option<View>,
    /// Values of a row.
    pub cols: u32,
    /// Rows to write, in the wanted form.
    pub out: Home,
    /// Form that readers want, exactly one.
    pub forms: Wanted,
}

/// Chooses experts by their logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// `f32[rows][count]`.
    pub logits: View,
    /// Number of experts.
    pub count: u32,
    /// Makes chances of logits.
    pub gating: Gating,
    /// Added to the chances for the choice.
    pub bias: Option<Operand>,
    /// Runs of experts of which the best ones count.
    pub groups: Option<ExpertGroups>,
    /// Divides the weights by their sum.
    pub normalise: bool,
    /// Factor of the weights, applied last.
    pub scale: f32,
    /// Planes to write: the chosen experts and their weights.
    pub out: Choice,
    /// Numbers of the part's expert sets that use the choice.
    pub sets: Vec<usize>,
    /// The norm and the product that make the logits, if nothing else reads these. At few rows one launch computes all.
    pub router: Option<Router>,
}

/// The units that make the logits of a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Norm of the rows, to f32 for the product alone, and to forms for others.
    pub norm: Norm,
    /// The product of one matrix.
    pub product: Products,
}

/// The chosen experts' work, on pairs of a row and an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Number of the expert set in the part.
    pub set: usize,
    /// The chosen experts.
    pub choice: Choice,
    /// The input x.
    pub from: Home,
    /// Whether experts have gates. Else all that is said of a gate is said of the up, and the up is left out.
    pub has_gates: bool,
    /// Activation of the gate.
    pub activation: Activation,
    /// Biases of all experts' gates, ups and downs.
    pub biases: Option<[Operand; 3]>,
    /// Factors of gates, ups and downs: one for each expert.
    pub factors: [Option<Operand>; 3],
    /// Output that the results are added to.
    pub out: View,
    /// `activation(gate x) * (up x)` of each pair, in the form that down matrices want.
    pub gated: Home,
    /// `f32[pairs][gate | up]`, where one launch does not compute both and their gate.
    pub both: Option<View>,
    /// `f32[pairs][cols of out]`.
    pub results: PlaneId,
    /// Memory to sort pairs by expert; `None` if no step does.
    pub grouped: Option<Grouped>,
}

/// Pairs of a row and an expert, sorted by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// `u32[pairs]`: numbers of the pairs.
    pub members: PlaneId,
    /// `u32[pairs][4]`: tiles of `members`.
    pub tiles: PlaneId,
}

impl Experts {
    /// Whether gate and up are products of their own even where pairs are not sorted. The kernels that compute both with
    /// their gate know no factors, no biases, no clamps, and no experts without gates.
    pub fn is_apart(&self) -> bool {
        is_apart(self.has_gates, self.activation, &self.factors, self.biases.as_ref())
    }
}

/// See [`Experts::is_apart`].
pub fn is_apart<T>(
    has_gates: bool,
    activation: Activation,
    factors: &[Option<T>; 3],
    biases: Option<&[T; 3]>,
) -> bool {
    !has_gates || biases.is_some() || factors.iter().any(Option::is_some) || !of_products(activation)
}

/// Whether kernels that compute a gate's two products know its activation.
pub fn of_products(activation: Activation) -> bool {
    matches!(activation, Activation::Silu | Activation::Gelu)
}

/// Adds rows, or copies them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Add {
    /// Rows to read.
    pub from: View,
    /// Rows to write or to add to.
    pub out: View,
    /// Factor of `from`.
    pub scale: f32,
    /// Adds to `out` instead of overwriting it.
    pub keep: bool,
    /// Values of a row.
    pub cols: u32,
}

/// Caps rows in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cap {
    /// Read and written.
    pub rows: View,
    /// Must be above 0.
    pub cap: f32,
    /// Values of a row.
    pub cols: u32,
}

/// Multiplies rows by the sigmoid of one number each, in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Open {
    /// One number per row.
    pub gate: View,
    /// Read and written.
    pub rows: View,
    /// Values of a row.
    pub cols: u32,
}

/// All experts of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSet {
    /// The experts' tensors.
    pub range: ExpertRange,
    /// Type of the gate and up matrices, and type of the down matrices.
    pub dtypes: [DType; 2],
    /// Rows of a gate matrix.
    pub ffn: u32,
    /// Values of an input row.
    pub cols: u32,
    /// Values of a result row.
    pub out_cols: u32,
}

impl Work {
    /// Whether the unit may turn heads, and so reads the rotary tables.
    pub fn turns(&self) -> bool {
        matches!(self, Self::Heads(_) | Self::Attend(Attend { source: Some(_), .. }))
    }

    /// The planes that the unit reads or writes.
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
            Self::ProjectHeads(ProjectHeads { from, out, .. }) => {
                of(&[], &[Some(from.rows), Some(*out)], &[])
            }
            Self::JoinHeads(JoinHeads { first, second, out, .. }) => {
                of(&[], &[Some(first.rows), Some(second.rows), Some(*out)], &[])
            }
            Self::Attend(Attend { queries, out, source, .. }) => {
                of(&[*out], &[Some(*queries), source.map(|heads| heads.from)], &[])
            }
            Self::GatedProducts(gated) => of(&[gated.from, gated.out], &[gated.both], &[]),
            Self::Gate(gate) => of(&[gate.out], &[Some(gate.gate), gate.up], &[]),
            Self::Route(Route { logits, out, router, .. }) => {
                let of_router = |router: &Router| [router.norm.out, router.product.from];
                let homes = router.as_ref().map_or(Vec::new(), |router| of_router(router).to_vec());
                let rows = router.as_ref().map(|router| router.norm.from);
                of(&homes, &[Some(*logits), rows], &[out.chosen, out.weights])
            }
            Self::Experts(Experts { choice, from, out, gated, both, results, grouped, .. }) => {
                let mut more = vec![choice.chosen, choice.weights, *results];
                more.extend(grouped.iter().flat_map(|grouped| [grouped.members, grouped.tiles]));
                of(&[*from, *gated], &[Some(*out), *both], &more)
            }
            Self::Add(add) => of(&[], &[Some(add.from), Some(add.out)], &[]),
            Self::Cap(cap) => of(&[], &[Some(cap.rows)], &[]),
            Self::Open(open) => of(&[], &[Some(open.gate), Some(open.rows)], &[]),
            Self::Convolve(unit) => of(&[], &[Some(unit.from), Some(unit.out)], &[]),
            Self::SelectiveScan(SelectiveScan { from, steps, out, .. }) => {
                of(&[], &[Some(*from), Some(*steps), Some(*out)], &[])
            }
            Self::DeltaRule(DeltaRule { from, decay, amount, out, .. }) => {
                of(&[], &[Some(*from), Some(*decay), Some(*amount), Some(*out)], &[])
            }
            Self::Multiply(unit) => of(&[], &[Some(unit.rows)], &[]),
            Self::Rescale(unit) => of(&[], &[Some(unit.rows), unit.like.map(|(view, _)| view)], &[]),
            Self::Sparsify(unit) => of(&[], &[Some(unit.rows)], &[]),
            Self::MixStreams(unit) => of(&[], &[Some(unit.amounts), Some(unit.from), Some(unit.out)], &[]),
            Self::AddToStreams(unit) => of(&[], &[Some(unit.from), unit.amounts, Some(unit.out)], &[]),
        }
    }
}
