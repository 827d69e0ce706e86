//! Feed-forward layers of experts: which of them each row uses, and their weighted sum.
//!
//! Rows are taken expert by expert, so that weights are read once for all rows that use them; each row's results are
//! then added in the order of its own choice, so that no bit depends on what else is in the step.

use std::cmp::Ordering;
use std::ops::Range;

use super::activations::{FINE_ABOVE, FINE_ALL};
use super::compute::{Compute, Run, Store, matrix};
use super::model::Model;
use super::norm;
use super::scratch::Plane;
use super::units::{check_layer, read_norm, want, want_projection};
use crate::backend::{BackendError, Expert, ExpertDims, Experts, Router};

/// What layers of experts work on. A use is a row at one of its chosen experts.
pub struct ExpertRows {
    dims: ExpertDims,
    /// Layer whose choice this is.
    layer: Option<usize>,
    /// Normed rows, `[rows_max][hidden]`.
    normed: Plane,
    /// Router's logits, `[rows_max][count]`.
    logits: Plane,
    /// Each row's experts, best first: `[rows][used]`.
    chosen: Vec<u32>,
    /// Their weights.
    weights: Vec<f32>,
    /// Indices of `chosen` by expert, then by row: the order in which uses are computed.
    order: Vec<u32>,
    /// Where each of `chosen` stands in `order`.
    places: Vec<u32>,
    /// `silu(gate) * up` in computing order, `[rows_max * used][ffn]`.
    gated: Plane,
    /// Experts' results in computing order, `[rows_max * used][hidden]`.
    results: Plane,
}

impl ExpertRows {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn new(dims: &ExpertDims, rows: usize, hidden: usize) -> Result<Self, BackendError> {
        let uses = rows.saturating_mul(dims.used);
        Ok(Self {
            layer: None,
            normed: Plane::new("rows for experts", rows, hidden)?,
            logits: Plane::new("the choice of experts", rows, dims.count)?,
            chosen: Vec::new(),
            weights: Vec::new(),
            order: Vec::new(),
            places: Vec::new(),
            gated: Plane::new("experts", uses, dims.ffn)?,
            results: Plane::new("results of experts", uses, hidden)?,
            dims: dims.clone(),
        })
    }

    /// Forgets the choice.
    pub fn clear(&mut self) {
        self.layer = None;
    }

    /// As [`Model::poison`].
    pub fn poison(&mut self, rows: usize) {
        let uses = rows * self.dims.used;
        for (plane, rows) in [
            (&mut self.normed, rows),
            (&mut self.logits, rows),
            (&mut self.gated, uses),
            (&mut self.results, uses),
        ] {
            let cols = plane.cols();
            plane.values_mut()[..rows * cols].fill(f32::NAN);
        }
    }

    /// Chooses from the logits of `rows` rows.
    fn choose(&mut self, rows: usize) {
        self.chosen.clear();
        self.weights.clear();
        for row in 0..rows {
            choose(self.logits.row(row), &self.dims, &mut self.chosen, &mut self.weights);
        }
        self.order.clear();
        self.order.extend(0..self.chosen.len() as u32); // rows_max * used fits in memory several times
        self.order.sort_by_key(|&index| self.chosen[index as usize]); // stable: rows keep their order
        self.places.resize(self.chosen.len(), 0);
        for (place, &index) in (0..).zip(&self.order) {
            self.places[index as usize] = place;
        }
    }

    /// Runs of `order` with one expert each.
    fn runs(&self) -> Vec<(u32, Range<usize>)> {
        let mut start = 0;
        let same = |a: &u32, b: &u32| self.chosen[*a as usize] == self.chosen[*b as usize];
        self.order
            .chunk_by(same)
            .map(|run| {
                start += run.len();
                (self.chosen[run[0] as usize], start - run.len()..start)
            })
            .collect()
    }
}

/// Appends the `used` experts with the largest logits, the lower number of equals first, and their weights.
///
/// A logit that is no number is the largest there is: its row's weights are then no numbers either, and the broken
/// weights show in the logits.
fn choose(logits: &[f32], dims: &ExpertDims, chosen: &mut Vec<u32>, weights: &mut Vec<f32>) {
    let size = |expert: u32| Some(logits[expert as usize]).filter(|l| !l.is_nan()).unwrap_or(f32::INFINITY);
    let better = |a: &u32, b: &u32| match size(*b).partial_cmp(&size(*a)) {
        None | Some(Ordering::Equal) => a.cmp(b),
        Some(order) => order,
    };
    let mut all: Vec<u32> = (0..logits.len() as u32).collect();
    if dims.used < all.len() {
        all.select_nth_unstable_by(dims.used, better);
        all.truncate(dims.used);
    }
    all.sort_unstable_by(better);
    let most = all.first().map_or(0.0, |&first| f64::from(logits[first as usize]));
    let share = |logit: f32| (f64::from(logit) - most).exp();
    let total: f64 = match dims.normalise {
        true => all.iter().map(|&expert| share(logits[expert as usize])).sum(),
        false => logits.iter().map(|&logit| share(logit)).sum(),
    };
    let scale = f64::from(dims.scale);
    weights.extend(all.iter().map(|&expert| (share(logits[expert as usize]) / total * scale) as f32));
    chosen.extend(all);
}

