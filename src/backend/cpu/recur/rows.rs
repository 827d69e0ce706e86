//! One row of each operation with a recurrent state, in vectors of sixteen columns of the state.

use super::super::simd::{LANES, Simd, vectorize};

/// Vectors of a state's columns that are computed together: their sums stay in registers.
const TOGETHER: usize = 4;

vectorize! {
    /// `out[c] = bias[c] +` the sum over taps j of `weight[j][c] * inputs[j][c]`.
    pub fn convolve = convolve_lanes, (weight: &[f32], bias: &[f32], inputs: &[&[f32]], out: &mut [f32])
}

vectorize! {
    /// For each value x of a head, with its row s of the state: `s = decay * s + step * x * b`, `out = s . c + skip * x`.
    pub fn scan = scan_lanes, (state: &mut [f32], row: &ScanRow<'_>, x: &[f32], out: &mut [f32])
}

vectorize! {
    /// The gated delta rule for one head and row; see [`Op::DeltaRule`](crate::program::Op::DeltaRule).
    pub fn delta = delta_lanes, (state: &mut [f32], row: &DeltaRow<'_>, v: &[f32], out: &mut [f32])
}

/// Numbers of a head and row of a scan.
pub struct ScanRow<'a> {
    pub step: f32,
    pub decay: f32,
    pub skip: f32,
    /// As long as a row of the state, as is `c`.
    pub b: &'a [f32],
    pub c: &'a [f32],
}

/// Numbers of a head and row of the delta rule.
pub struct DeltaRow<'a> {
    /// As they are, not of length 1; as is `k`.
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub eps: f32,
    /// Factor of the state.
    pub decay: f32,
    /// Part of the difference that is learnt.
    pub amount: f32,
}

/// The first sixteen values, or all of fewer and zeros.
#[inline(always)]
fn load<S: Simd>(s: S, from: &[f32]) -> S::V {
    match from.first_chunk::<LANES>() {
        Some(from) => s.load(from),
        None => {
            let mut lanes = [0.0; LANES];
            lanes[..from.len()].copy_from_slice(from);
            s.load(&lanes)
        }
    }
}

/// Stores the first sixteen values, or all of fewer.
#[inline(always)]
fn store<S: Simd>(s: S, v: S::V, to: &mut [f32]) {
    match to.first_chunk_mut::<LANES>() {
        Some(to) => s.store(v, to),
        None => {
            let mut lanes = [0.0; LANES];
            s.store(v, &mut lanes);
            to.copy_from_slice(&lanes[..to.len()]);
        }
    }
}

#[inline(always)]
fn convolve_lanes<S: Simd>(s: S, weight: &[f32], bias: &[f32], inputs: &[&[f32]], out: &mut [f32]) {
    let width = out.len();
    for at in (0..width).step_by(LANES) {
        let mut sum = load(s, &bias[at..]);
        for (weight, input) in weight.chunks_exact(width).zip(inputs) {
            sum = s.mul_add(load(s, &weight[at..]), load(s, &input[at..]), sum);
        }
        store(s, sum, &mut out[at..]);
    }
}

#[inline(always)]
fn scan_lanes<S: Simd>(s: S, state: &mut [f32], row: &ScanRow<'_>, x: &[f32], out: &mut [f32]) {
    let columns = row.b.len();
    let decay = s.splat(row.decay);
    for ((state, x), out) in state.chunks_exact_mut(columns).zip(x).zip(out) {
        let new = s.splat(row.step * x);
        let mut sum = s.splat(0.0);
        for at in (0..columns).step_by(LANES) {
            let kept = s.mul(decay, load(s, &state[at..]));
            let changed = s.mul_add(new, load(s, &row.b[at..]), kept);
            sum = s.mul_add(changed, load(s, &row.c[at..]), sum);
            store(s, changed, &mut state[at..]);
        }
        *out = s.reduce_add(sum) + row.skip * x;
    }
}

#[inline(always)]
fn delta_lanes<S: Simd>(s: S, state: &mut [f32], row: &DeltaRow<'_>, v: &[f32], out: &mut [f32]) {
    let [q, k] = [row.q, row.k].map(|x| 1.0 / (squares(s, x) + row.eps).sqrt());
    let scales = [q / (row.q.len() as f32).sqrt(), k];
    let width = v.len();
    let whole = width - width % (TOGETHER * LANES);
    for at in (0..whole).step_by(TOGETHER * LANES) {
        delta_columns::<S, TOGETHER>(s, state, row, scales, (v, at), out);
    }
    for at in (whole..width).step_by(LANES) {
        delta_columns::<S, 1>(s, state, row, scales, (v, at), out);
    }
}

/// The sum of squares.
#[inline(always)]
fn squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for at in (0..x.len()).step_by(LANES) {
        let x = load(s, &x[at..]);
        sum = s.mul_add(x, x, sum);
    }
    s.reduce_add(sum)
}

/// `N` vectors of columns of the state, from column `at` on. Reads the state twice, the second time from the cache.
#[inline(always)]
fn delta_columns<S: Simd, const N: usize>(
    s: S,
    state: &mut [f32],
    row: &DeltaRow<'_>,
    [q, k]: [f32; 2],
    (v, at): (&[f32], usize),
    out: &mut [f32],
) {
    let width = v.len();
    let (decay, amount) = (s.splat(row.decay), s.splat(row.amount));
    let mut known = [s.splat(0.0); N];
    for (state, key) in state.chunks_exact(width).zip(row.k) {
        let key = s.splat(key * k);
        for (number, known) in known.iter_mut().enumerate() {
            *known = s.mul_add(load(s, &state[at + number * LANES..]), key, *known);
        }
    }
    let mut delta = [s.splat(0.0); N];
    for (number, delta) in delta.iter_mut().enumerate() {
        let off = s.sub(load(s, &v[at + number * LANES..]), s.mul(decay, known[number]));
        *delta = s.mul(amount, off);
    }
    let mut sums = [s.splat(0.0); N];
    for ((state, key), query) in state.chunks_exact_mut(width).zip(row.k).zip(row.q) {
        let (key, query) = (s.splat(key * k), s.splat(query * q));
        for (number, sum) in sums.iter_mut().enumerate() {
            let state = &mut state[at + number * LANES..];
            let changed = s.mul_add(key, delta[number], s.mul(decay, load(s, state)));
            *sum = s.mul_add(changed, query, *sum);
            store(s, changed, state);
        }
    }
    for (number, sum) in sums.into_iter().enumerate() {
        store(s, sum, &mut out[at + number * LANES..]);
    }
}

#[cfg(test)]
mod tests;
