//! F16C conversions, eight values at a time.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::f16;

use crate::backend::cpu::isa::{Isa, Kernels};

/// See [`Kernels::f16_to_f32`]. Lengths are equal.
pub(super) fn f16_to_f32(kernels: Kernels, src: &[f16], dst: &mut [f32]) {
    debug_assert!(kernels.isa() >= Isa::Avx2);
    // SAFETY: kernels of this level exist only when AVX2 and F16C were detected (`Kernels::new`, `Kernels::detect`).
    unsafe { f16_to_f32_f16c(src, dst) }
}

/// See [`Kernels::f32_to_f16`]. Lengths are equal.
pub(super) fn f32_to_f16(kernels: Kernels, src: &[f32], dst: &mut [f16]) {
    debug_assert!(kernels.isa() >= Isa::Avx2);
    // SAFETY: as in `f16_to_f32`.
    unsafe { f32_to_f16_f16c(src, dst) }
}

#[target_feature(enable = "avx2,f16c")]
fn f16_to_f32_f16c(src: &[f16], dst: &mut [f32]) {
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (s, d) in src.iter().zip(dst) {
        // SAFETY: `s` is 8 f16 of 2 bytes, `d` is 8 f32; the loads and stores need no alignment.
        unsafe { _mm256_storeu_ps(d.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(s.as_ptr().cast()))) };
    }
    dst_tail.iter_mut().zip(src_tail).for_each(|(d, s)| *d = s.to_f32());
}

#[target_feature(enable = "avx2,f16c")]
fn f32_to_f16_f16c(src: &[f32], dst: &mut [f16]) {
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (s, d) in src.iter().zip(dst) {
        // SAFETY: `s` is 8 f32, `d` is 8 f16 of 2 bytes; the loads and stores need no alignment.
        unsafe {
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(s.as_ptr()));
            _mm_storeu_si128(d.as_mut_ptr().cast(), half);
        }
    }
    dst_tail.iter_mut().zip(src_tail).for_each(|(d, s)| *d = f16::from_f32(*s));
}
