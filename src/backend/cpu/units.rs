//! The fused units of a layer, as the [`Backend`](crate::backend::Backend) trait names them.
//!
//! Each takes weights of checked shape. Norms, rotation and quantising are done by the caller's thread for a few rows
//! and by all for many; products and attention are phases of the pool: four phases a layer at one row, five when
//! attention is split.

use super::activations::{FINE_ABOVE, FINE_ALL};
use super::attention::{self, Problem};
use super::compute::{Compute, Store, append_values};
use super::model::Model;
use super::norm;
use super::quant;
use crate::backend::{AttentionInput, BackendError, DeviceTensor, FfnInput, Projection};

/// Refuses a tensor that is not `rows` rows of `cols` values.
pub fn want(tensor: &DeviceTensor, rows: usize, cols: usize) -> Result<(), BackendError> {
    tensor.want(rows, cols)
}

/// As [`want`], the bias included.
pub fn want_projection(part: &Projection<'_>, rows: usize, cols: usize) -> Result<(), BackendError> {
    part.want(rows, cols)
}

/// Residual row r = row `token_ids[r]` of `table`.
pub fn embed(model: &mut Model, table: &DeviceTensor) -> Result<(), BackendError> {
    want(table, model.dims.vocab, model.dims.hidden)?;
    let bytes = table.tensor.bytes();
    let row_bytes = bytes.len() / model.dims.vocab;
    for (row, &id) in model.step.token_ids.iter().enumerate() {
        let values = &bytes[id as usize * row_bytes..][..row_bytes];
        quant::dequantize_row(table.dtype(), values, model.residual.row_mut(row))
            .map_err(|error| BackendError::Internal(error.to_string()))?;
    }
    Ok(())
}

/// Norm, q/k/v projections, per-head norms, rotation; keys and values to their pages.
pub fn attention_input(
    compute: &mut Compute,
    model: &mut Model,
    layer: u32,
    weights: &AttentionInput<'_>,
) -> Result<(), BackendError> {
    let (q_cols, kv_cols) = model.head_cols();
    let (hidden, head_dim, eps) = (model.dims.hidden, model.dims.head_dim, model.dims.norm_eps);
    let layer = check_layer(model, layer)?;
    want(weights.norm, 1, hidden)?;
    want_projection(&weights.q, q_cols, hidden)?;
    want_projection(&weights.k, kv_cols, hidden)?;
    want_projection(&weights.v, kv_cols, hidden)?;
    read_norm(weights.norm, &mut model.norm)?;
    for (norm, values) in [weights.q_norm, weights.k_norm].into_iter().zip(&mut model.head_norms) {
        values.clear();
        if let Some(norm) = norm {
            want(norm, 1, head_dim)?;
            append_values(norm, values)?;
        }
    }
    make_rope(model, weights.rope_factors)?;
    let parts = [weights.q, weights.k, weights.v];
    let (level, rows) = (compute.level, model.step.rows());
    let (residual, norm) = (&model.residual, &model.norm);
    compute.activate(&mut model.acts, rows, hidden, &parts.map(|p| p.weight), FINE_ABOVE, |row, out| {
        norm::rms_norm(level, residual.row(row), norm, eps, out);
    });
    let stride = model.qkv.cols();
    compute.project(&parts, &model.acts, Store::Replace, model.qkv.values_mut(), stride)?;
    let (rope, layout, [q_norm, k_norm]) = (&model.rope, model.dims.rope.layout, &model.head_norms);
    let turn = |row: usize, values: &mut [f32]| {
        let (q, k) = values[..q_cols + kv_cols].split_at_mut(q_cols);
        for (heads, norm) in [(q, q_norm), (k, k_norm)] {
            if !norm.is_empty() {
                for head in heads.chunks_exact_mut(head_dim) {
                    norm::rms_norm_in_place(level, head, norm, eps);
                }
            }
            rope.rotate(layout, row, heads, head_dim);
        }
    };
    let parallel = compute.is_parallel(rows * stride);
    let mut qkv_rows = model.qkv.values_mut().chunks_exact_mut(stride).take(rows);
    if parallel {
        let mut qkv_rows: Vec<_> = qkv_rows.collect();
        compute.pool.run_items(&mut qkv_rows, |row, values| turn(row, values));
    } else {
        qkv_rows.by_ref().enumerate().for_each(|(row, values)| turn(row, values));
    }
    let qkv = &model.qkv;
    model.kv.write(&mut compute.pool, parallel, level, layer, &model.step.places, |row, kv_head| {
        let key = &qkv.row(row)[q_cols + kv_head * head_dim..];
        [&key[..head_dim], &key[kv_cols..][..head_dim]]
    });
    Ok(())
}

/// The step's rotary angles, made at its first layer, or anew for other factors.
fn make_rope(model: &mut Model, factors: Option<&DeviceTensor>) -> Result<(), BackendError> {
    let tensor = factors.map(|f| &f.tensor);
    let same = match (&model.rope_made_with, tensor) {
        (Some(None), None) => true,
        (Some(Some(made)), Some(tensor)) => made.same(tensor),
        _ => false,
    };
    if same {
        return Ok(());
    }
    let mut values = Vec::new();
    if let Some(factors) = factors {
        want(factors, 1, model.dims.rope.dims / 2)?;
        append_values(factors, &mut values)?;
    }
    let given = factors.map(|_| values.as_slice());
    model.rope.fill(&model.dims.rope, given, &model.step.positions);
    model.rope_made_with = Some(tensor.cloned());
    Ok(())
}

