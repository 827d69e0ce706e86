use super::super::super::simd::tests::levels;
use super::*;

/// Largest relative error of a sum of products: some 256 roundings of terms that may cancel.
const OFF: f64 = 2e-5;

fn values(n: usize, salt: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7 + salt).sin() * 1.5).collect()
}

fn same(name: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let size = want.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= OFF * size, "{name} at {at}: {got} {want}");
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn a_convolution_is_that_of_f64() {
    for (name, level) in levels() {
        for (width, taps) in [(1, 2), (15, 3), (16, 4), (33, 4), (256, 3)] {
            let (weight, bias) = (values(width * taps, 0.2), values(width, 1.1));
            let inputs: Vec<Vec<f32>> = (0..taps).map(|tap| values(width, tap as f32)).collect();
            let inputs: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let mut out = vec![f32::NAN; width];
            convolve(level, &weight, &bias, &inputs, &mut out);
            let want = |c: usize| {
                let term = |tap: usize| f64::from(weight[tap * width + c]) * f64::from(inputs[tap][c]);
                f64::from(bias[c]) + (0..taps).map(term).sum::<f64>()
            };
            same(name, &out, &(0..width).map(want).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_scan_is_that_of_f64() {
    for (name, level) in levels() {
        for (dim, columns) in [(1, 1), (4, 8), (5, 17), (64, 128), (3, 40)] {
            let mut state = values(dim * columns, 0.4);
            let mut exact = wide(&state);
            for row in 0..20 {
                let salt = row as f32;
                let (x, b, c) = (values(dim, salt), values(columns, salt + 0.5), values(columns, salt + 2.0));
                let numbers = ScanRow { step: 0.3, decay: 0.9, skip: -0.6, b: &b, c: &c };
                let mut out = vec![f32::NAN; dim];
                scan(level, &mut state, &numbers, &x, &mut out);
                let mut want = vec![0.0; dim];
                for (i, want) in want.iter_mut().enumerate() {
                    let x = f64::from(x[i]);
                    *want = f64::from(numbers.skip) * x;
                    for j in 0..columns {
                        let at = &mut exact[i * columns + j];
                        *at = f64::from(numbers.decay) * *at + f64::from(numbers.step) * x * f64::from(b[j]);
                        *want += *at * f64::from(c[j]);
                    }
                }
                same(name, &out, &want);
            }
            same(name, &state, &exact);
        }
    }
}

#[test]
fn a_delta_rule_is_that_of_f64() {
    for (name, level) in levels() {
        for (dim, width) in [(1, 1), (8, 16), (16, 17), (128, 128), (12, 100), (64, 64)] {
            let mut state = values(dim * width, 0.4);
            let mut exact = wide(&state);
            for row in 0..20 {
                let salt = row as f32;
                let (q, k, v) = (values(dim, salt), values(dim, salt + 0.5), values(width, salt + 2.0));
                let numbers = DeltaRow { q: &q, k: &k, eps: 0.01, decay: 0.95, amount: 0.7 };
                let mut out = vec![f32::NAN; width];
                delta(level, &mut state, &numbers, &v, &mut out);
                let unit = |x: &[f32]| {
                    let x = wide(x);
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(numbers.eps)).sqrt();
                    x.into_iter().map(|x| x / length).collect::<Vec<_>>()
                };
                let (q, k) = (unit(&q), unit(&k));
                exact.iter_mut().for_each(|s| *s *= f64::from(numbers.decay));
                let want = |j: usize, exact: &mut [f64]| {
                    let known: f64 = (0..dim).map(|i| exact[i * width + j] * k[i]).sum();
                    let delta = (f64::from(v[j]) - known) * f64::from(numbers.amount);
                    (0..dim).for_each(|i| exact[i * width + j] += k[i] * delta);
                    (0..dim).map(|i| exact[i * width + j] * q[i]).sum::<f64>() / (dim as f64).sqrt()
                };
                same(name, &out, &(0..width).map(|j| want(j, &mut exact)).collect::<Vec<_>>());
            }
            same(name, &state, &exact);
        }
    }
}

#[test]
fn all_instruction_sets_give_the_same_bits() {
    let of = |level| {
        let (mut scanned, mut learnt) = (values(40 * 100, 0.3), values(40 * 100, 0.3));
        let [a, b, c] = [0.1, 1.2, 2.3].map(|salt| values(100, salt));
        let mut out = vec![0.0; 40];
        let row = ScanRow { step: 0.4, decay: 0.8, skip: 0.5, b: &a, c: &b };
        scan(level, &mut scanned, &row, &c[..40], &mut out);
        let row = DeltaRow { q: &a[..40], k: &b[..40], eps: 1e-6, decay: 0.9, amount: 0.5 };
        let mut more = vec![0.0; 100];
        delta(level, &mut learnt, &row, &c, &mut more);
        let mut last = vec![0.0; 50];
        convolve(level, &a, &b, &[&c, &a], &mut last);
        [scanned, learnt, out, more, last].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let all = levels();
    all.iter().for_each(|&(name, level)| assert!(of(level) == of(all[0].1), "{name}"));
}
