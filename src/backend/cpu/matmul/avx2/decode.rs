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
    /// Values and bytes of a quant block.
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    const CODES: Codes;
    /// Most groups that one call of `codes` gives.
    const STEP_GROUPS: usize;

    /// Gives `put(g, quad, codes)` for all quads of the `R` groups from `first` on, `g` counting from 0.
    /// Types of larger blocks take `R = STEP_GROUPS` only. A type that has no use for `scales` writes theirs to `out`.
    ///
    /// # Safety
    /// The processor has the features; the rows hold these groups.
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        out: ScalesOut<'_>,
        put: impl FnMut(usize, usize, __m256i),
    );

    /// Writes scales and minima of the `groups` groups from `first` on, whole blocks both.
    ///
    /// # Safety
    /// As for `codes`.
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>);
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

/// Where scales of the groups from `at` on go.
pub(super) struct ScalesOut<'a> {
    pub(super) scales: &'a mut Scales,
    pub(super) at: usize,
}

impl ScalesOut<'_> {
    /// Scales and minima of group `at + g`.
    #[inline(always)]
    fn group(&mut self, g: usize) -> (&mut Lanes, &mut Lanes) {
        let g = self.at + g;
        (&mut self.scales.scales[g][0], &mut self.scales.mins[g])
    }
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

/// Scales of types whose block is a group that starts with f16 d.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn leading_scales(strip: Strip, block_bytes: usize, first: usize, groups: usize, out: ScalesOut<'_>) {
    let ScalesOut { scales, at } = out;
    let (headers, scales) = (&mut scales.headers, &mut scales.scales[at..]);
    for (g, header) in headers.iter_mut().enumerate().take(groups) {
        for (row, h) in header.iter_mut().enumerate() {
            let p = strip.at(row, (first + g) * block_bytes);
            // SAFETY: the caller vouches for the block of each row; the read needs no alignment.
            *h = u32::from(unsafe { p.cast::<u16>().read_unaligned() });
        }
    }
    // Read back only when all are written, so that no load waits on a store.
    for (scales, header) in scales.iter_mut().zip(headers).take(groups) {
        // SAFETY: `header` is 32 bytes.
        store(&mut scales[0], halves_to_f32(unsafe { _mm256_loadu_si256(header.as_ptr().cast()) }));
    }
}

pub(super) struct Q8_0;

impl Codec for Q8_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 34;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m256i),
    ) {
        for half in 0..2 {
            // SAFETY: bytes 2..34 of the block.
            let v = unsafe { words(strip, first * 34 + 2 + 16 * half) };
            for (i, v) in v.into_iter().enumerate() {
                put(0, 4 * half + i, v);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 34, first, groups, out) }
    }
}

pub(super) struct Q4_0;

impl Codec for Q4_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Nibbles { zero: 8 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 18;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m256i),
    ) {
        // SAFETY: bytes 2..18 of the block.
        let v = unsafe { words(strip, first * 18 + 2) };
        for (i, v) in v.into_iter().enumerate() {
            put(0, i, low_nibbles(v));
            put(0, 4 + i, high_nibbles(v));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 18, first, groups, out) }
    }
}

pub(super) struct Q4_1;

impl Codec for Q4_1 {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 20;
    const STEP_GROUPS: usize = 4;

    /// Four blocks are 20 words, so headers come with the codes at no load of their own.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m256i),
    ) {
        let mut word = |k: usize, v: __m256i| match k % 5 {
            0 => {
                let (scale, min) = out.group(k / 5);
                store(scale, halves_to_f32(v));
                store(min, halves_to_f32(_mm256_srli_epi32::<16>(v)));
            }
            i => {
                put(k / 5, i - 1, low_nibbles(v));
                put(k / 5, i + 3, high_nibbles(v));
            }
        };
        // SAFETY: the blocks of the groups are 20 bytes each.
        unsafe {
            q4_1_words::<R, 0>(strip, first, &mut word);
            q4_1_words::<R, 1>(strip, first, &mut word);
            q4_1_words::<R, 2>(strip, first, &mut word);
            q4_1_words::<R, 3>(strip, first, &mut word);
            q4_1_words::<R, 4>(strip, first, &mut word);
        }
    }

    unsafe fn scales(_: Strip, _: usize, _: usize, _: ScalesOut<'_>) {}
}

/// Gives words `4 J .. 4 J + 4` of the `5 R` words of `R` Q4_1 blocks; the last four are loaded together, so that no
/// load goes past them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4_1_words<const R: usize, const J: usize>(
    strip: Strip,
    first: usize,
    word: &mut impl FnMut(usize, __m256i),
) {
    if 4 * J >= 5 * R {
        return;
    }
    let from = (4 * J).min(5 * R - 4);
    // SAFETY: the caller vouches for 20 R bytes.
    let v = unsafe { words(strip, first * 20 + 4 * from) };
    for (i, v) in v.into_iter().enumerate() {
        if from + i >= 4 * J {
            word(from + i, v);
        }
    }
}

pub(super) struct Q4_K;

impl Codec for Q4_K {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const STEP_GROUPS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m256i),
    ) {
        let at = first / 8 * 144 + 16 + first % 8 * 16;
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
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        let ScalesOut { scales: Scales { scales, mins, .. }, at } = out;
        let scales = scales[at..].chunks_exact_mut(8).zip(mins[at..].chunks_exact_mut(8));
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
    const BLOCK_BYTES: usize = 210;
    const STEP_GROUPS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m256i),
    ) {
        let (block, part) = (first / 8 * 210, first % 8 / 4);
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
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        let ScalesOut { scales: Scales { scales, headers, .. }, at: start } = out;
        for (block, scales) in scales[start..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            let at = (first / 8 + block) * 210;
            let d = &mut headers[0];
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
