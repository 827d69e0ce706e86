//! Codecs of types whose codes are indices of a codebook, in blocks of eight groups of 32.
//!
//! A gather brings four or eight codes of each row. It costs more than a shift and a mask, so these types are limited by
//! it, and not by memory.

#![allow(non_camel_case_types)] // ggml's names

use super::{Codec, Codes, Rows, ScalesOut};
use crate::backend::cpu::matmul::strips::Strip;
use crate::backend::cpu::quant::{GroupKind, grids};

/// 128 at each number of 4 bits of which an odd number is set.
const ODD: [u8; 16] = [0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0];

/// Adds the eighth sign to seven in each byte: the number of set bits becomes even.
#[inline(always)]
fn even_signs<V: Rows>(v: V, sevens: V::Words) -> V::Words {
    let folded = v.low_nibbles(v.xor(sevens, v.shr16(sevens, 4)));
    v.or(sevens, v.lookup(ODD, folded))
}

/// The 32 signs of words with 7 bits for each 8 values from bit 0 on.
#[inline(always)]
fn four_even_signs<V: Rows>(v: V, word: V::Words) -> V::Words {
    let (first, second) = (v.splat32(0x7f), v.splat32(0x7f00));
    let low = v.or(v.and(word, first), v.and(v.shl32(word, 1), second));
    let (third, fourth) = (v.splat32(0x7f_0000), v.splat32(0x7f00_0000));
    let high = v.or(v.and(v.shl32(word, 2), third), v.and(v.shl32(word, 3), fourth));
    even_signs(v, v.or(low, high))
}

/// `2 n + 1` of each byte, which must be below 128.
#[inline(always)]
fn odd<V: Rows>(v: V, bytes: V::Words) -> V::Words {
    v.or(v.add8(bytes, bytes), v.splat(1))
}

/// Multiplies the scales of the groups from `first` on by `2 n + 1`. The n have 4 bits for each half of a group. They
/// are the last 8 of the 16 bytes from `scales_at` on.
///
/// # Safety
/// The rows hold the groups, in blocks of `block_bytes` bytes.
#[inline(always)]
unsafe fn nibble_scales<V: Rows>(
    v: V,
    strip: Strip,
    block_bytes: usize,
    scales_at: usize,
    first: usize,
    groups: usize,
    out: ScalesOut<'_, V>,
) {
    let ScalesOut { scales, at } = out;
    for (block, scales) in scales.scales[at..].chunks_exact_mut(8).enumerate().take(groups / 8) {
        // SAFETY: 16 bytes of the block.
        let [.., a, b] = unsafe { v.words(strip, (first / 8 + block) * block_bytes + scales_at) };
        for (j, scale) in scales.iter_mut().enumerate() {
            let packed = if j < 4 { a } else { b };
            scale[0] = v.mul(scale[0], v.byte(odd(v, v.low_nibbles(packed)), j % 4));
            scale[1] = v.mul(scale[1], v.byte(odd(v, v.high_nibbles(packed)), j % 4));
        }
    }
}

pub(in super::super) struct IQ2_XXS;

impl Codec for IQ2_XXS {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 66;
    const STEP_GROUPS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 2..66 of the block, 16 for each of 4 steps.
        let words = unsafe { v.words(strip, first / 8 * 66 + 2 + first % 8 * 8) };
        for g in 0..2 {
            let (indices, word) = (words[2 * g], words[2 * g + 1]);
            let signs = four_even_signs(v, word);
            for k in 0..4 {
                // SAFETY: an index of 8 bits is below 256.
                let quads = unsafe { v.gather_pairs(&grids::IQ2_XXS, v.field(indices, 8 * k, 8)) };
                put(g, 2 * k, v.symmetric(v.negate(quads[0], signs, 2 * k), 0));
                put(g, 2 * k + 1, v.symmetric(v.negate(quads[1], signs, 2 * k + 1), 0));
            }
            out.multiply(v, g, 0, v.byte(odd(v, v.shr32(word, 28)), 0));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the first two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 0, 0.125, first, groups) }
    }
}

pub(in super::super) struct IQ2_XS;

