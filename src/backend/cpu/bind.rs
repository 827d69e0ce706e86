//! Binds a program: decides which stretches of operations form one unit, and which plane holds each value.
//!
//! A unit of several operations computes the same bits as the operations one by one, with fewer planes and fewer
//! phases of the pool. Four patterns form units:
//!
//! - projections of one input, side by side
//! - a norm, and the choice of rows before it, that only such projections read
//! - a gate over two projections
//! - runs of operations that work row by row

mod places;

use std::collections::HashMap;

use places::{Places, note_values, place};

use super::activations::{FINE_ABOVE, FINE_ALL};
use super::experts::{ChoiceSpec, ExpertSet};
use super::recur::Recur;
use crate::program::{
    Activation, HeadPart, NormKind, Op, Program, RopeId, Rows, State, StateId, TableRow, TensorId, ValueId,
    alibi_slope,
};

/// The columns of a plane that hold a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Plane number.
    pub plane: usize,
    /// First column.
    pub first: usize,
    /// Number of columns.
    pub width: usize,
}

/// A plane to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlaneSpec {
    /// Number of columns.
    pub cols: usize,
    /// The rows of a step that it has.
    pub rows: Rows,
}

/// A norm of whole rows, or of groups of neighbouring values.
#[derive(Clone, Copy, Debug)]
pub struct NormSpec {
    /// Kind of norm.
    pub kind: NormKind,
    /// Added under the square root.
    pub eps: f32,
    /// Shape `[group]`, or `[group, groups]`.
    pub weight: TensorId,
    /// As the weight.
    pub bias: Option<TensorId>,
}

/// Activation rows that are the input of products.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Place of the value that is read.
    pub from: Place,
    /// Whether only the rows that ask for logits are taken, out of all rows.
    pub take: bool,
    /// Norm applied while reading.
    pub norm: Option<NormSpec>,
    /// The rows of a step.
    pub rows: Rows,
    /// Threshold above which groups have fine codes: see [`FINE_ABOVE`].
    pub fine_above: f32,
}

/// A matrix and its bias.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Shape `[outputs, inputs]`.
    pub weight: TensorId,
    /// Shape `[outputs]`.
    pub bias: Option<TensorId>,
}

/// An operation that works row by row.
#[derive(Clone, Copy, Debug)]
pub enum RowOp {
    /// See [`Op::Norm`].
    Norm { norm: NormSpec, from: Place, out: Place, add: bool },
    /// See [`Op::Rope`].
    Rope { rope: RopeId, head_dim: usize, value: Place },
    /// See [`Op::JoinHeads`].
    Join { parts: [(Place, HeadPart); 2], out: Place },
    /// See [`Op::Gate`].
    Gate { activation: Activation, gate: Place, up: Place, out: Place },
    /// See [`Op::Activate`].
    Activate { activation: Activation, from: Place, out: Place },
    /// See [`Op::Add`].
    Add { from: Place, scale: f32, out: Place },
    /// See [`Op::Cap`].
    Cap { cap: f32, value: Place },
    /// See [`Op::Open`].
    Open { gate: Place, value: Place },
    /// See [`Op::Scale`].
    Scale { by: f32, value: Place },
    /// See [`Op::Slice`]; `from` has only the slice's columns.
    Slice { from: Place, out: Place },
    /// See [`Op::Multiply`].
    Multiply { weight: TensorId, value: Place },
    /// See [`Op::Rescale`].
    Rescale { group: usize, eps: f32, like: Option<Place>, value: Place },
    /// See [`Op::Sparsify`].
    Sparsify { deviations: f32, value: Place },
    /// See [`Op::MixStreams`].
    MixStreams { amounts: Place, from: Place, out: Place },
    /// See [`Op::AddToStreams`].
    AddToStreams { from: Place, amounts: Option<Place>, first: usize, out: Place },
}

