//! Row-by-row operations: all run over a row, one after the other, while it is in the cache.

mod streams;

use std::ops::Range;

use super::bind::{Place, RowOp};
use super::compute::{Compute, append_values};
use super::model::{InFlight, OpenModel};
use super::norm;
use super::rope::RopeTable;
use super::run::{NormWeights, angles};
use super::simd::Level;
use crate::backend::{BackendError, Weights};
use crate::program::{Activation, RopeLayout, Rows};

/// One row of each plane that the operations use, and the planes' numbers.
struct Row<'a, 'b> {
    slices: &'b mut [&'a mut [f32]],
    planes: &'b [usize],
}

/// Inputs of an operation besides its row.
enum Beside<'a> {
    Norm(NormWeights),
    Rope(&'a RopeTable, RopeLayout),
    /// Where a vector lies among the small weights.
    Vector(Range<usize>),
    Nothing,
}

/// Runs `ops` over all rows of the step, or over the rows that ask for logits.
///
/// # Errors
/// [`BackendError::Internal`] if a weight is absent.
pub fn run(
    compute: &mut Compute,
    model: &mut OpenModel,
    ops: &[RowOp],
    rows: Rows,
    weights: &Weights<'_>,
) -> Result<(), BackendError> {
    for op in ops {
        if let RowOp::Rope { rope, .. } = op {
            angles(model, *rope)?;
        }
    }
    let OpenModel { program, now: InFlight { values, ropes, step, .. }, .. } = model;
    let vectors = &mut values.vectors;
    vectors.clear();
    let mut beside = Vec::with_capacity(ops.len());
    for op in ops {
        beside.push(match op {
            RowOp::Norm { norm, .. } => Beside::Norm(NormWeights::append(norm, weights, vectors)?),
            RowOp::Rope { rope, .. } => match &ropes[rope.0 as usize] {
                Some(table) => Beside::Rope(table, program.ropes()[rope.0 as usize].spec.layout),
                None => return Err(BackendError::Internal("the rotary angles were not computed".into())),
            },
            RowOp::Multiply { weight, .. } => {
                let first = vectors.len();
                append_values(&weights.tensor(*weight)?.tensor, vectors)?;
                Beside::Vector(first..vectors.len())
            }
            _ => Beside::Nothing,
        });
    }
    let mut planes: Vec<usize> = ops.iter().flat_map(places).map(|place| place.plane).collect();
    planes.sort_unstable();
    planes.dedup();
    let count = step.rows_of(rows);
    let width: usize = ops.iter().flat_map(places).map(|place| place.width).sum();
    let used = values.planes.iter_mut().enumerate().filter(|(number, _)| planes.contains(number));
    let mut sources: Vec<_> = used
        .map(|(_, plane)| {
            let cols = plane.cols();
            plane.values_mut().chunks_exact_mut(cols)
        })
        .collect();
    let mut slices = Vec::with_capacity(count * planes.len());
    for _ in 0..count {
        slices.extend(sources.iter_mut().filter_map(Iterator::next));
    }
    let (level, vectors) = (compute.level, values.vectors.as_slice());
    let work = |number: usize, row: &mut Row<'_, '_>| {
        let mut copy = Vec::new();
        for (op, beside) in ops.iter().zip(&beside) {
            run_op(level, op, beside, vectors, number, row, &mut copy);
        }
    };
    let chunks = slices.chunks_exact_mut(planes.len().max(1));
    let mut rows: Vec<Row<'_, '_>> = chunks.map(|slices| Row { slices, planes: &planes }).collect();
    if compute.is_parallel(count * width) {
        compute.pool.run_items(&mut rows, work);
    } else {
        rows.iter_mut().enumerate().for_each(|(number, row)| work(number, row));
    }
    Ok(())
}

/// Places that an operation reads and writes.
fn places(op: &RowOp) -> impl Iterator<Item = Place> + use<> {
    let all = match *op {
        RowOp::Norm { from, out, .. }
        | RowOp::Activate { from, out, .. }
        | RowOp::Add { from, out, .. }
        | RowOp::Slice { from, out } => [Some(from), Some(out), None],
        RowOp::Rope { value, .. }
        | RowOp::Cap { value, .. }
        | RowOp::Scale { value, .. }
        | RowOp::Multiply { value, .. }
        | RowOp::Sparsify { value, .. } => [Some(value), None, None],
        RowOp::Rescale { like, value, .. } => [like, Some(value), None],
        RowOp::MixStreams { amounts, from, out } => [Some(amounts), Some(from), Some(out)],
        RowOp::AddToStreams { from, amounts, out, .. } => [Some(from), amounts, Some(out)],
        RowOp::Open { gate, value } => [Some(gate), Some(value), None],
        RowOp::Join { parts: [(first, _), (second, _)], out } => [Some(first), Some(second), Some(out)],
        RowOp::Gate { gate, up, out, .. } => [Some(gate), Some(up), Some(out)],
    };
    all.into_iter().flatten()
}

impl Row<'_, '_> {
    fn value(&mut self, place: Place) -> &mut [f32] {
        let slice = self.planes.iter().position(|plane| *plane == place.plane).unwrap_or_default();
        &mut self.slices[slice][place.first..][..place.width]
    }
}

