//! AVX2 quantisation, one group at a time. The AVX-512 level uses it too: it takes under 1 % of any matmul that
//! follows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{A8Mut, FINE_STEPS, GROUP};
use crate::backend::cpu::isa::{Isa, Kernels};

/// See [`super::ActivationRow::quantize`].
pub(super) fn quantize(kernels: Kernels, values: &[[f32; GROUP]], fine_above: f32, out: &mut A8Mut<'_>) {
    debug_assert!(kernels.isa() >= Isa::Avx2);
    // SAFETY: kernels of this level exist only when AVX2 was detected (`Kernels::new`, `Kernels::detect`).
    unsafe { quantize_avx2(values, fine_above, out) }
}

#[target_feature(enable = "avx2")]
fn quantize_avx2(values: &[[f32; GROUP]], fine_above: f32, out: &mut A8Mut<'_>) {
    super::quantize(
        values,
        fine_above,
        out,
        |x| amax(x),
        |x, factor, codes| {
            let [a, b, c, d] = scaled(x, factor);
            pack(
                [_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b), _mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d)],
                codes,
            )
        },
        |x, factor, codes| encode_fine(x, factor, codes),
    );
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32; GROUP]) -> [__m256; 4] {
    // SAFETY: `x` is 32 f32: four unaligned loads of 8.
    unsafe {
        let at = x.as_ptr();
        [
            _mm256_loadu_ps(at),
            _mm256_loadu_ps(at.add(8)),
            _mm256_loadu_ps(at.add(16)),
            _mm256_loadu_ps(at.add(24)),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn without_sign(v: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff))
}

/// Compares the bits without sign as integers.
#[inline]
#[target_feature(enable = "avx2")]
fn amax(x: &[f32; GROUP]) -> f32 {
    let [a, b, c, d] = load(x);
    let (a, b, c, d) = (without_sign(a), without_sign(b), without_sign(c), without_sign(d));
    let m = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    let m = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
    let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
    f32::from_bits(_mm_cvtsi128_si32(m) as u32)
}

#[inline]
#[target_feature(enable = "avx2")]
fn scaled(x: &[f32; GROUP], factor: f32) -> [__m256; 4] {
    let ([a, b, c, d], factor) = (load(x), _mm256_set1_ps(factor));
    [_mm256_mul_ps(a, factor), _mm256_mul_ps(b, factor), _mm256_mul_ps(c, factor), _mm256_mul_ps(d, factor)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn encode_fine(x: &[f32; GROUP], factor: f32, codes: &mut [i8; GROUP]) -> [i16; 2] {
    let [a, b, c, d] = scaled(x, factor);
    pack([fine_of(a), fine_of(b), fine_of(c), fine_of(d)], codes)
}

/// The rest of each value that rounding leaves, in fine steps.
#[inline]
#[target_feature(enable = "avx2")]
fn fine_of(t: __m256) -> __m256i {
    let rest = _mm256_sub_ps(t, _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(t));
    _mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(FINE_STEPS)))
}

/// Writes the codes and returns the sums of both halves. cvtps rounded the inputs to nearest even, the mode that Rust
/// keeps MXCSR in.
#[inline]
#[target_feature(enable = "avx2")]
fn pack([a, b, c, d]: [__m256i; 4], codes: &mut [i8; GROUP]) -> [i16; 2] {
    // The packs interleave 128-bit halves; the permutation puts groups of 4 codes back in order.
    let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: `codes` is 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    // Sums of 8 codes, each 128 too large.
    let sums = _mm256_sad_epu8(_mm256_xor_si256(packed, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    [sum_of(_mm256_castsi256_si128(sums)), sum_of(_mm256_extracti128_si256::<1>(sums))]
}

/// The sum of 16 codes from two sums of 8.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_of(v: __m128i) -> i16 {
    (_mm_extract_epi16::<0>(v) + _mm_extract_epi16::<4>(v) - 16 * 128) as i16
}
