//! Runs the units of a part.
//!
//! The caller's thread does norms, rotation and quantisation for few rows; all threads share them for many. Products
//! and attention are phases of the pool: four phases per typical layer at one row, five if attention is split.

use std::time::Instant;

use super::activations::FINE_ABOVE;
use super::attention::{self, Problem};
use super::bind::{Input, Matrix, NormSpec, Place, Unit};
use super::compute::{Compute, Projection, Store, append_values};
use super::experts;
use super::model::{OpenModel, Values};
use super::quant;
use super::recur;
use super::rope::RopeTable;
use super::row_ops;
use super::slices::Stretch;
use crate::backend::{BackendError, DeviceTensor, Progress, Weights};
use crate::program::{NormKind, Program, RopeId, StateId, TableRow, TensorId};

/// Runs the remaining units of a part, or some of them.
///
/// # Errors
/// [`BackendError`] of a unit, and of a part that does not follow the last one.
pub fn run(
    compute: &mut Compute,
    model: &mut OpenModel,
    part: u32,
    weights: &Weights<'_>,
) -> Result<Progress, BackendError> {
    let (at, first) = model.now.at;
    let done = model.bound.parts.get(at as usize).map_or(0, Vec::len);
    let first = match part {
        _ if part == at && first < done => first,
        _ if part == at + 1 && first == done => 0,
        _ => return Err(BackendError::OutOfOrder("a part was run out of turn")),
    };
    let bound = std::sync::Arc::clone(&model.bound);
    let until = Instant::now() + compute.slices.pause;
    let units = bound.parts.get(part as usize).map_or(&[][..], Vec::as_slice);
    for (number, unit) in units.iter().enumerate().skip(first) {
        model.now.at = (part, number);
        match run_unit(compute, model, unit, weights, until)? {
            Progress::Done => {}
            stopped => return Ok(stopped),
        }
        if number + 1 < units.len() && Instant::now() >= until {
            model.now.at = (part, number + 1);
            return Ok(Progress::Paused);
        }
    }
    model.now.at = (part, units.len());
    model.now.has_logits |= part == model.program.head_part();
    Ok(Progress::Done)
}

fn run_unit(
    compute: &mut Compute,
    model: &mut OpenModel,
    unit: &Unit,
    weights: &Weights<'_>,
    until: Instant,
) -> Result<Progress, BackendError> {
    match unit {
        Unit::Embed { table, scale, out } => {
            embed(model, host(&model.program.clone(), *table)?, *scale, *out)?
        }
        Unit::AddRow { table, row, out } => add_row(model, &weights.tensor(*table)?.tensor, *row, *out)?,
        Unit::Take { from, out } => take(model, *from, *out),
        Unit::Product { input, parts, out, add } => {
            return product(compute, model, (input, parts, *out, *add), weights, until);
        }
        Unit::Gated { input, gate, up, activation, out } => {
            let parts = [projection(weights, gate)?, projection(weights, up)?];
            if model.now.within == 0 {
                activate(compute, model, input, &parts, weights)?;
            }
            let (acts, plane) = (&model.now.values.acts, &mut model.now.values.planes[out.plane]);
            let stretch = Stretch { from: model.now.within, until };
            let left = compute.project_gated(parts, *activation, acts, plane, stretch)?;
            return Ok(model.stops_at(left));
        }
        Unit::Heads { .. } => return heads(compute, model, unit, weights, until),
        Unit::RowOps { ops, rows } => row_ops::run(compute, model, ops, *rows, weights)?,
        Unit::Store { state, keys, values } => store(compute, model, *state, *keys, *values),
        Unit::Attend { state, group, queries, scale, window, both_ways, cap, slopes, sinks, out } => {
            let stride = model.now.values.planes[queries.plane].cols();
            let sinks = small(weights, *sinks)?;
            let mut result =
                std::mem::replace(&mut model.now.values.planes[out.plane], super::scratch::Plane::empty());
            let problem = Problem {
                step: &model.now.step,
                tiles: model.now.step.tiles(*group),
                kv: &model.kv,
                layout: model.kv.layout(*state),
                queries: &model.now.values.planes[queries.plane].values()[queries.first..],
                stride,
                group: *group,
                scale: *scale,
                window: *window,
                both_ways: *both_ways,
                cap: *cap,
                slopes,
                sinks: &sinks,
            };
            let phase = attention::Phase {
                pool: &mut compute.pool,
                workers: &mut compute.workers,
                slices: compute.slices,
                stretch: Stretch { from: model.now.within, until },
            };
            let partials = &mut model.now.partials;
            let left = attention::attend(compute.level, &problem, phase, partials, result.values_mut());
            model.now.values.planes[out.plane] = result;
            return Ok(model.stops_at(left?));
        }
        Unit::Route { logits, bias, choice } => {
            let added = small(weights, *bias)?;
            let rows = model.now.step.rows();
            let (values, choice) = (&model.now.values, &mut model.now.choices[*choice]);
            choice.choose(rows, &added, |row| values.row(*logits, row));
        }
        Unit::Recur(op) => recur::run(compute, model, op, weights)?,
        Unit::Experts(set) => return experts::run(compute, model, set, weights, until),
    }
    Ok(Progress::Done)
}

