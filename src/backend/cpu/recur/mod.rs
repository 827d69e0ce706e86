//! Operations with recurrent states: short convolutions, the recurrence of Mamba 2, and the gated delta rule.
//!
//! Threads share the work by sequence, and by columns or heads. Rows of a sequence follow each other. Each row is computed by
//! the same sums in the same order, wherever its prompt is cut and whatever else is in the step.

mod rows;

use std::ops::Range;

use rows::{DeltaRow, ScanRow};

use super::bind::Place;
use super::compute::{Compute, append_values};
use super::model::{InFlight, OpenModel, Values};
use super::row_ops::activate;
use super::scratch::Plane;
use super::simd::Level;
use super::states::Change;
use crate::backend::{BackendError, Weights};
use crate::program::{Activation, DeltaHeads, Op, StateId, TensorId, ValueId};

/// Columns of a convolution that one thread computes: whole vectors, and a few KiB of state.
const CONVOLVED: usize = 256;

/// An operation with a recurrent state.
#[derive(Clone, Copy, Debug)]
pub enum Recur {
    /// See [`Op::Convolve`].
    Convolve {
        state: StateId,
        weight: TensorId,
        bias: Option<TensorId>,
        activation: Option<Activation>,
        from: Place,
        out: Place,
    },
    /// See [`Op::SelectiveScan`]; `small` are the bias of steps, the rates and the skips.
    Scan {
        state: StateId,
        heads: usize,
        groups: usize,
        from: Place,
        steps: Place,
        small: [TensorId; 3],
        out: Place,
    },
    /// See [`Op::DeltaRule`]; `small` are the bias of decays and the rates.
    Delta {
        state: StateId,
        heads: DeltaHeads,
        from: Place,
        eps: f32,
        decay: Place,
        amount: Place,
        small: [TensorId; 2],
        out: Place,
    },
}

impl Recur {
    /// The operation over places; `None` for one without a recurrent state.
    pub fn of(op: &Op, at: impl Fn(ValueId) -> Place) -> Option<Self> {
        Some(match *op {
            Op::Convolve { state, weight, bias, activation, from, out } => {
                Self::Convolve { state, weight, bias, activation, from: at(from), out: at(out) }
            }
            Op::SelectiveScan { state, heads, groups, from, steps, step_bias, rate, skip, out } => {
                Self::Scan {
                    state,
                    heads: heads as usize,
                    groups: groups as usize,
                    from: at(from),
                    steps: at(steps),
                    small: [step_bias, rate, skip],
                    out: at(out),
                }
            }
            Op::DeltaRule { state, heads, from, eps, decay, decay_bias, rate, amount, out } => Self::Delta {
                state,
                heads,
                from: at(from),
                eps,
                decay: at(decay),
                amount: at(amount),
                small: [decay_bias, rate],
                out: at(out),
            },
            _ => return None,
        })
    }

    fn state(&self) -> StateId {
        match *self {
            Self::Convolve { state, .. } | Self::Scan { state, .. } | Self::Delta { state, .. } => state,
        }
    }

    fn out(&self) -> Place {
        match *self {
            Self::Convolve { out, .. } | Self::Scan { out, .. } | Self::Delta { out, .. } => out,
        }
    }
}

/// The share of a sequence's rows that one thread computes: some columns, or a head.
struct Item<'a> {
    /// The sequence's rows in the step.
    rows: Range<usize>,
    /// Number of the part.
    part: usize,
    /// The whole state before the step, if there is one.
    before: Option<&'a [f32]>,
    /// The part of each row of the state.
    after: Vec<&'a mut [f32]>,
    /// The part of each row of the result.
    out: Vec<&'a mut [f32]>,
}

/// How sequences are cut into parts.
#[derive(Clone, Copy)]
struct Cut {
    parts: usize,
    /// Values of a row of the state, and those of a part.
    state: [usize; 2],
    /// Values of a part of a row of the result.
    out: usize,
}

/// Runs the operation over all rows of the step.
///
/// # Errors
/// [`BackendError::Internal`] if a weight is absent, or the places of states contradict each other.
pub fn run(
    compute: &mut Compute,
    model: &mut OpenModel,
    recur: &Recur,
    weights: &Weights<'_>,
) -> Result<(), BackendError> {
    let out = recur.out();
    let mut plane = std::mem::replace(&mut model.now.values.planes[out.plane], Plane::empty());
    let done = run_into(compute, model, recur, weights, &mut plane);
    model.now.values.planes[out.plane] = plane;
    done
}

