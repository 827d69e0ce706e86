//! A decoder in plain f64, written from the formulas alone.
//!
//! Sublayers take the residual rows of one whole sequence, positions `0..rows`, and return what to add to them.

use rocmforge::program::{RopeLayout, RopeScaling};

use crate::small::{EPS, Ffn, Layer, Linear, Matrix, Recipe, Small, Weight};

/// Rows of values.
pub type Rows = Vec<Vec<f64>>;

fn rms_norm(x: &[f64], weight: &Matrix, eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight.row(0)).map(|(x, w)| x * factor * w).collect()
}

fn linear(part: &Linear, x: &[f64]) -> Vec<f64> {
    let product = |row: usize| part.weight.exact.row(row).iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    let bias = |row: usize| part.bias.as_ref().map_or(0.0, |b| b.exact.row(0)[row]);
    (0..part.weight.exact.rows).map(|row| product(row) + bias(row)).collect()
}

/// Angle of pair `i` at `position`, and the factor of its length.
fn turn(spec: &Recipe, factor: f64, position: usize, i: usize) -> (f64, f64) {
    let (dims, theta) = (spec.rope_dims as f64, 1e4f64);
    let angle = position as f64 * theta.powf(-(2.0 * i as f64) / dims) / factor;
    match spec.scaling {
        RopeScaling::None => (angle, 1.0),
        RopeScaling::Linear { factor } => (angle / f64::from(factor), 1.0),
        // arXiv 2309.00071: lambda, b', d and the ramp gamma of section 3.2, the temperature of 3.4.
        RopeScaling::Yarn(y) => {
            let turns_at = |beta: f32| {
                let wavelength = f64::from(y.original_context) / f64::from(beta);
                dims * (wavelength / std::f64::consts::TAU).ln() / (2.0 * theta.ln())
            };
            let (low, high) = (turns_at(y.beta_fast).floor(), turns_at(y.beta_slow).ceil());
            let slow = ((i as f64 - low.max(0.0)) / (high.min(dims - 1.0) - low.max(0.0))).clamp(0.0, 1.0);
            let s = f64::from(y.factor);
            (angle / s * slow + angle * (1.0 - slow), 0.1 * s.ln() + 1.0)
        }
    }
}

/// Rotates the pairs of one head by the angles of `position`.
fn rope(spec: &Recipe, factors: Option<&Matrix>, position: usize, head: &mut [f64]) {
    let half = spec.rope_dims / 2;
    for i in 0..half {
        let (angle, length) = turn(spec, factors.map_or(1.0, |f| f.row(0)[i]), position, i);
        let (a, b) = match spec.layout {
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            RopeLayout::Halves => (i, i + half),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = (x * angle.cos() - y * angle.sin()) * length;
        head[b] = (x * angle.sin() + y * angle.cos()) * length;
    }
}

/// Norm and attention with all projections.
pub fn attention(model: &Small, layer: &Layer, residual: &Rows) -> Rows {
    let dims = &model.recipe;
    let (d, factors) = (dims.head_dim, model.rope_factors.as_ref().map(|f| &f.exact));
    let heads = |part: &Linear, norm: Option<&Matrix>, turn: bool| -> Vec<Rows> {
        let one = |(position, x): (usize, &Vec<f64>)| {
            let x = rms_norm(x, &layer.attn_norm.exact, EPS);
            let mut heads: Rows = linear(part, &x).chunks(d).map(<[f64]>::to_vec).collect();
            for head in &mut heads {
                if let Some(norm) = norm {
                    *head = rms_norm(head, norm, EPS);
                }
                if turn {
                    rope(dims, factors, position, head);
                }
            }
            heads
        };
        residual.iter().enumerate().map(one).collect()
    };
    let q = heads(&layer.q, layer.q_norm.as_ref().map(|n| &n.exact), true);
    let k = heads(&layer.k, layer.k_norm.as_ref().map(|n| &n.exact), true);
    let v = heads(&layer.v, None, false);
    let group = dims.group;
    (0..residual.len())
        .map(|row| {
            let mut all = Vec::new();
            for h in 0..dims.n_kv_heads * dims.group {
                let score = |t: usize| {
                    let dot: f64 = q[row][h].iter().zip(&k[t][h / group]).map(|(q, k)| q * k).sum();
                    dot / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=row).map(score).collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                all.extend((0..d).map(|i| {
                    let values = v.iter().map(|heads| heads[h / group][i]);
                    weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>() / total
                }));
            }
            linear(&layer.attn_output, &all)
        })
        .collect()
}

fn swiglu(gate: Vec<f64>, up: Vec<f64>) -> Vec<f64> {
    gate.into_iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
}

/// Norm and feed-forward layer.
pub fn ffn(model: &Small, layer: &Layer, residual: &Rows) -> Rows {
    let one = |x: &Vec<f64>| {
        let x = rms_norm(x, &layer.ffn_norm.exact, EPS);
        match &layer.ffn {
            Ffn::Dense { gate, up, down } => linear(down, &swiglu(linear(gate, &x), linear(up, &x))),
            Ffn::Experts { router, experts } => mixture(model, &linear(router, &x), experts, &x),
        }
    };
    residual.iter().map(one).collect()
}

/// The experts with the largest probabilities, weighted by them.
fn mixture(model: &Small, logits: &[f64], experts: &[[Weight; 3]], x: &[f64]) -> Vec<f64> {
    let dims = model.recipe.experts.as_ref().unwrap();
    let total: f64 = logits.iter().map(|l| l.exp()).sum();
    let mut best: Vec<(f64, usize)> = logits.iter().map(|l| l.exp() / total).zip(0..).collect();
    best.sort_by(|a, b| b.0.total_cmp(&a.0));
    best.truncate(dims.used);
    let sum: f64 = if dims.normalise { best.iter().map(|(p, _)| p).sum() } else { 1.0 };
    let product = |w: &Weight, x: &[f64]| -> Vec<f64> {
        (0..w.exact.rows).map(|row| w.exact.row(row).iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let mut out = vec![0.0; x.len()];
    for (p, expert) in best {
        let [gate, up, down] = &experts[expert];
        let result = product(down, &swiglu(product(gate, x), product(up, x)));
        out.iter_mut().zip(result).for_each(|(out, y)| *out += p / sum * f64::from(dims.scale) * y);
    }
    out
}

/// Logits of each residual row.
pub fn head(model: &Small, residual: &Rows) -> Rows {
    let output = |x: &[f64]| -> Vec<f64> {
        let row = |row: usize| model.output.exact.row(row).iter().zip(x).map(|(w, x)| w * x).sum();
        (0..model.output.exact.rows).map(row).collect()
    };
    residual.iter().map(|x| output(&rms_norm(x, &model.output_norm.exact, EPS))).collect()
}

/// Residual rows of `tokens`.
pub fn embed(model: &Small, tokens: &[u32]) -> Rows {
    tokens.iter().map(|&t| model.embedding.exact.row(t as usize).to_vec()).collect()
}

/// Logits at every position of `tokens`.
pub fn logits(model: &Small, tokens: &[u32]) -> Rows {
    let mut residual = embed(model, tokens);
    let add = |residual: &mut Rows, more: Rows| {
        for (x, more) in residual.iter_mut().zip(more) {
            x.iter_mut().zip(more).for_each(|(x, y)| *x += y);
        }
    };
    for layer in &model.layers {
        let more = attention(model, layer, &residual);
        add(&mut residual, more);
        let more = ffn(model, layer, &residual);
        add(&mut residual, more);
    }
    head(model, &residual)
}