/// The values of a small tensor, such as one number for each head; none without a tensor.
fn small(weights: &Weights<'_>, id: Option<TensorId>) -> Result<Vec<f32>, BackendError> {
    let mut values = Vec::new();
    if let Some(id) = id {
        append_values(&weights.tensor(id)?.tensor, &mut values)?;
    }
    Ok(values)
}

/// A tensor that the host reads from the mapped file.
fn host(program: &Program, id: TensorId) -> Result<crate::tensor::LazyTensor, BackendError> {
    let missing = || BackendError::Internal(format!("the program has no tensor {}", id.0));
    Ok(program.tensor(id).ok_or_else(missing)?.lazy.clone())
}

fn embed(
    model: &mut OpenModel,
    table: crate::tensor::LazyTensor,
    scale: f32,
    out: Place,
) -> Result<(), BackendError> {
    let bytes = table.bytes();
    let row_bytes = bytes.len() / model.program.vocab();
    for row in 0..model.now.step.rows() {
        let id = model.now.step.token_ids[row] as usize;
        let values = model.now.values.row_mut(out, row);
        quant::dequantize_row(table.dtype(), &bytes[id * row_bytes..][..row_bytes], values)
            .map_err(|error| BackendError::Internal(error.to_string()))?;
        if scale != 1.0 {
            values.iter_mut().for_each(|x| *x *= scale);
        }
    }
    Ok(())
}

/// Adds a row of the table to each row.
fn add_row(
    model: &mut OpenModel,
    table: &crate::tensor::LazyTensor,
    row: TableRow,
    out: Place,
) -> Result<(), BackendError> {
    let bytes = table.bytes();
    let row_bytes = bytes.len() / (table.shape().rows() as usize).max(1);
    let mut values = vec![0.0; out.width];
    for number in 0..model.now.step.rows() {
        let at = match row {
            TableRow::Position => model.now.step.positions[number] as usize,
            TableRow::First => 0,
        };
        let bytes = bytes.get(at * row_bytes..(at + 1) * row_bytes);
        let bytes = bytes.ok_or(BackendError::Batch("a position is past the end of the model's table"))?;
        quant::dequantize_row(table.dtype(), bytes, &mut values)
            .map_err(|error| BackendError::Internal(error.to_string()))?;
        model.now.values.row_mut(out, number).iter_mut().zip(&values).for_each(|(x, value)| *x += value);
    }
    Ok(())
}

fn take(model: &mut OpenModel, from: Place, out: Place) {
    for (index, &row) in model.now.step.logits_rows.iter().enumerate() {
        let values = model.now.values.row(from, row as usize).to_vec();
        model.now.values.row_mut(out, index).copy_from_slice(&values);
    }
}

/// A loaded matrix and its bias.
pub fn projection<'a>(weights: &Weights<'a>, matrix: &Matrix) -> Result<Projection<'a>, BackendError> {
    let bias = matrix.bias.map(|bias| weights.tensor(bias)).transpose()?;
    Ok(Projection { weight: weights.tensor(matrix.weight)?, bias })
}

