//! f32 activations: 16 columns per vector, with sums of several weight rows and activation rows at once.

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::floats::{FloatKernels, ROWS, Tile};
use crate::backend::cpu::thresholds::AVX512;
use crate::tensor::DType;

/// The AVX-512 kernels.
pub(super) struct Floats;

impl FloatKernels for Floats {
    const TILE: usize = AVX512.float_tile;

    unsafe fn multiply(dtype: DType, n: usize, tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
        // SAFETY: the caller's promise is this function's.
        unsafe {
            match dtype {
                DType::F16 => multiply_n::<F16>(n, tile, sums),
                DType::BF16 => multiply_n::<Bf16>(n, tile, sums),
                _ => multiply_n::<F32>(n, tile, sums),
            }
        }
    }
}

/// A weight type that converts to f32 in registers.
trait Float {
    const BYTES: usize;

    /// Loads the values that `mask` selects of the 16 at `p`; others are 0.
    ///
    /// # Safety
    /// The processor has the features; the selected values at `p` are readable.
    unsafe fn load(p: *const u8, mask: u16) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load(p: *const u8, mask: u16) -> __m512 {
        // SAFETY: the caller vouches for the masked values; the load skips the others.
        unsafe { _mm512_maskz_loadu_ps(mask, p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load(p: *const u8, mask: u16) -> __m512 {
        // SAFETY: as for F32.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load(p: *const u8, mask: u16) -> __m512 {
        // SAFETY: as for F32.
        let bits = _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) });
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
    }
}

/// # Safety
/// As for [`multiply`] with `N = n`.
unsafe fn multiply_n<T: Float>(n: usize, tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
    // SAFETY: the caller's promise is this function's.
    unsafe {
        match n {
            1 => multiply::<T, 1>(tile, sums),
            2 => multiply::<T, 2>(tile, sums),
            3 => multiply::<T, 3>(tile, sums),
            4 => multiply::<T, 4>(tile, sums),
            5 => multiply::<T, 5>(tile, sums),
            _ => multiply::<T, 6>(tile, sums),
        }
    }
}

/// # Safety
/// The processor has the features. Each of `tile.weights` points at `cols` values of the type. `tile.acts` points at
/// `N` rows of `stride` floats, at least `cols` rounded up to 16 and zero beyond `cols`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply<T: Float, const N: usize>(tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
    let mut acc = [[_mm512_setzero_ps(); N]; ROWS];
    let full = tile.cols / 16 * 16;
    for k in (0..full).step_by(16) {
        tile.prefetch(k * T::BYTES);
        // SAFETY: each row has 16 values from `k` on.
        unsafe { step::<T, N>(tile, k, u16::MAX, &mut acc) };
    }
    if full < tile.cols {
        // SAFETY: the mask selects existing values only; activation rows are padded.
        unsafe { step::<T, N>(tile, full, (1 << (tile.cols - full)) - 1, &mut acc) };
    }
    for row in 0..ROWS {
        for n in 0..N {
            sums[row][n] = add_lanes(acc[row][n]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn step<T: Float, const N: usize>(tile: Tile, k: usize, mask: u16, acc: &mut [[__m512; N]; ROWS]) {
    let mut w = [_mm512_setzero_ps(); ROWS];
    for (row, w) in w.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the masked values from `k` on.
        *w = unsafe { T::load(tile.weights[row].wrapping_add(k * T::BYTES), mask) };
    }
    for n in 0..N {
        // SAFETY: row `n` holds 16 values from `k` on.
        let x = unsafe { _mm512_loadu_ps(tile.acts.wrapping_add(n * tile.stride + k)) };
        for (row, acc) in acc.iter_mut().enumerate() {
            acc[n] = _mm512_fmadd_ps(w[row], x, acc[n]);
        }
    }
}

/// Adds lanes l and l+8, then l+4, l+2, l+1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_lanes(v: __m512) -> f32 {
    let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}
