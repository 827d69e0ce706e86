//! Weights of 16 rows, from the file's blocks to codes with one row per 32-bit lane.
//!
//! A vector holds 4 consecutive codes of each of 16 rows: what `vpdpbusd` multiplies with 4 broadcast activation codes.
//! Codes are unsigned: those of symmetric types are 128 too large, and the activations' `offsets` take that back.

#![allow(non_camel_case_types)] // the names are ggml's own

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::strips::{PANEL_GROUPS, Strip};
use crate::backend::cpu::quant::GroupKind;

/// A quantised type. Callers of its functions vouch that each of the strip's 16 rows holds the block asked for.
pub(super) trait Codec {
    const KIND: GroupKind;
    /// Values and bytes of a quant block.
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
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
        put: impl FnMut(usize, usize, __m512i),
    );

    /// Writes scales and minima of the `groups` groups from `first` on, whole blocks both.
    ///
    /// # Safety
    /// As for `codes`.
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>);
}

/// 16 floats, one per row.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub(super) [f32; 16]);

/// Scales of a panel's groups, one row per lane.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    /// Per group, per half.
    pub(super) scales: [[Lanes; 2]; PANEL_GROUPS],
    pub(super) mins: [Lanes; PANEL_GROUPS],
    /// Bytes of block headers on their way.
    headers: [[u32; 16]; PANEL_GROUPS],
}

impl Scales {
    pub(super) const ZERO: Self = Self {
        scales: [[Lanes([0.0; 16]); 2]; PANEL_GROUPS],
        mins: [Lanes([0.0; 16]); PANEL_GROUPS],
        headers: [[0; 16]; PANEL_GROUPS],
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn words(strip: Strip, at: usize) -> [__m512i; 4] {
    // Row 4l + i stands in 128-bit lane l of vector i.
    let mut v = [_mm512_setzero_si512(); 4];
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: the caller vouches for 16 bytes at `at` of each of the 16 rows; loads need no alignment.
        unsafe {
            let lane = |l: usize| _mm_loadu_si128(strip.at(4 * l + i, at).cast());
            let x = _mm512_castsi128_si512(lane(0));
            let x = _mm512_inserti32x4::<1>(x, lane(1));
            let x = _mm512_inserti32x4::<2>(x, lane(2));
            *v = _mm512_inserti32x4::<3>(x, lane(3));
        }
    }
    let (ab_lo, ab_hi) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    let (cd_lo, cd_hi) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    [
        _mm512_unpacklo_epi64(ab_lo, cd_lo),
        _mm512_unpackhi_epi64(ab_lo, cd_lo),
        _mm512_unpacklo_epi64(ab_hi, cd_hi),
        _mm512_unpackhi_epi64(ab_hi, cd_hi),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn low_nibbles(v: __m512i) -> __m512i {
    _mm512_and_si512(v, _mm512_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn high_nibbles(v: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15))
}

/// f16 in the low 16 bits of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn halves_to_f32(v: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn store(to: &mut Lanes, v: __m512) {
    // SAFETY: 16 floats at 64-byte alignment.
    unsafe { _mm512_store_ps(to.0.as_mut_ptr(), v) }
}

/// Scales of types whose block is a group that starts with f16 d.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
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
        // SAFETY: `header` is 64 bytes.
        store(&mut scales[0], halves_to_f32(unsafe { _mm512_loadu_si512(header.as_ptr().cast()) }));
    }
}

pub(super) struct Q8_0;

impl Codec for Q8_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 34;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m512i),
    ) {
        for half in 0..2 {
            // SAFETY: bytes 2..34 of the block.
            let v = unsafe { words(strip, first * 34 + 2 + 16 * half) };
            for (i, v) in v.into_iter().enumerate() {
                put(0, 4 * half + i, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 34, first, groups, out) }
    }
}

pub(super) struct Q4_0;

impl Codec for Q4_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 18;
    const STEP_GROUPS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m512i),
    ) {
        let raise = _mm512_set1_epi8(120); // 128 - 8
        // SAFETY: bytes 2..18 of the block.
        let v = unsafe { words(strip, first * 18 + 2) };
        for (i, v) in v.into_iter().enumerate() {
            put(0, i, _mm512_add_epi8(low_nibbles(v), raise));
            put(0, 4 + i, _mm512_add_epi8(high_nibbles(v), raise));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_scales(strip, 18, first, groups, out) }
    }
}

pub(super) struct Q4_1;

impl Codec for Q4_1 {
    const KIND: GroupKind = GroupKind::Affine;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 20;
    const STEP_GROUPS: usize = 4;

