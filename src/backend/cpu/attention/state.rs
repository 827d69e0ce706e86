//! Softmax in one pass: the greatest score so far, and sums to its scale.

use crate::backend::cpu::simd::{LANES, Simd};

/// Online softmax state of some queries.
#[derive(Default)]
pub(super) struct State {
    /// Greatest score so far.
    pub max: Vec<f32>,
    /// Sum of e^(score - max).
    pub sum: Vec<f32>,
    /// Sum of e^(score - max) times value, `head_stride` values per query.
    pub values: Vec<f32>,
}

impl State {
    pub fn reset(&mut self, queries: usize, head_stride: usize) {
        self.max.clear();
        self.max.resize(queries, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(queries, 0.0);
        self.values.clear();
        self.values.resize(queries * head_stride, 0.0);
    }
}

/// Adds one split's result to the total of query `q`.
#[inline(always)]
pub(super) fn merge<S: Simd>(s: S, total: &mut State, q: usize, max: f32, sum: f32, values: &[f32]) {
    let (keep, take) = if max > total.max[q] {
        let keep = exp(s, total.max[q] - max);
        total.max[q] = max;
        (keep, 1.0)
    } else {
        (1.0, exp(s, max - total.max[q]))
    };
    total.sum[q] = total.sum[q] * keep + sum * take;
    let total = &mut total.values[q * values.len()..][..values.len()];
    let ((total, _), (values, _)) = (total.as_chunks_mut::<LANES>(), values.as_chunks::<LANES>());
    for (total, value) in total.iter_mut().zip(values) {
        let kept = s.mul(s.load(total), s.splat(keep));
        s.store(s.mul_add(s.load(value), s.splat(take), kept), total);
    }
}

/// Writes the attention result of query `q`. A sink is a score whose value is 0.
#[inline(always)]
pub(super) fn finish<S: Simd>(s: S, total: &State, q: usize, sink: Option<&f32>, head: &mut [f32]) {
    let stride = total.values.len() / total.sum.len();
    let (max, sum) = (total.max[q], total.sum[q]);
    let (keep, sum) = match sink {
        None => (1.0, sum),
        Some(&sink) if sink > max => (exp(s, max - sink), sum * exp(s, max - sink) + 1.0),
        Some(&sink) => (1.0, sum + exp(s, sink - max)),
    };
    for (out, value) in head.iter_mut().zip(&total.values[q * stride..]) {
        *out = value * keep / sum;
    }
}

#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(s.exp(s.splat(x)), &mut lanes);
    lanes[0]
}
