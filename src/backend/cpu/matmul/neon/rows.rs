//! Vectors of 8 weight rows: rows 0 to 3 in the first register, rows 4 to 7 in the second.

use std::arch::aarch64::*;

use crate::backend::cpu::convert::neon::widen;
use crate::backend::cpu::matmul::codecs::Rows;
use crate::backend::cpu::matmul::strips::Strip;

/// NEON.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows8(());

impl Rows8 {
    /// # Safety
    /// The processor has NEON.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Applies operations on registers to each register of the vectors. Written out, because the compiler need not inline
/// `map` and its closure.
macro_rules! op {
    (|$($a:ident),+| $e:expr) => {
        // SAFETY: a `Rows8` exists only where the processor has NEON; the operation touches no memory.
        unsafe {
            [
                {
                    $(let $a = $a[0];)+
                    $e
                },
                {
                    $(let $a = $a[1];)+
                    $e
                },
            ]
        }
    };
}

type Words = [uint32x4_t; 2];
type Floats = [float32x4_t; 2];

impl Rows for Rows8 {
    const ROWS: usize = 8;
    type Words = Words;
    type Floats = Floats;
    // SAFETY: all-zero bytes are valid floats.
    const ZEROS: Floats = unsafe { std::mem::zeroed() };

    #[inline(always)]
    unsafe fn words(self, strip: Strip, at: usize) -> [Words; 4] {
        // SAFETY: the processor has NEON; the caller vouches for 16 bytes at `at` of each of the 8 rows.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (four(strip, 0, at), four(strip, 4, at)) };
        [[a, e], [b, f], [c, g], [d, h]]
    }
    #[inline(always)]
    fn load(self, rows: &[u32; 16]) -> Words {
        // SAFETY: the processor has NEON; reads the first 32 bytes.
        unsafe { [vld1q_u32(rows.as_ptr()), vld1q_u32(rows.as_ptr().add(4))] }
    }
    #[inline(always)]
    fn splat(self, byte: u8) -> Words {
        self.splat32(u32::from_ne_bytes([byte; 4]))
    }
    #[inline(always)]
    fn splat32(self, word: u32) -> Words {
        let words = [word; 2];
        op!(|words| vdupq_n_u32(words))
    }
    #[inline(always)]
    fn and(self, a: Words, b: Words) -> Words {
        op!(|a, b| vandq_u32(a, b))
    }
    #[inline(always)]
    fn xor(self, a: Words, b: Words) -> Words {
        op!(|a, b| veorq_u32(a, b))
    }
    #[inline(always)]
    fn add8(self, a: Words, b: Words) -> Words {
        op!(|a, b| words(vaddq_u8(bytes(a), bytes(b))))
    }
    #[inline(always)]
    fn at_least(self, a: Words, least: u8) -> Words {
        op!(|a| words(vandq_u8(vcgeq_u8(bytes(a), vdupq_n_u8(least)), vdupq_n_u8(1))))
    }
    #[inline(always)]
    fn negate(self, codes: Words, bits: Words, quad: usize) -> Words {
        // All bits of a byte are its sign.
        let signs = op!(|bits| set_bits(bits, quad));
        op!(|codes, signs| words(vsubq_u8(veorq_u8(bytes(codes), signs), signs)))
    }
    #[inline(always)]
    fn or(self, a: Words, b: Words) -> Words {
        op!(|a, b| vorrq_u32(a, b))
    }
    #[inline(always)]
    fn shl16(self, a: Words, n: usize) -> Words {
        op!(|a| vreinterpretq_u32_u16(vshlq_u16(vreinterpretq_u16_u32(a), vdupq_n_s16(n as i16))))
    }
    #[inline(always)]
    fn shr16(self, a: Words, n: usize) -> Words {
        op!(|a| vreinterpretq_u32_u16(vshlq_u16(vreinterpretq_u16_u32(a), vdupq_n_s16(-(n as i16)))))
    }
    #[inline(always)]
    fn shl32(self, a: Words, n: usize) -> Words {
        op!(|a| vshlq_u32(a, vdupq_n_s32(n as i32)))
    }
    #[inline(always)]
    fn shr32(self, a: Words, n: usize) -> Words {
        op!(|a| vshlq_u32(a, vdupq_n_s32(-(n as i32))))
    }
    #[inline(always)]
    fn high_nibbles(self, a: Words) -> Words {
        op!(|a| words(vshrq_n_u8::<4>(bytes(a))))
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], indices: Words) -> Words {
        // SAFETY: the processor has NEON; the table is 16 bytes.
        let table = unsafe { vld1q_u8(table.as_ptr()) };
        op!(|indices| words(vqtbl1q_u8(table, bytes(indices))))
    }
    #[inline(always)]
    unsafe fn gather(self, table: &[u32], indices: Words) -> Words {
        let i = lanes(indices);
        // The caller vouches for the indices; an entry is one word.
        let found = op!(|i| [*at(table, i[0]), *at(table, i[1]), *at(table, i[2]), *at(table, i[3])]);
        op!(|found| vld1q_u32(found.as_ptr()))
    }
    #[inline(always)]
    unsafe fn gather_pairs(self, table: &[[u32; 2]], indices: Words) -> [Words; 2] {
        let i = lanes(indices);
        // The caller vouches for the indices; an entry is two words.
        let ab = op!(|i| vcombine_u32(vld1_u32(at(table, i[0]).cast()), vld1_u32(at(table, i[1]).cast())));
        let cd = op!(|i| vcombine_u32(vld1_u32(at(table, i[2]).cast()), vld1_u32(at(table, i[3]).cast())));
        [op!(|ab, cd| vuzp1q_u32(ab, cd)), op!(|ab, cd| vuzp2q_u32(ab, cd))]
    }
    #[inline(always)]
    fn fifth_bits(self, bits: Words, quad: usize) -> Words {
        op!(|bits| words(vandq_u8(set_bits(bits, quad), vdupq_n_u8(16))))
    }
    #[inline(always)]
    fn symmetric(self, codes: Words, zero: u8) -> Words {
        if zero == 0 {
            return codes;
        }
        op!(|codes| words(vsubq_u8(bytes(codes), vdupq_n_u8(zero))))
    }
    #[inline(always)]
    fn halves(self, a: Words) -> Floats {
        op!(|a| widen(vmovn_u32(a)))
    }
    #[inline(always)]
    fn floats(self, a: Words) -> Floats {
        op!(|a| vreinterpretq_f32_u32(a))
    }
    #[inline(always)]
    fn byte(self, a: Words, j: usize) -> Floats {
        let byte = self.field(a, 8 * j, 8);
        op!(|byte| vcvtq_f32_u32(byte))
    }
    #[inline(always)]
    fn signed_byte(self, a: Words, j: usize) -> Floats {
        // Shifts the byte to the top, then back down with its sign.
        let up = self.shl32(a, 24 - 8 * j);
        op!(|up| vcvtq_f32_s32(vshrq_n_s32::<24>(vreinterpretq_s32_u32(up))))
    }
    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        op!(|a, b| vmulq_f32(a, b))
    }
    #[inline(always)]
    fn neg(self, a: Floats) -> Floats {
        op!(|a| vsubq_f32(vdupq_n_f32(0.0), a))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn bytes(a: uint32x4_t) -> uint8x16_t {
    // SAFETY: the caller's promise; no memory is touched.
    unsafe { vreinterpretq_u8_u32(a) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn words(a: uint8x16_t) -> uint32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_u32_u8(a) }
}

/// All ones in byte i of a word where bit `4 * quad + i` of the same word of `bits` is set, else 0.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn set_bits(bits: uint32x4_t, quad: usize) -> uint8x16_t {
    let mask = if quad.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010 };
    // The places of the first byte of each word, four times.
    const WORDS: [u32; 4] = [0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c];
    // SAFETY: the caller's promise; only the constant is read. Copies byte quad / 2 of each word four times.
    unsafe {
        let places = vaddq_u8(bytes(vld1q_u32(WORDS.as_ptr())), vdupq_n_u8(quad as u8 / 2));
        vtstq_u8(vqtbl1q_u8(bytes(bits), places), bytes(vdupq_n_u32(mask)))
    }
}

