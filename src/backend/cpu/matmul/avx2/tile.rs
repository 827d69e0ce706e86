//! Products of decoded weights and activation rows, 8 weight rows per vector.

use std::arch::x86_64::*;

use super::rows::Rows8;
use crate::backend::cpu::matmul::codecs::{
    Codec, Codes, DIGIT_SHIFT, Places, SCALE_RUN, Scales, ScalesOut, panel_place, with_step,
};
use crate::backend::cpu::matmul::strips::{Acts, PANEL_GROUPS, Piece, Plane, Spread, Strip, Sums};
use crate::backend::cpu::quant::GroupKind;

/// 32 bytes: 4 codes of each of 8 rows.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Quad([u8; 32]);

/// Decoded weights of 8 rows, up to [`PANEL_GROUPS`] groups.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    codes: [[Quad; 8]; PANEL_GROUPS],
    pub(super) scales: Scales<Rows8>,
}

impl Panel {
    pub(super) const ZERO: Self = Self { codes: [[Quad([0; 32]); 8]; PANEL_GROUPS], scales: Scales::ZERO };
}

/// Quads whose products fit in 16-bit sums.
const fn run<C: Codec>() -> usize {
    match C::CODES {
        Codes::Nibbles { .. } => 8 / C::PARTS, // a sum is of one part
        Codes::FiveBits { .. } => 4,
        Codes::SixBits { .. } | Codes::SignedSixBits => 2,
        Codes::Signed => 1,
    }
}

/// Start value of the integer sum over part `part` of group `g`: it corrects codes that are too large.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn offset<C: Codec>(acts: Plane, m: usize, g: usize, part: usize) -> __m256i {
    let zero = C::CODES.zero();
    if zero == 0 {
        return _mm256_setzero_si256();
    }
    // SAFETY: the caller vouches for group `g` of row `m`.
    let offsets = unsafe { acts.offsets(m, g) };
    let sum = if C::PARTS == 2 { offsets[part] } else { offsets[0] + offsets[1] };
    _mm256_set1_epi32(sum / 128 * zero) // exact: the offsets are -128 times code sums
}

/// Products of one quad in 16 bits, with pairs added.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<C: Codec>(weights: __m256i, x: __m256i) -> __m256i {
    match C::CODES {
        Codes::Nibbles { .. } | Codes::FiveBits { .. } | Codes::SixBits { .. } => {
            _mm256_maddubs_epi16(weights, x)
        }
        Codes::SignedSixBits | Codes::Signed => {
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights))
        }
    }
}

/// `dots` plus the 16-bit sums, with pairs added once more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(dots: __m256i, sums: __m256i) -> __m256i {
    _mm256_add_epi32(dots, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
}

/// `acc + f32(dots) * activation scale * weight scale`, by the rule of `matmul`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_dots(acts: Plane, m: usize, g: usize, dots: __m256i, scales: __m256, acc: __m256) -> __m256 {
    // SAFETY: the caller vouches for group `g` of row `m`.
    let scale = _mm256_set1_ps(unsafe { acts.scale(m, g) });
    _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dots), scale), scales, acc)
}

/// `acc` plus activation scaled sums times minima, for types that have minima.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_mins<C: Codec>(acts: Acts, m: usize, g: usize, mins: &[__m256; 2], acc: __m256) -> __m256 {
    match C::KIND {
        GroupKind::Symmetric | GroupKind::SymmetricHalves => acc,
        GroupKind::Affine => {
            // SAFETY: the caller vouches for group `g` of row `m`.
            _mm256_fmadd_ps(_mm256_set1_ps(unsafe { acts.scaled_sum(m, g) }), mins[0], acc)
        }
        GroupKind::AffineHalves => {
            // SAFETY: as above.
            let [low, high] = unsafe { acts.half_sums(m, g) };
            let acc = _mm256_fmadd_ps(_mm256_set1_ps(low), mins[0], acc);
            _mm256_fmadd_ps(_mm256_set1_ps(high), mins[1], acc)
        }
    }
}

