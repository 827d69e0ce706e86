//! Products of decoded weights and activation rows, 8 weight rows in two vectors.

use std::arch::aarch64::*;
use std::arch::asm;

use super::rows::Rows8;
use crate::backend::cpu::matmul::codecs::{
    Codec, DIGIT_SHIFT, Places, SCALE_RUN, Scales, ScalesOut, panel_place, with_step,
};
use crate::backend::cpu::matmul::strips::{Acts, PANEL_GROUPS, Piece, Plane, Spread, Strip, Sums};
use crate::backend::cpu::quant::GroupKind;

/// 32 bytes: 4 codes of each of 8 rows.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Quad([i8; 32]);

/// Decoded weights of 8 rows, up to [`PANEL_GROUPS`] groups.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    codes: [[Quad; 8]; PANEL_GROUPS],
    pub(super) scales: Scales<Rows8>,
}

impl Panel {
    pub(super) const ZERO: Self = Self { codes: [[Quad([0; 32]); 8]; PANEL_GROUPS], scales: Scales::ZERO };
}

/// Integer sums of 8 rows.
type Dots = [int32x4_t; 2];
/// Float sums, or scales, of 8 rows.
type Floats = [float32x4_t; 2];

/// Adds to each lane of `dots` the 4 products of its codes and codes `4 LANE .. 4 LANE + 4` of `x`. The compiler's own
/// name of this instruction is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: usize>(dots: &mut int32x4_t, weights: int8x16_t, x: int8x16_t) {
    const { assert!(LANE < 4, "a vector has four quads") };
    // SAFETY: the processor has the instruction, as the features say; it touches nothing but these registers.
    unsafe {
        asm!(
            "sdot {dots:v}.4s, {weights:v}.16b, {x:v}.4b[{lane}]",
            dots = inout(vreg) *dots,
            weights = in(vreg) weights,
            x = in(vreg) x,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
}

/// As [`sdot`], for 4 codes in the bits of `x`: loads bring them without a vector operation.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_quad(dots: &mut int32x4_t, weights: int8x16_t, x: f32) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "sdot {dots:v}.4s, {weights:v}.16b, {x:v}.4b[0]",
            dots = inout(vreg) *dots,
            weights = in(vreg) weights,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
}

/// No sum yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn none() -> Dots {
    [vdupq_n_s32(0); 2]
}

/// Sums of low digits plus those of high ones.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_digit(high: Dots, low: Dots) -> Dots {
    const SHIFT: i32 = DIGIT_SHIFT as i32;
    [vaddq_s32(vshlq_n_s32::<SHIFT>(high[0]), low[0]), vaddq_s32(vshlq_n_s32::<SHIFT>(high[1]), low[1])]
}

/// `acc + f32(dots) * activation scale * weight scale`, by the rule of `matmul`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_dots(acts: Plane, m: usize, g: usize, dots: Dots, scales: &Floats, acc: Floats) -> Floats {
    // SAFETY: the caller vouches for group `g` of row `m`.
    let scale = vdupq_n_f32(unsafe { acts.scale(m, g) });
    let add = |i: usize| vfmaq_f32(acc[i], vmulq_f32(vcvtq_f32_s32(dots[i]), scale), scales[i]);
    [add(0), add(1)]
}

/// `acc + sum * mins`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_min(sum: f32, mins: &Floats, acc: Floats) -> Floats {
    let sum = vdupq_n_f32(sum);
    [vfmaq_f32(acc[0], sum, mins[0]), vfmaq_f32(acc[1], sum, mins[1])]
}

/// `acc` plus activation scaled sums times minima, for types that have minima.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_mins<C: Codec>(acts: Acts, m: usize, g: usize, mins: &[Floats; 2], acc: Floats) -> Floats {
    match C::KIND {
        GroupKind::Symmetric | GroupKind::SymmetricHalves => acc,
        // SAFETY: the caller vouches for group `g` of row `m`.
        GroupKind::Affine => add_min(unsafe { acts.scaled_sum(m, g) }, &mins[0], acc),
        GroupKind::AffineHalves => {
            // SAFETY: as above.
            let [low, high] = unsafe { acts.half_sums(m, g) };
            add_min(high, &mins[1], add_min(low, &mins[0], acc))
        }
    }
}

