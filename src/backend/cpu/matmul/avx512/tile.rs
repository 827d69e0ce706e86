//! Products of decoded weights and activation rows, 16 weight rows per vector.

#![allow(clippy::needless_range_loop)] // tiles index several arrays by the same row

use std::arch::x86_64::*;

use super::rows::Rows16;
use crate::backend::cpu::matmul::codecs::{
    Codec, DIGIT_SHIFT, Places, SCALE_RUN, Scales, ScalesOut, panel_place, with_step,
};
use crate::backend::cpu::matmul::strips::{Acts, PANEL_GROUPS, Piece, Plane, Spread, Strip, Sums};
use crate::backend::cpu::quant::GroupKind;

/// 64 bytes: 4 codes of each of 16 rows.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Quad([u8; 64]);

/// Decoded weights of 16 rows, up to [`PANEL_GROUPS`] groups.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    codes: [[Quad; 8]; PANEL_GROUPS],
    pub(super) scales: Scales<Rows16>,
}

impl Panel {
    pub(super) const ZERO: Self = Self { codes: [[Quad([0; 64]); 8]; PANEL_GROUPS], scales: Scales::ZERO };
}

/// Start value of the integer sum over part `part` of group `g`: it corrects codes that are too large, by 128 if they were signed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn offset<C: Codec>(acts: Plane, m: usize, g: usize, part: usize) -> __m512i {
    // SAFETY: the caller vouches for group `g` of row `m`.
    let [low, high] = unsafe { acts.offsets(m, g) };
    let sum = match (C::KIND, part) {
        (GroupKind::Affine | GroupKind::AffineHalves, _) => 0,
        (GroupKind::Symmetric, _) => low + high,
        (GroupKind::SymmetricHalves, 0) => low,
        (GroupKind::SymmetricHalves, _) => high,
    };
    // Exact: offsets are multiples of 128.
    _mm512_set1_epi32(match C::CODES.zero() {
        0 => sum,
        zero => (sum >> 7) * zero,
    })
}

/// `acc + f32(dots) * activation scale * weight scale`, by the rule of `matmul`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_dots(acts: Plane, m: usize, g: usize, dots: __m512i, scales: __m512, acc: __m512) -> __m512 {
    // SAFETY: the caller vouches for group `g` of row `m`.
    let scale = _mm512_set1_ps(unsafe { acts.scale(m, g) });
    _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale), scales, acc)
}

/// `acc` plus activation scaled sums times minima, for types that have minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_mins<C: Codec>(acts: Acts, m: usize, g: usize, mins: &[__m512; 2], acc: __m512) -> __m512 {
    match C::KIND {
        GroupKind::Symmetric | GroupKind::SymmetricHalves => acc,
        GroupKind::Affine => {
            // SAFETY: the caller vouches for group `g` of row `m`.
            _mm512_fmadd_ps(_mm512_set1_ps(unsafe { acts.scaled_sum(m, g) }), mins[0], acc)
        }
        GroupKind::AffineHalves => {
            // SAFETY: as above.
            let [low, high] = unsafe { acts.half_sums(m, g) };
            let acc = _mm512_fmadd_ps(_mm512_set1_ps(low), mins[0], acc);
            _mm512_fmadd_ps(_mm512_set1_ps(high), mins[1], acc)
        }
    }
}

/// Sums of low digits plus those of high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_digit(high: __m512i, low: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_slli_epi32::<DIGIT_SHIFT>(high), low)
}

/// 4 codes of row `m`, in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn broadcast(acts: Plane, m: usize, at: usize) -> __m512i {
    // SAFETY: the caller vouches for codes `at .. at + 4` of row `m`.
    _mm512_set1_epi32(unsafe { acts.quad(m, at) })
}

