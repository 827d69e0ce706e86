//! Reads the weights of a strip's rows from the file's blocks into codes, with one row per 32-bit lane. Written once
//! for all vector instruction sets.
//!
//! A vector holds 4 consecutive codes of each row, to be multiplied with 4 broadcast activation codes. Codes of
//! symmetric types are signed, or unsigned and `zero` too large. [`Rows::symmetric`] converts them to the form that
//! the instruction set's products take. The activations' `offsets` subtract what is left of it.
#![allow(unsafe_code)]

mod blocks;
mod codebooks;
mod six_bits;
mod superblocks;
mod two_bits;

use std::fmt::Debug;

pub(super) use blocks::{IQ4_NL, MXFP4, NVFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(super) use codebooks::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
pub(super) use six_bits::{MXFP6_E2M3, MXFP6_E3M2};
pub(super) use superblocks::{IQ4_XS, Q4_K, Q5_K, Q6_K};
pub(super) use two_bits::{Q2_K, Q3_K, TQ1_0, TQ2_0};

use super::strips::{PANEL_GROUPS, Strip};
use crate::backend::cpu::quant::GroupKind;

/// Range of the codes, which determines how many of their products fit in 16 bits. Activation codes are in
/// -127..=127. Exact products of four codes, as of VNNI and NEON, do not ask for it.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) enum Codes {
    /// 0..=15, `zero` too large. A whole group: 15 * 127 * 2 * 8 = 30,480.
    Nibbles { zero: i32 },
    /// 0..=31, `zero` too large. Four quads: 31 * 127 * 2 * 4 = 31,496.
    FiveBits { zero: i32 },
    /// 0..=63, `zero` too large. Two quads: 63 * 127 * 2 * 2 = 32,004.
    SixBits { zero: i32 },
    /// -63..=63. Two quads: 63 * 127 * 2 * 2 = 32,004, with the activation taking the weight's sign.
    SignedSixBits,
    /// -128..=127. One quad: 128 * 127 * 2 = 32,512, with the activation taking the weight's sign.
    Signed,
}

impl Codes {
    /// The number added to the codes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) const fn zero(self) -> i32 {
        match self {
            Self::Nibbles { zero } | Self::FiveBits { zero } | Self::SixBits { zero } => zero,
            Self::SignedSixBits | Self::Signed => 0,
        }
    }
}

/// Operations on vectors that hold one 32-bit word, or one f32, per weight row of a strip. A value proves that the
/// processor has the instructions.
pub(super) trait Rows: Copy + Debug {
    /// Rows of a strip, at most 16.
    const ROWS: usize;
    /// One word per row: 4 codes, or bytes of headers.
    type Words: Copy;
    /// One f32 per row.
    type Floats: Copy + Debug;
    /// All lanes zero.
    const ZEROS: Self::Floats;

    /// 16 bytes at `at` of each row, as 4 vectors of one word per row.
    ///
    /// # Safety
    /// The bytes are readable.
    unsafe fn words(self, strip: Strip, at: usize) -> [Self::Words; 4];
    /// One word for each row; ignores those past [`Self::ROWS`].
    fn load(self, rows: &[u32; 16]) -> Self::Words;
    /// `byte` in all bytes.
    fn splat(self, byte: u8) -> Self::Words;
    /// `word` in all words.
    fn splat32(self, word: u32) -> Self::Words;
    fn and(self, a: Self::Words, b: Self::Words) -> Self::Words;
    fn xor(self, a: Self::Words, b: Self::Words) -> Self::Words;
    /// Adds bytes, modulo 256.
    fn add8(self, a: Self::Words, b: Self::Words) -> Self::Words;
    /// 1 in each byte of at least `least` (1 or more), else 0.
    fn at_least(self, a: Self::Words, least: u8) -> Self::Words;
    /// Negates byte i of a word where bit `4 * quad + i` of the same word of `bits` is set.
    fn negate(self, codes: Self::Words, bits: Self::Words, quad: usize) -> Self::Words;
    fn or(self, a: Self::Words, b: Self::Words) -> Self::Words;
    /// Shifts 16-bit lanes left.
    fn shl16(self, a: Self::Words, n: usize) -> Self::Words;
    /// Shifts 16-bit lanes right.
    fn shr16(self, a: Self::Words, n: usize) -> Self::Words;
    /// Shifts words left.
    fn shl32(self, a: Self::Words, n: usize) -> Self::Words;
    /// Shifts words right.
    fn shr32(self, a: Self::Words, n: usize) -> Self::Words;
    /// Looks up each byte, which must be below 16, in the table.
    fn lookup(self, table: [u8; 16], bytes: Self::Words) -> Self::Words;
    /// Looks up each word in the table.
    ///
    /// # Safety
    /// Each word is an index of the table.
    unsafe fn gather(self, table: &[u32], indices: Self::Words) -> Self::Words;
    /// Looks up each word in the table: first and second halves of the entries.
    ///
    /// # Safety
    /// Each word is an index of the table.
    unsafe fn gather_pairs(self, table: &[[u32; 2]], indices: Self::Words) -> [Self::Words; 2];
    /// 16 in byte i of a word where bit `4 * quad + i` of the same word of `bits` is set, else 0.
    fn fifth_bits(self, bits: Self::Words, quad: usize) -> Self::Words;
    /// Converts codes of a symmetric type, `zero` too large (128 or less), to the form that products take. `zero` is that of
    /// [`Codec::CODES`].
    fn symmetric(self, codes: Self::Words, zero: u8) -> Self::Words;
    /// The f16 in the low half of each word.
    fn halves(self, a: Self::Words) -> Self::Floats;
    /// Reinterprets words as floats.
    fn floats(self, a: Self::Words) -> Self::Floats;
    /// Byte `j` of each word as a number.
    fn byte(self, a: Self::Words, j: usize) -> Self::Floats;
    /// Byte `j` of each word as a signed number.
    fn signed_byte(self, a: Self::Words, j: usize) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn neg(self, a: Self::Floats) -> Self::Floats;

