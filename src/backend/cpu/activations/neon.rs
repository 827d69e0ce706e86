//! NEON quantisation, one group at a time.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::{A8Mut, FINE_STEPS, GROUP};
use crate::backend::cpu::isa::{Isa, Kernels};

/// See [`super::ActivationRow::quantize`].
pub(super) fn quantize(kernels: Kernels, values: &[[f32; GROUP]], fine_above: f32, out: &mut A8Mut<'_>) {
    debug_assert!(kernels.isa() == Isa::Neon);
    // SAFETY: kernels of this level exist only when NEON was detected (`Kernels::new`, `Kernels::detect`).
    unsafe { quantize_neon(values, fine_above, out) }
}

#[target_feature(enable = "neon")]
fn quantize_neon(values: &[[f32; GROUP]], fine_above: f32, out: &mut A8Mut<'_>) {
    super::quantize(
        values,
        fine_above,
        out,
        |x| amax(x),
        |x, factor, codes| pack(each(scaled(x, factor), |t| vcvtnq_s32_f32(t)), codes),
        |x, factor, codes| encode_fine(x, factor, codes),
    );
}

/// As `vectors.map(apply)`, which is inlined only where the linker optimises.
#[inline(always)]
fn each<A, B>([a, b, c, d, e, f, g, h]: [A; 8], apply: impl Fn(A) -> B) -> [B; 8] {
    [apply(a), apply(b), apply(c), apply(d), apply(e), apply(f), apply(g), apply(h)]
}

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[f32; GROUP]) -> [float32x4_t; 8] {
    // SAFETY: `x` is 32 f32: eight loads of 4.
    each([0, 4, 8, 12, 16, 20, 24, 28], |at| unsafe { vld1q_f32(x.as_ptr().add(at)) })
}

/// Compares the bits without sign as integers.
#[inline]
#[target_feature(enable = "neon")]
fn amax(x: &[f32; GROUP]) -> f32 {
    let [a, b, c, d, e, f, g, h] = each(load(x), |v| vreinterpretq_u32_f32(vabsq_f32(v)));
    let ad = vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d));
    let eh = vmaxq_u32(vmaxq_u32(e, f), vmaxq_u32(g, h));
    f32::from_bits(vmaxvq_u32(vmaxq_u32(ad, eh)))
}

#[inline]
#[target_feature(enable = "neon")]
fn scaled(x: &[f32; GROUP], factor: f32) -> [float32x4_t; 8] {
    each(load(x), |v| vmulq_f32(v, vdupq_n_f32(factor)))
}

#[inline]
#[target_feature(enable = "neon")]
fn encode_fine(x: &[f32; GROUP], factor: f32, codes: &mut [i8; GROUP]) -> [i16; 2] {
    let fine = each(scaled(x, factor), |t| {
        let rest = vsubq_f32(t, vrndnq_f32(t));
        vcvtnq_s32_f32(vmulq_f32(rest, vdupq_n_f32(FINE_STEPS)))
    });
    pack(fine, codes)
}

/// Writes the codes and returns the sums of both halves. Codes fit in bytes, so narrowing drops only copies of signs.
#[inline]
#[target_feature(enable = "neon")]
fn pack([a, b, c, d, e, f, g, h]: [int32x4_t; 8], codes: &mut [i8; GROUP]) -> [i16; 2] {
    let sixteen = |a, b, c, d| {
        let low = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
        let high = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
        vcombine_s8(vmovn_s16(low), vmovn_s16(high))
    };
    let (low, high) = (sixteen(a, b, c, d), sixteen(e, f, g, h));
    // SAFETY: `codes` is 32 bytes.
    unsafe {
        vst1q_s8(codes.as_mut_ptr(), low);
        vst1q_s8(codes.as_mut_ptr().add(16), high);
    }
    [vaddlvq_s8(low), vaddlvq_s8(high)]
}