/// Runs one operation over row `number`. `copy` holds its input, so that the input may be overwritten.
fn run_op(
    level: Level,
    op: &RowOp,
    beside: &Beside<'_>,
    vectors: &[f32],
    number: usize,
    row: &mut Row<'_, '_>,
    copy: &mut Vec<f32>,
) {
    copy.clear();
    match (op, beside) {
        (RowOp::Norm { from, out, add, .. }, Beside::Norm(norm)) => {
            copy.extend_from_slice(row.value(*from));
            let group = norm.group().max(1);
            let out = row.value(*out);
            if !add {
                let groups = copy.chunks_exact(group).zip(out.chunks_exact_mut(group)).enumerate();
                return groups
                    .for_each(|(number, (from, out))| norm.apply(level, vectors, number, from, out));
            }
            let mut normed = vec![0.0; group];
            let groups = copy.chunks_exact(group).zip(out.chunks_exact_mut(group));
            for (number, (from, out)) in groups.enumerate() {
                norm.apply(level, vectors, number, from, &mut normed);
                out.iter_mut().zip(&normed).for_each(|(out, x)| *out += x);
            }
        }
        (RowOp::Rope { head_dim, value, .. }, Beside::Rope(table, layout)) => {
            table.rotate(*layout, number, row.value(*value), *head_dim);
        }
        (RowOp::Join { parts, out }, _) => {
            let joined = parts.iter().map(|(_, part)| part.width as usize).sum();
            let mut at = 0;
            for (from, part) in parts {
                let [head_dim, first, width] = [part.head_dim, part.first, part.width].map(|n| n as usize);
                copy.clear();
                copy.extend_from_slice(row.value(*from));
                let heads = copy.chunks_exact(head_dim).zip(row.value(*out).chunks_exact_mut(joined));
                heads.for_each(|(from, out)| out[at..][..width].copy_from_slice(&from[first..][..width]));
                at += width;
            }
        }
        (RowOp::Gate { activation, gate, up, out }, _) => {
            copy.extend_from_slice(row.value(*gate));
            copy.extend_from_slice(row.value(*up));
            let (gate, up) = copy.split_at(gate.width);
            activate(level, *activation, gate, up, row.value(*out));
        }
        (RowOp::Activate { activation, from, out }, _) => {
            copy.extend_from_slice(row.value(*from));
            activate_alone(level, *activation, copy, row.value(*out));
        }
        (RowOp::Add { from, scale, out }, _) => {
            copy.extend_from_slice(row.value(*from));
            row.value(*out).iter_mut().zip(copy.iter()).for_each(|(out, x)| *out += scale * x);
        }
        (RowOp::Cap { cap, value }, _) => {
            row.value(*value).iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        (RowOp::Open { gate, value }, _) => {
            let open = row.value(*gate).first().map_or(1.0, |gate| 1.0 / (1.0 + (-gate).exp()));
            row.value(*value).iter_mut().for_each(|x| *x *= open);
        }
        (RowOp::Scale { by, value }, _) => row.value(*value).iter_mut().for_each(|x| *x *= by),
        (RowOp::Slice { from, out }, _) => {
            copy.extend_from_slice(row.value(*from));
            row.value(*out).copy_from_slice(copy);
        }
        (RowOp::Multiply { value, .. }, Beside::Vector(weight)) => {
            let weight = &vectors[weight.clone()];
            row.value(*value).iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight);
        }
        (RowOp::Rescale { group, eps, like, value }, _) => {
            let root = like.map_or(1.0, |like| streams::root_mean_square(level, row.value(like)));
            row.value(*value).chunks_exact_mut(*group).for_each(|x| streams::rescale(level, x, root, *eps));
        }
        (RowOp::Sparsify { deviations, value }, _) => norm::sparsify(level, row.value(*value), *deviations),
        (RowOp::MixStreams { amounts, from, out }, _) => {
            copy.extend_from_slice(row.value(*amounts));
            copy.extend_from_slice(row.value(*from));
            let (amounts, from) = copy.split_at(amounts.width);
            streams::mix(amounts, from, row.value(*out));
        }
        (RowOp::AddToStreams { from, amounts, first, out }, _) => {
            copy.extend_from_slice(row.value(*from));
            if let Some(amounts) = amounts {
                copy.extend_from_slice(row.value(*amounts));
            }
            let (from, amounts) = copy.split_at(from.width);
            streams::add(from, amounts, *first, row.value(*out));
        }
        (RowOp::Norm { .. } | RowOp::Rope { .. } | RowOp::Multiply { .. }, _) => {}
    }
}

/// As many values as stay in a nearby cache.
const ONES: [f32; 512] = [1.0; 512];

/// `out = activation(values)`.
pub fn activate_alone(level: Level, activation: Activation, values: &[f32], out: &mut [f32]) {
    for (values, out) in values.chunks(ONES.len()).zip(out.chunks_mut(ONES.len())) {
        activate(level, activation, values, &ONES[..values.len()], out);
    }
}

/// `out = activation(gate) * up`.
pub fn activate(level: Level, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => norm::swiglu(level, gate, up, out),
        Activation::Gelu => norm::geglu(level, gate, up, out),
        Activation::Clamped => norm::clamped(level, gate, up, out),
        Activation::Sigmoid => norm::sigmoid(level, gate, up, out),
        Activation::Linear => norm::product(level, gate, up, out),
        Activation::SquaredRelu => norm::squared_relu(level, gate, up, out),
    }
}