/// The sums of 8 weight rows and activation row `m`; unneeded sums are 0.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sums_at(sums: Sums, m: usize) -> Floats {
    if sums.from_zero {
        return [vdupq_n_f32(0.0); 2];
    }
    let mut all = [0.0; 8];
    let (place, rows) = (sums.place(m, 0), sums.rows_from(0, 8));
    // SAFETY: the caller vouches for the places of the needed rows, at most 8.
    unsafe {
        if rows == 8 {
            return [vld1q_f32(place), vld1q_f32(place.add(4))];
        }
        std::ptr::copy_nonoverlapping(place, all.as_mut_ptr(), rows);
        [vld1q_f32(all.as_ptr()), vld1q_f32(all.as_ptr().add(4))]
    }
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn store_sums(sums: Sums, m: usize, acc: Floats) {
    let mut all = [0.0; 8];
    let (place, rows) = (sums.place(m, 0), sums.rows_from(0, 8));
    // SAFETY: the caller vouches for the places of the needed rows, at most 8.
    unsafe {
        if rows == 8 {
            vst1q_f32(place, acc[0]);
            vst1q_f32(place.add(4), acc[1]);
            return;
        }
        vst1q_f32(all.as_mut_ptr(), acc[0]);
        vst1q_f32(all.as_mut_ptr().add(4), acc[1]);
        std::ptr::copy_nonoverlapping(all.as_ptr(), place, rows);
    }
}

/// Decodes a piece.
///
/// # Safety
/// The processor has the features. The strip's rows hold the piece's groups, which are whole blocks and at most
/// [`PANEL_GROUPS`], half of that of two digits.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn decode<C: Codec>(piece: Piece, panel: &mut Panel) {
    let Piece { strip, first, groups, ahead } = piece;
    debug_assert!(groups <= PANEL_GROUPS && (32 * groups).is_multiple_of(C::BLOCK_LEN));
    // SAFETY: the caller's promise is this function's.
    unsafe { C::scales(Rows8::new(), strip, first, groups, ScalesOut { scales: &mut panel.scales, at: 0 }) };
    let mut at = 0;
    while at < groups {
        let step = C::STEP_GROUPS.min(groups - at);
        ahead.prefetch(8, C::bytes(at), C::bytes(step));
        // SAFETY: as above.
        unsafe {
            with_step!(C, step, R => decode_step::<C, R>(strip, first, at, panel));
        }
        at += step;
    }
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn decode_step<C: Codec, const R: usize>(strip: Strip, first: usize, at: usize, panel: &mut Panel) {
    let Panel { codes, scales } = panel;
    let mut places = Places::new::<C>(codes, at, R);
    let put = |g: usize, quad: usize, v: [uint32x4_t; 2]| {
        let to = places.quad(g, quad).0.as_mut_ptr();
        // SAFETY: a quad is 32 bytes.
        unsafe {
            vst1q_s8(to, vreinterpretq_s8_u32(v[0]));
            vst1q_s8(to.add(16), vreinterpretq_s8_u32(v[1]));
        }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows8, R>(Rows8::new(), strip, first + at, ScalesOut { scales, at }, put) };
}