/// The model's room for experts.
fn rows_of(experts: &mut Option<ExpertRows>) -> Result<&mut ExpertRows, BackendError> {
    experts.as_mut().ok_or(BackendError::Batch("a layer of experts in a model that has none"))
}

/// Norm, router, choice.
pub fn route(
    compute: &mut Compute,
    model: &mut Model,
    layer: u32,
    weights: &Router<'_>,
) -> Result<(), BackendError> {
    let layer = check_layer(model, layer)?;
    let (hidden, eps, rows) = (model.dims.hidden, model.dims.norm_eps, model.step.rows());
    let experts = rows_of(&mut model.experts)?;
    experts.layer = None;
    want(weights.norm, 1, hidden)?;
    want_projection(&weights.logits, experts.dims.count, hidden)?;
    read_norm(weights.norm, &mut model.norm)?;
    let (level, residual, norm) = (compute.level, &model.residual, &model.norm);
    compute.activate(&mut model.acts, rows, hidden, &[weights.logits.weight], FINE_ALL, |row, out| {
        norm::rms_norm(level, residual.row(row), norm, eps, out);
    });
    for row in 0..rows {
        experts.normed.row_mut(row).copy_from_slice(model.acts.view().values(row));
    }
    let stride = experts.logits.cols();
    let logits = experts.logits.values_mut();
    compute.project(&[weights.logits], &model.acts, Store::Replace, logits, stride)?;
    experts.choose(rows);
    experts.layer = Some(layer);
    Ok(())
}

/// Numbers of all chosen experts.
pub fn routed(model: &mut Model) -> Result<Vec<u32>, BackendError> {
    let experts = rows_of(&mut model.experts)?;
    if experts.layer.is_none() {
        return Err(BackendError::Batch("no experts were chosen"));
    }
    Ok(experts.runs().into_iter().map(|(expert, _)| expert).collect())
}

/// Gate, up and down of each row's experts; residual += their weighted sum.
pub fn experts(
    compute: &mut Compute,
    model: &mut Model,
    layer: u32,
    given: &Experts<'_>,
) -> Result<(), BackendError> {
    let layer = check_layer(model, layer)?;
    let hidden = model.dims.hidden;
    let experts = rows_of(&mut model.experts)?;
    if experts.layer.take() != Some(layer) {
        return Err(BackendError::Batch("experts of a layer that was not routed"));
    }
    let runs = experts.runs();
    let uses = experts.order.len();
    let loaded = runs
        .iter()
        .map(|(number, rows)| Ok((check(given, *number, &experts.dims, hidden)?, rows.clone())))
        .collect::<Result<Vec<_>, BackendError>>()?;
    let Some((first, _)) = loaded.first() else { return Ok(()) };
    let (level, dims) = (compute.level, &experts.dims);

    let (normed, order) = (&experts.normed, &experts.order);
    compute.activate(&mut model.acts, uses, hidden, &[&first.gate, &first.up], FINE_ABOVE, |index, out| {
        out.copy_from_slice(normed.row(order[index] as usize / dims.used));
    });
    let gate_up = loaded
        .iter()
        .map(|(e, rows)| Ok(Run { rows: rows.clone(), weights: [matrix(&e.gate)?, matrix(&e.up)?] }))
        .collect::<Result<Vec<_>, BackendError>>()?;
    compute.project_runs(&gate_up, &model.acts, dims.ffn, &mut experts.gated, |[gate, up], out| {
        norm::swiglu(level, gate, up, out);
    })?;

    let gated = &experts.gated;
    compute.activate(&mut model.acts, uses, dims.ffn, &[&first.down], FINE_ABOVE, |index, out| {
        out.copy_from_slice(gated.row(index));
    });
    let down = loaded
        .iter()
        .map(|(e, rows)| Ok(Run { rows: rows.clone(), weights: [matrix(&e.down)?] }))
        .collect::<Result<Vec<_>, BackendError>>()?;
    compute.project_runs(&down, &model.acts, hidden, &mut experts.results, |[result], out| {
        out.copy_from_slice(result);
    })?;
    add(compute, experts, &mut model.residual, model.step.rows());
    Ok(())
}