fn run_into(
    compute: &mut Compute,
    model: &mut OpenModel,
    recur: &Recur,
    weights: &Weights<'_>,
    plane: &mut Plane,
) -> Result<(), BackendError> {
    let recurrence = Recurrence::of(recur, weights)?;
    let OpenModel { states, now: InFlight { step, values, .. }, .. } = model;
    let changes = states.changes(recur.state(), &step.recurrent)?;
    let each = changes.first().map_or(0, |(_, after)| after.len());
    let parallel = compute.is_parallel(step.rows() * each);
    let mut items = items(&step.runs, changes, plane, recur.out(), recurrence.cut());
    let (level, values) = (compute.level, &*values);
    if parallel {
        compute.pool.run_items(&mut items, |_, item| recurrence.compute(level, values, item));
    } else {
        items.iter_mut().for_each(|item| recurrence.compute(level, values, item));
    }
    Ok(())
}

/// An operation with its small weights.
enum Recurrence {
    Convolve(Kernel),
    Scan(Scan),
    Delta(Delta),
}

impl Recurrence {
    fn of(recur: &Recur, weights: &Weights<'_>) -> Result<Self, BackendError> {
        let small = |id: TensorId| {
            let mut values = Vec::new();
            append_values(&weights.tensor(id)?.tensor, &mut values).map(|()| values)
        };
        Ok(match *recur {
            Recur::Convolve { weight, bias, activation, from, .. } => {
                let (weight, bias) = (small(weight)?, bias.map(small).transpose()?.unwrap_or_default());
                let taps = weight.len() / from.width.max(1);
                Self::Convolve(Kernel { from, taps, weight, bias, activation })
            }
            Recur::Scan { heads, groups, from, steps, small: [bias, rate, skip], out, .. } => {
                Self::Scan(Scan {
                    heads,
                    groups,
                    dim: out.width / heads,
                    columns: (from.width - out.width) / (2 * groups),
                    from,
                    steps,
                    bias: small(bias)?,
                    rate: small(rate)?,
                    skip: small(skip)?,
                })
            }
            Recur::Delta { heads, from, eps, decay, amount, small: [bias, rate], .. } => {
                Self::Delta(Delta { heads, from, eps, decay, amount, bias: small(bias)?, rate: small(rate)? })
            }
        })
    }

    fn cut(&self) -> Cut {
        match self {
            Self::Convolve(Kernel { from, .. }) => {
                Cut { parts: from.width.div_ceil(CONVOLVED), state: [from.width, CONVOLVED], out: CONVOLVED }
            }
            Self::Scan(Scan { heads, dim, columns, .. }) => {
                Cut { parts: *heads, state: [heads * dim * columns, dim * columns], out: *dim }
            }
            Self::Delta(Delta { heads, .. }) => {
                let [parts, keys, out] = [heads.values, heads.key_dim, heads.value_dim].map(|n| n as usize);
                Cut { parts, state: [parts * keys * out, keys * out], out }
            }
        }
    }

    fn compute(&self, level: Level, values: &Values, item: &mut Item<'_>) {
        match self {
            Self::Convolve(kernel) => kernel.convolve(level, values, item),
            Self::Scan(scan) => scan.head(level, values, item),
            Self::Delta(delta) => delta.head(level, values, item),
        }
    }
}

/// The parts of all sequences. Runs of rows follow each other from the step's first row on.
fn items<'a>(
    runs: &[Range<usize>],
    changes: Vec<Change<'a>>,
    plane: &'a mut Plane,
    out: Place,
    cut: Cut,
) -> Vec<Item<'a>> {
    let cols = plane.cols().max(1);
    let mut results = plane.values_mut().chunks_exact_mut(cols).map(|row| &mut row[out.first..][..out.width]);
    let mut items: Vec<Item<'a>> = Vec::with_capacity(runs.len() * cut.parts);
    for (rows, (before, after)) in runs.iter().zip(changes) {
        let first = items.len();
        items.extend((0..cut.parts).map(|part| Item {
            rows: rows.clone(),
            part,
            before,
            after: Vec::new(),
            out: Vec::with_capacity(rows.len()),
        }));
        let [state_row, piece] = cut.state.map(|values| values.max(1));
        for row in after.chunks_exact_mut(state_row) {
            items[first..]
                .iter_mut()
                .zip(row.chunks_mut(piece))
                .for_each(|(item, piece)| item.after.push(piece));
        }
        for row in results.by_ref().take(rows.len()) {
            let pieces = row.chunks_mut(cut.out.max(1));
            items[first..].iter_mut().zip(pieces).for_each(|(item, piece)| item.out.push(piece));
        }
    }
    items
}

