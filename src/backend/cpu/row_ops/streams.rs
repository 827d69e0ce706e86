//! Operations of a row's streams, which lie one after the other, and the sizes of values.

use crate::backend::cpu::norm;
use crate::backend::cpu::simd::Level;

/// `sqrt(mean(x^2))`.
pub fn root_mean_square(level: Level, x: &[f32]) -> f32 {
    1.0 / norm::inverse_root_mean_square(level, x, 0.0)
}

/// `x *= root / sqrt(mean(x^2) + eps)`.
pub fn rescale(level: Level, x: &mut [f32], root: f32, eps: f32) {
    let factor = root * norm::inverse_root_mean_square(level, x, eps);
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `out[s] = from[s] + sum over i of amounts[n * s + i] * from[i]`, for n streams; the sum in order of i, before it is added.
pub fn mix(amounts: &[f32], from: &[f32], out: &mut [f32]) {
    let streams = amounts.len().isqrt().max(1);
    let width = from.len() / streams;
    let each = out.chunks_exact_mut(width).zip(from.chunks_exact(width)).zip(amounts.chunks_exact(streams));
    for ((out, own), amounts) in each {
        out.fill(0.0);
        for (amount, from) in amounts.iter().zip(from.chunks_exact(width)) {
            out.iter_mut().zip(from).for_each(|(out, x)| *out += amount * x);
        }
        out.iter_mut().zip(own).for_each(|(out, x)| *out += x);
    }
}

/// `out[s] += (1 + amounts[s]) * from` of each stream s from `first` on; without amounts, they are 0.
pub fn add(from: &[f32], amounts: &[f32], first: usize, out: &mut [f32]) {
    for (stream, out) in out.chunks_exact_mut(from.len()).enumerate().skip(first) {
        let amount = 1.0 + amounts.get(stream).copied().unwrap_or(0.0);
        out.iter_mut().zip(from).for_each(|(out, x)| *out += amount * x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_mixed_and_added_to_by_their_amounts() {
        let (from, amounts) = ([1.0, 2.0, 30.0, 40.0], [0.0, 1.0, -1.0, 0.5]);
        let mut out = [f32::NAN; 4];
        mix(&amounts, &from, &mut out);
        assert_eq!(out, [31.0, 42.0, 44.0, 58.0]);
        add(&[1.0, 10.0], &[7.0, 2.0], 1, &mut out);
        assert_eq!(out, [31.0, 42.0, 47.0, 88.0]);
        add(&[1.0, 10.0], &[], 0, &mut out);
        assert_eq!(out, [32.0, 52.0, 48.0, 98.0]);
    }

    #[test]
    fn groups_get_the_size_of_another_value() {
        for (name, level) in crate::backend::cpu::simd::tests::levels() {
            // Some ten roundings of 2^-24 each, of 5: below 3e-6.
            let mut x = vec![3.0, -3.0, 3.0];
            rescale(level, &mut x, root_mean_square(level, &[5.0; 33]), 1e-30);
            assert!(x.iter().all(|x| (x.abs() - 5.0).abs() < 1e-5), "{name}: {x:?}");
            let mut nothing = [0.0; 4];
            rescale(level, &mut nothing, 1.0, 1e-30);
            assert_eq!(nothing, [0.0; 4], "{name}");
        }
    }

    #[test]
    fn values_below_a_number_of_deviations_become_nothing() {
        for (name, level) in crate::backend::cpu::simd::tests::levels() {
            for n in [2, 15, 16, 100] {
                let before: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32).sin() * 2.0 + 5.0).collect();
                let mean = before.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
                let squares = before.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
                let cut = mean + 0.5 * (squares / (n - 1) as f64).sqrt();
                // The mean and the deviation are off by some ten roundings of numbers below 8, 5e-7 each.
                let mut x = before.clone();
                norm::sparsify(level, &mut x, 0.5);
                for (x, before) in x.iter().zip(before) {
                    let want = (f64::from(before) - cut).max(0.0);
                    assert!((f64::from(*x) - want).abs() < 1e-5, "{name} {n}: {x} {want}");
                }
            }
        }
    }
}