/// Sums of low digits plus those of high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_digit(high: __m256i, low: __m256i) -> __m256i {
    _mm256_add_epi32(_mm256_slli_epi32::<{ DIGIT_SHIFT as i32 }>(high), low)
}

/// 4 codes of row `m`, in every lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast(acts: Plane, m: usize, at: usize) -> __m256i {
    // SAFETY: the caller vouches for codes `at .. at + 4` of row `m`.
    _mm256_set1_epi32(unsafe { acts.quad(m, at) })
}

/// A mask of the lowest `rows` of 8 lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mask(rows: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(rows as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// The sums of 8 weight rows and activation row `m`; unneeded sums are 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_at(sums: Sums, m: usize) -> __m256 {
    if sums.from_zero {
        return _mm256_setzero_ps();
    }
    // SAFETY: the caller vouches for the places that the mask selects.
    unsafe { _mm256_maskload_ps(sums.place(m, 0), mask(sums.rows_from(0, 8))) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_sums(sums: Sums, m: usize, acc: __m256) {
    // SAFETY: the caller vouches for the places that the mask selects.
    unsafe { _mm256_maskstore_ps(sums.place(m, 0), mask(sums.rows_from(0, 8)), acc) }
}

/// Decodes a piece.
///
/// # Safety
/// The processor has the features. The strip's rows hold the piece's groups, which are whole blocks and at most
/// [`PANEL_GROUPS`], half of that of two digits.
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_step<C: Codec, const R: usize>(strip: Strip, first: usize, at: usize, panel: &mut Panel) {
    let Panel { codes, scales } = panel;
    let mut places = Places::new::<C>(codes, at, R);
    let put = |g: usize, quad: usize, v| {
        // SAFETY: 32 aligned bytes.
        unsafe { _mm256_store_si256(places.quad(g, quad).0.as_mut_ptr().cast(), v) }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows8, R>(Rows8::new(), strip, first + at, ScalesOut { scales, at }, put) };
}

/// Multiplies a panel with `N` activation rows: adds `groups` groups to the sums.
///
/// Registers: 3 N sums (16 and 32 bits, float), a weight, an activation. N = 4 fills the 16 registers.
///
/// # Safety
/// The processor has the features; `acts` holds `N` rows of `groups` groups; the places of `sums` are readable and
/// writable.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply<C: Codec, const N: usize>(
    panel: &Panel,
    groups: usize,
    acts: Acts,
    sums: Sums,
) {
    let mut acc = [_mm256_setzero_ps(); N];
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_codes<C: Codec, const N: usize>(
    panel: &Panel,
    g: usize,
    acts: Plane,
    mut acc: [__m256; N],
) -> [__m256; N] {
    for part in 0..C::PARTS {
        // SAFETY: the caller vouches for group `g` of `N` rows.
        let dots = unsafe { part_dots::<C, N>(panel, g, part, acts) };
        for m in 0..N {
            // SAFETY: as above.
            acc[m] = unsafe { add_dots(acts, m, g, dots[m], panel.scales.scales[g][part], acc[m]) };
        }
    }
    acc
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn part_dots<C: Codec, const N: usize>(
    panel: &Panel,
    g: usize,
    part: usize,
    acts: Plane,
) -> [__m256i; N] {
    let mut dots = [_mm256_setzero_si256(); N];
    let quads = 8 / C::PARTS;
    for digit in (0..C::DIGITS).rev() {
        for (m, dots) in dots.iter_mut().enumerate() {
            // SAFETY: the caller vouches for group `g` of row `m`.
            let start = unsafe { offset::<C>(acts, m, g, part) };
            *dots = if digit + 1 < C::DIGITS { add_digit(*dots, start) } else { start };
        }
        for first in (quads * part..quads * (part + 1)).step_by(run::<C>()) {
            let mut short = [_mm256_setzero_si256(); N];
            for quad in first..first + run::<C>() {
                let codes = &panel.codes[panel_place::<C>(g, digit)];
                // SAFETY: 32 aligned bytes.
                let weights = unsafe { _mm256_load_si256(codes[quad].0.as_ptr().cast()) };
                for (m, short) in short.iter_mut().enumerate() {
                    // SAFETY: the caller vouches for group `g` of row `m`.
                    let x = unsafe { broadcast(acts, m, 32 * g + 4 * quad) };
                    *short = _mm256_add_epi16(*short, pairs::<C>(weights, x));
                }
            }
            for m in 0..N {
                dots[m] = widen(dots[m], short[m]);
            }
        }
    }
    dots
}

/// As [`multiply`], but codes go from the file's bytes directly through registers. With so few activation rows, a panel
/// would cost more than it saves. `scales` is scratch.
///
/// # Safety
/// As for [`decode`] and [`multiply`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply_in_place<C: Codec, const N: usize>(
    piece: Piece,
    scales: &mut Scales<Rows8>,
    acts: Acts,
    sums: Sums,
) {
    let Piece { strip, first, groups, .. } = piece;
    let mut acc = [_mm256_setzero_ps(); N];
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

/// 16-bit sums of each run of quads, by group and activation row; those of high digits follow those of low ones.
type Shorts<const N: usize, const R: usize> = [[[__m256i; 8]; N]; R];

/// Adds `R` groups of `N` activation rows, and their fine codes if `FINE`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn in_place_step<C: Codec, const N: usize, const R: usize, const FINE: bool>(
    strip: Strip,
    first: usize,
    at: usize,
    ahead: Spread,
    scales: &mut Scales<Rows8>,
    acts: Acts,
    mut acc: [__m256; N],
) -> [__m256; N] {
    let mut short: Shorts<N, R> = [[[_mm256_setzero_si256(); 8]; N]; R];
    let mut fine = short;
    let put = |g: usize, quad: usize, weights: __m256i| {
        ahead.prefetch(8 * 32 * C::BLOCK_BYTES / C::BLOCK_LEN, g, quad);
        let run = quad / run::<C>();
        for m in 0..N {
            let add = |plane: Plane, short: __m256i| {
                // SAFETY: the caller vouches for group `at + g` of row `m`.
                let x = unsafe { broadcast(plane, m, 32 * (at + g) + 4 * (quad % 8)) };
                _mm256_add_epi16(short, pairs::<C>(weights, x))
            };
            short[g][m][run] = add(acts.coarse, short[g][m][run]);
            if FINE {
                fine[g][m][run] = add(acts.fine, fine[g][m][run]);
            }
        }
    };
    // SAFETY: the caller vouches for the rows' groups.
    unsafe { C::codes::<Rows8, R>(Rows8::new(), strip, first + at, ScalesOut { scales, at }, put) };
    for g in 0..R {
        let (scales, mins) = (&scales.scales[at + g], &scales.mins[at + g]);
        for m in 0..N {
            // SAFETY: as above.
            unsafe {
                acc[m] = add_shorts::<C>(acts.coarse, m, at + g, &short[g][m], scales, acc[m]);
                if FINE && acts.fine.has(m, at + g) {
                    acc[m] = add_shorts::<C>(acts.fine, m, at + g, &fine[g][m], scales, acc[m]);
                }
                acc[m] = add_mins::<C>(acts, m, at + g, mins, acc[m]);
            }
        }
    }
    acc
}

/// Adds the products of group `g` of row `m`, given as sums of runs of quads.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_shorts<C: Codec>(
    acts: Plane,
    m: usize,
    g: usize,
    short: &[__m256i; 8],
    scales: &[__m256; 2],
    mut acc: __m256,
) -> __m256 {
    let runs = 8 / run::<C>() / C::PARTS;
    for (part, scales) in scales.iter().enumerate().take(C::PARTS) {
        // SAFETY: the caller vouches for group `g` of row `m`.
        let mut dots = unsafe { offset::<C>(acts, m, g, part) };
        if C::DIGITS > 1 {
            let mut high = _mm256_setzero_si256();
            for short in &short[runs..2 * runs] {
                high = widen(high, *short);
            }
            dots = add_digit(high, dots);
        }
        for short in &short[runs * part..runs * (part + 1)] {
            dots = widen(dots, *short);
        }
        // SAFETY: as above.
        acc = unsafe { add_dots(acts, m, g, dots, *scales, acc) };
    }
    acc
}