impl Codec for IQ2_XS {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 74;
    const STEP_GROUPS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 2..66 of the block, 16 for each of 4 steps.
        let words = unsafe { v.words(strip, first / 8 * 74 + 2 + first % 8 * 8) };
        for (i, word) in words.into_iter().enumerate() {
            // A word has two indices of 9 bits, each below 7 signs.
            let sevens = v.or(v.field(word, 9, 7), v.and(v.shr32(word, 17), v.splat32(0x7f00)));
            let signs = even_signs(v, sevens);
            for k in 0..2 {
                // SAFETY: an index of 9 bits is below 512.
                let quads = unsafe { v.gather_pairs(&grids::IQ2_XS, v.field(word, 16 * k, 9)) };
                let quad = 4 * (i % 2) + 2 * k;
                put(i / 2, quad, v.symmetric(v.negate(quads[0], signs, 2 * k), 0));
                put(i / 2, quad + 1, v.symmetric(v.negate(quads[1], signs, 2 * k + 1), 0));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; bytes 58..74 end with the scales.
        unsafe {
            out.block_halves::<Self>(v, strip, 0, 0.125, first, groups);
            nibble_scales(v, strip, 74, 58, first, groups, out);
        }
    }
}

pub(in super::super) struct IQ2_S;

impl Codec for IQ2_S {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 82;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 82, first % 8);
        // SAFETY: bytes 2..34 (indices), 34..66 (signs), 66..74 (upper bits of indices, 4 for each of 2 steps).
        let (low, signs, high) = unsafe {
            let high = v.words(strip, block + 66)[part / 4];
            (v.words(strip, block + 2 + 4 * part), v.words(strip, block + 34 + 4 * part), high)
        };
        for g in 0..4 {
            let (low, signs) = (low[g], signs[g]);
            for k in 0..4 {
                let index = v.or(v.field(low, 8 * k, 8), v.shl32(v.field(high, 8 * g + 2 * k, 2), 8));
                // SAFETY: an index of 10 bits is below 1024.
                let quads = unsafe { v.gather_pairs(&grids::IQ2_S, index) };
                put(g, 2 * k, v.symmetric(v.negate(quads[0], signs, 2 * k), 0));
                put(g, 2 * k + 1, v.symmetric(v.negate(quads[1], signs, 2 * k + 1), 0));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; bytes 66..82 end with the scales.
        unsafe {
            out.block_halves::<Self>(v, strip, 0, 0.125, first, groups);
            nibble_scales(v, strip, 82, 66, first, groups, out);
        }
    }
}

pub(in super::super) struct IQ3_XXS;

impl Codec for IQ3_XXS {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 98;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 98, first % 8);
        // SAFETY: bytes 66..98 of the block: signs and scales, 16 for each of 2 steps.
        let heads = unsafe { v.words(strip, block + 66 + 4 * part) };
        for half in 0..2 {
            // SAFETY: bytes 2..66 of the block: indices, 16 for each two groups.
            let indices = unsafe { v.words(strip, block + 2 + 8 * part + 16 * half) };
            for (i, indices) in indices.into_iter().enumerate() {
                let g = 2 * half + i / 2;
                let signs = four_even_signs(v, heads[g]);
                for k in 0..4 {
                    let quad = 4 * (i % 2) + k;
                    // SAFETY: an index of 8 bits is below 256.
                    let codes = unsafe { v.gather(&grids::IQ3_XXS, v.field(indices, 8 * k, 8)) };
                    put(g, quad, v.symmetric(v.negate(codes, signs, quad), 0));
                }
            }
        }
        for (g, head) in heads.into_iter().enumerate() {
            out.multiply(v, g, 0, v.byte(odd(v, v.shr32(head, 28)), 0));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the first two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 0, 0.25, first, groups) }
    }
}

pub(in super::super) struct IQ3_S;

impl Codec for IQ3_S {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::FiveBits { zero: 15 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 110;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 110, first % 8);
        // SAFETY: bytes 66..82 (ninth bits first, 4 for each of 2 steps) and 74..106 (signs) of the block.
        let (high, signs) =
            unsafe { (v.words(strip, block + 66)[part / 4], v.words(strip, block + 74 + 4 * part)) };
        for half in 0..2 {
            // SAFETY: bytes 2..66 of the block: indices, 16 for each two groups.
            let indices = unsafe { v.words(strip, block + 2 + 8 * part + 16 * half) };
            for (i, indices) in indices.into_iter().enumerate() {
                let g = 2 * half + i / 2;
                for k in 0..4 {
                    let quad = 4 * (i % 2) + k;
                    let ninth = v.shl32(v.field(high, 8 * g + quad, 1), 8);
                    // SAFETY: an index of 9 bits is below 512.
                    let codes = unsafe { v.gather(&grids::IQ3_S, v.or(v.field(indices, 8 * k, 8), ninth)) };
                    put(g, quad, v.symmetric(v.add8(v.negate(codes, signs[g], quad), v.splat(15)), 15));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the first two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 0, 1.0, first, groups) };
        let ScalesOut { scales, at } = out;
        for (block, scales) in scales.scales[at..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            // SAFETY: the last 16 bytes of the block.
            let [.., packed] = unsafe { v.words(strip, (first / 8 + block) * 110 + 94) };
            let packed = [odd(v, v.low_nibbles(packed)), odd(v, v.high_nibbles(packed))];
            for (j, scale) in scales.iter_mut().enumerate() {
                scale[0] = v.mul(scale[0], v.byte(packed[j % 2], j / 2));
            }
        }
    }
}

