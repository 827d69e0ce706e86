//! Codecs of types whose quant block is one group of 32, or two.

#![allow(non_camel_case_types)] // ggml's names
#![allow(clippy::needless_range_loop)] // an iterator over four vectors may keep them on the stack

use super::{Codec, Codes, Rows, Scales, ScalesOut};
use crate::backend::cpu::matmul::strips::Strip;
use crate::backend::cpu::quant::{E2M1_DOUBLED, GroupKind, UE4M3_HALF, e8m0_bits, grids};

/// Reads the first bytes of the blocks of `groups` groups, an f16 or one byte each, into the words of `headers`.
///
/// # Safety
/// The rows hold the groups.
#[inline(always)]
unsafe fn read_headers<V: Rows, T: Into<u32>>(
    headers: &mut [[u32; 16]],
    strip: Strip,
    block_bytes: usize,
    first: usize,
) {
    for (g, header) in headers.iter_mut().enumerate() {
        for (row, h) in header.iter_mut().enumerate().take(V::ROWS) {
            let p = strip.at(row, (first + g) * block_bytes);
            // SAFETY: the caller vouches for the block of each row; the read needs no alignment.
            *h = unsafe { p.cast::<T>().read_unaligned() }.into();
        }
    }
}

/// Reads the scales of types whose block starts with f16 d.
///
/// # Safety
/// The rows hold the groups.
#[inline(always)]
unsafe fn leading_halves<V: Rows>(
    v: V,
    strip: Strip,
    block_bytes: usize,
    first: usize,
    groups: usize,
    out: ScalesOut<'_, V>,
) {
    let ScalesOut { scales: Scales { scales, headers, .. }, at } = out;
    let headers = &mut headers[..groups];
    // SAFETY: the caller's promise is this function's.
    unsafe { read_headers::<V, u16>(headers, strip, block_bytes, first) };
    // Read back only after all are written, so that no load waits on a store.
    for g in 0..groups {
        scales[at + g][0] = v.halves(v.load(&headers[g]));
    }
}

/// Reads the scales of types whose block starts with an 8-bit power of two: it over 2^`LESS`.
///
/// # Safety
/// The rows hold the groups.
#[inline(always)]
pub(super) unsafe fn leading_powers<V: Rows, const LESS: u32>(
    v: V,
    strip: Strip,
    block_bytes: usize,
    first: usize,
    groups: usize,
    out: ScalesOut<'_, V>,
) {
    let ScalesOut { scales: Scales { scales, headers, .. }, at } = out;
    let headers = &mut headers[..groups];
    // SAFETY: the caller's promise is this function's.
    unsafe { read_headers::<V, u8>(headers, strip, block_bytes, first) };
    for g in 0..groups {
        scales[at + g][0] = v.floats(v.load(&changed(headers[g], |e| e8m0_bits(e, LESS))));
    }
}

/// As `words.map(change)`, which is inlined only where the linker optimises.
#[inline(always)]
fn changed(mut words: [u32; 16], change: impl Fn(u32) -> u32) -> [u32; 16] {
    for word in &mut words {
        *word = change(*word);
    }
    words
}

pub(in super::super) struct Q8_0;

impl Codec for Q8_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 34;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        for half in 0..2 {
            // SAFETY: bytes 2..34 of the block.
            let words = unsafe { v.words(strip, first * 34 + 2 + 16 * half) };
            for i in 0..4 {
                let word = words[i];
                put(0, 4 * half + i, v.symmetric(word, 0));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_halves(v, strip, 34, first, groups, out) }
    }
}

pub(in super::super) struct Q4_0;

impl Codec for Q4_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Nibbles { zero: 8 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 18;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 2..18 of the block.
        let words = unsafe { v.words(strip, first * 18 + 2) };
        for i in 0..4 {
            let word = words[i];
            put(0, i, v.symmetric(v.low_nibbles(word), 8));
            put(0, 4 + i, v.symmetric(v.high_nibbles(word), 8));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_halves(v, strip, 18, first, groups, out) }
    }
}

pub(in super::super) struct Q4_1;

impl Codec for Q4_1 {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 20;
    const STEP_GROUPS: usize = 4;

