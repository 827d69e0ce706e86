//! Codecs of types of two or three bits, and of three values, whose quant block is eight groups of 32.

#![allow(non_camel_case_types)] // ggml's names
#![allow(clippy::needless_range_loop)] // an iterator over four vectors may keep them on the stack

use super::{Codec, Codes, Rows, ScalesOut};
use crate::backend::cpu::matmul::strips::Strip;
use crate::backend::cpu::quant::GroupKind;

pub(in super::super) struct Q2_K;

impl Codec for Q2_K {
    const KIND: GroupKind = GroupKind::AffineHalves;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 84;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        for half in 0..2 {
            // SAFETY: bytes 16..80 of the block, 32 for each of its 2 steps.
            let words = unsafe { v.words(strip, first / 8 * 84 + 16 + first % 8 * 8 + 16 * half) };
            for i in 0..4 {
                let word = words[i];
                for g in 0..4 {
                    put(g, 4 * half + i, v.and(v.shr16(word, 2 * g), v.splat(3)));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        let ScalesOut { scales, at } = out;
        for block in 0..groups / 8 {
            let run = at + 8 * block..at + 8 * block + 8;
            let (scales, mins) = (&mut scales.scales[run.clone()], &mut scales.mins[run]);
            let at = (first / 8 + block) * 84;
            // SAFETY: the first and the last 16 bytes of the block.
            let (packed, [.., last]) = unsafe { (v.words(strip, at), v.words(strip, at + 68)) };
            let (d, dmin) = (v.halves(last), v.neg(v.halves(v.shr32(last, 16))));
            for j in 0..16 {
                let packed = packed[j / 4];
                scales[j / 2][j % 2] = v.mul(d, v.byte(v.low_nibbles(packed), j % 4));
                mins[j / 2][j % 2] = v.mul(dmin, v.byte(v.high_nibbles(packed), j % 4));
            }
        }
    }
}

pub(in super::super) struct Q3_K;

impl Codec for Q3_K {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::Nibbles { zero: 4 };
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
        for half in 0..2 {
            // SAFETY: bytes 0..32 (third bits) and 32..96 (the lower two, 32 for each of 2 steps) of the block.
            let (high, low) = unsafe {
                (v.words(strip, block + 16 * half), v.words(strip, block + 32 + 8 * part + 16 * half))
            };
            for i in 0..4 {
                let (high, low) = (high[i], low[i]);
                // Bit g of a byte is the third bit of that value's code in group g.
                for g in 0..4 {
                    let third = v.shl16(v.and(v.shr16(high, part + g), v.splat(1)), 2);
                    let code = v.or(v.and(v.shr16(low, 2 * g), v.splat(3)), third);
                    put(g, 4 * half + i, v.symmetric(code, 4));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the last two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 108, 1.0, first, groups) };
        let ScalesOut { scales, at } = out;
        for (block, scales) in scales.scales[at..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            // SAFETY: bytes 94..110 of the block; the 12 bytes of scales are two bytes further on.
            let words = unsafe { v.words(strip, (first / 8 + block) * 110 + 94) };
            let shifted = |i: usize| v.or(v.shr32(words[i], 16), v.shl32(words[i + 1], 16));
            let (a, b, c) = (shifted(0), shifted(1), shifted(2));
            let two = v.splat(0x30);
            let packed = [
                v.or(v.low_nibbles(a), v.and(v.shl16(c, 4), two)),
                v.or(v.low_nibbles(b), v.and(v.shl16(c, 2), two)),
                v.or(v.high_nibbles(a), v.and(c, two)),
                v.or(v.high_nibbles(b), v.and(v.shr16(c, 2), two)),
            ];
            for j in 0..16 {
                // -32, as a byte.
                let scale = v.signed_byte(v.add8(packed[j / 4], v.splat(224)), j % 4);
                scales[j / 2][j % 2] = v.mul(scales[j / 2][j % 2], scale);
            }
        }
    }
}

pub(in super::super) struct TQ2_0;

impl Codec for TQ2_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Nibbles { zero: 1 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 66;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        for half in 0..2 {
            // SAFETY: bytes 0..64 of the block, 32 for each of its 2 steps.
            let words = unsafe { v.words(strip, first / 8 * 66 + first % 8 * 8 + 16 * half) };
            for i in 0..4 {
                let word = words[i];
                for g in 0..4 {
                    put(g, 4 * half + i, v.symmetric(v.and(v.shr16(word, 2 * g), v.splat(3)), 1));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the last two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 64, 1.0, first, groups) }
    }
}

pub(in super::super) struct TQ1_0;

/// The first digit of each byte, 0 to 2: the byte times 3 / 256.
#[inline(always)]
fn digit<V: Rows>(v: V, bytes: V::Words) -> V::Words {
    v.add8(v.at_least(bytes, 86), v.at_least(bytes, 171))
}

/// Three times each byte, modulo 256: the next digit becomes the first.
#[inline(always)]
fn next_digits<V: Rows>(v: V, bytes: V::Words) -> V::Words {
    v.add8(bytes, v.add8(bytes, bytes))
}

impl Codec for TQ1_0 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Nibbles { zero: 1 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 54;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let block = first / 8 * 54;
        for half in 0..2 {
            // SAFETY: bytes 0..32 of the block: five digits each, of groups 0 to 4.
            let words = unsafe { v.words(strip, block + 16 * half) };
            for i in 0..4 {
                let mut word = words[i];
                for g in 0..5 {
                    if (g < 4) == first.is_multiple_of(8) {
                        put(g % 4, 4 * half + i, v.symmetric(digit(v, word), 1));
                    }
                    word = next_digits(v, word);
                }
            }
        }
        if first.is_multiple_of(8) {
            return;
        }
        // SAFETY: bytes 32..48 (five digits each, of halves of groups 5 to 7) and 36..52 of the block.
        let (words, [.., mut last]) = unsafe { (v.words(strip, block + 32), v.words(strip, block + 36)) };
        for i in 0..4 {
            let mut word = words[i];
            for half in 0..5 {
                put(1 + half / 2, 4 * (half % 2) + i, v.symmetric(digit(v, word), 1));
                word = next_digits(v, word);
            }
        }
        // The last four bytes hold four digits each, of the last half.
        for i in 0..4 {
            put(3, 4 + i, v.symmetric(digit(v, last), 1));
            last = next_digits(v, last);
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, mut out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's; d is the last two bytes of a block.
        unsafe { out.block_halves::<Self>(v, strip, 52, 1.0, first, groups) }
    }
}