/// Codes of IQ1_S and IQ1_M, 9 too large: the codebook's 0, 8 or 16, and 2 more where bit `bit` of `below` is not set.
///
/// # Safety
/// Each word of `indices` is below 2048.
#[inline(always)]
unsafe fn ternary<V: Rows>(v: V, indices: V::Words, below: V::Words, bit: usize) -> [V::Words; 2] {
    // SAFETY: the caller vouches for the indices.
    let quads = unsafe { v.gather_pairs(&grids::IQ1, indices) };
    // 1 in all four bytes where the bit is set.
    let bit = v.field(below, bit, 1);
    let pair = v.or(bit, v.shl32(bit, 8));
    let all = v.or(pair, v.shl32(pair, 16));
    let add = v.xor(v.add8(all, all), v.splat(2));
    [v.symmetric(v.or(quads[0], add), 9), v.symmetric(v.or(quads[1], add), 9)]
}

pub(in super::super) struct IQ1_S;

impl Codec for IQ1_S {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::FiveBits { zero: 9 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 50;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        mut out: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 50, first % 8);
        // SAFETY: bytes 2..34 (lower bits of indices, 16 for each of 2 steps) and 34..50 of the block.
        let (low, heads) = unsafe { (v.words(strip, block + 2 + 4 * part), v.words(strip, block + 34)) };
        for (g, low) in low.into_iter().enumerate() {
            let head = v.shr32(heads[part / 2 + g / 2], 16 * (g % 2));
            for k in 0..4 {
                let index = v.or(v.field(low, 8 * k, 8), v.shl32(v.field(head, 3 * k, 3), 8));
                // SAFETY: an index of 11 bits is below 2048.
                let quads = unsafe { ternary(v, index, head, 15) };
                put(g, 2 * k, quads[0]);
                put(g, 2 * k + 1, quads[1]);
            }
            out.multiply(v, g, 0, v.byte(odd(v, v.field(head, 12, 3)), 0));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the first two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 0, 0.125, first, groups) }
    }
}

pub(in super::super) struct IQ1_M;

impl Codec for IQ1_M {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::FiveBits { zero: 9 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 56;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 56, first % 8);
        // SAFETY: bytes 0..32 (lower bits of indices, 16 for each of 2 steps) and 32..48 of the block.
        let (low, heads) = unsafe { (v.words(strip, block + 4 * part), v.words(strip, block + 32)) };
        for (g, low) in low.into_iter().enumerate() {
            let head = v.shr32(heads[part / 2 + g / 2], 16 * (g % 2));
            for k in 0..4 {
                let index = v.or(v.field(low, 8 * k, 8), v.shl32(v.field(head, 4 * k, 3), 8));
                // SAFETY: an index of 11 bits is below 2048.
                let quads = unsafe { ternary(v, index, head, 4 * k + 3) };
                put(g, 2 * k, quads[0]);
                put(g, 2 * k + 1, quads[1]);
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        let ScalesOut { scales, at } = out;
        for (block, scales) in scales.scales[at..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            // SAFETY: the last 16 bytes of the block, of which the last 8 are the scales.
            let [.., a, b] = unsafe { v.words(strip, (first / 8 + block) * 56 + 40) };
            // The f16 d is in the upper four bits of four 16-bit words, its lowest ones first.
            let low = v.or(v.field(a, 12, 4), v.shl32(v.field(a, 28, 4), 4));
            let high = v.or(v.shl32(v.field(b, 12, 4), 8), v.shl32(v.field(b, 28, 4), 12));
            let d = v.mul(v.halves(v.or(low, high)), v.floats(v.splat32(0.125f32.to_bits())));
            for j in 0..16 {
                let three = v.field(if j < 8 { a } else { b }, j / 4 % 2 * 16 + j % 4 * 3, 3);
                scales[j / 2][j % 2] = v.mul(d, v.byte(odd(v, three), 0));
            }
        }
    }
}
