//! AVX-512 with VNNI: 16 weight rows per vector.
//!
//! Quantised weights meet 8-bit activations in two ways with the same bits. For many activation rows, two strips of 16
//! weight rows are decoded once, 768 values at a time, into panels that stay in L1, and multiplied in tiles of 32
//! weight rows by 6 activation rows. For few, codes go from the file's bytes straight into the sums.
#![allow(unsafe_code)]

mod decode;
mod float;
mod tile;

use std::ops::Range;

use decode::{Codec, PANEL_GROUPS, Strip};
use tile::{Acts, Panel, Sums};

use super::{MatmulScratch, MatrixView, Output};
use crate::backend::cpu::activations::ActivationView;
use crate::backend::cpu::isa::{Isa, Kernels};
use crate::tensor::DType;

pub(super) use float::float;

/// Most activation rows of a tile.
const TILE: usize = 6;

/// Up to here decoding for every activation row anew is cheaper than going through a panel.
const IN_PLACE_ROWS_MAX: usize = 0;

/// What a thread keeps between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    panels: Option<Box<[Panel; 2]>>,
    /// Copies of the last rows, when they do not fill a strip.
    tail: Vec<u8>,
}

/// Quantised weights, 8-bit activations. Shapes were checked.
pub(super) fn int8(
    kernels: Kernels,
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    scratch: &mut MatmulScratch,
    out: Output<'_>,
) {
    debug_assert!(kernels.isa() == Isa::Avx512Vnni);
    match weight.dtype() {
        DType::Q8_0 => strips::<decode::Q8_0>(weight, rows, acts, scratch, out),
        DType::Q4_0 => strips::<decode::Q4_0>(weight, rows, acts, scratch, out),
        DType::Q4_1 => strips::<decode::Q4_1>(weight, rows, acts, scratch, out),
        DType::Q4_K => strips::<decode::Q4_K>(weight, rows, acts, scratch, out),
        DType::Q6_K => strips::<decode::Q6_K>(weight, rows, acts, scratch, out),
        _ => {}
    }
}

/// Walks the rows in strips of 16, or pairs of strips.
fn strips<C: Codec>(
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    scratch: &mut MatmulScratch,
    out: Output<'_>,
) {
    let in_place = acts.rows() <= IN_PLACE_ROWS_MAX;
    let Scratch { panels, tail } = &mut scratch.avx512;
    let panels = panels.get_or_insert_with(|| Box::new([Panel::ZERO, Panel::ZERO]));
    let mut at = 0;
    while at < rows.len() {
        let count = (rows.len() - at).min(if in_place { 16 } else { 32 });
        let first = rows.start + at;
        let strips = [
            strip(weight, first, count.min(16), tail),
            // A first strip that is copied to `tail` is the only one.
            if count > 16 { strip(weight, first + 16, count - 16, tail) } else { Strip::EMPTY },
        ];
        let masks = [mask(count), mask(count.saturating_sub(16))];
        let sums = Sums { at: out.values[at..].as_mut_ptr(), stride: out.stride, masks, from_zero: true };
        // SAFETY: `Kernels` of this level exist only after detection. `strip` gives 16 whole rows each. The planes of
        // `acts` hold `rows` rows of `stride` values, at least the weights' columns (checked by `matmul_rows`). Rows of
        // `out` from `at` on hold `count` values at its stride (checked there too), which the masks keep to.
        unsafe {
            if in_place {
                few::<C>(strips[0], weight.cols() / 32, acts, &mut panels[0], sums.narrow());
            } else {
                many::<C>(strips, weight.cols() / 32, acts, panels, sums);
            }
        }
        at += count;
    }
}

fn mask(rows: usize) -> u16 {
    if rows >= 16 { u16::MAX } else { (1 << rows) - 1 }
}

