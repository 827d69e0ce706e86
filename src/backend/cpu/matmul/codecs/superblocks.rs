//! Codecs of types whose quant block is eight groups of 32.

#![allow(non_camel_case_types)] // ggml's names

use super::{Codec, Codes, Rows, ScalesOut};
use crate::backend::cpu::matmul::strips::Strip;
use crate::backend::cpu::quant::{GroupKind, grids};

/// Reads scales and minima of Q4_K and Q5_K, whose blocks start with f16 d, f16 dmin and 12 bytes with 6 bits of
/// each.
///
/// # Safety
/// The rows hold the groups.
#[inline(always)]
unsafe fn k4_scales<V: Rows>(
    v: V,
    strip: Strip,
    block_bytes: usize,
    first: usize,
    groups: usize,
    out: ScalesOut<'_, V>,
) {
    let ScalesOut { scales, at } = out;
    for block in 0..groups / 8 {
        let run = at + 8 * block..at + 8 * block + 8;
        let (scales, mins) = (&mut scales.scales[run.clone()], &mut scales.mins[run]);
        // SAFETY: the block's first 16 bytes.
        let [d, a, b, c] = unsafe { v.words(strip, (first / 8 + block) * block_bytes) };
        let (d, dmin) = (v.halves(d), v.neg(v.halves(v.shr32(d, 16))));
        // Bytes of each word: numbers 0..4 are 6 bits of a and b. Numbers 4..8 are 4 bits of c and the top bits of a
        // and b.
        let six = v.splat(63);
        let top = v.splat(0x30);
        let sc = [v.and(a, six), v.or(v.low_nibbles(c), v.and(v.shr16(a, 2), top))];
        let mn = [v.and(b, six), v.or(v.high_nibbles(c), v.and(v.shr16(b, 2), top))];
        for j in 0..8 {
            scales[j][0] = v.mul(d, v.byte(sc[j / 4], j % 4));
            mins[j][0] = v.mul(dmin, v.byte(mn[j / 4], j % 4));
        }
    }
}

pub(in super::super) struct Q4_K;

impl Codec for Q4_K {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::Nibbles { zero: 0 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const STEP_GROUPS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let at = first / 8 * 144 + 16 + first % 8 * 16;
        for half in 0..2 {
            // SAFETY: bytes 16..144 of the block, 32 for each of its 4 steps.
            let words = unsafe { v.words(strip, at + 16 * half) };
            for (i, word) in words.into_iter().enumerate() {
                put(0, 4 * half + i, v.low_nibbles(word));
                put(1, 4 * half + i, v.high_nibbles(word));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { k4_scales(v, strip, 144, first, groups, out) }
    }
}

pub(in super::super) struct Q5_K;

impl Codec for Q5_K {
    const KIND: GroupKind = GroupKind::Affine;
    const CODES: Codes = Codes::FiveBits { zero: 0 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 176;
    const STEP_GROUPS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, g) = (first / 8 * 176, first % 8);
        for half in 0..2 {
            // SAFETY: bytes 16..48 (high bits) and 48..176 (nibbles, 32 for each of 4 steps) of the block.
            let (high, low) = unsafe {
                (v.words(strip, block + 16 + 16 * half), v.words(strip, block + 48 + 16 * g + 16 * half))
            };
            for i in 0..4 {
                let (high, low) = (high[i], low[i]);
                // Bit g of a byte is the fifth bit of that value's code in group g.
                let fifth = v.shl16(v.and(v.shr16(high, g), v.splat(1)), 4);
                put(0, 4 * half + i, v.or(v.low_nibbles(low), fifth));
                let fifth = v.shl16(v.and(v.shr16(high, g + 1), v.splat(1)), 4);
                put(1, 4 * half + i, v.or(v.high_nibbles(low), fifth));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { k4_scales(v, strip, 176, first, groups, out) }
    }
}

pub(in super::super) struct Q6_K;

impl Codec for Q6_K {
    const KIND: GroupKind = GroupKind::SymmetricHalves;
    const CODES: Codes = Codes::SixBits { zero: 32 };
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const STEP_GROUPS: usize = 4;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        let (block, part) = (first / 8 * 210, first % 8 / 4);
        let two_bits = v.splat(0x30);
        for half in 0..2 {
            let low = block + 64 * part + 16 * half;
            // SAFETY: bytes 0..128 (low nibbles) and 128..192 (high bits) of the block.
            let (a, b, high) = unsafe {
                let high = v.words(strip, block + 128 + 32 * part + 16 * half);
                (v.words(strip, low), v.words(strip, low + 32), high)
            };
            for i in 0..4 {
                let bits = [v.shl16(high[i], 4), v.shl16(high[i], 2), high[i], v.shr16(high[i], 2)];
                let nibbles =
                    [v.low_nibbles(a[i]), v.low_nibbles(b[i]), v.high_nibbles(a[i]), v.high_nibbles(b[i])];
                for quarter in 0..4 {
                    let code = v.or(nibbles[quarter], v.and(bits[quarter], two_bits));
                    put(quarter, 4 * half + i, v.symmetric(code, 32));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        let ScalesOut { scales, at: start } = out;
        for (block, scales) in scales.scales[start..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            let at = (first / 8 + block) * 210;
            // SAFETY: bytes 192..208 of the block, and its last 16, which end with d. One by one, the d of 16 rows would go by way
            // of memory.
            let (words, [.., last]) = unsafe { (v.words(strip, at + 192), v.words(strip, at + 194)) };
            let d = v.halves(v.shr32(last, 16));
            for (two, word) in scales.chunks_exact_mut(2).zip(words) {
                two[0] = [v.mul(d, v.signed_byte(word, 0)), v.mul(d, v.signed_byte(word, 1))];
                two[1] = [v.mul(d, v.signed_byte(word, 2)), v.mul(d, v.signed_byte(word, 3))];
            }
        }
    }
}

pub(in super::super) struct IQ4_XS;

impl Codec for IQ4_XS {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::Signed;
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 136;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: bytes 8..136 of the block, 16 for each group.
        let words = unsafe { v.words(strip, first / 8 * 136 + 8 + first % 8 * 16) };
        for (i, word) in words.into_iter().enumerate() {
            put(0, i, v.symmetric(v.lookup(grids::IQ4_BYTES, v.low_nibbles(word)), 0));
            put(0, 4 + i, v.symmetric(v.lookup(grids::IQ4_BYTES, v.high_nibbles(word)), 0));
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        let ScalesOut { scales, at } = out;
        for (block, scales) in scales.scales[at..].chunks_exact_mut(8).enumerate().take(groups / 8) {
            // SAFETY: the block's first 16 bytes.
            let [head, nibbles, ..] = unsafe { v.words(strip, (first / 8 + block) * 136) };
            let d = v.halves(head);
            for (j, scale) in scales.iter_mut().enumerate() {
                let low = v.field(nibbles, 4 * j, 4);
                let high = v.shl32(v.field(head, 16 + 2 * j, 2), 4);
                // -32, as a byte.
                scale[0] = v.mul(d, v.signed_byte(v.add8(v.or(low, high), v.splat(224)), 0));
            }
        }
    }
}
