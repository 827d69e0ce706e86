//! Each sublayer of random decoders on the CPU backend, against f64.
//!
//! Tolerances are relative errors of whole result rows in the Euclidean norm. The reference gets the backend's own
//! residual rows, so that errors of earlier sublayers do not accumulate.

use rocmforge::backend::cpu::CpuOptions;
use rocmforge::backend::{Backend, KvType};
use rocmforge::program::{RopeLayout, RopeScaling, Yarn};
use rocmforge::tensor::DType;

use crate::forward::{self, Rows};
use crate::small::{Recipe, Small};
use crate::steps::{FLOAT, Runner, isas, rows, table, tokens};

/// Products of 256..512 terms in 16 lanes of f32: at most 32 additions of a lane and 4 of the tree. Each may be off by
/// 2^-24 of a partial sum, which is of the order of the result. The errors are independent: about sqrt(36) units. A
/// sublayer is two such products, a norm and a softmax or silu within 2^-22: below 32 units of 2^-24 together.
pub const EXACT: f64 = 32.0 / (1 << 24) as f64;

/// Keys and values rounded to f16 are off by at most 2^-11, by 2^-12.8 in the mean square, independently. Sums of
/// head_dim terms have the same relative error. Scores have it times their size (below 4 here), and the result has
/// both.
const HALF_KV: f64 = 1e-3;

/// Rounding to 127 steps of the largest of 32 values is off by 0.6 % of a row's norm. That is a step over sqrt(12),
/// where the largest is about 2.2 times the mean square. Attention rounds before q, k, v and before its output. Both q
/// and k shift the scores by 0.6 % of their size (below 4). Then v and the output add as much: sqrt(2 * 2.4^2 + 2) *
/// 0.6 % at worst.
const INT8: f64 = 2.5e-2;

#[test]
fn sublayers_are_those_of_f64_for_every_type() {
    for &dtype in rocmforge::backend::cpu::quant::SUPPORTED {
        let recipe = Recipe { seed: 3 + u64::from(dtype.ggml()), n_layers: 1, ..Recipe::plain(dtype) };
        for isa in isas() {
            check_sublayers(&recipe, CpuOptions { isa: Some(isa), ..FLOAT }, 33, EXACT);
        }
        check_sublayers(&recipe, CpuOptions { kv: KvType::F16, ..FLOAT }, 33, HALF_KV);
        check_sublayers(&recipe, CpuOptions::default(), 33, INT8);
    }
}

#[test]
fn sublayers_of_two_types_are_those_of_f64() {
    for (seed, first, second) in [(71, DType::Q4_K, DType::Q6_K), (72, DType::Q5_K, DType::Q6_K)] {
        let recipe = Recipe { seed, second: Some(second), n_layers: 1, ..Recipe::plain(first) };
        for isa in isas() {
            check_sublayers(&recipe, CpuOptions { isa: Some(isa), ..FLOAT }, 33, EXACT);
        }
        check_sublayers(&recipe, CpuOptions::default(), 33, INT8);
    }
}

#[test]
fn sublayers_are_those_of_f64_for_every_shape() {
    let (halves, interleaved) = (RopeLayout::Halves, RopeLayout::Interleaved);
    let mut seed = 40;
    for group in 1..=8usize {
        for (head_dim, rope_dims, layout) in
            [(8, 8, interleaved), (64, 64, halves), (80, 32, halves), (64, 16, interleaved)]
        {
            seed += 1;
            let recipe = Recipe { seed, n_layers: 1, ..Recipe::of_heads(group, head_dim, rope_dims, layout) };
            check_sublayers(&recipe, FLOAT, 40, EXACT);
            check_sublayers(&recipe, CpuOptions { kv: KvType::F16, ..FLOAT }, 40, HALF_KV);
        }
    }
}

#[test]
fn layers_of_experts_are_those_of_f64() {
    // The choice is discrete: if two logits were closer than the rounding, another choice would be right too. These
    // seeds have no such pair.
    for (seed, dtype, used, normalise, scale) in [
        (81, DType::F32, 3, true, 1.0),
        (82, DType::F16, 6, false, 1.0),
        (83, DType::Q8_0, 1, true, 1.0),
        (84, DType::Q4_K, 2, false, 2.5),
        (85, DType::Q6_K, 3, true, 0.5),
    ] {
        let mut recipe = Recipe { seed, n_layers: 2, ..Recipe::plain(dtype).with_experts() };
        let experts = recipe.experts.as_mut().unwrap();
        (experts.used, experts.normalise, experts.scale) = (used, normalise, scale);
        for isa in isas() {
            check_sublayers(&recipe, CpuOptions { isa: Some(isa), ..FLOAT }, 33, EXACT);
        }
        check_sublayers(&recipe, CpuOptions { kv: KvType::F32, ..CpuOptions::default() }, 1, INT8);
    }
}