/// Rows `first .. first + count`, in place when they are 16, else copied in front of rows of zeros.
fn strip(weight: &MatrixView<'_>, first: usize, count: usize, tail: &mut Vec<u8>) -> Strip {
    let bytes = weight.rows_bytes(first, count);
    let stride = weight.row_bytes();
    if count == 16 {
        return Strip { base: bytes.as_ptr(), stride };
    }
    tail.clear();
    tail.extend_from_slice(bytes);
    tail.resize(16 * stride, 0);
    Strip { base: tail.as_ptr(), stride }
}

/// Planes of all rows from group 0 on.
fn planes(acts: &ActivationView<'_>) -> Acts {
    Acts {
        codes: acts.codes.as_ptr(),
        scales: acts.scales.as_ptr(),
        scaled_sums: acts.scaled_sums.as_ptr(),
        offsets: acts.offsets.as_ptr(),
        stride: acts.stride,
    }
}

/// One strip times at most [`IN_PLACE_ROWS_MAX`] activation rows.
///
/// # Safety
/// The processor has the features; the strip's rows and the rows of `acts` hold `groups` groups; the masked places
/// of `sums` may be written for each row of `acts`.
unsafe fn few<C: Codec>(
    strip: Strip,
    groups: usize,
    acts: &ActivationView<'_>,
    panel: &mut Panel,
    mut sums: Sums<1>,
) {
    for first in (0..groups).step_by(PANEL_GROUPS) {
        let count = (groups - first).min(PANEL_GROUPS);
        let planes = planes(acts).at(0, first);
        // SAFETY: the caller's promise, for groups `first .. first + count`; PANEL_GROUPS are whole blocks.
        unsafe {
            C::scales(strip, first, count, &mut panel.scales);
            match acts.rows() {
                1 => tile::multiply_in_place::<C, 1>(strip, &panel.scales, first, count, planes, sums),
                _ => tile::multiply_in_place::<C, 2>(strip, &panel.scales, first, count, planes, sums),
            }
        }
        sums.from_zero = false;
    }
}

/// Two strips (the second may be empty) times any number of activation rows.
///
/// # Safety
/// As for [`few`].
unsafe fn many<C: Codec>(
    strips: [Strip; 2],
    groups: usize,
    acts: &ActivationView<'_>,
    panels: &mut [Panel; 2],
    mut sums: Sums<2>,
) {
    let wide = sums.masks[1] != 0;
    for first in (0..groups).step_by(PANEL_GROUPS) {
        let count = (groups - first).min(PANEL_GROUPS);
        for (strip, panel) in strips.into_iter().zip(panels.iter_mut()).take(1 + usize::from(wide)) {
            // SAFETY: the caller's promise, for groups `first .. first + count`; PANEL_GROUPS are whole blocks.
            unsafe { tile::decode::<C>(strip, first, count, panel) };
        }
        let mut m = 0;
        while m < acts.rows() {
            let n = (acts.rows() - m).min(TILE);
            let (planes, sums) = (planes(acts).at(m, first), sums.below(m));
            // SAFETY: the caller's promise, for rows `m .. m + n`.
            unsafe {
                if wide {
                    multiply_n::<C, 2>(n, panels, count, planes, sums);
                } else {
                    multiply_n::<C, 1>(n, panels, count, planes, sums.narrow());
                }
            }
            m += n;
        }
        sums.from_zero = false;
    }
}

/// [`tile::multiply`] of `n` activation rows, 1 to [`TILE`].
///
/// # Safety
/// As there.
unsafe fn multiply_n<C: Codec, const W: usize>(
    n: usize,
    panels: &[Panel; 2],
    groups: usize,
    acts: Acts,
    sums: Sums<W>,
) {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        match n {
            1 => tile::multiply::<C, W, 1>(panels, groups, acts, sums),
            2 => tile::multiply::<C, W, 2>(panels, groups, acts, sums),
            3 => tile::multiply::<C, W, 3>(panels, groups, acts, sums),
            4 => tile::multiply::<C, W, 4>(panels, groups, acts, sums),
            5 => tile::multiply::<C, W, 5>(panels, groups, acts, sums),
            _ => tile::multiply::<C, W, TILE>(panels, groups, acts, sums),
        }
    }
}
