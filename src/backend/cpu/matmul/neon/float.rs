//! f32 activations: 16 columns per step in four vectors, with sums of several weight rows at once.

use std::arch::aarch64::*;

use crate::backend::cpu::convert::neon::widen;
use crate::backend::cpu::matmul::floats::{FloatKernels, ROWS, Tile};
use crate::backend::cpu::thresholds::NEON;
use crate::tensor::DType;

/// The NEON kernels.
pub(super) struct Floats;

const _: () = assert!(NEON.float_tile == 1, "`multiply` takes one activation row");

impl FloatKernels for Floats {
    const TILE: usize = NEON.float_tile;

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

    /// Loads 4 values at `p`.
    ///
    /// # Safety
    /// The processor has NEON; 4 values at `p` are readable.
    unsafe fn load(p: *const u8) -> float32x4_t;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const u8) -> float32x4_t {
        // SAFETY: the caller vouches for 4 values; a load of bytes needs no alignment.
        vreinterpretq_f32_u8(unsafe { vld1q_u8(p) })
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const u8) -> float32x4_t {
        // SAFETY: as for F32.
        unsafe { widen(vreinterpret_u16_u8(vld1_u8(p))) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const u8) -> float32x4_t {
        // SAFETY: as for F32.
        let bits = vreinterpret_u16_u8(unsafe { vld1_u8(p) });
        vreinterpretq_f32_u32(vshll_n_u16::<16>(bits))
    }
}

/// # Safety
/// As for [`FloatKernels::multiply`] with one activation row.
#[target_feature(enable = "neon")]
unsafe fn multiply<T: Float>(tile: Tile, sums: &mut [[f32; 6]; ROWS]) {
    let mut acc = [[vdupq_n_f32(0.0); 4]; ROWS];
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
#[target_feature(enable = "neon")]
unsafe fn step<T: Float>(weights: [*const u8; ROWS], acts: *const f32, acc: &mut [[float32x4_t; 4]; ROWS]) {
    for row in 0..ROWS {
        for (i, acc) in acc[row].iter_mut().enumerate() {
            let p = weights[row].wrapping_add(4 * i * T::BYTES);
            // SAFETY: the caller vouches for 16 values at each pointer.
            let (w, x) = unsafe { (T::load(p), vld1q_f32(acts.add(4 * i))) };
            *acc = vfmaq_f32(*acc, w, x);
        }
    }
}

/// Adds lanes l and l+8, then l+4, l+2, l+1.
#[inline]
#[target_feature(enable = "neon")]
fn add_lanes(v: [float32x4_t; 4]) -> f32 {
    let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
    let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
}
