//! AVX-512 with VNNI: 16 weight rows per vector, `vpdpbusd` on 4 codes of each.
//!
//! AMX is not used. Each group of 32 codes has scales of its own, so a product of tiles goes through memory to be scaled. With the same
//! bits, prompts of Q8_0 then ran 1.25x on a Sapphire Rapids, of Q6_K 1.1x, of Q4_K 1.03x, of Q2_K 0.55x. Alone and with its operands
//! in the first cache, the loop of tiles is 1.45 times as fast as this one. Nor is `vdpbf16ps` used, which rounds activations: bits
//! would depend on the instruction set.
#![allow(unsafe_code)]

mod float;
mod rows;
mod tile;

use std::marker::PhantomData;
use std::ops::Range;

use tile::Panel;

use super::codecs::{Codec, with_codec};
use super::floats;
use super::strips::{self, Acts, Piece, StripKernels, Sums};
use super::{MatmulScratch, MatrixView, Output};
use crate::backend::cpu::activations::ActivationView;
use crate::backend::cpu::isa::{Isa, Kernels};
use crate::backend::cpu::thresholds::AVX512;

/// A thread's buffers, kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    panels: Option<Box<[Panel; 2]>>,
    tail: Vec<u8>,
}

/// Quantised weights times 8-bit activations. Shapes were checked.
pub(super) fn int8(
    kernels: Kernels,
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    scratch: &mut MatmulScratch,
    out: Output<'_>,
) {
    debug_assert!(kernels.isa() == Isa::Avx512Vnni);
    let Scratch { panels, tail } = &mut scratch.avx512;
    let panels = panels.get_or_insert_with(|| Box::new([Panel::ZERO, Panel::ZERO]));
    // SAFETY: kernels of this level exist only when its features were detected (`Kernels::new`, `Kernels::detect`).
    unsafe {
        with_codec!(weight.dtype(), C => strips::multiply::<Of<C>>(weight, rows, acts, panels, tail, out));
    }
}

/// Any weights times f32 activations. Shapes were checked.
pub(super) fn float(
    kernels: Kernels,
    weight: &MatrixView<'_>,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    scratch: &mut MatmulScratch,
    out: Output<'_>,
) {
    debug_assert!(kernels.isa() == Isa::Avx512Vnni);
    // SAFETY: as in `int8`.
    unsafe { floats::multiply::<float::Floats>(weight, rows, acts, &mut scratch.values, out) }
}

/// The kernels of one weight type.
struct Of<C>(PhantomData<C>);

impl<C: Codec> StripKernels for Of<C> {
    const LANES: usize = 16;
    const STRIPS: usize = 2;
    const TILE: usize = AVX512.tile;
    const IN_PLACE: usize = AVX512.in_place;
    const DIGITS: usize = C::DIGITS;
    type Panel = Panel;

    unsafe fn decode(piece: Piece, panel: &mut Panel) {
        // SAFETY: the caller's promise is this function's.
        unsafe { tile::decode::<C>(piece, panel) }
    }

    unsafe fn multiply(strips: usize, n: usize, panels: &[Panel; 2], groups: usize, acts: Acts, sums: Sums) {
        // SAFETY: the caller's promise is this function's.
        unsafe {
            if strips == 2 {
                multiply_n::<C, 2>(n, panels, groups, acts, sums);
            } else {
                multiply_n::<C, 1>(n, panels, groups, acts, sums);
            }
        }
    }

    unsafe fn multiply_in_place(n: usize, piece: Piece, panel: &mut Panel, acts: Acts, sums: Sums) {
        // SAFETY: the caller's promise is this function's.
        unsafe {
            match n {
                1 => tile::multiply_in_place::<C, 1>(piece, &mut panel.scales, acts, sums),
                _ => tile::multiply_in_place::<C, 2>(piece, &mut panel.scales, acts, sums),
            }
        }
    }
}

const _: () = assert!(AVX512.in_place <= 2 && AVX512.tile <= 6, "more rows need functions of their own here");

/// [`tile::multiply`] with `n` activation rows.
///
/// # Safety
/// As for [`tile::multiply`].
unsafe fn multiply_n<C: Codec, const W: usize>(
    n: usize,
    panels: &[Panel; 2],
    groups: usize,
    acts: Acts,
    sums: Sums,
) {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        match n {
            1 => tile::multiply::<C, W, 1>(panels, groups, acts, sums),
            2 => tile::multiply::<C, W, 2>(panels, groups, acts, sums),
            3 => tile::multiply::<C, W, 3>(panels, groups, acts, sums),
            4 => tile::multiply::<C, W, 4>(panels, groups, acts, sums),
            5 => tile::multiply::<C, W, 5>(panels, groups, acts, sums),
            _ => tile::multiply::<C, W, 6>(panels, groups, acts, sums),
        }
    }
}
