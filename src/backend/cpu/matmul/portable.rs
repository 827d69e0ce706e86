//! Plain Rust: the definition that the SIMD kernels must match bit for bit.

use std::ops::Range;

use super::{MatmulScratch, MatrixView, Output};
use crate::backend::cpu::activations::ActivationView;
use crate::backend::cpu::quant::{Group, GroupKind, dequantize_row, group};

/// Quantised weights times 8-bit activations.
pub(super) fn int8(
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    kind: GroupKind,
    out: Output<'_>,
) {
    for (i, row) in rows.enumerate() {
        let bytes = weight.row(row);
        for m in 0..acts.rows() {
            out.values[m * out.stride + i] = 0.0;
        }
        for g in 0..weight.cols() / 32 {
            let group = group(weight.dtype(), bytes, g);
            for m in 0..acts.rows() {
                let (at, acc) = (m * acts.stride + 32 * g, &mut out.values[m * out.stride + i]);
                let (codes, scale) = acts.coarse.group(at);
                *acc = add_dots(&group, kind, codes, scale, *acc);
                let (codes, scale) = acts.fine.group(at);
                if scale != 0.0 {
                    *acc = add_dots(&group, kind, codes, scale, *acc);
                }
                match kind {
                    GroupKind::Affine => *acc = acts.scaled_sums[at / 32].mul_add(group.mins[0], *acc),
                    GroupKind::AffineHalves => {
                        let sums = acts.half_sums(at);
                        *acc = sums[0].mul_add(group.mins[0], *acc);
                        *acc = sums[1].mul_add(group.mins[1], *acc);
                    }
                    GroupKind::Symmetric | GroupKind::SymmetricHalves => {}
                }
            }
        }
    }
}

/// `acc` plus the products of a group of weights and a group of codes.
fn add_dots(group: &Group, kind: GroupKind, codes: &[i8], scale: f32, acc: f32) -> f32 {
    let (low, high) = (dot(&group.codes[..16], &codes[..16]), dot(&group.codes[16..], &codes[16..]));
    match kind {
        GroupKind::Symmetric | GroupKind::Affine => {
            ((low + high) as f32 * scale).mul_add(group.scales[0], acc)
        }
        GroupKind::SymmetricHalves | GroupKind::AffineHalves => {
            let acc = (low as f32 * scale).mul_add(group.scales[0], acc);
            (high as f32 * scale).mul_add(group.scales[1], acc)
        }
    }
}

fn dot(a: &[i16], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

/// Any weights times f32 activations.
pub(super) fn float(
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    scratch: &mut MatmulScratch,
    out: Output<'_>,
) {
    scratch.values.resize(weight.cols(), 0.0);
    for (i, row) in rows.enumerate() {
        // `MatrixView::new` checked the type and the length.
        if dequantize_row(weight.dtype(), weight.row(row), &mut scratch.values).is_err() {
            scratch.values.fill(f32::NAN);
        }
        for m in 0..acts.rows() {
            out.values[m * out.stride + i] = dot_f32(&scratch.values, acts.values(m));
        }
    }
}

fn dot_f32(weights: &[f32], acts: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    for (w, x) in weights.chunks(16).zip(acts.chunks(16)) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            let (w, x) = (w.get(l).copied().unwrap_or(0.0), x.get(l).copied().unwrap_or(0.0));
            *lane = w.mul_add(x, *lane);
        }
    }
    for half in [8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(a, b)| *a += *b);
    }
    lanes[0]
}
