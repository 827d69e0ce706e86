//! Weights of 8 rows, from the file's blocks to codes with one row per 32-bit lane.
//!
//! A vector holds 4 consecutive codes of each of 8 rows, to be multiplied with 4 broadcast activation codes. Codes are
//! unsigned where they are small, so that `vpmaddubsw` takes them as they are: those of Q4_0 are 8 and those of Q6_K 32
//! too large, and the activations' `offsets` take that back. Those of Q8_0 are signed.

#![allow(non_camel_case_types)] // the names are ggml's own

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::strips::{PANEL_GROUPS, Strip};
use crate::backend::cpu::quant::GroupKind;

/// What codes are, and so how many of their products 16 bits hold. Activation codes are in -127..=127.
#[derive(Clone, Copy)]
pub(super) enum Codes {
    /// 0..=15, `zero` too large. A whole group: 15 * 127 * 2 * 8 = 30,480.
    Nibbles { zero: i32 },
    /// 0..=63, `zero` too large. Two quads: 63 * 127 * 2 * 2 = 32,004.
    SixBits { zero: i32 },
    /// -128..=127. One quad: 128 * 127 * 2 = 32,512, with the activation taking the weight's sign.
    Signed,
}

/// A quantised type. Callers of its functions vouch that each of the strip's 8 rows holds the block asked for.
pub(super) trait Codec {
    const KIND: GroupKind;
    /// Values of a quant block.
    const BLOCK_LEN: usize;
    const CODES: Codes;
    /// Groups that one call of `codes` gives.
    const STEP_GROUPS: usize;

    /// Gives `put(group in step, quad in group, codes)` for all quads of step `step` of the rows.
    ///
    /// # Safety
    /// The processor has the features; the 8 rows hold the step's block.
    unsafe fn codes(strip: Strip, step: usize, put: impl FnMut(usize, usize, __m256i));

    /// Gives `put(group, half, scales)` and, of affine types, `put_min(group, minima)` for `groups` from `first` on.
    /// `first` starts a block. `half` is 0 unless the kind is [`GroupKind::SymmetricHalves`].
    ///
    /// # Safety
    /// As for `codes`.
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales);
}

/// 8 floats, one per row.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Lanes(pub(super) [f32; 8]);

/// Scales of a panel's groups, one row per lane.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    /// Per group, per half.
    pub(super) scales: [[Lanes; 2]; PANEL_GROUPS],
    pub(super) mins: [Lanes; PANEL_GROUPS],
    /// Bytes of block headers on their way.
    headers: [[u32; 8]; PANEL_GROUPS],
}

impl Scales {
    pub(super) const ZERO: Self = Self {
        scales: [[Lanes([0.0; 8]); 2]; PANEL_GROUPS],
        mins: [Lanes([0.0; 8]); PANEL_GROUPS],
        headers: [[0; 8]; PANEL_GROUPS],
    };
}

/// 16 bytes at `at` of each row, as 4 vectors of one 32-bit word per row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words(strip: Strip, at: usize) -> [__m256i; 4] {
    // Row 4l + i stands in 128-bit lane l of vector i.
    let mut v = [_mm256_setzero_si256(); 4];
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: the caller vouches for 16 bytes at `at` of each of the 8 rows; loads need no alignment.
        unsafe {
            let lane = |l: usize| _mm_loadu_si128(strip.at(4 * l + i, at).cast());
            *v = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(lane(0)), lane(1));
        }
    }
    let (ab_lo, ab_hi) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    let (cd_lo, cd_hi) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    [
        _mm256_unpacklo_epi64(ab_lo, cd_lo),
        _mm256_unpackhi_epi64(ab_lo, cd_lo),
        _mm256_unpacklo_epi64(ab_hi, cd_hi),
        _mm256_unpackhi_epi64(ab_hi, cd_hi),
    ]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn low_nibbles(v: __m256i) -> __m256i {
    _mm256_and_si256(v, _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high_nibbles(v: __m256i) -> __m256i {
    _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15))
}