/// A stretch of operations that runs as one.
#[derive(Clone, Debug)]
pub enum Unit {
    /// See [`Op::Embed`].
    Embed { table: TensorId, scale: f32, out: Place },
    /// See [`Op::AddRow`].
    AddRow { table: TensorId, row: TableRow, out: Place },
    /// See [`Op::Take`].
    Take { from: Place, out: Place },
    /// Projections of one input. Their outputs lie side by side in a plane of their own, or a single output is added.
    Product { input: Input, parts: Vec<Matrix>, out: Place, add: bool },
    /// `activation(gate) * up` of two projections of one input.
    Gated { input: Input, gate: Matrix, up: Matrix, activation: Activation, out: Place },
    /// See [`Op::ProjectHeads`]. The output has a plane of its own.
    Heads { weight: TensorId, from: Place, part: HeadPart, out: Place, rows: Rows },
    /// Row-by-row operations, one after the other.
    RowOps { ops: Vec<RowOp>, rows: Rows },
    /// See [`Op::Store`].
    Store { state: StateId, keys: Place, values: Place },
    /// See [`Op::Attend`].
    Attend {
        state: StateId,
        group: usize,
        queries: Place,
        scale: f32,
        window: usize,
        both_ways: bool,
        cap: Option<f32>,
        slopes: Vec<f32>,
        sinks: Option<TensorId>,
        out: Place,
    },
    /// See [`Op::Route`]; `choice` is the number of the choice.
    Route { logits: Place, bias: Option<TensorId>, choice: usize },
    /// See [`Op::Experts`].
    Experts(ExpertSet),
    /// An operation with a recurrent state.
    Recur(Recur),
}

/// A program as units over planes.
#[derive(Debug, Default)]
pub struct Bound {
    /// Units by part.
    pub parts: Vec<Vec<Unit>>,
    /// Planes by number.
    pub planes: Vec<PlaneSpec>,
    /// Choices by number.
    pub choices: Vec<ChoiceSpec>,
    /// Distinct numbers of query heads that share a KV head.
    pub groups: Vec<usize>,
    /// Place by value; `None` for a value that exists only within a unit.
    places: Vec<Option<Place>>,
    /// Place of the logits.
    pub logits: Option<Place>,
}

/// Operations that form one unit.
enum Stretch {
    /// `count` projections, with `folded` operations before them folded in.
    Product { folded: usize, count: usize },
    /// Two projections and their gate.
    Gated { folded: usize },
    /// Row-by-row operations.
    RowOps { count: usize },
    /// One operation.
    Single,
}

impl Stretch {
    fn len(&self) -> usize {
        match self {
            Self::Product { folded, count } => folded + count,
            Self::Gated { folded } => folded + 3,
            Self::RowOps { count } => *count,
            Self::Single => 1,
        }
    }
}

/// Facts about the values, collected before units are made.
struct Outline<'a> {
    program: &'a Program,
    /// Operations that read each value.
    readers: Vec<u32>,
    /// Operations that write each value.
    writers: Vec<u32>,
    /// Values that a projection writes before any other operation: they may lie side by side.
    projected: Vec<bool>,
    /// Values that decide which experts or tokens are chosen: small errors matter.
    precise: Vec<bool>,
    /// Whether stretches of several operations become one unit.
    fused: bool,
}

impl<'a> Outline<'a> {
    fn of(program: &'a Program, fused: bool) -> Self {
        let count = program.values().len();
        let (mut readers, mut writers) = (vec![0; count], vec![0; count]);
        let (mut projected, mut precise) = (vec![false; count], vec![false; count]);
        if let Some(logits) = program.logits() {
            precise[logits.0 as usize] = true;
        }
        for op in program.parts().iter().flat_map(|part| &part.ops) {
            for (value, access) in op.values() {
                let value = value.0 as usize;
                projected[value] |=
                    writers[value] == 0 && matches!(op, Op::Project { add: false, .. }) && access.writes();
                readers[value] += u32::from(access.reads());
                writers[value] += u32::from(access.writes());
            }
            if let Op::Route { logits, .. } = op {
                precise[logits.0 as usize] = true;
            }
        }
        Self { program, readers, writers, projected, precise, fused }
    }