/// A head's state, as it is before its first row in the step.
fn begin<'a>(before: Option<&[f32]>, after: &'a mut [&mut [f32]], first: usize) -> &'a mut [f32] {
    let Some(state) = after.first_mut() else { return &mut [] };
    match before {
        Some(before) => state.copy_from_slice(&before[first..][..state.len()]),
        None => state.fill(0.0),
    }
    state
}

/// `ln(1 + e^x)`, which is x in single precision beyond 20.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// A convolution.
struct Kernel {
    from: Place,
    taps: usize,
    /// `[width][taps]`.
    weight: Vec<f32>,
    /// `[width]`, or empty.
    bias: Vec<f32>,
    activation: Option<Activation>,
}

impl Kernel {
    /// Computes some columns.
    fn convolve(&self, level: Level, values: &Values, item: &mut Item<'_>) {
        let Item { rows, part, before, after, out } = item;
        let Some(width) = out.first().map(|out| out.len()) else { return };
        let (first, back) = (*part * CONVOLVED, self.taps - 1);
        let none = vec![0.0; width];
        // The input of row `at - back` of the sequence's rows in the step. The state has those before row 0.
        let input = |at: usize| match (at.checked_sub(back), *before) {
            (Some(row), _) => &values.row(self.from, rows.start + row)[first..][..width],
            (None, Some(before)) => &before[at * self.from.width + first..][..width],
            (None, None) => &none,
        };
        let of = &self.weight[first * self.taps..][..width * self.taps];
        let tap = |tap: usize| of.iter().skip(tap).step_by(self.taps).copied();
        let weight: Vec<f32> = (0..self.taps).flat_map(tap).collect();
        let bias = self.bias.get(first..first + width).unwrap_or(&none);
        let (ones, mut sums) = (vec![1.0; width], vec![0.0; width]);
        let mut inputs = Vec::with_capacity(self.taps);
        for (row, out) in out.iter_mut().enumerate() {
            inputs.clear();
            inputs.extend((row..row + self.taps).map(input));
            match self.activation {
                None => rows::convolve(level, &weight, bias, &inputs, out),
                Some(activation) => {
                    rows::convolve(level, &weight, bias, &inputs, &mut sums);
                    activate(level, activation, &sums, &ones, out);
                }
            }
        }
        for (at, after) in after.iter_mut().enumerate() {
            after.copy_from_slice(input(rows.len() + at));
        }
    }
}

/// The recurrence of Mamba 2.
struct Scan {
    heads: usize,
    groups: usize,
    /// Values of a head.
    dim: usize,
    columns: usize,
    from: Place,
    steps: Place,
    bias: Vec<f32>,
    rate: Vec<f32>,
    skip: Vec<f32>,
}

impl Scan {
    fn head(&self, level: Level, values: &Values, item: &mut Item<'_>) {
        let Item { rows, part: head, before, after, out } = item;
        let (head, Self { heads, groups, dim, columns, .. }) = (*head, self);
        let group = head / (heads / groups);
        let state = begin(*before, after, head * dim * columns);
        for (row, out) in rows.clone().zip(out) {
            let all = values.row(self.from, row);
            let [b, c] = [group, groups + group].map(|at| &all[heads * dim + at * columns..][..*columns]);
            let step = softplus(values.row(self.steps, row)[head] + self.bias[head]);
            let row = ScanRow { step, decay: (step * self.rate[head]).exp(), skip: self.skip[head], b, c };
            rows::scan(level, state, &row, &all[head * dim..][..*dim], out);
        }
    }
}

/// The gated delta rule.
struct Delta {
    heads: DeltaHeads,
    from: Place,
    eps: f32,
    decay: Place,
    amount: Place,
    bias: Vec<f32>,
    rate: Vec<f32>,
}

impl Delta {
    fn head(&self, level: Level, values: &Values, item: &mut Item<'_>) {
        let Item { rows, part: head, before, after, out } = item;
        let (head, heads) = (*head, &self.heads);
        let [keys, dim, width] = [heads.keys, heads.key_dim, heads.value_dim].map(|n| n as usize);
        let key = heads.key_of(head as u32) as usize; // below the number of heads
        let state = begin(*before, after, head * dim * width);
        for (row, out) in rows.clone().zip(out) {
            let all = values.row(self.from, row);
            let decay = softplus(values.row(self.decay, row)[head] + self.bias[head]);
            let amount = 1.0 / (1.0 + (-values.row(self.amount, row)[head]).exp());
            let [q, k] = [key, keys + key].map(|at| &all[at * dim..][..dim]);
            let row = DeltaRow { q, k, eps: self.eps, decay: (self.rate[head] * decay).exp(), amount };
            rows::delta(level, state, &row, &all[2 * keys * dim + head * width..][..width], out);
        }
    }
}
