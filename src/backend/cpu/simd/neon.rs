//! [`Simd`] on NEON.

use std::arch::aarch64::*;

use super::{LANES, Simd, f16};
use crate::backend::cpu::convert::neon::{narrow, widen};

/// NEON: four vectors of four.
#[derive(Clone, Copy)]
pub struct Neon(());

impl Neon {
    /// `None` if the processor lacks NEON.
    pub fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// Runs an operation for each quarter `$i` of the vectors.
macro_rules! quarters {
    (|$i:ident| $e:expr) => {
        // SAFETY: a `Neon` exists only where `detect` found NEON. Operations touch no memory but arrays of sixteen, of which
        // a quarter is four elements from `4 * $i` on.
        unsafe {
            [
                {
                    let $i = 0;
                    $e
                },
                {
                    let $i = 1;
                    $e
                },
                {
                    let $i = 2;
                    $e
                },
                {
                    let $i = 3;
                    $e
                },
            ]
        }
    };
}

impl Simd for Neon {
    type V = [float32x4_t; 4];
    const SUMS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: NEON was detected; no memory is touched.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        quarters!(|i| vld1q_f32(from.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        quarters!(|i| vst1q_f32(to.as_mut_ptr().add(4 * i), v[i]));
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::V {
        let from = from.as_ptr().cast::<u16>();
        quarters!(|i| widen(vld1_u16(from.add(4 * i)))) // f16 is 16 bits
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::V {
        // SAFETY: NEON was detected; the load is exactly the array.
        let all = unsafe {
            let all = vld1q_s8(from.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all)));
            [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)]
        };
        quarters!(|i| vcvtq_f32_s32(vmovl_s16(all[i])))
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]) {
        let to = to.as_mut_ptr().cast::<u16>();
        quarters!(|i| vst1_u16(to.add(4 * i), narrow(v[i]))); // f16 is 16 bits
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        quarters!(|i| vfmaq_f32(c[i], a[i], b[i]))
    }
    // `fmax` and `fmin` would give NaN wherever one lane is NaN.
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        quarters!(|i| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        quarters!(|i| vrndnq_f32(a[i]))
    }
    #[inline(always)]
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V {
        quarters!(|i| {
            let exponent = vaddq_s32(vcvtq_s32_f32(n[i]), vdupq_n_s32(127));
            vmulq_f32(a[i], vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        })
    }
    #[inline(always)]
    fn reduce_add(self, v: Self::V) -> f32 {
        // SAFETY: NEON was detected; no memory is touched.
        unsafe {
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        }
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        let [a, b, c, d] = v;
        // SAFETY: NEON was detected; no memory is touched. A NaN gives way to the other lane.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, c), vmaxnmq_f32(b, d))) }
    }
}
