//! Norms, feed-forward activations and the softmax sum, on rows of f32.

use super::simd::{LANES, Simd, vectorize};

vectorize! {
    /// `out[i] = x[i] * weight[i] / sqrt(mean(x^2) + eps)`. All three have one length. Sums are f32: 16 lanes, then a
    /// tree, so a row's bits depend only on the row.
    pub fn rms_norm = rms_norm_lanes, (x: &[f32], weight: &[f32], eps: f32, out: &mut [f32])
}

vectorize! {
    /// `out[i] = (x[i] - mean(x)) * weight[i] / sqrt(variance(x) + eps)`. All three have one length. Sums as in [`rms_norm`].
    pub fn layer_norm = layer_norm_lanes, (x: &[f32], weight: &[f32], eps: f32, out: &mut [f32])
}

vectorize! {
    /// `1 / sqrt(mean(x^2) + eps)`. Sums as in [`rms_norm`].
    pub fn inverse_root_mean_square = inverse_rms, (x: &[f32], eps: f32) -> f32
}

vectorize! {
    /// `x[i] = max(0, x[i] - mean(x) - deviations * deviation(x))`, where the variance of n values is divided by n - 1. Sums as in
    /// [`rms_norm`].
    pub fn sparsify = sparsify_lanes, (x: &mut [f32], deviations: f32)
}

vectorize! {
    /// `out[i] = gelu(gate[i]) * up[i]`, by the tanh approximation. All three have one length.
    pub fn geglu = geglu_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// `out[i] = silu(gate[i]) * up[i]`, with `silu(x) = x / (1 + e^-x)`. All three have one length.
    pub fn swiglu = swiglu_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// `out[i] = up[i] / (1 + e^-gate[i])`. All three have one length.
    pub fn sigmoid = sigmoid_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// `out[i] = gate[i] * up[i]`. All three have one length.
    pub fn product = product_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// `out[i] = max(gate[i], 0)^2 * up[i]`. All three have one length.
    pub fn squared_relu = squared_relu_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// `out[i]` of a gate and its up; see [`Activation::Clamped`](crate::program::Activation::Clamped). All three have one length.
    pub fn clamped = clamped_lanes, (gate: &[f32], up: &[f32], out: &mut [f32])
}

vectorize! {
    /// Sum of `e^((x[i] - max) * scale)`: 16 lanes in f64. `max` must be at least every x; terms below e^-87 count as
    /// e^-87.
    pub fn sum_exp = sum_exp_lanes, (x: &[f32], max: f32, scale: f32) -> f64
}

/// `from` in the first lanes, 0 in the rest.
fn pad(from: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..from.len()].copy_from_slice(from);
    lanes
}

#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sums = [s.splat(0.0); 2];
    for pair in chunks.chunks(2) {
        for (i, x) in pair.iter().enumerate() {
            let x = s.load(x);
            sums[i] = s.mul_add(x, x, sums[i]);
        }
    }
    let last = s.load(&pad(tail));
    sums[0] = s.mul_add(last, last, sums[0]);
    let mean = s.reduce_add(s.add(sums[0], sums[1])) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// A function of sixteen values. A type and no closure. A closure would not be compiled for the processor that `S`
/// stands for, and each of its operations would be a call. That made prompts of a small model half as fast.
trait Lanes<S: Simd> {
    fn of(&self, s: S, x: S::V) -> S::V;
}

/// The values themselves.
struct Same;

impl<S: Simd> Lanes<S> for Same {
    #[inline(always)]
    fn of(&self, _: S, x: S::V) -> S::V {
        x
    }
}

/// Squares of distances from a mean.
struct SquareFrom(f32);

impl<S: Simd> Lanes<S> for SquareFrom {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let off = s.sub(x, s.splat(self.0));
        s.mul(off, off)
    }
}

struct Silu;

impl<S: Simd> Lanes<S> for Silu {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let e = s.exp(s.sub(s.splat(0.0), x));
        s.div(x, s.add(s.splat(1.0), e))
    }
}

struct Sigmoid;

impl<S: Simd> Lanes<S> for Sigmoid {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let e = s.exp(s.sub(s.splat(0.0), x));
        s.div(s.splat(1.0), s.add(s.splat(1.0), e))
    }
}

struct SquaredRelu;