    fn width(&self, value: ValueId) -> usize {
        self.program.values()[value.0 as usize].width as usize
    }

    fn rows(&self, value: ValueId) -> Rows {
        self.program.values()[value.0 as usize].rows
    }

    /// Whether a value has exactly this many readers and one writer, so that no plane need keep it.
    fn passes(&self, value: ValueId, readers: usize) -> bool {
        self.readers[value.0 as usize] as usize == readers && self.writers[value.0 as usize] == 1
    }

    fn stretch(&self, ops: &[Op]) -> Stretch {
        if !self.fused {
            return Stretch::Single;
        }
        let folded = self.folded(ops);
        if let Some(Op::Project { from, add, .. }) = ops.get(folded) {
            let count = self.projections(&ops[folded..], *from, *add);
            return match self.is_gate(&ops[folded..], count) {
                true => Stretch::Gated { folded },
                false => Stretch::Product { folded, count },
            };
        }
        let is_row_op = |at: &usize| {
            self.folded(&ops[*at..]) == 0
                && row_value(&ops[*at]).is_some_and(|value| {
                    Some(self.rows(value)) == row_value(&ops[0]).map(|first| self.rows(first))
                })
        };
        match (0..ops.len()).take_while(is_row_op).count() {
            0 | 1 => Stretch::Single,
            count => Stretch::RowOps { count },
        }
    }

    /// Number of operations that can be folded into the projections that follow. These are a norm that only they read,
    /// and a choice of rows that only the norm reads.
    fn folded(&self, ops: &[Op]) -> usize {
        let taken = usize::from(matches!(ops[0], Op::Take { out, .. } if self.passes(out, 1)));
        let Some(&Op::Norm { weight, from, out, add: false, .. }) = ops.get(taken) else { return 0 };
        let group = self.program.tensor(weight).map_or(0, |tensor| tensor.lazy.shape().cols() as usize);
        let of_taken = taken == 0 || matches!(ops[0], Op::Take { out, .. } if out == from);
        let Some(&Op::Project { from: read, add, .. }) = ops.get(taken + 1) else { return 0 };
        let count = self.projections(&ops[taken + 1..], read, add);
        let whole = from != out && read == out && group == self.width(out);
        if of_taken && whole && self.passes(out, count) { taken + 1 } else { 0 }
    }

    /// How many adjacent projections have the same input and may write side by side.
    fn projections(&self, ops: &[Op], input: ValueId, add: bool) -> usize {
        let together = |op: &&Op| {
            matches!(op, Op::Project { from, out, add: false, .. }
                if *from == input && self.projected[out.0 as usize])
        };
        if add { 1 } else { ops.iter().take_while(together).count().max(1) }
    }

    fn is_gate(&self, ops: &[Op], count: usize) -> bool {
        let [Op::Project { out: a, .. }, Op::Project { out: b, .. }, Op::Gate { gate, up, .. }, ..] = ops
        else {
            return false;
        };
        count == 2 && (a, b) == (gate, up) && self.passes(*a, 1) && self.passes(*b, 1)
    }
}

/// The value that determines the rows of a row-by-row operation; `None` for other operations.
fn row_value(op: &Op) -> Option<ValueId> {
    match op {
        Op::Norm { out, .. }
        | Op::JoinHeads { out, .. }
        | Op::Gate { out, .. }
        | Op::Activate { out, .. }
        | Op::Slice { out, .. }
        | Op::MixStreams { out, .. }
        | Op::AddToStreams { out, .. }
        | Op::Add { out, .. } => Some(*out),
        Op::Rope { value, .. }
        | Op::Cap { value, .. }
        | Op::Open { value, .. }
        | Op::Multiply { value, .. }
        | Op::Rescale { value, .. }
        | Op::Sparsify { value, .. }
        | Op::Scale { value, .. } => Some(*value),
        _ => None,
    }
}

