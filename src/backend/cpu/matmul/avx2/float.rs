//! f32 activations: 16 columns per step in two vectors, with sums of several weight rows and activation rows at once.

use std::arch::x86_64::*;

use crate::backend::cpu::matmul::floats::{FloatKernels, ROWS, Tile};
use crate::backend::cpu::thresholds::AVX2;
use crate::tensor::DType;

/// The AVX2 kernels.
pub(super) struct Floats;

impl FloatKernels for Floats {
    const TILE: usize = AVX2.float_tile;

    unsafe fn multiply(dtype: DType, _: usize, tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            match dtype {
                DType::F16 => multiply::<F16>(tile, sums),
                DType::BF16 => multiply::<Bf16>(tile, sums),
                _ => multiply::<F32>(tile, sums),
            }
        }
    }
}

/// A weight type that converts to f32 in registers.
trait Float {
    const BYTES: usize;

    /// Loads 8 values at `p`.
    ///
    /// # Safety
    /// The processor has the features; 8 values at `p` are readable.
    unsafe fn load(p: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller vouches for 8 values; the load needs no alignment.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as for F32.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as for F32.
        let bits = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(p.cast()) });
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }
}

/// # Safety
/// As for [`FloatKernels::multiply`] with one activation row.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<T: Float>(tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
    let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
    let full = tile.cols / 16 * 16;
    for k in (0..full).step_by(16) {
        tile.prefetch(k * T::BYTES);
        let mut weights = tile.weights;
        for p in &mut weights {
            *p = p.wrapping_add(k * T::BYTES);
        }
        // SAFETY: each row has 16 values from `k` on.
        unsafe { step::<T>(weights, tile.acts.wrapping_add(k), &mut acc) };
    }
    if full < tile.cols {
        let mut last = [[0u8; 64]; ROWS];
        for (last, p) in last.iter_mut().zip(tile.weights) {
            let (at, bytes) = (p.wrapping_add(full * T::BYTES), (tile.cols - full) * T::BYTES);
            // SAFETY: fewer than 16 values of at most 4 bytes are left in the row.
            unsafe { std::ptr::copy_nonoverlapping(at, last.as_mut_ptr(), bytes) };
        }
        // SAFETY: each buffer has 16 values; the activation row is padded.
        unsafe { step::<T>(last.each_ref().map(|l| l.as_ptr()), tile.acts.wrapping_add(full), &mut acc) };
    }
    for row in 0..ROWS {
        sums[row][0] = add_lanes(acc[row]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<T: Float>(weights: [*const u8; ROWS], acts: *const f32, acc: &mut [[__m256; 2]; ROWS]) {
    // SAFETY: the caller vouches for 16 values at each pointer.
    unsafe {
        let x = [_mm256_loadu_ps(acts), _mm256_loadu_ps(acts.wrapping_add(8))];
        for row in 0..ROWS {
            let p = weights[row];
            acc[row][0] = _mm256_fmadd_ps(T::load(p), x[0], acc[row][0]);
            acc[row][1] = _mm256_fmadd_ps(T::load(p.wrapping_add(8 * T::BYTES)), x[1], acc[row][1]);
        }
    }
}

/// Adds lanes l and l+8, then l+4, l+2, l+1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_lanes(v: [__m256; 2]) -> f32 {
    let v = _mm256_add_ps(v[0], v[1]);
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}