/// Multiplies a panel with `N` activation rows: adds `groups` groups to the sums.
///
/// Registers: 4 N sums (integer and float), 2 weights, N activations. N = 4 leaves room for the next loads.
///
/// # Safety
/// The processor has the features; `acts` holds `N` rows of `groups` groups; the places of `sums` are readable and
/// writable.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn multiply<C: Codec, const N: usize>(
    panel: &Panel,
    groups: usize,
    acts: Acts,
    sums: Sums,
) {
    let mut acc = [[vdupq_n_f32(0.0); 2]; N];
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the places.
        *acc = unsafe { sums_at(sums, m) };
    }
    for g in 0..groups.min(PANEL_GROUPS) {
        // SAFETY: the caller vouches for group `g` of `N` rows.
        acc = unsafe { add_codes::<C, N>(panel, g, acts.coarse, acc) };
        // SAFETY: as above.
        if unsafe { acts.any_fine(N, g, 1) } {
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: as above.
                unsafe {
                    if acts.fine.has(m, g) {
                        [*acc] = add_codes::<C, 1>(panel, g, acts.fine.from(m, 0), [*acc]);
                    }
                }
            }
        }
        for (m, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above.
            *acc = unsafe { add_mins::<C>(acts, m, g, &panel.scales.mins[g], *acc) };
        }
    }
    for (m, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller vouches for the places.
        unsafe { store_sums(sums, m, acc) };
    }
}

/// Adds the products of group `g` with one plane's codes of `N` rows.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_codes<C: Codec, const N: usize>(
    panel: &Panel,
    g: usize,
    acts: Plane,
    mut acc: [Floats; N],
) -> [Floats; N] {
    for part in 0..C::PARTS {
        let mut dots = [none(); N];
        for digit in (0..C::DIGITS).rev() {
            if digit + 1 < C::DIGITS {
                dots.iter_mut().for_each(|dots| *dots = add_digit(*dots, none()));
            }
            let codes = &panel.codes[panel_place::<C>(g, digit)];
            for half in if C::PARTS == 2 { part..part + 1 } else { 0..2 } {
                // SAFETY: the caller vouches for group `g` of `N` rows.
                dots = unsafe { half_dots::<N>(codes, g, half, acts, dots) };
            }
        }
        for (m, (acc, dots)) in acc.iter_mut().zip(dots).enumerate() {
            // SAFETY: as above.
            *acc = unsafe { add_dots(acts, m, g, dots, &panel.scales.scales[g][part], *acc) };
        }
    }
    acc
}

/// Adds the products of half `half` of group `g`, whose codes are `codes`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn half_dots<const N: usize>(
    codes: &[Quad; 8],
    g: usize,
    half: usize,
    acts: Plane,
    mut dots: [Dots; N],
) -> [Dots; N] {
    let mut x = [vdupq_n_s8(0); N];
    for (m, x) in x.iter_mut().enumerate() {
        // SAFETY: the caller vouches for group `g` of row `m`.
        *x = unsafe { sixteen(acts, m, 32 * g + 16 * half) };
    }
    // No loop: the number of a lane is part of its instruction.
    dots = lane_dots::<N, 0>(&codes[4 * half], x, dots);
    dots = lane_dots::<N, 1>(&codes[4 * half + 1], x, dots);
    dots = lane_dots::<N, 2>(&codes[4 * half + 2], x, dots);
    lane_dots::<N, 3>(&codes[4 * half + 3], x, dots)
}

/// Adds the products of a quad, which is quad `LANE` of each `x`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn lane_dots<const N: usize, const LANE: usize>(
    codes: &Quad,
    x: [int8x16_t; N],
    mut dots: [Dots; N],
) -> [Dots; N] {
    let from = codes.0.as_ptr();
    // SAFETY: a quad is 32 bytes.
    let weights = unsafe { [vld1q_s8(from), vld1q_s8(from.add(16))] };
    for (dots, x) in dots.iter_mut().zip(x) {
        sdot::<LANE>(&mut dots[0], weights[0], x);
        sdot::<LANE>(&mut dots[1], weights[1], x);
    }
    dots
}

/// 16 codes of row `m`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sixteen(acts: Plane, m: usize, at: usize) -> int8x16_t {
    // SAFETY: the caller vouches for codes `at .. at + 16` of row `m`.
    unsafe { vld1q_s8(acts.code(m, at)) }
}