#[test]
fn yarn_turns_as_its_paper_says() {
    let yarn = Yarn {
        factor: 4.0,
        original_context: 512,
        ext_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        log_multiplier: 0.0,
        whole_pairs: true,
    };
    for layout in [RopeLayout::Interleaved, RopeLayout::Halves] {
        let scaling = RopeScaling::Yarn(yarn);
        let recipe = Recipe { seed: 91, layout, scaling, n_layers: 1, ..Recipe::plain(DType::F32) };
        check_sublayers(&recipe, FLOAT, 120, EXACT);
    }
}

#[test]
fn logits_of_a_whole_model_are_those_of_f64() {
    let recipe =
        Recipe { seed: 9, n_layers: 4, biases: true, head_norms: true, ..Recipe::plain(DType::Q4_1) };
    let model = Small::new(&recipe);
    let ids = tokens(10, 70);
    let want = forward::logits(&model, &ids);
    let mut runner = Runner::new(&model, FLOAT, 1);
    let got = runner.step(&rows(&ids, 0, 70), &[table(3)]);
    for (row, (got, want)) in got.iter().zip(&want).enumerate() {
        let got: Vec<f64> = got.iter().map(|&x| f64::from(x)).collect();
        // Nine sublayers; each at most doubles the error of those before, relative to its own share.
        close(&got, want, 9.0 * EXACT, &format!("logits of row {row}"));
        let kl = divergence(want, &got);
        assert!(kl <= 1e-9, "row {row}: KL {kl:e}"); // about the square of the tolerance above times the logits' size
    }
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    let got = runner.step(&rows(&ids, 0, 70), &[table(3)]);
    let mean = got
        .iter()
        .zip(&want)
        .map(|(g, w)| divergence(w, &g.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()));
    let mean = mean.sum::<f64>() / 70.0;
    assert!(mean <= 1e-2, "8-bit activations: mean KL {mean:e}, limit 1e-2");
}

/// Kullback-Leibler divergence of softmax(got) from softmax(want).
pub fn divergence(want: &[f64], got: &[f64]) -> f64 {
    let logsum = |x: &[f64]| {
        let max = x.iter().copied().fold(f64::MIN, f64::max);
        max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
    };
    let (want_sum, got_sum) = (logsum(want), logsum(got));
    want.iter().zip(got).map(|(w, g)| (w - want_sum).exp() * ((w - want_sum) - (g - got_sum))).sum()
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
    let size = norm(&mut want.iter().copied());
    // `<=` so that NaN fails.
    assert!(
        error <= tolerance * size,
        "{what}: off by {:.2e} of {size:.2e}, {tolerance:.1e} allowed",
        error / size
    );
}

fn difference(after: &Rows, before: &Rows) -> Rows {
    after.iter().zip(before).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect()).collect()
}

/// Runs `n` tokens of a recipe's model in one step and compares every sublayer and the head.
fn check_sublayers(recipe: &Recipe, options: CpuOptions, n: usize, tolerance: f64) {
    let model = Small::new(recipe);
    let mut runner = Runner::new(&model, options, 2);
    let ids = tokens(recipe.seed + 100, n);
    runner.begin(&rows(&ids, 0, n), &[table(n.div_ceil(32) as u32)]);
    let mut before = runner.residual(n);
    assert_eq!(before, forward::embed(&model, &ids));
    let check = |got: &Rows, want: &Rows, sublayer: &str| {
        for (row, (got, want)) in got.iter().zip(want).enumerate() {
            close(got, want, tolerance, &format!("{recipe:?} {options:?}: {sublayer} row {row}"));
        }
    };
    for (index, layer) in model.layers.iter().enumerate() {
        runner.attention(index);
        let after = runner.residual(n);
        check(&difference(&after, &before), &forward::attention(&model, layer, &before), "attention");
        before = after;
        runner.ffn(index);
        let after = runner.residual(n);
        check(&difference(&after, &before), &forward::ffn(&model, layer, &before), "ffn");
        before = after;
    }
    runner.head();
    let got: Rows = (0..n)
        .map(|i| runner.loaded.backend.logits(i).unwrap().into_iter().map(f64::from).collect())
        .collect();
    check(&got, &forward::head(&model, &before), "head");
}