/// Computes the activations of a unit's input, in the forms that its matrices take.
fn activate(
    compute: &mut Compute,
    model: &mut OpenModel,
    input: &Input,
    parts: &[Projection<'_>],
    weights: &Weights<'_>,
) -> Result<(), BackendError> {
    let Values { acts, planes, vectors } = &mut model.now.values;
    let norm = input.norm.map(|norm| NormWeights::read(&norm, weights, vectors)).transpose()?;
    let (rows, wanted) = (model.now.step.rows_of(input.rows), &model.now.step.logits_rows);
    let plane = &planes[input.from.plane];
    let matrices: Vec<&DeviceTensor> = parts.iter().map(|part| part.weight).collect();
    let level = compute.level;
    compute.activate(acts, rows, input.from.width, &matrices, input.fine_above, |row, out| {
        let row = if input.take { wanted[row] as usize } else { row };
        let from = &plane.row(row)[input.from.first..][..input.from.width];
        match norm {
            None => out.copy_from_slice(from),
            Some(norm) => norm.apply(level, vectors, 0, from, out),
        }
    });
    Ok(())
}

/// Position of a norm's weights among a unit's small weights.
#[derive(Clone, Copy)]
pub struct NormWeights {
    kind: NormKind,
    eps: f32,
    first: usize,
    /// Of all rows of the weight.
    len: usize,
    /// Rows of the weight: one for all groups, or one for each.
    rows: usize,
    biased: bool,
}

impl NormWeights {
    /// Clears `vectors` and reads a norm's weights into it.
    fn read(norm: &NormSpec, weights: &Weights<'_>, vectors: &mut Vec<f32>) -> Result<Self, BackendError> {
        vectors.clear();
        Self::append(norm, weights, vectors)
    }

    /// Appends a norm's weights to `vectors`.
    pub fn append(
        norm: &NormSpec,
        weights: &Weights<'_>,
        vectors: &mut Vec<f32>,
    ) -> Result<Self, BackendError> {
        let first = vectors.len();
        append_values(&weights.tensor(norm.weight)?.tensor, vectors)?;
        let len = vectors.len() - first;
        if let Some(bias) = norm.bias {
            append_values(&weights.tensor(bias)?.tensor, vectors)?;
        }
        let rows = weights.tensor(norm.weight)?.rows().max(1);
        Ok(Self { kind: norm.kind, eps: norm.eps, first, len, rows, biased: norm.bias.is_some() })
    }

    /// Number of values normed together.
    pub fn group(&self) -> usize {
        self.len / self.rows
    }

    /// Norms a row's group with this number, `from`, into `out`.
    pub fn apply(
        &self,
        level: super::simd::Level,
        vectors: &[f32],
        number: usize,
        from: &[f32],
        out: &mut [f32],
    ) {
        let group = self.group();
        let first = self.first + number % self.rows * group;
        let weight = &vectors[first..][..group];
        match self.kind {
            NormKind::Rms => super::norm::rms_norm(level, from, weight, self.eps, out),
            NormKind::Layer => super::norm::layer_norm(level, from, weight, self.eps, out),
        }
        if self.biased {
            let bias = &vectors[first + self.len..][..group];
            out.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
        }
    }
}

fn product(
    compute: &mut Compute,
    model: &mut OpenModel,
    (input, parts, out, add): (&Input, &[Matrix], Place, bool),
    weights: &Weights<'_>,
    until: Instant,
) -> Result<Progress, BackendError> {
    let parts = parts.iter().map(|part| projection(weights, part)).collect::<Result<Vec<_>, _>>()?;
    if model.now.step.rows_of(input.rows) == 0 {
        return Ok(Progress::Done);
    }
    if model.now.within == 0 {
        activate(compute, model, input, &parts, weights)?;
    }
    let store = if add { Store::Add } else { Store::Replace };
    let (acts, plane) = (&model.now.values.acts, &mut model.now.values.planes[out.plane]);
    let left = compute.project(&parts, acts, store, plane, Stretch { from: model.now.within, until })?;
    Ok(model.stops_at(left))
}

/// Multiplies a part of each head with the head's own matrix.
fn heads(
    compute: &mut Compute,
    model: &mut OpenModel,
    unit: &Unit,
    weights: &Weights<'_>,
    until: Instant,
) -> Result<Progress, BackendError> {
    let &Unit::Heads { weight, from, part, out, rows } = unit else { return Ok(Progress::Done) };
    let (weight, rows) = (weights.tensor(weight)?, model.now.step.rows_of(rows));
    if rows == 0 {
        return Ok(Progress::Done);
    }
    let [head_dim, first, width] = [part.head_dim, part.first, part.width].map(|n| n as usize);
    let heads = from.width / head_dim;
    let Values { acts, planes, .. } = &mut model.now.values;
    if model.now.within == 0 {
        let plane = &planes[from.plane];
        // The rows of a head are neighbours, because they meet the same matrix.
        compute.activate(acts, heads * rows, width, &[weight], FINE_ABOVE, |index, values| {
            let (head, row) = (index / rows, index % rows);
            values.copy_from_slice(&plane.row(row)[from.first + head * head_dim + first..][..width]);
        });
    }
    let stretch = Stretch { from: model.now.within, until };
    let left = compute.project_heads(weight, heads, acts, &mut planes[out.plane], stretch)?;
    Ok(model.stops_at(left))
}

fn store(compute: &mut Compute, model: &mut OpenModel, state: StateId, keys: Place, values: Place) {
    let layout = model.kv.layout(state);
    let parallel = compute.is_parallel(model.now.step.rows() * (keys.width + values.width));
    let (planes, places) = (&model.now.values.planes, &model.now.step.places);
    let head = |place: Place, row: usize, head: usize| {
        &planes[place.plane].row(row)[place.first + head * layout.head_dim..][..layout.head_dim]
    };
    model.kv.write(&mut compute.pool, parallel, compute.level, layout, places, |row, number| {
        [head(keys, row, number), head(values, row, number)]
    });
}

/// Computes the step's angles at their first use.
pub fn angles(model: &mut OpenModel, rope: RopeId) -> Result<(), BackendError> {
    let number = rope.0 as usize;
    if model.now.ropes[number].is_some() {
        return Ok(());
    }
    let rope = &model.program.ropes()[number];
    let mut factors = Vec::new();
    if let Some(id) = rope.factors {
        append_values(&host(&model.program, id)?, &mut factors)?;
    }
    let mut table = RopeTable::default();
    table.fill(&rope.spec, rope.factors.map(|_| factors.as_slice()), &model.now.step.positions);
    model.now.ropes[number] = Some(table);
    Ok(())
}

/// The first tensor of a program whose type this backend cannot compute, as an error.
pub fn refuses(program: &Program) -> Option<BackendError> {
    let unsupported = program.dtypes().into_iter().find(|(dtype, _)| !quant::is_supported(*dtype));
    let (dtype, tensor) = unsupported?;
    Some(BackendError::Unsupported { tensor: tensor.name().to_owned(), dtype, backend: "cpu" })
}
