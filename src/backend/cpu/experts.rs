//! Feed-forward layers of experts: the choice of experts for each row, and the weighted sum of their results.
//!
//! Rows are computed expert by expert, so weights are read once for all rows that use them. Each row's results are
//! then added in the order of its own choice, so no bit depends on other rows of the step.

use std::cmp::Ordering;
use std::ops::Range;
use std::time::Instant;

use super::activations::FINE_ABOVE;
use super::bind::Place;
use super::compute::{Compute, Run, matrix};
use super::model::OpenModel;
use super::row_ops::{activate, activate_alone};
use super::scratch::Plane;
use super::slices::Stretch;
use crate::backend::{BackendError, Progress, Weights};
use crate::program::{Activation, ExpertGroups, ExpertRange, Gating, TensorId};

/// A choice of experts, and the widths of the experts it is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceSpec {
    /// Experts per row.
    pub used: usize,
    /// See [`Op::Route`](crate::program::Op::Route).
    pub gating: Gating,
    /// See [`Op::Route`](crate::program::Op::Route).
    pub groups: Option<ExpertGroups>,
    /// See [`Op::Route`](crate::program::Op::Route).
    pub normalise: bool,
    /// See [`Op::Route`](crate::program::Op::Route).
    pub scale: f32,
    /// Width of an expert's hidden layer.
    pub ffn: usize,
    /// Width of an expert's result.
    pub hidden: usize,
}

/// A layer's experts: see [`Op::Experts`](crate::program::Op::Experts).
#[derive(Clone, Copy, Debug)]
pub struct ExpertSet {
    /// All experts.
    pub experts: ExpertRange,
    /// Biases of gates, ups and downs.
    pub biases: Option<[TensorId; 3]>,
    /// Factors of gates, ups and downs: one for each expert.
    pub factors: [Option<TensorId>; 3],
    /// Number of the choice.
    pub choice: usize,
    /// Activation of the gate, or of the up.
    pub activation: Activation,
    /// The experts' input.
    pub from: Place,
    /// Their results are added to it.
    pub out: Place,
}

/// The experts that rows chose, and their intermediate values. A use is one row at one of its chosen experts.
pub struct ChoiceRows {
    spec: ChoiceSpec,
    /// Each row's experts, best first: `[rows][used]`; empty before the choice.
    chosen: Vec<u32>,
    /// Weights of the chosen experts, parallel to `chosen`.
    weights: Vec<f32>,
    /// Indices into `chosen`, sorted by expert, then by row: the order of computation.
    order: Vec<u32>,
    /// Position in `order` of each entry of `chosen`.
    places: Vec<u32>,
    /// `activation(gate) * up`, or `activation(up)`, in computing order, `[rows_max * used][ffn]`.
    gated: Plane,
    /// Experts' results in computing order, `[rows_max * used][hidden]`.
    results: Plane,
}

impl ChoiceRows {
    /// Allocates for `rows` rows.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn new(spec: ChoiceSpec, rows: usize) -> Result<Self, BackendError> {
        let uses = rows.saturating_mul(spec.used);
        Ok(Self {
            chosen: Vec::new(),
            weights: Vec::new(),
            order: Vec::new(),
            places: Vec::new(),
            gated: Plane::new("experts", uses, spec.ffn)?,
            results: Plane::new("results of experts", uses, spec.hidden)?,
            spec,
        })
    }

    /// Clears the choice.
    pub fn clear(&mut self) {
        self.chosen.clear();
        self.order.clear();
    }

    /// Gives the memory of the planes back.
    pub fn release(&mut self) {
        self.clear();
        self.gated.release();
        self.results.release();
    }

    /// Fills the planes with NaN, so that a read before the first write shows.
    pub fn poison(&mut self, rows: usize) {
        let uses = rows * self.spec.used;
        for plane in [&mut self.gated, &mut self.results] {
            let cols = plane.cols();
            plane.values_mut()[..uses * cols].fill(f32::NAN);
        }
    }

    /// Chooses experts from the logits of `rows` rows. `bias` is empty, or has one number for each expert.
    pub fn choose<'a>(&mut self, rows: usize, bias: &[f32], logits: impl Fn(usize) -> &'a [f32]) {
        self.chosen.clear();
        self.weights.clear();
        for row in 0..rows {
            choose(logits(row), bias, &self.spec, &mut self.chosen, &mut self.weights);
        }
        self.order.clear();
        self.order.extend(0..self.chosen.len() as u32); // rows_max * used fits in memory several times
        self.order.sort_by_key(|&index| self.chosen[index as usize]); // stable: rows keep their order
        self.places.resize(self.chosen.len(), 0);
        for (place, &index) in (0..).zip(&self.order) {
            self.places[index as usize] = place;
        }
    }

    /// Ranges of `order` that use the same expert.
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