impl<S: Simd> Lanes<S> for SquaredRelu {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let x = s.max(s.splat(0.0), x); // in this order a NaN stays one
        s.mul(x, x)
    }
}

struct Gelu;

/// Uses that `x / 2 * (1 + tanh(z))` equals `x / (1 + e^-2z)`.
impl<S: Simd> Lanes<S> for Gelu {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        const SQRT_2_OVER_PI: f32 = 0.797_884_6;
        const CUBE: f32 = 0.044_715;
        let cube = s.mul(s.mul(x, x), s.mul(x, s.splat(CUBE)));
        let e = s.exp(s.mul(s.add(x, cube), s.splat(-2.0 * SQRT_2_OVER_PI)));
        s.div(x, s.add(s.splat(1.0), e))
    }
}

/// Largest gate, and largest size of an up, of a clamped gate.
const LIMIT: f32 = 7.0;

struct ClampedGate;

impl<S: Simd> Lanes<S> for ClampedGate {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let x = s.min(s.splat(LIMIT), x); // in this order a NaN stays one
        let e = s.exp(s.mul(x, s.splat(-1.702)));
        s.div(x, s.add(s.splat(1.0), e))
    }
}

struct ClampedUp;

impl<S: Simd> Lanes<S> for ClampedUp {
    #[inline(always)]
    fn of(&self, s: S, x: S::V) -> S::V {
        let x = s.max(s.splat(-LIMIT), s.min(s.splat(LIMIT), x));
        s.add(s.splat(1.0), x)
    }
}

/// The sum of all terms: two accumulators of 16 lanes, then a tree.
#[inline(always)]
fn sum<S: Simd>(s: S, x: &[f32], term: &impl Lanes<S>) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sums = [s.splat(0.0); 2];
    for pair in chunks.chunks(2) {
        for (i, x) in pair.iter().enumerate() {
            sums[i] = s.add(sums[i], term.of(s, s.load(x)));
        }
    }
    let mut last = [0.0; LANES];
    s.store(term.of(s, s.load(&pad(tail))), &mut last);
    sums[0] = s.add(sums[0], s.load(&pad(&last[..tail.len()])));
    s.reduce_add(s.add(sums[0], sums[1]))
}

#[inline(always)]
fn layer_norm_lanes<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = sum(s, x, &Same) / x.len() as f32;
    let squares = sum(s, x, &SquareFrom(mean));
    let factor = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = (x - mean) * factor * w;
    }
}

#[inline(always)]
fn rms_norm_lanes<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let factor = inverse_rms(s, x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * w;
    }
}

#[inline(always)]
fn sparsify_lanes<S: Simd>(s: S, x: &mut [f32], deviations: f32) {
    let mean = sum(s, x, &Same) / x.len() as f32;
    let variance = sum(s, x, &SquareFrom(mean)) / (x.len() - 1) as f32;
    let cut = mean + deviations * variance.sqrt();
    for x in x {
        // In this order a NaN stays one.
        *x = if *x <= cut { 0.0 } else { *x - cut };
    }
}

#[inline(always)]
fn swiglu_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &Silu, &Same);
}

#[inline(always)]
fn geglu_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &Gelu, &Same);
}

#[inline(always)]
fn sigmoid_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &Sigmoid, &Same);
}

#[inline(always)]
fn product_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &Same, &Same);
}

#[inline(always)]
fn squared_relu_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &SquaredRelu, &Same);
}

#[inline(always)]
fn clamped_lanes<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    gated(s, gate, up, out, &ClampedGate, &ClampedUp);
}

/// `out = f(gate) * g(up)`, sixteen values at a time.
#[inline(always)]
fn gated<S: Simd>(s: S, gate: &[f32], up: &[f32], out: &mut [f32], f: &impl Lanes<S>, g: &impl Lanes<S>) {
    let (gates, gate_tail) = gate.as_chunks::<LANES>();
    let (ups, up_tail) = up.as_chunks::<LANES>();
    let (o, o_tail) = out.as_chunks_mut::<LANES>();
    for ((gate, up), o) in gates.iter().zip(ups).zip(o) {
        s.store(s.mul(f.of(s, s.load(gate)), g.of(s, s.load(up))), o);
    }
    let mut last = [0.0; LANES];
    s.store(s.mul(f.of(s, s.load(&pad(gate_tail))), g.of(s, s.load(&pad(up_tail)))), &mut last);
    o_tail.copy_from_slice(&last[..o_tail.len()]);
}