    /// Four blocks are 20 words, so headers come with the codes at no load of their own.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m512i),
    ) {
        let mut word = |k: usize, v: __m512i| match k % 5 {
            0 => {
                let (scale, min) = out.group(k / 5);
                store(scale, halves_to_f32(v));
                store(min, halves_to_f32(_mm512_srli_epi32::<16>(v)));
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn q4_1_words<const R: usize, const J: usize>(
    strip: Strip,
    first: usize,
    word: &mut impl FnMut(usize, __m512i),
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
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const STEP_GROUPS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m512i),
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
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        let ScalesOut { scales: Scales { scales, mins, .. }, at } = out;
        let scales = scales[at..].chunks_exact_mut(8).zip(mins[at..].chunks_exact_mut(8));
        for (block, (scales, mins)) in scales.enumerate().take(groups / 8) {
            // SAFETY: the block's first 16 bytes: d, dmin and 12 bytes of scales and minima.
            let [d, a, b, c] = unsafe { words(strip, (first / 8 + block) * 144) };
            let (d, dmin) = (halves_to_f32(d), halves_to_f32(_mm512_srli_epi32::<16>(d)));
            let dmin = _mm512_sub_ps(_mm512_setzero_ps(), dmin);
            // Bytes of each word: numbers 0..4 in 6 bits of a and b; 4..8 in 4 bits of c and the top bits of a and b.
            let six = _mm512_set1_epi8(63);
            let top = |v| _mm512_and_si512(_mm512_srli_epi16::<2>(v), _mm512_set1_epi8(0x30));
            let sc = [_mm512_and_si512(a, six), _mm512_or_si512(low_nibbles(c), top(a))];
            let mn = [_mm512_and_si512(b, six), _mm512_or_si512(high_nibbles(c), top(b))];
            for j in 0..8 {
                let byte = |v: [__m512i; 2]| {
                    let shifted = _mm512_srl_epi32(v[j / 4], _mm_cvtsi32_si128(8 * (j as i32 % 4)));
                    _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)))
                };
                store(&mut scales[j][0], _mm512_mul_ps(d, byte(sc)));
                store(&mut mins[j], _mm512_mul_ps(dmin, byte(mn)));
            }
        }
    }
}

pub(super) struct Q6_K;

impl Codec for Q6_K {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const STEP_GROUPS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn codes<const R: usize>(
        strip: Strip,
        first: usize,
        _: ScalesOut<'_>,
        mut put: impl FnMut(usize, usize, __m512i),
    ) {
        let (block, part) = (first / 8 * 210, first % 8 / 4);
        let two_bits = _mm512_set1_epi8(0x30);
        let raise = _mm512_set1_epi8(96); // 128 - 32
        for half in 0..2 {
            let low = block + 64 * part + 16 * half;
            // SAFETY: bytes 0..128 (low nibbles) and 128..192 (high bits) of the block.
            let (a, b, high) = unsafe {
                (words(strip, low), words(strip, low + 32), words(strip, block + 128 + 32 * part + 16 * half))
            };
            for i in 0..4 {
                let bits = [
                    _mm512_slli_epi16::<4>(high[i]),
                    _mm512_slli_epi16::<2>(high[i]),
                    high[i],
                    _mm512_srli_epi16::<2>(high[i]),
                ];
                let nibbles = [low_nibbles(a[i]), low_nibbles(b[i]), high_nibbles(a[i]), high_nibbles(b[i])];
                for quarter in 0..4 {
                    let code = _mm512_or_si512(nibbles[quarter], _mm512_and_si512(bits[quarter], two_bits));
                    put(quarter, 4 * half + i, _mm512_add_epi8(code, raise));
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn scales(strip: Strip, first: usize, groups: usize, out: ScalesOut<'_>) {
        let ScalesOut { scales: Scales { scales, headers, .. }, at: start } = out;
        for (block, scales) in scales[start..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            let at = (first / 8 + block) * 210;
            let d = &mut headers[0];
            for (row, d) in d.iter_mut().enumerate() {
                // SAFETY: the last two bytes of the block, at any alignment.
                *d = u32::from(unsafe { strip.at(row, at + 208).cast::<u16>().read_unaligned() });
            }
            // SAFETY: 64 bytes of headers; bytes 192..208 of the block.
            let (d, words) = unsafe { (_mm512_loadu_si512(d.as_ptr().cast()), words(strip, at + 192)) };
            let d = halves_to_f32(d);
            for j in 0..16 {
                // Byte j % 4 of the word to the top, then down again with its sign.
                let up = _mm512_sll_epi32(words[j / 4], _mm_cvtsi32_si128(24 - 8 * (j as i32 % 4)));
                let scale = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(up));
                store(&mut scales[j / 2][j % 2], _mm512_mul_ps(d, scale));
            }
        }
    }
}