/// Causal attention of each row over its sequence's pages.
pub fn attention(compute: &mut Compute, model: &mut Model, layer: u32) -> Result<(), BackendError> {
    let layer = check_layer(model, layer)?;
    let problem = Problem {
        step: &model.step,
        kv: &model.kv,
        layer,
        queries: model.qkv.values(),
        stride: model.qkv.cols(),
        n_kv_heads: model.dims.n_kv_heads,
        group: model.dims.n_heads / model.dims.n_kv_heads,
    };
    let out = model.attended.values_mut();
    attention::attend(
        compute.level,
        &problem,
        &mut compute.pool,
        &mut compute.workers,
        &mut model.partials,
        out,
    )
}

/// Residual += output projection of the attention result.
pub fn attention_output(
    compute: &mut Compute,
    model: &mut Model,
    weights: &Projection<'_>,
) -> Result<(), BackendError> {
    let (cols, _) = model.head_cols();
    want_projection(weights, model.dims.hidden, cols)?;
    let attended = &model.attended;
    compute.activate(&mut model.acts, model.step.rows(), cols, &[weights.weight], FINE_ABOVE, |row, out| {
        out.copy_from_slice(attended.row(row));
    });
    add_to_residual(compute, model, weights)
}

/// Norm, gate and up projections, `silu(gate) * up`.
pub fn ffn_input(
    compute: &mut Compute,
    model: &mut Model,
    weights: &FfnInput<'_>,
) -> Result<(), BackendError> {
    let (hidden, eps) = (model.dims.hidden, model.dims.norm_eps);
    let cols = weights.gate.weight.rows();
    if cols > model.dims.ffn {
        want(weights.gate.weight, model.dims.ffn, hidden)?;
    }
    want(weights.norm, 1, hidden)?;
    want_projection(&weights.gate, cols, hidden)?;
    want_projection(&weights.up, cols, hidden)?;
    read_norm(weights.norm, &mut model.norm)?;
    let (level, residual, norm) = (compute.level, &model.residual, &model.norm);
    let both = [weights.gate.weight, weights.up.weight];
    compute.activate(&mut model.acts, model.step.rows(), hidden, &both, FINE_ABOVE, |row, out| {
        norm::rms_norm(level, residual.row(row), norm, eps, out);
    });
    model.gated_cols = cols;
    compute.project_gated(weights.gate, weights.up, &model.acts, model.gated.values_mut(), cols)
}

/// Residual += down projection of what [`ffn_input`] left.
pub fn ffn_output(
    compute: &mut Compute,
    model: &mut Model,
    weights: &Projection<'_>,
) -> Result<(), BackendError> {
    let cols = model.gated_cols;
    want_projection(weights, model.dims.hidden, cols)?;
    let gated = model.gated.values();
    compute.activate(&mut model.acts, model.step.rows(), cols, &[weights.weight], FINE_ABOVE, |row, out| {
        out.copy_from_slice(&gated[row * cols..][..cols]);
    });
    add_to_residual(compute, model, weights)
}

fn add_to_residual(
    compute: &mut Compute,
    model: &mut Model,
    weights: &Projection<'_>,
) -> Result<(), BackendError> {
    let stride = model.residual.cols();
    compute.project(&[*weights], &model.acts, Store::Add, model.residual.values_mut(), stride)
}

/// Final norm and output projection of the rows whose logits are wanted.
pub fn head(
    compute: &mut Compute,
    model: &mut Model,
    norm: &DeviceTensor,
    output: &DeviceTensor,
) -> Result<(), BackendError> {
    let (hidden, eps) = (model.dims.hidden, model.dims.norm_eps);
    want(norm, 1, hidden)?;
    want(output, model.dims.vocab, hidden)?;
    read_norm(norm, &mut model.norm)?;
    model.has_logits = true;
    if model.step.logits_rows.is_empty() {
        return Ok(());
    }
    let (level, residual, norm, rows) =
        (compute.level, &model.residual, &model.norm, &model.step.logits_rows);
    compute.activate(&mut model.acts, rows.len(), hidden, &[output], FINE_ALL, |row, out| {
        norm::rms_norm(level, residual.row(rows[row] as usize), norm, eps, out);
    });
    let stride = model.logits.cols();
    let part = Projection { weight: output, bias: None };
    compute.project(&[part], &model.acts, Store::Replace, model.logits.values_mut(), stride)
}

/// Refuses a layer that the model does not have.
pub fn check_layer(model: &Model, layer: u32) -> Result<usize, BackendError> {
    let layer = layer as usize;
    if layer < model.dims.n_layers {
        Ok(layer)
    } else {
        Err(BackendError::Batch("a layer the model does not have"))
    }
}

/// Makes `values` a norm's weight.
pub fn read_norm(norm: &DeviceTensor, values: &mut Vec<f32>) -> Result<(), BackendError> {
    values.clear();
    append_values(norm, values)
}