/// `x = cap * tanh(x / cap)`, within cap * 2^-22. Uses that tanh(z) equals `1 - 2 / (e^2z + 1)`.
#[inline(always)]
pub fn cap<S: Simd>(s: S, cap: f32, x: &mut [f32]) {
    let (one, two) = (s.splat(1.0), s.splat(2.0));
    for x in x.as_chunks_mut::<LANES>().0 {
        let e = s.exp(s.mul(s.load(x), s.splat(2.0 / cap)));
        let tanh = s.sub(one, s.div(two, s.add(e, one)));
        s.store(s.mul(tanh, s.splat(cap)), x);
    }
}

#[inline(always)]
fn sum_exp_lanes<S: Simd>(s: S, x: &[f32], max: f32, scale: f32) -> f64 {
    let (max, scale) = (s.splat(max), s.splat(scale));
    let mut sums = [0.0f64; LANES];
    let mut exps = [0.0; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for x in chunks {
        s.store(s.exp(s.mul(s.sub(s.load(x), max), scale)), &mut exps);
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum += f64::from(exps[i]);
        }
    }
    s.store(s.exp(s.mul(s.sub(s.load(&pad(tail)), max), scale)), &mut exps);
    sums.iter().sum::<f64>() + exps[..tail.len()].iter().map(|&e| f64::from(e)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::super::simd::tests::levels;
    use super::*;

    fn values(n: usize, salt: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7 + salt).sin() * 3.0).collect()
    }

    #[test]
    fn norm_is_that_of_f64() {
        for (name, level) in levels() {
            for n in [1, 8, 15, 16, 17, 64, 576, 1000] {
                let (x, w) = (values(n, 0.3), values(n, 1.7));
                let mut out = vec![f32::NAN; n];
                rms_norm(level, &x, &w, 1e-5, &mut out);
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                let factor = 1.0 / (mean + 1e-5).sqrt();
                for i in 0..n {
                    let want = f64::from(x[i]) * factor * f64::from(w[i]);
                    // n/32 additions per lane and five in the tree; half of each error survives the root; then three
                    // roundings. Below 24 units of 2^-24 for these lengths.
                    assert!(
                        (f64::from(out[i]) - want).abs() <= want.abs() * 24.0 * 2f64.powi(-24),
                        "{name} {n}"
                    );
                }
            }
        }
    }

    #[test]
    fn layer_norm_is_that_of_f64() {
        for (name, level) in levels() {
            for n in [1, 8, 15, 16, 17, 64, 576, 1000] {
                // A mean a hundred times the spread: a variance by sums of squares would have a large error.
                let (x, w) = (values(n, 0.3).iter().map(|x| x + 300.0).collect::<Vec<_>>(), values(n, 1.7));
                let mut out = vec![f32::NAN; n];
                layer_norm(level, &x, &w, 1e-5, &mut out);
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
                let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let want = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt() * f64::from(w[i]);
                    // The mean has an error of up to n/32 + 7 roundings of 300, relative to the spread of 2.
                    let bound = 300.0 * (n as f64 / 32.0 + 8.0) * 2f64.powi(-24) / variance.sqrt().max(3e-3);
                    assert!(
                        (f64::from(out[i]) - want).abs() <= bound * 4.0,
                        "{name} {n} {i}: {} {want}",
                        out[i]
                    );
                }
            }
        }
    }

    #[test]
    fn geglu_is_that_of_f64() {
        for (name, level) in levels() {
            for n in [1, 16, 33, 1536] {
                let (g, u) = (values(n, 0.1).iter().map(|g| g * 3.0).collect::<Vec<_>>(), values(n, 2.2));
                let mut out = vec![f32::NAN; n];
                geglu(level, &g, &u, &mut out);
                for i in 0..n {
                    let x = f64::from(g[i]);
                    let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                    let want = x / (1.0 + (-2.0 * z).exp()) * f64::from(u[i]);
                    // The exponent has an error of three roundings of up to 58, so the power has this relative error.
                    let bound = want.abs() * (3.0 * 2.0 * z.abs() + 8.0) * 2f64.powi(-24) + 1e-30;
                    assert!((f64::from(out[i]) - want).abs() <= bound, "{name} {n} {x}: {} {want}", out[i]);
                }
            }
            let mut out = [0.0; 3];
            geglu(level, &[-1e30, f32::NAN, 1e30], &[1.0; 3], &mut out);
            assert!(out[0].abs() < 1e-7 && out[1].is_nan() && out[2] == 1e30, "{name} {out:?}");
        }
    }

    #[test]
    fn a_clamped_gate_is_that_of_f64() {
        for (name, level) in levels() {
            for n in [1, 16, 33, 1536] {
                let of = |salt| values(n, salt).iter().map(|x| x * 5.0).collect::<Vec<_>>(); // -15 to 15
                let (g, u) = (of(0.1), of(2.2));
                let mut out = vec![f32::NAN; n];
                clamped(level, &g, &u, &mut out);
                for i in 0..n {
                    let gate = f64::from(g[i]).min(7.0);
                    let up = f64::from(u[i]).clamp(-7.0, 7.0) + 1.0;
                    let want = gate / (1.0 + (-1.702 * gate).exp()) * up;
                    // The exponent, up to 26, is off by two roundings; exp by 2^-22, 1 + up by 2^-24 of 8.
                    let bound = want.abs() * 60.0 * 2f64.powi(-24) + gate.abs() * 2f64.powi(-21);
                    assert!((f64::from(out[i]) - want).abs() <= bound, "{name} {n}: {} {want}", out[i]);
                }
            }
            let mut out = [0.0; 4];
            clamped(level, &[-1e30, f32::NAN, 1.0, 1e30], &[1.0, 1.0, f32::NAN, 1e30], &mut out);
            assert!(out[0].abs() < 1e-7 && out[1].is_nan() && out[2].is_nan(), "{name} {out:?}");
            assert!((out[3] - 56.0).abs() < 1e-3, "{name} {out:?}");
        }
    }

    #[test]
    fn simple_gates_are_those_of_f64() {
        type Gate = fn(Level, &[f32], &[f32], &mut [f32]);
        type Exact = fn(f64) -> f64;
        let all: [(Gate, Exact); 3] = [
            (sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
            (product, |x| x),
            (squared_relu, |x| x.max(0.0).powi(2)),
        ];
        for (name, level) in levels() {
            for (number, (gate, exact)) in all.into_iter().enumerate() {
                for n in [1, 16, 33, 1536] {
                    let (g, u) =
                        (values(n, 0.1).iter().map(|g| g * 20.0).collect::<Vec<_>>(), values(n, 2.2));
                    let mut out = vec![f32::NAN; n];
                    gate(level, &g, &u, &mut out);
                    for i in 0..n {
                        let want = exact(f64::from(g[i])) * f64::from(u[i]);
                        // As below.
                        let off = (f64::from(out[i]) - want).abs();
                        assert!(off <= want.abs() * 2f64.powi(-21), "{name}: gate {number} of {}", g[i]);
                    }
                }
                let mut out = [0.0];
                gate(level, &[f32::NAN], &[1.0], &mut out);
                assert!(out[0].is_nan(), "{name}: gate {number}");
            }
        }
    }

    #[test]
    fn swiglu_is_that_of_f64() {
        for (name, level) in levels() {
            for n in [1, 16, 33, 1536] {
                let (g, u) = (values(n, 0.1).iter().map(|g| g * 20.0).collect::<Vec<_>>(), values(n, 2.2));
                let mut out = vec![f32::NAN; n];
                swiglu(level, &g, &u, &mut out);
                for i in 0..n {
                    let gate = f64::from(g[i]);
                    let want = gate / (1.0 + (-gate).exp()) * f64::from(u[i]);
                    // exp has an error of 2^-22; the sum, quotient and product of 2^-24 each.
                    assert!(
                        (f64::from(out[i]) - want).abs() <= want.abs() * 2f64.powi(-21),
                        "{name} {n} {gate}"
                    );
                }
            }
            let mut out = [0.0; 2];
            swiglu(level, &[-1e30, f32::NAN], &[1.0, 1.0], &mut out);
            assert!(out[0].abs() < 1e-7 && out[1].is_nan(), "{name} {out:?}");
        }
    }
}
