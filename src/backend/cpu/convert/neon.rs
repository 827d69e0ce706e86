//! NEON conversions, eight values at a time.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

/// Four f16 as f32, exact. The compiler's own name of this instruction is newer than its type.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn widen(halves: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: the caller's promise; the instruction touches nothing but these registers.
    unsafe {
        asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    floats
}

/// Four f32 rounded to f16, ties to even: the mode that Rust keeps FPCR in.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn narrow(floats: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: as above.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {floats:v}.4s",
            halves = lateout(vreg) halves,
            floats = in(vreg) floats,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    halves
}

/// See [`super::Kernels::f16_to_f32`]. Lengths are equal.
pub(super) fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (s, d) in src.iter().zip(dst) {
        // SAFETY: NEON is part of aarch64. `s` is 8 f16 of 2 bytes, `d` is 8 f32.
        unsafe {
            let halves = vld1q_u16(s.as_ptr().cast());
            vst1q_f32(d.as_mut_ptr(), widen(vget_low_u16(halves)));
            vst1q_f32(d.as_mut_ptr().add(4), widen(vget_high_u16(halves)));
        }
    }
    dst_tail.iter_mut().zip(src_tail).for_each(|(d, s)| *d = s.to_f32());
}

/// See [`super::Kernels::f32_to_f16`]. Lengths are equal.
pub(super) fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
    let (src, src_tail) = src.as_chunks::<8>();
    let (dst, dst_tail) = dst.as_chunks_mut::<8>();
    for (s, d) in src.iter().zip(dst) {
        // SAFETY: NEON is part of aarch64. `s` is 8 f32, `d` is 8 f16 of 2 bytes.
        unsafe {
            let halves = [narrow(vld1q_f32(s.as_ptr())), narrow(vld1q_f32(s.as_ptr().add(4)))];
            vst1q_u16(d.as_mut_ptr().cast(), vcombine_u16(halves[0], halves[1]));
        }
    }
    dst_tail.iter_mut().zip(src_tail).for_each(|(d, s)| *d = f16::from_f32(*s));
}
