//! [`Simd`] on AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{LANES, Simd, f16};

/// Rounding mode of vectors: nearest, ties to even, no exceptions.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// AVX2 with FMA and F16C: two vectors of eight.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// `None` if the processor lacks AVX2, FMA or F16C.
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }
}

/// AVX-512 F: one vector of sixteen.
#[derive(Clone, Copy)]
pub struct Avx512(Avx2);

impl Avx512 {
    /// `None` if the processor lacks AVX-512 F or [`Avx2`].
    pub fn detect() -> Option<Self> {
        if is_x86_feature_detected!("avx512f") { Avx2::detect().map(Self) } else { None }
    }
}

/// Applies one operation to both halves.
macro_rules! halves {
    ($f:ident, $($v:expr),+) => {
        // SAFETY: an `Avx2` exists only where `detect` found AVX2, FMA and F16C; the operation touches no memory.
        unsafe { [$f($($v[0]),+), $f($($v[1]),+)] }
    };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const SUMS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: AVX2 was detected; no memory is touched.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        // SAFETY: AVX2 was detected; both loads lie in the array of sixteen.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        // SAFETY: AVX2 was detected; both stores lie in the array of sixteen.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::V {
        let from = from.as_ptr().cast::<__m128i>();
        // SAFETY: F16C was detected; f16 is 16 bits, so both loads lie in the array of sixteen.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))] }
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::V {
        // SAFETY: AVX2 was detected; the load is exactly the array.
        unsafe {
            let all = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(all, all);
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]) {
        let to = to.as_mut_ptr().cast::<__m128i>();
        // SAFETY: F16C was detected; f16 is 16 bits, so both stores lie in the array of sixteen.
        unsafe {
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        halves!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // SAFETY: AVX2 was detected; no memory is touched.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V {
        // SAFETY: AVX2 was detected; no memory is touched.
        let factor = unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n[0]), bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n[1]), bias));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        };
        self.mul(a, factor)
    }
    #[inline(always)]
    fn reduce_add(self, v: Self::V) -> f32 {
        // SAFETY: AVX2 was detected; no memory is touched.
        unsafe {
            let v = _mm256_add_ps(v[0], v[1]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        // SAFETY: AVX2 was detected; no memory is touched.
        unsafe {
            let v = _mm256_max_ps(v[0], v[1]);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<1>(v, v)))
        }
    }
}

/// Applies one operation to the vector.
macro_rules! whole {
    ($f:ident, $($v:expr),+) => {
        // SAFETY: an `Avx512` exists only where `detect` found AVX-512 F; the operation touches no memory.
        unsafe { $f($($v),+) }
    };
}

impl Avx512 {
    #[inline(always)]
    fn split(v: __m512) -> [__m256; 2] {
        let high = whole!(_mm512_shuffle_f32x4, v, v);
        // SAFETY: AVX-512 F was detected; no memory is touched.
        unsafe { [_mm512_castps512_ps256(v), _mm512_castps512_ps256(high)] }
    }
}

#[inline(always)]
unsafe fn _mm512_shuffle_f32x4(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512 F; no memory is touched. Moves lanes 8..16 to the front.
    unsafe { std::arch::x86_64::_mm512_shuffle_f32x4::<0b01_00_11_10>(a, b) }
}

impl Simd for Avx512 {
    type V = __m512;
    const SUMS: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        whole!(_mm512_set1_ps, x)
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        // SAFETY: AVX-512 F was detected; the load is exactly the array.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        // SAFETY: AVX-512 F was detected; the store is exactly the array.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::V {
        // SAFETY: AVX-512 F was detected; f16 is 16 bits, so the load is exactly the array.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::V {
        // SAFETY: AVX-512 F was detected; the load is exactly the array.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]) {
        // SAFETY: AVX-512 F was detected; f16 is 16 bits, so the store is exactly the array.
        unsafe {
            let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_div_ps, a, b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        whole!(_mm512_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        whole!(_mm512_min_ps, a, b)
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // SAFETY: AVX-512 F was detected; no memory is touched. Immediate 0: nearest integer, ties to even.
        unsafe { _mm512_roundscale_ps::<0>(a) }
    }
    #[inline(always)]
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V {
        // SAFETY: AVX-512 F was detected; no memory is touched.
        let factor = unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        };
        self.mul(a, factor)
    }
    #[inline(always)]
    fn reduce_add(self, v: Self::V) -> f32 {
        self.0.reduce_add(Self::split(v))
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        self.0.reduce_max(Self::split(v))
    }
}