/// Bytes of a row of a step: its planes, those of its experts, and copies of the widest one as a product's input. These copies take at
/// most 8 bytes a value.
pub fn row_bytes(program: &Program) -> u64 {
    let bound = Bound::of(program, true);
    let planes = bound.planes.iter().filter(|plane| plane.rows == Rows::All);
    let (all, widest) = planes.fold((0u64, 0), |(all, widest), plane| {
        let cols = plane.cols as u64;
        (all.saturating_add(cols), cols.max(widest))
    });
    let of_experts =
        bound.choices.iter().map(|spec| (spec.used as u64).saturating_mul((spec.ffn + spec.hidden) as u64));
    let all = of_experts.fold(all, u64::saturating_add);
    all.saturating_mul(4).saturating_add(widest.saturating_mul(8))
}

impl Bound {
    /// Binds a program. Without `fused`, each operation is its own unit: the plainest way, and the reference for
    /// fused units.
    pub fn of(program: &Program, fused: bool) -> Self {
        let outline = Outline::of(program, fused);
        let mut stretches: Vec<(usize, &[Op], Stretch)> = Vec::new();
        for (part, content) in program.parts().iter().enumerate() {
            let mut rest = content.ops.as_slice();
            while !rest.is_empty() {
                let stretch = outline.stretch(rest);
                let (ops, later) = rest.split_at(stretch.len());
                stretches.push((part, ops, stretch));
                rest = later;
            }
        }
        let mut places = Places::new(program.values().len());
        for (at, (_, ops, stretch)) in stretches.iter().enumerate() {
            note_values(&mut places, &outline, ops, stretch, at);
        }
        let mut bound = Self { planes: places.planes(), ..Self::default() };
        bound.parts.resize_with(program.parts().len(), Vec::new);
        let mut maker =
            Maker { outline: &outline, places: &places, bound: &mut bound, choices: HashMap::new() };
        maker.number_choices();
        for (part, ops, stretch) in &stretches {
            let unit = maker.unit(ops, stretch);
            maker.bound.parts[*part].extend(unit);
        }
        let of = |value: u32| places.of[value as usize].map(|_| place(&outline, &places, ValueId(value)));
        bound.places = (0..program.values().len() as u32).map(of).collect();
        bound.logits = program.logits().and_then(|logits| bound.place(logits));
        bound
    }

    /// Place of a value; `None` if it exists only within a unit.
    pub fn place(&self, value: ValueId) -> Option<Place> {
        self.places.get(value.0 as usize).copied().flatten()
    }
}

struct Maker<'a, 'b> {
    outline: &'a Outline<'a>,
    places: &'a Places,
    bound: &'b mut Bound,
    choices: HashMap<ValueId, usize>,
}

impl Maker<'_, '_> {
    fn place(&self, value: ValueId) -> Place {
        place(self.outline, self.places, value)
    }

    fn unit(&mut self, ops: &[Op], stretch: &Stretch) -> Option<Unit> {
        match stretch {
            Stretch::Product { folded, .. } => self.product(ops, *folded),
            Stretch::Gated { folded } => self.gated(ops, *folded),
            Stretch::RowOps { .. } => self.row_ops(ops),
            Stretch::Single => self.single(ops.first()?),
        }
    }

    fn input(&self, ops: &[Op], folded: usize) -> Option<Input> {
        let &Op::Project { from, out, .. } = ops.get(folded)? else { return None };
        let read = ops.first()?.values().next()?.0;
        let norm = ops[..folded].iter().find_map(|op| Some(norm_of(op)?.0));
        Some(Input {
            from: self.place(if folded == 0 { from } else { read }),
            take: matches!(ops.first(), Some(Op::Take { .. })),
            norm,
            rows: self.outline.rows(out),
            fine_above: if self.outline.precise[out.0 as usize] { FINE_ALL } else { FINE_ABOVE },
        })
    }