/// The least sum that divides sigmoids: the smallest normal number of half precision, as in llama.cpp.
const SUM_MIN: f64 = 1.0 / (1 << 14) as f64;

/// Appends the `used` experts with the largest chances plus `bias`, lower number first among equals, and their weights.
///
/// A NaN counts as the largest. Its row's weights then become NaN too, so broken weights show in the logits.
/// A softmax with a bias has a NaN for each of the row's experts then, and the lowest numbers are chosen.
fn choose(logits: &[f32], bias: &[f32], dims: &ChoiceSpec, chosen: &mut Vec<u32>, weights: &mut Vec<f32>) {
    let number = |x: f32| if x.is_nan() { f32::INFINITY } else { x };
    let most = f64::from(logits.iter().copied().map(number).fold(f32::NEG_INFINITY, f32::max));
    let share = |expert: u32| {
        let logit = f64::from(logits[expert as usize]);
        match dims.gating {
            Gating::Softmax => (logit - most).exp(),
            Gating::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        }
    };
    let all = || 0..logits.len() as u32;
    let sum_of_all: f64 = match dims.gating {
        // Only chances need it: a bias is added to them, or they are weights as they are.
        Gating::Softmax if !(bias.is_empty() && dims.groups.is_none() && dims.normalise) => {
            all().map(share).sum()
        }
        Gating::Softmax | Gating::Sigmoid => 1.0,
    };
    // Without a bias, logits are in the order of their chances, and still differ where chances are equal.
    let sizes: Vec<f32> = match (bias, dims.groups) {
        ([], None) => logits.iter().copied().map(number).collect(),
        (bias, groups) => {
            let bias = |expert: u32| bias.get(expert as usize).copied().unwrap_or(0.0);
            let size = |expert| number((share(expert) / sum_of_all) as f32 + bias(expert));
            let sizes: Vec<f32> = all().map(size).collect();
            groups.map_or_else(|| sizes.clone(), |groups| of_best_groups(&sizes, groups))
        }
    };
    let better = |a: &u32, b: &u32| match sizes[*b as usize].partial_cmp(&sizes[*a as usize]) {
        None | Some(Ordering::Equal) => a.cmp(b),
        Some(order) => order,
    };
    let mut best: Vec<u32> = all().collect();
    if dims.used < best.len() {
        best.select_nth_unstable_by(dims.used, better);
        best.truncate(dims.used);
    }
    best.sort_unstable_by(better);
    let sum_of_best = || best.iter().copied().map(share).sum::<f64>();
    let total = match (dims.normalise, dims.gating) {
        (false, _) => sum_of_all,
        (true, Gating::Softmax) => sum_of_best(),
        (true, Gating::Sigmoid) => match sum_of_best() {
            sum if sum < SUM_MIN => SUM_MIN,
            sum => sum, // NaN too
        },
    };
    let scale = f64::from(dims.scale);
    weights.extend(best.iter().map(|&expert| (share(expert) / total * scale) as f32));
    chosen.extend(best);
}

/// The sizes, with those of all but the best groups below any other.
fn of_best_groups(sizes: &[f32], groups: ExpertGroups) -> Vec<f32> {
    let of_group = (sizes.len() / groups.count.max(1) as usize).max(1);
    let two_best = |group: &[f32]| {
        let largest = |best: [f32; 2], size: f32| match best {
            [first, _] if size > first => [size, first],
            [first, second] => [first, second.max(size)],
        };
        group.iter().copied().fold([f32::NEG_INFINITY; 2], largest).iter().sum::<f32>()
    };
    let mut best: Vec<(usize, f32)> = sizes.chunks(of_group).map(two_best).enumerate().collect();
    best.sort_by(|(_, a), (_, b)| b.total_cmp(a)); // stable: the lower of equal groups comes first
    let mut kept = vec![f32::NEG_INFINITY; sizes.len()];
    for (group, _) in best.into_iter().take(groups.used as usize) {
        let experts = group * of_group..((group + 1) * of_group).min(sizes.len());
        kept[experts.clone()].copy_from_slice(&sizes[experts]);
    }
    kept
}