/// Entry `index` of the table, which has it.
#[inline(always)]
fn at<T>(table: &[T], index: u32) -> *const T {
    debug_assert!((index as usize) < table.len());
    table.as_ptr().wrapping_add(index as usize)
}

/// The words of all rows.
#[inline(always)]
fn lanes(a: Words) -> [[u32; 4]; 2] {
    let mut lanes = [[0; 4]; 2];
    // SAFETY: a `Rows8` exists only where the processor has NEON; four words are written twice.
    unsafe {
        vst1q_u32(lanes[0].as_mut_ptr(), a[0]);
        vst1q_u32(lanes[1].as_mut_ptr(), a[1]);
    }
    lanes
}

/// 16 bytes at `at` of rows `i` to `i + 3`, at any alignment, as 4 registers of one word per row.
///
/// # Safety
/// The processor has NEON; the bytes are readable.
#[inline(always)]
unsafe fn four(strip: Strip, i: usize, at: usize) -> [uint32x4_t; 4] {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        let (a, b) = (words(vld1q_u8(strip.at(i, at))), words(vld1q_u8(strip.at(i + 1, at))));
        let (c, d) = (words(vld1q_u8(strip.at(i + 2, at))), words(vld1q_u8(strip.at(i + 3, at))));
        let (ab_even, ab_odd) = (pairs(vtrn1q_u32(a, b)), pairs(vtrn2q_u32(a, b)));
        let (cd_even, cd_odd) = (pairs(vtrn1q_u32(c, d)), pairs(vtrn2q_u32(c, d)));
        [
            vreinterpretq_u32_u64(vtrn1q_u64(ab_even, cd_even)),
            vreinterpretq_u32_u64(vtrn1q_u64(ab_odd, cd_odd)),
            vreinterpretq_u32_u64(vtrn2q_u64(ab_even, cd_even)),
            vreinterpretq_u32_u64(vtrn2q_u64(ab_odd, cd_odd)),
        ]
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn pairs(a: uint32x4_t) -> uint64x2_t {
    // SAFETY: the caller's promise; no memory is touched.
    unsafe { vreinterpretq_u64_u32(a) }
}