    fn product(&self, ops: &[Op], folded: usize) -> Option<Unit> {
        let input = self.input(ops, folded)?;
        let (mut parts, mut whole, mut added) = (Vec::new(), None::<Place>, false);
        for op in &ops[folded..] {
            let &Op::Project { weight, bias, out, add, .. } = op else { return None };
            parts.push(Matrix { weight, bias });
            added = add;
            let out = self.place(out);
            match &mut whole {
                None => whole = Some(out),
                Some(whole) => whole.width += out.width,
            }
        }
        Some(Unit::Product { input, parts, out: whole?, add: added })
    }

    fn gated(&self, ops: &[Op], folded: usize) -> Option<Unit> {
        let input = self.input(ops, folded)?;
        let [
            Op::Project { weight, bias, .. },
            Op::Project { weight: up, bias: up_bias, .. },
            Op::Gate { activation, out, .. },
        ] = &ops[folded..]
        else {
            return None;
        };
        Some(Unit::Gated {
            input,
            gate: Matrix { weight: *weight, bias: *bias },
            up: Matrix { weight: *up, bias: *up_bias },
            activation: *activation,
            out: self.place(*out),
        })
    }

    fn row_ops(&self, ops: &[Op]) -> Option<Unit> {
        let rows = self.outline.rows(row_value(ops.first()?)?);
        let ops = ops.iter().map(|op| self.row_op(op)).collect::<Option<Vec<_>>>()?;
        Some(Unit::RowOps { ops, rows })
    }

    fn row_op(&self, op: &Op) -> Option<RowOp> {
        let at = |value| self.place(value);
        Some(match *op {
            Op::Norm { .. } => {
                let (norm, from, out, add) = norm_of(op)?;
                RowOp::Norm { norm, from: at(from), out: at(out), add }
            }
            Op::Rope { rope, head_dim, value } => {
                RowOp::Rope { rope, head_dim: head_dim as usize, value: at(value) }
            }
            Op::JoinHeads { first, first_part, second, second_part, out } => {
                let parts = [(at(first), first_part), (at(second), second_part)];
                RowOp::Join { parts, out: at(out) }
            }
            Op::Gate { activation, gate, up, out } => {
                RowOp::Gate { activation, gate: at(gate), up: at(up), out: at(out) }
            }
            Op::Activate { activation, from, out } => {
                RowOp::Activate { activation, from: at(from), out: at(out) }
            }
            Op::Add { from, scale, out } => RowOp::Add { from: at(from), scale, out: at(out) },
            Op::Cap { cap, value } => RowOp::Cap { cap, value: at(value) },
            Op::Open { gate, value } => RowOp::Open { gate: at(gate), value: at(value) },
            Op::Scale { by, value } => RowOp::Scale { by, value: at(value) },
            Op::Slice { from, first, out } => {
                let (from, out) = (at(from), at(out));
                let from = Place { first: from.first + first as usize, width: out.width, ..from };
                RowOp::Slice { from, out }
            }
            Op::Multiply { weight, value } => RowOp::Multiply { weight, value: at(value) },
            Op::Rescale { group, eps, like, value } => {
                RowOp::Rescale { group: group as usize, eps, like: like.map(at), value: at(value) }
            }
            Op::Sparsify { deviations, value } => RowOp::Sparsify { deviations, value: at(value) },
            Op::MixStreams { amounts, from, out } => {
                RowOp::MixStreams { amounts: at(amounts), from: at(from), out: at(out) }
            }
            Op::AddToStreams { from, amounts, first, out } => {
                let (amounts, first) = (amounts.map(at), first as usize);
                RowOp::AddToStreams { from: at(from), amounts, first, out: at(out) }
            }
            _ => return None,
        })
    }