/// As [`multiply`], but codes go from the file's bytes directly through registers. With so few activation rows, a panel
/// would cost more than it saves. `scales` is scratch.
///
/// # Safety
/// As for [`decode`] and [`multiply`].
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn multiply_in_place<C: Codec, const N: usize>(
    piece: Piece,
    scales: &mut Scales<Rows8>,
    acts: Acts,
    sums: Sums,
) {
    let Piece { strip, first, groups, .. } = piece;
    let mut acc = [[vdupq_n_f32(0.0); 2]; N];
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the places.
        *acc = unsafe { sums_at(sums, m) };
    }
    let groups = groups.min(PANEL_GROUPS);
    let mut at = 0;
    while at < groups {
        let step = C::STEP_GROUPS.min(groups - at);
        let ahead = Spread::new(piece, 8, C::bytes(at), C::bytes(step));
        // SAFETY: the caller vouches for the rows' groups.
        acc = unsafe {
            if at % SCALE_RUN == 0 {
                let run = SCALE_RUN.min(groups - at);
                C::scales(Rows8::new(), strip, first + at, run, ScalesOut { scales, at });
            }
            let fine = acts.any_fine(N, at, step);
            if fine {
                with_step!(C, step, R => in_place_step::<C, N, R, true>(strip, first, at, ahead, scales, acts, acc))
            } else {
                with_step!(C, step, R => in_place_step::<C, N, R, false>(strip, first, at, ahead, scales, acts, acc))
            }
        };
        at += step;
    }
    for (m, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller vouches for the places.
        unsafe { store_sums(sums, m, acc) };
    }
}

/// Adds `R` groups of `N` activation rows, and their fine codes if `FINE`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn in_place_step<C: Codec, const N: usize, const R: usize, const FINE: bool>(
    strip: Strip,
    first: usize,
    at: usize,
    ahead: Spread,
    scales: &mut Scales<Rows8>,
    acts: Acts,
    mut acc: [Floats; N],
) -> [Floats; N] {
    let mut dots = [[[none(); 2]; N]; R];
    let mut fine = dots;
    let put = |g: usize, quad: usize, weights: [uint32x4_t; 2]| {
        ahead.prefetch(8 * 32 * C::BLOCK_BYTES / C::BLOCK_LEN, g, quad);
        let weights = [vreinterpretq_s8_u32(weights[0]), vreinterpretq_s8_u32(weights[1])];
        // A type with high digits, of quads 8 and up, has one part.
        let part = quad * C::PARTS / 8;
        for m in 0..N {
            let add = |plane: Plane, dots: &mut Dots| {
                // SAFETY: the caller vouches for group `at + g` of row `m`.
                let x = f32::from_bits(unsafe { plane.quad(m, 32 * (at + g) + 4 * (quad % 8)) } as u32);
                sdot_quad(&mut dots[0], weights[0], x);
                sdot_quad(&mut dots[1], weights[1], x);
            };
            add(acts.coarse, &mut dots[g][m][part]);
            if FINE {
                add(acts.fine, &mut fine[g][m][part]);
            }
        }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows8, R>(Rows8::new(), strip, first + at, ScalesOut { scales, at }, put) };
    for (g, (dots, fine)) in dots.iter().zip(fine).enumerate() {
        let (scales, mins) = (&scales.scales[at + g], &scales.mins[at + g]);
        for (m, (acc, (dots, fine))) in acc.iter_mut().zip(dots.iter().zip(fine)).enumerate() {
            let (mut dots, mut fine) = (*dots, fine);
            if C::DIGITS > 1 {
                dots[0] = add_digit(dots[1], dots[0]);
                fine[0] = add_digit(fine[1], fine[0]);
            }
            // SAFETY: as above.
            unsafe {
                for part in 0..C::PARTS {
                    *acc = add_dots(acts.coarse, m, at + g, dots[part], &scales[part], *acc);
                }
                if FINE && acts.fine.has(m, at + g) {
                    for part in 0..C::PARTS {
                        *acc = add_dots(acts.fine, m, at + g, fine[part], &scales[part], *acc);
                    }
                }
                *acc = add_mins::<C>(acts, m, at + g, mins, *acc);
            }
        }
    }
    acc
}