    /// Bits `at .. at + bits` of each word.
    #[inline(always)]
    fn field(self, a: Self::Words, at: usize, bits: u32) -> Self::Words {
        self.and(self.shr32(a, at), self.splat32((1 << bits) - 1))
    }
    #[inline(always)]
    fn low_nibbles(self, a: Self::Words) -> Self::Words {
        self.and(a, self.splat(15))
    }
    #[inline(always)]
    fn high_nibbles(self, a: Self::Words) -> Self::Words {
        self.and(self.shr16(a, 4), self.splat(15))
    }
}

/// A quantised type. The functions need the instructions of `V`, which only their callers enable. So all are
/// `#[inline(always)]`, and none has closures of its own.
pub(super) trait Codec {
    const KIND: GroupKind;
    /// Values and bytes of a quant block.
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const CODES: Codes;
    /// Most groups per call of `codes`.
    const STEP_GROUPS: usize;
    /// Digits of a code, 1 or 2. A code of two is its low digit and eight ([`DIGIT_SHIFT`]) times its high one, for codes past a byte. Such a type
    /// is [`GroupKind::Symmetric`].
    const DIGITS: usize = 1;
    /// Integer sums per group: one per scale.
    const PARTS: usize = match Self::KIND {
        GroupKind::SymmetricHalves | GroupKind::AffineHalves => 2,
        GroupKind::Symmetric | GroupKind::Affine => 1,
    };

    /// Calls `put(g, quad, codes)` for all quads of the `R` groups from `first` on; `g` counts from 0, and high digits
    /// have quads 8 to 15. Types of
    /// larger blocks take only `R = STEP_GROUPS`. A type whose `scales` does nothing writes its scales to `out` here.
    ///
    /// # Safety
    /// The rows hold these groups.
    unsafe fn codes<V: Rows, const R: usize>(
        v: V,
        strip: Strip,
        first: usize,
        out: ScalesOut<'_, V>,
        put: impl FnMut(usize, usize, V::Words),
    );

    /// Writes scales and minima of the `groups` groups from `first` on; both must be whole blocks.
    ///
    /// # Safety
    /// As for `codes`.
    unsafe fn scales<V: Rows>(v: V, strip: Strip, first: usize, groups: usize, out: ScalesOut<'_, V>);

    /// Bytes of `groups` groups, which must be whole blocks.
    fn bytes(groups: usize) -> usize {
        groups * 32 * Self::BLOCK_BYTES / Self::BLOCK_LEN
    }
}

/// The base of codes with two digits, as a shift: a high digit counts 8 times.
pub(super) const DIGIT_SHIFT: u32 = 3;

/// Place in a panel of digit `digit` of group `g`. High digits follow the low ones of all groups.
#[inline(always)]
pub(super) const fn panel_place<C: Codec>(g: usize, digit: usize) -> usize {
    g + digit * (PANEL_GROUPS / C::DIGITS)
}

/// Places of the codes of some groups in a panel, `Q` for a quad.
pub(super) struct Places<'a, Q> {
    low: &'a mut [[Q; 8]],
    /// Empty for codes of one digit.
    high: &'a mut [[Q; 8]],
}

impl<'a, Q> Places<'a, Q> {
    /// Those of `groups` groups from `at` on.
    #[inline(always)]
    pub(super) fn new<C: Codec>(codes: &'a mut [[Q; 8]; PANEL_GROUPS], at: usize, groups: usize) -> Self {
        let (low, high) = codes.split_at_mut(panel_place::<C>(0, 1));
        Self {
            low: &mut low[at..at + groups],
            high: if C::DIGITS > 1 { &mut high[at..at + groups] } else { &mut [] },
        }
    }

    /// That of quad `quad` of group `g`, numbered as for `put` in [`Codec::codes`].
    #[inline(always)]
    pub(super) fn quad(&mut self, g: usize, quad: usize) -> &mut Q {
        if quad < 8 { &mut self.low[g][quad] } else { &mut self.high[g][quad - 8] }
    }
}

