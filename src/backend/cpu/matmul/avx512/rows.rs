//! Vectors of 16 weight rows.

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::codecs::Rows;
use crate::backend::cpu::matmul::strips::Strip;

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows16(());

impl Rows16 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ, VL and VNNI.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Operations on registers only.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a `Rows16` exists only where the processor has the features; the operation touches no memory.
        unsafe { $e }
    };
}

impl Rows for Rows16 {
    const ROWS: usize = 16;
    type Words = __m512i;
    type Floats = __m512;
    // SAFETY: all-zero bytes are valid floats.
    const ZEROS: __m512 = unsafe { std::mem::zeroed() };

    #[inline(always)]
    unsafe fn words(self, strip: Strip, at: usize) -> [__m512i; 4] {
        // SAFETY: the processor has the features; the caller vouches for 16 bytes at `at` of each of the 16 rows.
        unsafe {
            let v = fours(strip, at);
            let (ab_lo, ab_hi) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
            let (cd_lo, cd_hi) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
            [
                _mm512_unpacklo_epi64(ab_lo, cd_lo),
                _mm512_unpackhi_epi64(ab_lo, cd_lo),
                _mm512_unpacklo_epi64(ab_hi, cd_hi),
                _mm512_unpackhi_epi64(ab_hi, cd_hi),
            ]
        }
    }
    #[inline(always)]
    fn load(self, rows: &[u32; 16]) -> __m512i {
        // SAFETY: the processor has the features; reads 64 bytes, at any alignment.
        unsafe { _mm512_loadu_si512(rows.as_ptr().cast()) }
    }
    #[inline(always)]
    fn splat(self, byte: u8) -> __m512i {
        op!(_mm512_set1_epi8(byte as i8))
    }
    #[inline(always)]
    fn splat32(self, word: u32) -> __m512i {
        op!(_mm512_set1_epi32(word as i32))
    }
    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn add8(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi8(a, b))
    }
    #[inline(always)]
    fn at_least(self, a: __m512i, least: u8) -> __m512i {
        op!(_mm512_min_epu8(_mm512_subs_epu8(a, _mm512_set1_epi8((least - 1) as i8)), _mm512_set1_epi8(1)))
    }
    #[inline(always)]
    fn negate(self, codes: __m512i, bits: __m512i, quad: usize) -> __m512i {
        let sign = self.fifth_bits(bits, quad);
        op!(_mm512_mask_sub_epi8(codes, _mm512_test_epi8_mask(sign, sign), _mm512_setzero_si512(), codes))
    }
    #[inline(always)]
    unsafe fn gather(self, table: &[u32], indices: __m512i) -> __m512i {
        // SAFETY: the processor has the features; the caller vouches for the indices.
        unsafe { _mm512_i32gather_epi32::<4>(indices, table.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn gather_pairs(self, table: &[[u32; 2]], indices: __m512i) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_i32gather_epi64::<8>(_mm512_castsi512_si256(indices), table.as_ptr().cast());
            let high = _mm512_extracti64x4_epi64::<1>(indices);
            let high = _mm512_i32gather_epi64::<8>(high, table.as_ptr().cast());
            // Even words are first halves, odd ones second halves.
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high)]
        }
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn shl16(self, a: __m512i, n: usize) -> __m512i {
        op!(_mm512_sll_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr16(self, a: __m512i, n: usize) -> __m512i {
        op!(_mm512_srl_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shl32(self, a: __m512i, n: usize) -> __m512i {
        op!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr32(self, a: __m512i, n: usize) -> __m512i {
        op!(_mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: __m512i) -> __m512i {
        // SAFETY: the processor has the features; the table is 16 bytes.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes)
        }
    }
    #[inline(always)]
    fn fifth_bits(self, bits: __m512i, quad: usize) -> __m512i {
        let mask = if quad.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 };
        // Copies byte quad / 2 of each word four times.
        op!({
            let words = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c));
            let bytes = _mm512_shuffle_epi8(bits, _mm512_add_epi8(words, _mm512_set1_epi8(quad as i8 / 2)));
            _mm512_maskz_set1_epi8(_mm512_test_epi8_mask(bytes, _mm512_set1_epi32(mask)), 16)
        })
    }
    #[inline(always)]
    fn symmetric(self, codes: __m512i, zero: u8) -> __m512i {
        // Codes with a zero are unsigned already. Signed ones become unsigned and 128 too large.
        if zero > 0 { codes } else { op!(_mm512_xor_si512(codes, _mm512_set1_epi8(-128))) }
    }
    #[inline(always)]
    fn halves(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))
    }
    #[inline(always)]
    fn floats(self, a: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn byte(self, a: __m512i, j: usize) -> __m512 {
        let byte = self.shr32(a, 8 * j);
        op!(_mm512_cvtepi32_ps(_mm512_and_si512(byte, _mm512_set1_epi32(255))))
    }
    #[inline(always)]
    fn signed_byte(self, a: __m512i, j: usize) -> __m512 {
        // Shifts the byte to the top, then back down with its sign.
        let up = self.shl32(a, 24 - 8 * j);
        op!(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(up)))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        op!(_mm512_sub_ps(_mm512_setzero_ps(), a))
    }
}

/// 16 bytes at `at` of rows `i`, `i + 4`, `i + 8` and `i + 12`, at any alignment, for `i` of 0 to 3.
///
/// # Safety
/// The processor has the features; the bytes are readable.
#[inline(always)]
unsafe fn fours(strip: Strip, at: usize) -> [__m512i; 4] {
    let mut stride = strip.stride;
    // The compiler no longer knows that the stride stays the same, and makes the rows' addresses here, out of six registers. Else it
    // keeps sixteen pointers through the loop, on the stack.
    // SAFETY: does nothing.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) stride, options(nomem, nostack, preserves_flags)) };
    let four = |row: usize| strip.base.wrapping_add(at).wrapping_add(4 * row * stride);
    let rows = [four(0), four(1), four(2), four(3)];
    // SAFETY: the caller's promise is this function's.
    unsafe { [rows_at(rows, 0), rows_at(rows, stride), rows_at(rows, 2 * stride), rows_at(rows, 3 * stride)] }
}

/// 16 bytes at `at` of each of four rows. No closure of `fours`: without link-time optimisation, its intrinsics were calls.
///
/// # Safety
/// As for [`fours`].
#[inline(always)]
unsafe fn rows_at(rows: [*const u8; 4], at: usize) -> __m512i {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        let x = _mm512_castsi128_si512(_mm_loadu_si128(rows[0].wrapping_add(at).cast()));
        let x = _mm512_inserti32x4::<1>(x, _mm_loadu_si128(rows[1].wrapping_add(at).cast()));
        let x = _mm512_inserti32x4::<2>(x, _mm_loadu_si128(rows[2].wrapping_add(at).cast()));
        _mm512_inserti32x4::<3>(x, _mm_loadu_si128(rows[3].wrapping_add(at).cast()))
    }
}