/// f16 in the low 16 bits of each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves_to_f32(v: __m256i) -> __m256 {
    let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    // Packing works within 128-bit halves; the permutation brings both together.
    let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(low, low));
    _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(to: &mut Lanes, v: __m256) {
    // SAFETY: 8 floats at 32-byte alignment.
    unsafe { _mm256_store_ps(to.0.as_mut_ptr(), v) }
}

/// Reads the first 4 (or, of f16 alone, 2) bytes of each block of each row into `headers`. By scalar loads, since the
/// vector ports are the busy ones; read back only when all are written, so that no load waits on a store.
#[inline]
unsafe fn headers<const BYTES: usize>(
    strip: Strip,
    block_bytes: usize,
    first: usize,
    groups: usize,
    headers: &mut [[u32; 8]; PANEL_GROUPS],
) {
    for (g, header) in headers.iter_mut().enumerate().take(groups) {
        for (row, h) in header.iter_mut().enumerate() {
            let p = strip.at(row, (first + g) * block_bytes);
            // SAFETY: the caller vouches for the block of each of the 8 rows; reads are unaligned ones.
            *h = unsafe {
                if BYTES == 2 {
                    u32::from(p.cast::<u16>().read_unaligned())
                } else {
                    p.cast::<u32>().read_unaligned()
                }
            };
        }
    }
}

/// Scales of types whose block is a group that starts with f16 d.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn leading_scales(strip: Strip, block_bytes: usize, first: usize, groups: usize, out: &mut Scales) {
    // SAFETY: the caller's promise is this function's.
    unsafe { headers::<2>(strip, block_bytes, first, groups, &mut out.headers) };
    for (scales, header) in out.scales.iter_mut().zip(&out.headers).take(groups) {
        // SAFETY: `header` is 32 bytes.
        store(&mut scales[0], halves_to_f32(unsafe { _mm256_loadu_si256(header.as_ptr().cast()) }));
    }
}

pub(super) struct Q8_0;

impl Codec for Q8_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 32;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(strip: Strip, step: usize, mut put: impl FnMut(usize, usize, __m256i)) {
        for half in 0..2 {
            // SAFETY: bytes 2..34 of the block.
            let v = unsafe { words(strip, step * 34 + 2 + 16 * half) };
            for (i, v) in v.into_iter().enumerate() {
                put(0, 4 * half + i, v);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 34, first, groups, out) }
    }
}

pub(super) struct Q4_0;

impl Codec for Q4_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Nibbles { zero: 8 };
    const BLOCK_LEN: usize = 32;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(strip: Strip, step: usize, mut put: impl FnMut(usize, usize, __m256i)) {
        // SAFETY: bytes 2..18 of the block.
        let v = unsafe { words(strip, step * 18 + 2) };
        for (i, v) in v.into_iter().enumerate() {
            put(0, i, low_nibbles(v));
            put(0, 4 + i, high_nibbles(v));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 18, first, groups, out) }
    }
}

pub(super) struct Q4_1;

