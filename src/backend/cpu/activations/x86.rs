//! AVX2 quantisation, a group at a time. Also taken at the AVX-512 level: it is under 1 % of any matmul that follows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{A8Mut, GROUP, scale_and_factor};
use crate::backend::cpu::isa::{Isa, Kernels};

/// See [`super::ActivationRow::quantize`].
pub(super) fn quantize(kernels: Kernels, values: &[f32], out: A8Mut<'_>) {
    debug_assert!(kernels.isa() >= Isa::Avx2);
    // SAFETY: kernels of this level exist only when AVX2 was detected (`Kernels::new`, `Kernels::detect`).
    unsafe { quantize_avx2(values, out) }
}

#[target_feature(enable = "avx2")]
fn quantize_avx2(values: &[f32], out: A8Mut<'_>) {
    let (values, _) = values.as_chunks::<GROUP>();
    let (codes, _) = out.codes.as_chunks_mut::<GROUP>();
    let (sums, _) = out.sums.as_chunks_mut::<2>();
    let (offsets, _) = out.offsets.as_chunks_mut::<2>();
    let scales = out.scales.iter_mut().zip(out.scaled_sums);
    for ((((x, codes), sums), offsets), (scale, scaled_sum)) in
        values.iter().zip(codes).zip(sums).zip(offsets).zip(scales)
    {
        let factor;
        (*scale, factor) = scale_and_factor(amax_bits(x));
        let (low, high) = encode(x, factor, codes);
        *sums = [low, high];
        *offsets = [-128 * i32::from(low), -128 * i32::from(high)];
        *scaled_sum = *scale * f32::from(low + high);
    }
}

#[target_feature(enable = "avx2")]
fn load(x: &[f32; GROUP]) -> [__m256; 4] {
    // SAFETY: `x` is 32 f32: four unaligned loads of 8.
    unsafe { [0, 8, 16, 24].map(|at| _mm256_loadu_ps(x.as_ptr().add(at))) }
}

/// Largest magnitude as bits, NaN above infinity: integer order of the bits without sign.
#[target_feature(enable = "avx2")]
fn amax_bits(x: &[f32; GROUP]) -> u32 {
    let [a, b, c, d] =
        load(x).map(|v| _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff)));
    let m = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    let m = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
    let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
    _mm_cvtsi128_si32(m) as u32
}

/// Writes the codes and returns the sums of both halves.
#[target_feature(enable = "avx2")]
fn encode(x: &[f32; GROUP], factor: f32, codes: &mut [i8; GROUP]) -> (i16, i16) {
    if factor == 0.0 {
        codes.fill(0);
        return (0, 0);
    }
    // cvtps rounds to nearest even: the mode that Rust keeps MXCSR in.
    let [a, b, c, d] = load(x).map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(factor))));
    // The packs interleave 128-bit halves; the permutation puts groups of 4 codes back in order.
    let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: `codes` is 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    // Sums of 8 codes, each 128 too large.
    let sums = _mm256_sad_epu8(_mm256_xor_si256(packed, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    let (low, high) = (_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let both = |v| (_mm_extract_epi16::<0>(v) + _mm_extract_epi16::<4>(v) - 16 * 128) as i16;
    (both(low), both(high))
}
