//! AVX2 with FMA and F16C: 8 weight rows per vector, `vpmaddubsw` on 4 codes of each.
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
use crate::backend::cpu::thresholds::AVX2;

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
    debug_assert!(kernels.isa() == Isa::Avx2);
    let Scratch { panels, tail } = &mut scratch.avx2;
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
    debug_assert!(kernels.isa() == Isa::Avx2);
    // SAFETY: as in `int8`.
    unsafe { floats::multiply::<float::Floats>(weight, rows, acts, &mut scratch.values, out) }
}

const _: () = assert!(AVX2.in_place <= 1 && AVX2.tile <= 4, "more rows need functions of their own here");

/// The kernels of one weight type.
struct Of<C>(PhantomData<C>);

impl<C: Codec> StripKernels for Of<C> {
    const LANES: usize = 8;
    const STRIPS: usize = 1;
    const TILE: usize = AVX2.tile;
    const IN_PLACE: usize = AVX2.in_place;
    const DIGITS: usize = C::DIGITS;
    type Panel = Panel;

    unsafe fn decode(piece: Piece, panel: &mut Panel) {
        // SAFETY: the caller's promise is this function's.
        unsafe { tile::decode::<C>(piece, panel) }
    }

    unsafe fn multiply(_: usize, n: usize, panels: &[Panel; 2], groups: usize, acts: Acts, sums: Sums) {
        // SAFETY: the caller's promise is this function's.
        unsafe {
            match n {
                1 => tile::multiply::<C, 1>(&panels[0], groups, acts, sums),
                2 => tile::multiply::<C, 2>(&panels[0], groups, acts, sums),
                3 => tile::multiply::<C, 3>(&panels[0], groups, acts, sums),
                _ => tile::multiply::<C, 4>(&panels[0], groups, acts, sums),
            }
        }
    }

    unsafe fn multiply_in_place(_: usize, piece: Piece, panel: &mut Panel, acts: Acts, sums: Sums) {
        // SAFETY: the caller's promise is this function's.
        unsafe {
            tile::multiply_in_place::<C, 1>(piece, &mut panel.scales, acts, sums);
        }
    }
}