    /// Four blocks are 20 words, so headers are loaded with the codes at no extra load.
    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: the blocks of the groups are 20 bytes each.
        unsafe {
            q4_1_words::<V, R, 0>(v, strip, first, &mut out, &mut put);
            q4_1_words::<V, R, 1>(v, strip, first, &mut out, &mut put);
            q4_1_words::<V, R, 2>(v, strip, first, &mut out, &mut put);
            q4_1_words::<V, R, 3>(v, strip, first, &mut out, &mut put);
            q4_1_words::<V, R, 4>(v, strip, first, &mut out, &mut put);
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(_: V, _: Strip, _: usize, _: usize, _: ScalesOut<'_, V>) {}
}

/// Takes words `4 J .. 4 J + 4` of the `5 R` words of `R` Q4_1 blocks. The last four are loaded together, so that no
/// load passes the end. No loop over `J` and no closure: the compiler may not inline either.
#[inline(always)]
unsafe fn q4_1_words<V: Rows, const R: usize, const J: usize>(
    v: V,
    strip: Strip,
    first: usize,
    out: &mut ScalesOut<'_, V>,
    put: &mut impl FnMut(usize, usize, V::Words),
) {
    if 4 * J >= 5 * R {
        return;
    }
    let from = (4 * J).min(5 * R - 4);
    // SAFETY: the caller vouches for 20 R bytes.
    let words = unsafe { v.words(strip, first * 20 + 4 * from) };
    for i in 0..4 {
        let word = words[i];
        let k = from + i;
        if k < 4 * J {
            continue;
        }
        if k.is_multiple_of(5) {
            out.put(k / 5, v.halves(word), v.halves(v.shr32(word, 16)));
        } else {
            put(k / 5, k % 5 - 1, v.low_nibbles(word));
            put(k / 5, k % 5 + 3, v.high_nibbles(word));
        }
    }
}

pub(in super::super) struct Q5_0;

impl Codec for Q5_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::FiveBits { zero: 16 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 22;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 0..16 (f16 d, 32 high bits) and 6..22 (nibbles) of the block.
        let (head, words) = unsafe { (v.words(strip, first * 22), v.words(strip, first * 22 + 6)) };
        out.put(0, v.halves(head[0]), V::ZEROS);
        let high = v.or(v.shr32(head[0], 16), v.shl32(head[1], 16));
        for (i, word) in words.into_iter().enumerate() {
            put(0, i, v.symmetric(v.or(v.low_nibbles(word), v.fifth_bits(high, i)), 16));
            put(0, 4 + i, v.symmetric(v.or(v.high_nibbles(word), v.fifth_bits(high, 4 + i)), 16));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(_: V, _: Strip, _: usize, _: usize, _: ScalesOut<'_, V>) {}
}

pub(in super::super) struct Q5_1;

impl Codec for Q5_1 {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::FiveBits { zero: 0 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 24;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 0..16 (f16 d, f16 m, 32 high bits) and 8..24 (nibbles) of the block.
        let (head, words) = unsafe { (v.words(strip, first * 24), v.words(strip, first * 24 + 8)) };
        out.put(0, v.halves(head[0]), v.halves(v.shr32(head[0], 16)));
        for (i, word) in words.into_iter().enumerate() {
            put(0, i, v.or(v.low_nibbles(word), v.fifth_bits(head[1], i)));
            put(0, 4 + i, v.or(v.high_nibbles(word), v.fifth_bits(head[1], 4 + i)));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(_: V, _: Strip, _: usize, _: usize, _: ScalesOut<'_, V>) {}
}

pub(in super::super) struct MXFP4;

impl MXFP4 {
    /// Added to codes to make them unsigned: the largest magnitude is 12.
    const ZERO: u8 = 12;
    /// Codes with [`Self::ZERO`] added.
    const TABLE: [u8; 16] = {
        let mut table = [0; 16];
        let mut i = 0;
        while i < 16 {
            table[i] = E2M1_DOUBLED[i].wrapping_add(Self::ZERO as i8) as u8;
            i += 1;
        }
        table
    };
}

impl Codec for MXFP4 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::FiveBits { zero: Self::ZERO as i32 };
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 17;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 1..17 of the block.
        let words = unsafe { v.words(strip, first * 17 + 1) };
        for (i, word) in words.into_iter().enumerate() {
            for (high, nibbles) in [v.low_nibbles(word), v.high_nibbles(word)].into_iter().enumerate() {
                put(0, 4 * high + i, v.symmetric(v.lookup(Self::TABLE, nibbles), Self::ZERO));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_powers::<V, 1>(v, strip, 17, first, groups, out) };
    }
}

pub(in super::super) struct NVFP4;

impl Codec for NVFP4 {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = MXFP4::CODES;
    const BLOCK_LEN: usize = 64;
    const BLOCK_BYTES: usize = 36;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 4..36 of the block, 16 for each group.
        let words = unsafe { v.words(strip, first / 2 * 36 + 4 + 16 * (first % 2)) };
        for (i, word) in words.into_iter().enumerate() {
            // Two words for each half of the group.
            let quad = i / 2 * 4 + i % 2;
            for (high, nibbles) in [v.low_nibbles(word), v.high_nibbles(word)].into_iter().enumerate() {
                put(0, quad + 2 * high, v.symmetric(v.lookup(MXFP4::TABLE, nibbles), MXFP4::ZERO));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        let ScalesOut { scales: Scales { scales, headers, .. }, at } = out;
        let headers = &mut headers[..groups / 2];
        // SAFETY: the caller's promise is this function's, and a block begins with four bytes of scales.
        unsafe { read_headers::<V, u32>(headers, strip, 36, first / 2) };
        for (number, scales) in scales[at..][..groups].iter_mut().enumerate() {
            for (half, scale) in scales.iter_mut().enumerate() {
                let byte = 8 * (number % 2 * 2 + half);
                let half_bits = |header: u32| UE4M3_HALF[(header >> byte & 255) as usize].to_bits();
                let bits = changed(headers[number / 2], half_bits);
                *scale = v.floats(v.load(&bits));
            }
        }
    }
}

pub(in super::super) struct IQ4_NL;

impl Codec for IQ4_NL {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = 18;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 2..18 of the block.
        let words = unsafe { v.words(strip, first * 18 + 2) };
        for (i, word) in words.into_iter().enumerate() {
            put(0, i, v.symmetric(v.lookup(grids::IQ4_BYTES, v.low_nibbles(word)), 0));
            put(0, 4 + i, v.symmetric(v.lookup(grids::IQ4_BYTES, v.high_nibbles(word)), 0));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_halves(v, strip, 18, first, groups, out) }
    }
}
