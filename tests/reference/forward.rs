//! A dense decoder in plain f64, written from the formulas and from nothing else.
//!
//! Sublayers take the residual rows of one whole sequence, positions `0..rows`, and give what is added to them.

use rocmforge::backend::{ModelDims, RopeLayout};

use crate::small::{Layer, Linear, Matrix, Small};

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

/// Turns the pairs of one head by the angles of `position`.
fn rope(dims: &ModelDims, factors: Option<&Matrix>, position: usize, head: &mut [f64]) {
    let spec = &dims.rope;
    let half = spec.dims / 2;
    for i in 0..half {
        let factor = factors.map_or(1.0, |f| f.row(0)[i]);
        let frequency = f64::from(spec.theta).powf(-(2.0 * i as f64) / spec.dims as f64) / factor;
        let angle = position as f64 * f64::from(spec.position_scale) * frequency;
        let (a, b) = match spec.layout {
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            RopeLayout::Halves => (i, i + half),
        };
        let (x, y) = (head[a], head[b]);
        head[a] = x * angle.cos() - y * angle.sin();
        head[b] = x * angle.sin() + y * angle.cos();
    }
}

/// Norm, attention with all its projections.
pub fn attention(model: &Small, layer: &Layer, residual: &Rows) -> Rows {
    let dims = &model.dims;
    let (d, factors) = (dims.head_dim, model.rope_factors.as_ref().map(|f| &f.exact));
    let heads = |part: &Linear, norm: Option<&Matrix>, turn: bool| -> Vec<Rows> {
        let one = |(position, x): (usize, &Vec<f64>)| {
            let x = rms_norm(x, &layer.attn_norm.exact, dims.norm_eps);
            let mut heads: Rows = linear(part, &x).chunks(d).map(<[f64]>::to_vec).collect();
            for head in &mut heads {
                if let Some(norm) = norm {
                    *head = rms_norm(head, norm, dims.norm_eps);
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
    let group = dims.n_heads / dims.n_kv_heads;
    (0..residual.len())
        .map(|row| {
            let mut all = Vec::new();
            for h in 0..dims.n_heads {
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

/// Norm and feed-forward layer.
pub fn ffn(model: &Small, layer: &Layer, residual: &Rows) -> Rows {
    let one = |x: &Vec<f64>| {
        let x = rms_norm(x, &layer.ffn_norm.exact, model.dims.norm_eps);
        let gated = linear(&layer.gate, &x).into_iter().zip(linear(&layer.up, &x));
        let gated: Vec<f64> = gated.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        linear(&layer.down, &gated)
    };
    residual.iter().map(one).collect()
}

/// Logits of each residual row.
pub fn head(model: &Small, residual: &Rows) -> Rows {
    let output = |x: &[f64]| -> Vec<f64> {
        let row = |row: usize| model.output.exact.row(row).iter().zip(x).map(|(w, x)| w * x).sum();
        (0..model.output.exact.rows).map(row).collect()
    };
    residual.iter().map(|x| output(&rms_norm(x, &model.output_norm.exact, model.dims.norm_eps))).collect()
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
