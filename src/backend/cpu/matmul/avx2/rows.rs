//! Vectors of 8 weight rows.

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::codecs::Rows;
use crate::backend::cpu::matmul::strips::Strip;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows8(());

impl Rows8 {
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Operations on registers only.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a `Rows8` exists only where the processor has the features; the operation touches no memory.
        unsafe { $e }
    };
}

impl Rows for Rows8 {
    const ROWS: usize = 8;
    type Words = __m256i;
    type Floats = __m256;
    // SAFETY: all-zero bytes are valid floats.
    const ZEROS: __m256 = unsafe { std::mem::zeroed() };

    #[inline(always)]
    unsafe fn words(self, strip: Strip, at: usize) -> [__m256i; 4] {
        // SAFETY: the processor has the features; the caller vouches for 16 bytes at `at` of each of the 8 rows.
        unsafe {
            let v = [pair(strip, 0, at), pair(strip, 1, at), pair(strip, 2, at), pair(strip, 3, at)];
            let (ab_lo, ab_hi) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
            let (cd_lo, cd_hi) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
            [
                _mm256_unpacklo_epi64(ab_lo, cd_lo),
                _mm256_unpackhi_epi64(ab_lo, cd_lo),
                _mm256_unpacklo_epi64(ab_hi, cd_hi),
                _mm256_unpackhi_epi64(ab_hi, cd_hi),
            ]
        }
    }
    #[inline(always)]
    fn load(self, rows: &[u32; 16]) -> __m256i {
        // SAFETY: the processor has the features; reads the first 32 of 64 bytes, at any alignment.
        unsafe { _mm256_loadu_si256(rows.as_ptr().cast()) }
    }
    #[inline(always)]
    fn splat(self, byte: u8) -> __m256i {
        op!(_mm256_set1_epi8(byte as i8))
    }
    #[inline(always)]
    fn splat32(self, word: u32) -> __m256i {
        op!(_mm256_set1_epi32(word as i32))
    }
    #[inline(always)]
    fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn add8(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi8(a, b))
    }
    #[inline(always)]
    fn at_least(self, a: __m256i, least: u8) -> __m256i {
        op!(_mm256_min_epu8(_mm256_subs_epu8(a, _mm256_set1_epi8((least - 1) as i8)), _mm256_set1_epi8(1)))
    }
    #[inline(always)]
    fn negate(self, codes: __m256i, bits: __m256i, quad: usize) -> __m256i {
        // 0 or 16 becomes 1 or -31: the sign of the byte.
        let sign = self.fifth_bits(bits, quad);
        op!(_mm256_sign_epi8(codes, _mm256_sub_epi8(_mm256_set1_epi8(1), _mm256_add_epi8(sign, sign))))
    }
    #[inline(always)]
    unsafe fn gather(self, table: &[u32], indices: __m256i) -> __m256i {
        // SAFETY: the processor has the features; the caller vouches for the indices.
        unsafe { _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), indices) }
    }
    #[inline(always)]
    unsafe fn gather_pairs(self, table: &[[u32; 2]], indices: __m256i) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let low = _mm256_i32gather_epi64::<8>(table.as_ptr().cast(), _mm256_castsi256_si128(indices));
            let high = _mm256_extracti128_si256::<1>(indices);
            let high = _mm256_i32gather_epi64::<8>(table.as_ptr().cast(), high);
            let (low, high) = (_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
            let first = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
            let second = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
            // Shuffling works within 128-bit halves; the permutation puts rows in order.
            [
                _mm256_permute4x64_epi64::<0b11_01_10_00>(first),
                _mm256_permute4x64_epi64::<0b11_01_10_00>(second),
            ]
        }
    }
    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn shl16(self, a: __m256i, n: usize) -> __m256i {
        op!(_mm256_sll_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr16(self, a: __m256i, n: usize) -> __m256i {
        op!(_mm256_srl_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shl32(self, a: __m256i, n: usize) -> __m256i {
        op!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr32(self, a: __m256i, n: usize) -> __m256i {
        op!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 16], bytes: __m256i) -> __m256i {
        // SAFETY: the processor has the features; the table is 16 bytes.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes)
        }
    }
    #[inline(always)]
    fn fifth_bits(self, bits: __m256i, quad: usize) -> __m256i {
        let mask =
            op!(_mm256_set1_epi32(if quad.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 }));
        // Copies byte quad / 2 of each word four times.
        op!({
            let words = _mm256_setr_epi32(
                0,
                0x0404_0404,
                0x0808_0808,
                0x0c0c_0c0c,
                0,
                0x0404_0404,
                0x0808_0808,
                0x0c0c_0c0c,
            );
            let bytes = _mm256_shuffle_epi8(bits, _mm256_add_epi8(words, _mm256_set1_epi8(quad as i8 / 2)));
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        })
    }
    #[inline(always)]
    fn symmetric(self, codes: __m256i, _: u8) -> __m256i {
        codes // products take codes unchanged: unsigned, or signed for `Codes::Signed`
    }
    #[inline(always)]
    fn halves(self, a: __m256i) -> __m256 {
        op!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            // Packing works within 128-bit halves; the permutation joins both.
            let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        })
    }
    #[inline(always)]
    fn floats(self, a: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(a))
    }
    #[inline(always)]
    fn byte(self, a: __m256i, j: usize) -> __m256 {
        let byte = self.shr32(a, 8 * j);
        op!(_mm256_cvtepi32_ps(_mm256_and_si256(byte, _mm256_set1_epi32(255))))
    }
    #[inline(always)]
    fn signed_byte(self, a: __m256i, j: usize) -> __m256 {
        // Shifts the byte to the top, then back down with its sign.
        let up = self.shl32(a, 24 - 8 * j);
        op!(_mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(up)))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn neg(self, a: __m256) -> __m256 {
        op!(_mm256_sub_ps(_mm256_setzero_ps(), a))
    }
}

/// 16 bytes at `at` of rows `i` and `i + 4`, at any alignment.
///
/// # Safety
/// The processor has the features; the bytes are readable.
#[inline(always)]
unsafe fn pair(strip: Strip, i: usize, at: usize) -> __m256i {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        let low = _mm_loadu_si128(strip.at(i, at).cast());
        let high = _mm_loadu_si128(strip.at(i + 4, at).cast());
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
    }
}