/// Runs gate, up and down of each row's experts; `out +=` their weighted sum. Asks for experts that are not resident.
///
/// # Errors
/// [`BackendError`] of a product.
pub fn run(
    compute: &mut Compute,
    model: &mut OpenModel,
    set: &ExpertSet,
    weights: &Weights<'_>,
    until: Instant,
) -> Result<Progress, BackendError> {
    let &ExpertSet { experts, factors, biases, choice, activation, from, out } = set;
    let choice = &mut model.now.choices[choice];
    let (spec, runs) = (choice.spec, choice.runs());
    let absent = |id: &TensorId| !weights.has(*id);
    let missing: Vec<TensorId> =
        runs.iter().flat_map(|(number, _)| experts.each(*number)).filter(absent).collect();
    if !missing.is_empty() {
        return Ok(Progress::Needs(missing));
    }
    let Some(&(first, _)) = runs.first() else { return Ok(Progress::Done) };
    let [gate, up, down] = experts.tensors(first);
    let (planes, acts, order) = (&mut model.now.values.planes, &mut model.now.values.acts, &choice.order);
    let (level, uses, input) = (compute.level, order.len(), &planes[from.plane]);
    let view = |id: TensorId| matrix(weights.tensor(id)?);
    let bias = |role: usize, number: u32, width: usize| -> Result<_, BackendError> {
        let Some(biases) = biases else { return Ok(&[][..]) };
        let (all, _) = weights.tensor(biases[role])?.tensor.bytes().as_chunks::<4>();
        Ok(&all[number as usize * width..][..width])
    };
    let factor = |role: usize, number: u32| -> Result<_, BackendError> {
        let Some(factors) = factors[role] else { return Ok(1.0) };
        let (all, _) = weights.tensor(factors)?.tensor.bytes().as_chunks::<4>();
        Ok(f32::from_le_bytes(all[number as usize]))
    };
    // First the columns of gate and up, then those of down.
    if model.now.within < spec.ffn {
        if model.now.within == 0 {
            let both = [weights.tensor(up)?, weights.tensor(gate)?];
            let matrices = &both[..if experts.gated { 2 } else { 1 }];
            compute.activate(acts, uses, from.width, matrices, FINE_ABOVE, |index, out| {
                let row = input.row(order[index] as usize / spec.used);
                out.copy_from_slice(&row[from.first..][..from.width]);
            });
        }
        let (gated, stretch) = (&mut choice.gated, Stretch { from: model.now.within, until });
        let left = if experts.gated {
            let gate_up = runs.iter().map(|(number, rows)| {
                let [gate, up, _] = experts.tensors(*number);
                let biases = [bias(0, *number, spec.ffn)?, bias(1, *number, spec.ffn)?];
                let factors = [factor(0, *number)?, factor(1, *number)?];
                Ok(Run { rows: rows.clone(), weights: [view(gate)?, view(up)?], factors, biases })
            });
            let gate_up = gate_up.collect::<Result<Vec<_>, BackendError>>()?;
            compute.project_runs(&gate_up, acts, spec.ffn, gated, stretch, |[gate, up], out| {
                activate(level, activation, gate, up, out);
            })?
        } else {
            let ups = runs.iter().map(|(number, rows)| {
                let [_, up, _] = experts.tensors(*number);
                let factors = [factor(1, *number)?];
                Ok(Run { rows: rows.clone(), weights: [view(up)?], factors, biases: [&[]] })
            });
            let ups = ups.collect::<Result<Vec<_>, BackendError>>()?;
            compute.project_runs(&ups, acts, spec.ffn, gated, stretch, |[up], out| {
                activate_alone(level, activation, up, out);
            })?
        };
        if left.is_some() {
            return Ok(model.stops_at(left));
        }
        model.now.within = spec.ffn;
    }
    if model.now.within == spec.ffn {
        let gated = &choice.gated;
        compute.activate(acts, uses, spec.ffn, &[weights.tensor(down)?], FINE_ABOVE, |index, out| {
            out.copy_from_slice(gated.row(index));
        });
    }
    let down = runs.iter().map(|(number, rows)| {
        let [_, _, down] = experts.tensors(*number);
        let biases = [bias(2, *number, spec.hidden)?];
        let factors = [factor(2, *number)?];
        Ok(Run { rows: rows.clone(), weights: [view(down)?], factors, biases })
    });
    let down = down.collect::<Result<Vec<_>, BackendError>>()?;
    let (results, stretch) = (&mut choice.results, Stretch { from: model.now.within - spec.ffn, until });
    let left = compute.project_runs(&down, acts, spec.hidden, results, stretch, |[result], out| {
        out.copy_from_slice(result);
    })?;
    if let Some(left) = left {
        return Ok(model.stops_at(Some(spec.ffn + left)));
    }
    add(compute, choice, &mut planes[out.plane], out, model.now.step.rows());
    choice.clear();
    Ok(model.stops_at(None))
}