impl Codec for Q4_1 {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 32;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(strip: Strip, step: usize, mut put: impl FnMut(usize, usize, __m256i)) {
        // SAFETY: bytes 4..20 of the block.
        let v = unsafe { words(strip, step * 20 + 4) };
        for (i, v) in v.into_iter().enumerate() {
            put(0, i, low_nibbles(v));
            put(0, 4 + i, high_nibbles(v));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales) {
        // SAFETY: the caller's promise is this function's.
        unsafe { headers::<4>(strip, 20, first, groups, &mut out.headers) };
        for ((scales, min), header) in out.scales.iter_mut().zip(&mut out.mins).zip(&out.headers).take(groups)
        {
            // SAFETY: `header` is 32 bytes.
            let header = unsafe { _mm256_loadu_si256(header.as_ptr().cast()) };
            store(&mut scales[0], halves_to_f32(header));
            store(min, halves_to_f32(_mm256_srli_epi32::<16>(header)));
        }
    }
}

pub(super) struct Q4_K;

impl Codec for Q4_K {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 256;
    const STEP_GROUPS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(strip: Strip, step: usize, mut put: impl FnMut(usize, usize, __m256i)) {
        let at = step / 4 * 144 + 16 + step % 4 * 32;
        for half in 0..2 {
            // SAFETY: bytes 16..144 of the block, 32 for each of its 4 steps.
            let v = unsafe { words(strip, at + 16 * half) };
            for (i, v) in v.into_iter().enumerate() {
                put(0, 4 * half + i, low_nibbles(v));
                put(1, 4 * half + i, high_nibbles(v));
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales) {
        let scales = out.scales.chunks_exact_mut(8).zip(out.mins.chunks_exact_mut(8));
        for (block, (scales, mins)) in scales.enumerate().take(groups / 8) {
            // SAFETY: the block's first 16 bytes: d, dmin and 12 bytes of scales and minima.
            let [d, a, b, c] = unsafe { words(strip, (first / 8 + block) * 144) };
            let (d, dmin) = (halves_to_f32(d), halves_to_f32(_mm256_srli_epi32::<16>(d)));
            let dmin = _mm256_sub_ps(_mm256_setzero_ps(), dmin);
            // Bytes of each word: numbers 0..4 in 6 bits of a and b; 4..8 in 4 bits of c and the top bits of a and b.
            let six = _mm256_set1_epi8(63);
            let top = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), _mm256_set1_epi8(0x30));
            let sc = [_mm256_and_si256(a, six), _mm256_or_si256(low_nibbles(c), top(a))];
            let mn = [_mm256_and_si256(b, six), _mm256_or_si256(high_nibbles(c), top(b))];
            for j in 0..8 {
                let byte = |v: [__m256i; 2]| {
                    let shifted = _mm256_srl_epi32(v[j / 4], _mm_cvtsi32_si128(8 * (j as i32 % 4)));
                    _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(255)))
                };
                store(&mut scales[j][0], _mm256_mul_ps(d, byte(sc)));
                store(&mut mins[j], _mm256_mul_ps(dmin, byte(mn)));
            }
        }
    }
}

pub(super) struct Q6_K;

impl Codec for Q6_K {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::SixBits { zero: 32 };
    const BLOCK_LEN: usize = 256;
    const STEP_GROUPS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(strip: Strip, step: usize, mut put: impl FnMut(usize, usize, __m256i)) {
        let (block, part) = (step / 2 * 210, step % 2);
        let two_bits = _mm256_set1_epi8(0x30);
        for half in 0..2 {
            let low = block + 64 * part + 16 * half;
            // SAFETY: bytes 0..128 (low nibbles) and 128..192 (high bits) of the block.
            let (a, b, high) = unsafe {
                (words(strip, low), words(strip, low + 32), words(strip, block + 128 + 32 * part + 16 * half))
            };
            for i in 0..4 {
                let bits = [
                    _mm256_slli_epi16::<4>(high[i]),
                    _mm256_slli_epi16::<2>(high[i]),
                    high[i],
                    _mm256_srli_epi16::<2>(high[i]),
                ];
                let nibbles = [low_nibbles(a[i]), low_nibbles(b[i]), high_nibbles(a[i]), high_nibbles(b[i])];
                for quarter in 0..4 {
                    let code = _mm256_or_si256(nibbles[quarter], _mm256_and_si256(bits[quarter], two_bits));
                    put(quarter, 4 * half + i, code);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: &mut Scales) {
        for (block, scales) in out.scales.chunks_exact_mut(8).enumerate().take(groups / 8) {
            let at = (first / 8 + block) * 210;
            let d = &mut out.headers[0];
            for (row, d) in d.iter_mut().enumerate() {
                // SAFETY: the last two bytes of the block, at any alignment.
                *d = u32::from(unsafe { strip.at(row, at + 208).cast::<u16>().read_unaligned() });
            }
            // SAFETY: 32 bytes of headers; bytes 192..208 of the block.
            let (d, words) = unsafe { (_mm256_loadu_si256(d.as_ptr().cast()), words(strip, at + 192)) };
            let d = halves_to_f32(d);
            for j in 0..16 {
                // Byte j % 4 of the word to the top, then down again with its sign.
                let up = _mm256_sll_epi32(words[j / 4], _mm_cvtsi32_si128(24 - 8 * (j as i32 % 4)));
                let scale = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(up));
                store(&mut scales[j / 2][j % 2], _mm256_mul_ps(d, scale));
            }
        }
    }
}
