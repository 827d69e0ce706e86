//! Codecs of the 6-bit floats. A block is a power of two, 16 bytes of nibbles and 8 of upper bits, of which the higher is
//! the sign.

#![allow(non_camel_case_types)] // the formats' names

use super::blocks::leading_powers;
use super::{Codec, Codes, DIGIT_SHIFT, Rows, ScalesOut};
use crate::backend::cpu::matmul::strips::Strip;
use crate::backend::cpu::quant::{E2M3_EIGHTHS, E3M2_SIXTEENTHS, GroupKind};

/// Bytes of a block.
const BYTES: usize = 25;

/// The upper bits of four values of each row, in bytes of all ones or none.
struct Upper<W> {
    fifth: W,
    sign: W,
}

impl<W: Copy> Upper<W> {
    /// Those of quad `i` of half a block. `upper` are those of the half, two in each byte for each quad.
    #[inline(always)]
    fn new<V: Rows<Words = W>>(v: V, upper: W, i: usize) -> Self {
        let fifth = v.and(v.shr16(upper, 2 * i), v.splat(1));
        let sign = v.and(v.shr16(upper, 2 * i + 1), v.splat(1));
        Self { fifth: ones(v, fifth), sign: ones(v, sign) }
    }

    /// `value`, or in a byte with the sign its negative.
    #[inline(always)]
    fn signed<V: Rows<Words = W>>(&self, v: V, value: W) -> W {
        v.symmetric(v.add8(v.xor(value, self.sign), v.and(self.sign, v.splat(1))), 0)
    }
}

/// All ones in each byte of 1, else none: the negative of 0 or 1.
#[inline(always)]
fn ones<V: Rows>(v: V, bits: V::Words) -> V::Words {
    v.add8(v.xor(bits, v.splat(255)), v.splat(1))
}

/// Nibbles and upper bits of a block: four words, and two.
///
/// # Safety
/// The rows hold the block.
#[inline(always)]
unsafe fn words<V: Rows>(v: V, strip: Strip, block: usize) -> ([V::Words; 4], [V::Words; 2]) {
    // SAFETY: bytes 1..17 of the block, the nibbles, and 9..25, of which the last eight are upper bits.
    let (low, upper) = unsafe { (v.words(strip, block * BYTES + 1), v.words(strip, block * BYTES + 9)) };
    (low, [upper[2], upper[3]])
}

pub(in super::super) struct MXFP6_E2M3;

impl MXFP6_E2M3 {
    /// The fifth bit adds this to eight times the value of a nibble, which is the nibble.
    const FIFTH: [u8; 16] = {
        let mut table = [0; 16];
        let mut i = 0;
        while i < 16 {
            table[i] = (E2M3_EIGHTHS[16 + i] - E2M3_EIGHTHS[i]) as u8;
            i += 1;
        }
        table
    };
}

impl Codec for MXFP6_E2M3 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::SignedSixBits;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = BYTES;
    const STEP_GROUPS: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: the caller's promise is this function's.
        let (low, upper) = unsafe { words(v, strip, first) };
        for (i, word) in low.into_iter().enumerate() {
            for (half, nibbles) in [v.low_nibbles(word), v.high_nibbles(word)].into_iter().enumerate() {
                let upper = Upper::new(v, upper[half], i);
                let more = v.and(v.lookup(Self::FIFTH, nibbles), upper.fifth);
                put(0, 4 * half + i, upper.signed(v, v.add8(nibbles, more)));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_powers::<V, 3>(v, strip, BYTES, first, groups, out) }
    }
}

pub(in super::super) struct MXFP6_E3M2;

impl MXFP6_E3M2 {
    /// Sixteen times the value of a nibble: the low digit where the fifth bit is 0.
    const LOW: [u8; 16] = Self::digits(0, 0);
    /// The high digit where the fifth bit is 1. The low digit is then 0.
    const HIGH: [u8; 16] = Self::digits(16, DIGIT_SHIFT);

    const fn digits(from: usize, shift: u32) -> [u8; 16] {
        let mut table = [0; 16];
        let mut i = 0;
        while i < 16 {
            table[i] = (E3M2_SIXTEENTHS[from + i] >> shift) as u8;
            i += 1;
        }
        table
    }
}

impl Codec for MXFP6_E3M2 {
    const KIND: GroupKind = GroupKind::Symmetric;
    const CODES: Codes = Codes::SignedSixBits;
    const BLOCK_LEN: usize = 32;
    const BLOCK_BYTES: usize = BYTES;
    const STEP_GROUPS: usize = 1;
    const DIGITS: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        _: ScalesOut<'_, V>,
        mut put: impl FnMut(usize, usize, V::Words),
    ) {
        // SAFETY: the caller's promise is this function's.
        let (words, upper) = unsafe { words(v, strip, first) };
        for (i, word) in words.into_iter().enumerate() {
            for (half, nibbles) in [v.low_nibbles(word), v.high_nibbles(word)].into_iter().enumerate() {
                let upper = Upper::new(v, upper[half], i);
                let low = v.and(v.lookup(Self::LOW, nibbles), v.xor(upper.fifth, v.splat(255)));
                let high = v.and(v.lookup(Self::HIGH, nibbles), upper.fifth);
                put(0, 4 * half + i, upper.signed(v, low));
                put(0, 8 + 4 * half + i, upper.signed(v, high));
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>) {
        // SAFETY: the caller's promise is this function's.
        unsafe { leading_powers::<V, 4>(v, strip, BYTES, first, groups, out) }
    }
}