/// Groups whose scales are read before their codes: whole blocks, and so few that prefetching hardly pauses.
pub(super) const SCALE_RUN: usize = 8;

/// Runs `$do` with `$groups` as the constant `$step`, at most [`Codec::STEP_GROUPS`]. Conditions are constants, so that a
/// type is compiled only for the step sizes that it has.
macro_rules! with_step {
    ($codec:ident, $step:expr, $groups:ident => $do:expr) => {
        if const { $codec::BLOCK_LEN == 32 && $codec::STEP_GROUPS > 1 } {
            with_step!($step, $groups => $do; 1 2 3)
        } else {
            with_step!(const { $codec::STEP_GROUPS }, $groups => $do; 1 2)
        }
    };
    ($step:expr, $groups:ident => $do:expr; $($number:literal)*) => {
        match $step {
            $($number => {
                const $groups: usize = $number;
                $do
            })*
            _ => {
                const $groups: usize = 4;
                $do
            }
        }
    };
}
pub(super) use with_step;

/// Scales of a panel's groups, one row per lane.
#[derive(Clone, Debug)]
pub(super) struct Scales<V: Rows> {
    /// By group, by half.
    pub(super) scales: [[V::Floats; 2]; PANEL_GROUPS],
    /// By group, by half; a type with one minimum per group uses the first.
    pub(super) mins: [[V::Floats; 2]; PANEL_GROUPS],
    /// Scratch for block headers.
    headers: [[u32; 16]; PANEL_GROUPS],
}

impl<V: Rows> Scales<V> {
    pub(super) const ZERO: Self = Self {
        scales: [[V::ZEROS; 2]; PANEL_GROUPS],
        mins: [[V::ZEROS; 2]; PANEL_GROUPS],
        headers: [[0; 16]; PANEL_GROUPS],
    };
}

/// Destination of the scales of groups from `at` on.
pub(super) struct ScalesOut<'a, V: Rows> {
    pub(super) scales: &'a mut Scales<V>,
    pub(super) at: usize,
}

impl<V: Rows> ScalesOut<'_, V> {
    /// Writes scale and minimum of group `at + g`.
    #[inline(always)]
    fn put(&mut self, g: usize, scale: V::Floats, min: V::Floats) {
        let g = self.at + g;
        self.scales.scales[g][0] = scale;
        self.scales.mins[g][0] = min;
    }

    /// Multiplies the scale of half `half` of group `at + g`, which `scales` wrote.
    #[inline(always)]
    fn multiply(&mut self, v: V, g: usize, half: usize, by: V::Floats) {
        let scale = &mut self.scales.scales[self.at + g][half];
        *scale = v.mul(*scale, by);
    }

    /// Reads the f16 at byte `d_at` of each block of `groups` groups from `first` on. Times `part`, a power of two, it
    /// becomes the scale of both halves of the block's groups.
    ///
    /// # Safety
    /// The rows hold the groups, in blocks of 256 values.
    #[inline(always)]
    unsafe fn block_halves<C: Codec>(
        &mut self,
        v: V,
        strip: Strip,
        d_at: usize,
        part: f32,
        first: usize,
        groups: usize,
    ) {
        let Scales { scales, headers, .. } = &mut *self.scales;
        let part = v.floats(v.splat32(part.to_bits()));
        for block in 0..groups / 8 {
            let header = &mut headers[0];
            for (row, d) in header.iter_mut().enumerate().take(V::ROWS) {
                let at = (first / 8 + block) * C::BLOCK_BYTES + d_at;
                // SAFETY: two bytes of the block, at any alignment.
                *d = u32::from(unsafe { strip.at(row, at).cast::<u16>().read_unaligned() });
            }
            let d = v.mul(v.halves(v.load(header)), part);
            // A call of `fill` is not inlined without link-time optimisation.
            for scales in &mut scales[self.at + 8 * block..][..8] {
                *scales = [d; 2];
            }
        }
    }
}

/// Runs `$do` with `$codec` as the codec of a quantised `$dtype`; does nothing for other types.
macro_rules! with_codec {
    ($dtype:expr, $codec:ident => $do:expr) => {
        with_codec!($dtype, $codec => $do; Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 MXFP4 MXFP6_E2M3 MXFP6_E3M2 NVFP4 Q4_K Q5_K Q6_K
            Q2_K Q3_K IQ4_NL IQ4_XS IQ3_XXS IQ3_S IQ2_XXS IQ2_XS IQ2_S IQ1_S IQ1_M TQ1_0 TQ2_0)
    };
    ($dtype:expr, $codec:ident => $do:expr; $($name:ident)*) => {
        match $dtype {
            $(crate::tensor::DType::$name => {
                type $codec = crate::backend::cpu::matmul::codecs::$name;
                $do
            })*
            _ => {}
        }
    };
}
pub(super) use with_codec;