/// Adds the weighted sums of the results to the rows of `out`.
fn add(compute: &mut Compute, choice: &ChoiceRows, plane: &mut Plane, out: Place, rows: usize) {
    let (used, cols) = (choice.spec.used, plane.cols());
    let sum = |row: usize, values: &mut [f32]| {
        let uses = row * used..(row + 1) * used;
        let results = choice.places[uses.clone()].iter().map(|&place| choice.results.row(place as usize));
        let mut total = vec![0.0f32; out.width];
        for (result, &weight) in results.zip(&choice.weights[uses]) {
            total.iter_mut().zip(result).for_each(|(total, x)| *total += weight * x);
        }
        values[out.first..][..out.width].iter_mut().zip(total).for_each(|(x, total)| *x += total);
    };
    let mut all: Vec<_> = plane.values_mut().chunks_exact_mut(cols).take(rows).collect();
    if compute.is_parallel(rows * used * out.width) {
        compute.pool.run_items(&mut all, |row, values| sum(row, values));
    } else {
        all.into_iter().enumerate().for_each(|(row, values)| sum(row, values));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn biased(
        logits: &[f32],
        bias: &[f32],
        gating: Gating,
        used: usize,
        normalise: bool,
        scale: f32,
    ) -> (Vec<u32>, Vec<f32>) {
        let dims = ChoiceSpec { used, gating, groups: None, normalise, scale, ffn: 1, hidden: 1 };
        let (mut experts, mut weights) = (Vec::new(), Vec::new());
        choose(logits, bias, &dims, &mut experts, &mut weights);
        (experts, weights)
    }

    fn chosen(logits: &[f32], used: usize, normalise: bool, scale: f32) -> (Vec<u32>, Vec<f32>) {
        biased(logits, &[], Gating::Softmax, used, normalise, scale)
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

    /// The sigmoids are 1/2, 3/4 and 1/4.
    #[test]
    fn a_bias_changes_the_choice_and_not_the_weights() {
        let logits = [0.0, 3f32.ln(), -(3f32.ln())];
        let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6);
        let (experts, weights) = biased(&logits, &[], Gating::Sigmoid, 2, false, 1.0);
        assert!(experts == [1, 0] && close(&weights, &[0.75, 0.5]), "{weights:?}");
        let (experts, weights) = biased(&logits, &[0.0, 0.0, 0.4], Gating::Sigmoid, 2, true, 2.0);
        assert!(experts == [1, 2] && close(&weights, &[1.5, 0.5]), "{experts:?} {weights:?}");
        let (_, weights) = biased(&[-30.0; 2], &[0.0; 2], Gating::Sigmoid, 1, true, 1.0);
        assert!(weights[0] < 1e-8, "the sum is at least 2^-14: {weights:?}");
        // The shares are 3/13, 9/13 and 1/13.
        let (experts, weights) = biased(&logits, &[0.5, 0.0, 0.0], Gating::Softmax, 2, false, 1.0);
        assert!(experts == [0, 1] && close(&weights, &[3.0 / 13.0, 9.0 / 13.0]), "{experts:?} {weights:?}");
    }

    /// The chances are 0.5 where not stated otherwise; the groups' two best sum up to 1.1, 1.3, 1.0 and 1.2.
    #[test]
    fn experts_are_chosen_of_the_best_groups() {
        let bias = [0.4, -0.3, 0.3, 0.0, 0.0, 0.0, 0.1, 0.1];
        let grouped = |used_groups, used| {
            let groups = Some(ExpertGroups { count: 4, used: used_groups });
            let (gating, normalise) = (Gating::Sigmoid, false);
            let dims = ChoiceSpec { used, gating, groups, normalise, scale: 1.0, ffn: 1, hidden: 1 };
            let (mut experts, mut weights) = (Vec::new(), Vec::new());
            choose(&[0.0; 8], &bias, &dims, &mut experts, &mut weights);
            assert_eq!(weights, vec![0.5; used]);
            experts
        };
        assert_eq!(grouped(1, 2), [2, 3]);
        assert_eq!(grouped(2, 3), [2, 6, 7]);
        assert_eq!(grouped(3, 3), [0, 2, 6]);
        assert_eq!(grouped(2, 4), [2, 6, 7, 3]);
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