    fn single(&mut self, op: &Op) -> Option<Unit> {
        let one = std::slice::from_ref(op);
        Some(match *op {
            Op::Embed { table, scale, out } => Unit::Embed { table, scale, out: self.place(out) },
            Op::AddRow { table, row, out } => Unit::AddRow { table, row, out: self.place(out) },
            Op::Take { from, out } => Unit::Take { from: self.place(from), out: self.place(out) },
            Op::Project { .. } => self.product(one, 0)?,
            Op::ProjectHeads { weight, from, part, out } => {
                let rows = self.outline.rows(out);
                Unit::Heads { weight, from: self.place(from), part, out: self.place(out), rows }
            }
            Op::Store { state, keys, values } => {
                Unit::Store { state, keys: self.place(keys), values: self.place(values) }
            }
            Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, out } => {
                let group = self.group(state, queries);
                let slopes = if alibi { self.slopes(state, group) } else { Vec::new() };
                let (queries, out) = (self.place(queries), self.place(out));
                let window = window.map_or(usize::MAX, |window| window as usize);
                Unit::Attend { state, group, queries, scale, window, both_ways, cap, slopes, sinks, out }
            }
            Op::Route { logits, bias, out, .. } => {
                Unit::Route { logits: self.place(logits), bias, choice: *self.choices.get(&out)? }
            }
            Op::Experts { experts, factors, biases, choice, activation, from, out } => {
                let (from, out, choice) = (self.place(from), self.place(out), *self.choices.get(&choice)?);
                Unit::Experts(ExpertSet { experts, factors, biases, choice, activation, from, out })
            }
            _ => match Recur::of(op, |value| self.place(value)) {
                Some(recur) => Unit::Recur(recur),
                None => self.row_ops(one)?,
            },
        })
    }

    /// Numbers the choices. Equal choices of different parts share a number, because a choice is used only within its
    /// part.
    fn number_choices(&mut self) {
        for part in self.outline.program.parts() {
            let mut taken = Vec::new();
            for op in &part.ops {
                let &Op::Route { gating, groups, normalise, scale, out, .. } = op else { continue };
                let Some((ffn, hidden)) = part.ops.iter().find_map(|op| self.expert_widths(op, out)) else {
                    continue;
                };
                let used = self.outline.width(out);
                let spec = ChoiceSpec { used, gating, groups, normalise, scale, ffn, hidden };
                let choices = &mut self.bound.choices;
                let same =
                    (0..choices.len()).find(|number| choices[*number] == spec && !taken.contains(number));
                let number = same.unwrap_or_else(|| {
                    choices.push(spec);
                    choices.len() - 1
                });
                taken.push(number);
                self.choices.insert(out, number);
            }
        }
    }

    /// Widths of the hidden layer and of the result of the experts that `choice` belongs to.
    fn expert_widths(&self, op: &Op, choice: ValueId) -> Option<(usize, usize)> {
        let Op::Experts { experts, out, .. } = op else { return None };
        let [gate, ..] = experts.tensors(0);
        let ffn = self.outline.program.tensor(gate)?.lazy.shape().rows() as usize;
        op.reads(choice).then_some((ffn, self.outline.width(*out)))
    }

    /// The slope of each query head.
    fn slopes(&self, state: StateId, group: usize) -> Vec<f32> {
        let heads = match self.outline.program.states().get(state.0 as usize) {
            Some(&State::Kv { heads, .. }) => heads.saturating_mul(group as u32),
            Some(State::Recurrent { .. }) | None => 0, // programs are checked
        };
        (0..heads).map(|head| alibi_slope(head, heads)).collect()
    }

    fn group(&mut self, state: StateId, queries: ValueId) -> usize {
        let (heads, head_dim) = match self.outline.program.states().get(state.0 as usize) {
            Some(&State::Kv { heads, head_dim }) => (heads, head_dim),
            Some(State::Recurrent { .. }) | None => (1, 1), // programs are checked
        };
        let group = self.outline.width(queries) / (heads as usize * head_dim as usize).max(1);
        if !self.bound.groups.contains(&group) {
            self.bound.groups.push(group);
        }
        group
    }
}

/// A norm's spec, its input, its output, and whether its result is added.
fn norm_of(op: &Op) -> Option<(NormSpec, ValueId, ValueId, bool)> {
    let &Op::Norm { kind, eps, weight, bias, from, out, add } = op else { return None };
    Some((NormSpec { kind, eps, weight, bias }, from, out, add))
}
