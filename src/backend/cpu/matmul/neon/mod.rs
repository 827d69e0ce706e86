//! NEON with dot products: 8 weight rows in two vectors, `sdot` on 4 codes of each.
//!
//! `sdot` adds products of signed codes to 32-bit sums exactly. So codes of symmetric types become signed when they are
//! decoded, and no sum needs a correction.
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
use crate::backend::cpu::thresholds::NEON;

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
    debug_assert!(kernels.isa() == Isa::Neon);
    let Scratch { panels, tail } = &mut scratch.neon;
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
    debug_assert!(kernels.isa() == Isa::Neon);
    // SAFETY: as in `int8`.
    unsafe { floats::multiply::<float::Floats>(weight, rows, acts, &mut scratch.values, out) }
}

const _: () = assert!(NEON.in_place <= 1 && NEON.tile <= 4, "more rows need functions of their own here");

/// The kernels of one weight type.
struct Of<C>(PhantomData<C>);

impl<C: Codec> StripKernels for Of<C> {
    const LANES: usize = 8;
    const STRIPS: usize = 1;
    const TILE: usize = NEON.tile;
    const IN_PLACE: usize = NEON.in_place;
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