/// The sums of 16 weight rows from `row` on and activation row `m`; unneeded sums are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn sums_at(sums: Sums, m: usize, row: usize) -> __m512 {
    if sums.from_zero {
        return _mm512_setzero_ps();
    }
    // SAFETY: the caller vouches for the places that the mask selects.
    unsafe { _mm512_maskz_loadu_ps(mask(sums.rows_from(row, 16)), sums.place(m, row)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn store_sums(sums: Sums, m: usize, row: usize, acc: __m512) {
    // SAFETY: the caller vouches for the places that the mask selects.
    unsafe { _mm512_mask_storeu_ps(sums.place(m, row), mask(sums.rows_from(row, 16)), acc) }
}

/// A mask of the lowest `rows` of 16 lanes.
#[inline(always)]
fn mask(rows: usize) -> u16 {
    ((1u32 << rows) - 1) as u16
}

/// Decodes a piece.
///
/// # Safety
/// The processor has the features. The strip's rows hold the piece's groups, which are whole blocks and at most
/// [`PANEL_GROUPS`], half of that of two digits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn decode<C: Codec>(piece: Piece, panel: &mut Panel) {
    let Piece { strip, first, groups, ahead } = piece;
    debug_assert!(groups <= PANEL_GROUPS && (32 * groups).is_multiple_of(C::BLOCK_LEN));
    // SAFETY: the caller's promise is this function's.
    unsafe { C::scales(Rows16::new(), strip, first, groups, ScalesOut { scales: &mut panel.scales, at: 0 }) };
    let mut at = 0;
    while at < groups {
        let step = C::STEP_GROUPS.min(groups - at);
        ahead.prefetch(16, C::bytes(at), C::bytes(step));
        // SAFETY: as above.
        unsafe {
            with_step!(C, step, R => decode_step::<C, R>(strip, first, at, panel));
        }
        at += step;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn decode_step<C: Codec, const R: usize>(strip: Strip, first: usize, at: usize, panel: &mut Panel) {
    let Panel { codes, scales } = panel;
    let mut places = Places::new::<C>(codes, at, R);
    let put = |g: usize, quad: usize, v| {
        // SAFETY: 64 aligned bytes.
        unsafe { _mm512_store_si512(places.quad(g, quad).0.as_mut_ptr().cast(), v) }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows16, R>(Rows16::new(), strip, first + at, ScalesOut { scales, at }, put) };
}

/// Multiplies `W` panels with `N` activation rows: adds `groups` groups to the sums.
///
/// Registers: 2 W N sums (integer and float), W weights, 1 activation. W = 2, N = 6 fills the 32 registers.
///
/// # Safety
/// The processor has the features; `acts` holds `N` rows of `groups` groups; the places of `sums` are readable and
/// writable.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn multiply<C: Codec, const W: usize, const N: usize>(
    panels: &[Panel; 2],
    groups: usize,
    acts: Acts,
    sums: Sums,
) {
    let mut acc = [[_mm512_setzero_ps(); N]; W];
    for (w, acc) in acc.iter_mut().enumerate() {
        for (m, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the places.
            *acc = unsafe { sums_at(sums, m, 16 * w) };
        }
    }
    for g in 0..groups.min(PANEL_GROUPS) {
        for part in 0..C::PARTS {
            // One part at a time, so that its integer sums need no second set of registers.
            // SAFETY: the caller vouches for group `g` of `N` rows.
            acc = unsafe { add_part::<C, W, N>(panels, g, part, acts.coarse, acc) };
        }
        // SAFETY: as above.
        if unsafe { acts.any_fine(N, g, 1) } {
            for m in 0..N {
                // SAFETY: as above.
                acc = unsafe { add_fine::<C, W, N>(panels, g, acts.fine, m, acc) };
            }
        }
        for m in 0..N {
            for w in 0..W {
                // SAFETY: as above.
                acc[w][m] = unsafe { add_mins::<C>(acts, m, g, &panels[w].scales.mins[g], acc[w][m]) };
            }
        }
    }
    for (w, acc) in acc.into_iter().enumerate() {
        for (m, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller vouches for the places.
            unsafe { store_sums(sums, m, 16 * w, acc) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_part<C: Codec, const W: usize, const N: usize>(
    panels: &[Panel; 2],
    g: usize,
    part: usize,
    acts: Plane,
    mut acc: [[__m512; N]; W],
) -> [[__m512; N]; W] {
    let mut dots = [[_mm512_setzero_si512(); N]; W];
    let quads = 8 / C::PARTS;
    for digit in (0..C::DIGITS).rev() {
        for m in 0..N {
            // SAFETY: the caller vouches for group `g` of row `m`.
            let start = unsafe { offset::<C>(acts, m, g, part) };
            for dots in &mut dots {
                dots[m] = if digit + 1 < C::DIGITS { add_digit(dots[m], start) } else { start };
            }
        }
        for quad in quads * part..quads * (part + 1) {
            let mut weights = [_mm512_setzero_si512(); W];
            for w in 0..W {
                let codes = &panels[w].codes[panel_place::<C>(g, digit)];
                // SAFETY: 64 aligned bytes.
                weights[w] = unsafe { _mm512_load_si512(codes[quad].0.as_ptr().cast()) };
            }
            for m in 0..N {
                // SAFETY: the caller vouches for group `g` of row `m`.
                let x = unsafe { broadcast(acts, m, 32 * g + 4 * quad) };
                for w in 0..W {
                    dots[w][m] = _mm512_dpbusd_epi32(dots[w][m], weights[w], x);
                }
            }
        }
    }
    for m in 0..N {
        for w in 0..W {
            let scales = panels[w].scales.scales[g][part];
            // SAFETY: as above.
            acc[w][m] = unsafe { add_dots(acts, m, g, dots[w][m], scales, acc[w][m]) };
        }
    }
    acc
}

/// Adds the fine codes of activation row `m`, if it has any in group `g`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_fine<C: Codec, const W: usize, const N: usize>(
    panels: &[Panel; 2],
    g: usize,
    fine: Plane,
    m: usize,
    mut acc: [[__m512; N]; W],
) -> [[__m512; N]; W] {
    // SAFETY: the caller vouches for group `g` of the row.
    unsafe {
        if fine.has(m, g) {
            let mut row = [[_mm512_setzero_ps()]; W];
            for w in 0..W {
                row[w][0] = acc[w][m];
            }
            for part in 0..C::PARTS {
                row = add_part::<C, W, 1>(panels, g, part, fine.from(m, 0), row);
            }
            for w in 0..W {
                acc[w][m] = row[w][0];
            }
        }
    }
    acc
}

/// As [`multiply`] for one strip, but codes go from the file's bytes directly through registers. With so few activation
/// rows, a panel would cost more than it saves. `scales` is scratch.
///
/// # Safety
/// As for [`decode`] and [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn multiply_in_place<C: Codec, const N: usize>(
    piece: Piece,
    scales: &mut Scales<Rows16>,
    acts: Acts,
    sums: Sums,
) {
    let Piece { strip, first, groups, .. } = piece;
    let mut acc = [_mm512_setzero_ps(); N];
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the places.
        *acc = unsafe { sums_at(sums, m, 0) };
    }
    let groups = groups.min(PANEL_GROUPS);
    let mut at = 0;
    while at < groups {
        let step = C::STEP_GROUPS.min(groups - at);
        let ahead = Spread::new(piece, 16, C::bytes(at), C::bytes(step));
        // SAFETY: the caller vouches for the rows' groups.
        acc = unsafe {
            if at % SCALE_RUN == 0 {
                let run = SCALE_RUN.min(groups - at);
                C::scales(Rows16::new(), strip, first + at, run, ScalesOut { scales, at });
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
        unsafe { store_sums(sums, m, 0, acc) };
    }
}

/// Adds `R` groups of `N` activation rows, and their fine codes if `FINE`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn in_place_step<C: Codec, const N: usize, const R: usize, const FINE: bool>(
    strip: Strip,
    first: usize,
    at: usize,
    ahead: Spread,
    scales: &mut Scales<Rows16>,
    acts: Acts,
    mut acc: [__m512; N],
) -> [__m512; N] {
    // SAFETY: the caller vouches for groups `at .. at + R` of `N` rows.
    let mut dots = unsafe { offsets::<C, N, R>(acts.coarse, at) };
    // SAFETY: as above.
    let mut fine = unsafe { offsets::<C, N, R>(acts.fine, at) };
    let put = |g: usize, quad: usize, weights: __m512i| {
        ahead.prefetch(16 * 32 * C::BLOCK_BYTES / C::BLOCK_LEN, g, quad);
        // A type with high digits, of quads 8 and up, has one part.
        let part = quad * C::PARTS / 8;
        for m in 0..N {
            let add = |plane: Plane, dots: __m512i| {
                // SAFETY: as above.
                let x = unsafe { broadcast(plane, m, 32 * (at + g) + 4 * (quad % 8)) };
                _mm512_dpbusd_epi32(dots, weights, x)
            };
            dots[g][m][part] = add(acts.coarse, dots[g][m][part]);
            if FINE {
                fine[g][m][part] = add(acts.fine, fine[g][m][part]);
            }
        }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows16, R>(Rows16::new(), strip, first + at, ScalesOut { scales, at }, put) };
    for g in 0..R {
        let (scales, mins) = (&scales.scales[at + g], &scales.mins[at + g]);
        for m in 0..N {
            if C::DIGITS > 1 {
                dots[g][m][0] = add_digit(dots[g][m][1], dots[g][m][0]);
                fine[g][m][0] = add_digit(fine[g][m][1], fine[g][m][0]);
            }
            // SAFETY: as above.
            unsafe {
                for part in 0..C::PARTS {
                    acc[m] = add_dots(acts.coarse, m, at + g, dots[g][m][part], scales[part], acc[m]);
                }
                if FINE && acts.fine.has(m, at + g) {
                    for part in 0..C::PARTS {
                        acc[m] = add_dots(acts.fine, m, at + g, fine[g][m][part], scales[part], acc[m]);
                    }
                }
                acc[m] = add_mins::<C>(acts, m, at + g, mins, acc[m]);
            }
        }
    }
    acc
}

/// Start values of the integer sums of `R` groups of `N` rows, for both parts or digits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn offsets<C: Codec, const N: usize, const R: usize>(
    acts: Plane,
    at: usize,
) -> [[[__m512i; 2]; N]; R] {
    let mut dots = [[[_mm512_setzero_si512(); 2]; N]; R];
    for g in 0..R {
        for m in 0..N {
            for part in 0..C::PARTS * C::DIGITS {
                // SAFETY: the caller vouches for group `at + g` of row `m`.
                dots[g][m][part] = unsafe { offset::<C>(acts, m, at + g, part) };
            }
        }
    }
    dots
}