/// Residual rows += the weighted sums of their results.
fn add(compute: &mut Compute, experts: &ExpertRows, residual: &mut Plane, rows: usize) {
    let (used, hidden) = (experts.dims.used, residual.cols());
    let sum = |row: usize, residual: &mut [f32]| {
        let uses = row * used..(row + 1) * used;
        let results = experts.places[uses.clone()].iter().map(|&place| experts.results.row(place as usize));
        let mut total = vec![0.0f32; hidden];
        for (result, &weight) in results.zip(&experts.weights[uses]) {
            total.iter_mut().zip(result).for_each(|(total, x)| *total += weight * x);
        }
        residual.iter_mut().zip(total).for_each(|(x, total)| *x += total);
    };
    let parallel = compute.is_parallel(rows * used * hidden);
    let mut residual_rows: Vec<_> = residual.values_mut().chunks_exact_mut(hidden).take(rows).collect();
    if parallel {
        compute.pool.run_items(&mut residual_rows, |row, values| sum(row, values));
    } else {
        residual_rows.into_iter().enumerate().for_each(|(row, values)| sum(row, values));
    }
}

/// The expert of that number, which has to be loaded, of the right shapes and of the types of the first that is.
fn check<'a>(
    given: &Experts<'a>,
    number: u32,
    dims: &ExpertDims,
    hidden: usize,
) -> Result<&'a Expert, BackendError> {
    if given.loaded.len() != dims.count {
        return Err(BackendError::Batch("a layer with another number of experts than the model"));
    }
    let expert = given.loaded.get(number as usize).and_then(Option::as_ref);
    let expert = expert.ok_or(BackendError::Batch("an expert that a row uses is not loaded"))?;
    want(&expert.gate, dims.ffn, hidden)?;
    want(&expert.up, dims.ffn, hidden)?;
    want(&expert.down, hidden, dims.ffn)?;
    let types = |e: &Expert| [e.gate.dtype(), e.up.dtype(), e.down.dtype()];
    match given.loaded.iter().flatten().next() {
        Some(first) if types(first) != types(expert) => {
            Err(BackendError::Batch("experts of one layer differ in type"))
        }
        _ => Ok(expert),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(logits: &[f32], used: usize, normalise: bool, scale: f32) -> (Vec<u32>, Vec<f32>) {
        let dims = ExpertDims { count: logits.len(), used, ffn: 1, normalise, scale };
        let (mut experts, mut weights) = (Vec::new(), Vec::new());
        choose(logits, &dims, &mut experts, &mut weights);
        (experts, weights)
    }

    #[test]
    fn the_best_are_chosen_and_the_lower_of_equals() {
        assert_eq!(chosen(&[0.0, 3.0, 1.0, 3.0, 2.0], 3, true, 1.0).0, [1, 3, 4]);
        assert_eq!(chosen(&[1.0; 6], 2, true, 1.0), (vec![0, 1], vec![0.5, 0.5]));
        assert_eq!(chosen(&[-1.0, f32::NEG_INFINITY, 5.0], 3, true, 1.0).0, [2, 0, 1]);
    }

    #[test]
    fn weights_are_shares_of_all_or_of_the_chosen() {
        let logits = [8f32.ln(), 0.0, 1e-9, 4f32.ln(), 3f32.ln()]; // shares 8, 1, 1, 4 and 3 of 17
        let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6);
        let (experts, weights) = chosen(&logits, 2, false, 1.0);
        assert!(experts == [0, 3] && close(&weights, &[8.0 / 17.0, 4.0 / 17.0]), "{weights:?}");
        let (_, weights) = chosen(&logits, 2, true, 1.0);
        assert!(close(&weights, &[2.0 / 3.0, 1.0 / 3.0]), "{weights:?}");
        let (_, weights) = chosen(&logits, 2, true, 3.0);
        assert!(close(&weights, &[2.0, 1.0]), "{weights:?}");
        let (_, weights) = chosen(&[200.0, -200.0], 2, true, 1.0);
        assert_eq!(weights, [1.0, 0.0], "far apart, and finite");
    }

    #[test]
    fn broken_logits_give_broken_weights_and_no_panic() {
        for broken in [[0.0, f32::NAN, 1.0], [0.0, f32::INFINITY, 1.0], [f32::NEG_INFINITY; 3]] {
            for used in [1, 2, 3] {
                let (experts, weights) = chosen(&broken, used, true, 1.0);
                assert_eq!(experts.len(), used);
                assert!(weights.iter().any(|w| w.is_nan()), "{broken:?} {weights:?}");
            }
        }
    }
}
