//! Sixteen f32 lanes on each instruction set, with the same order of operations.
//!
//! A kernel is written once over [`Simd`] and called through [`vectorize!`], which compiles it for each level. All
//! levels fuse multiply-adds and reduce by the same tree, so they give the same bits. On the portable level a fused
//! operation may be a library call: that level is for other processors, and the reference for the other levels.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::f16;

use super::isa::{Isa, Kernels};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// An instruction set of this processor. A value of an implementing type proves that the processor has it.
pub trait Simd: Copy + Send + Sync {
    /// Sixteen f32.
    type V: Copy;
    /// Vectors that a loop can keep as sums in registers.
    const SUMS: usize;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    fn load_f16(self, from: &[f16; LANES]) -> Self::V;
    fn load_i8(self, from: &[i8; LANES]) -> Self::V;
    /// Rounds to nearest, ties to even, as `half` does.
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// If either lane is NaN, the result is the lane of `b`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// If either lane is NaN, the result is the lane of `b`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integers `n` in -126..=127.
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V;
    /// Adds lanes i and i + 8, then i and i + 4, and so on.
    fn reduce_add(self, v: Self::V) -> f32;
    /// The greatest lane.
    fn reduce_max(self, v: Self::V) -> f32;

    /// `e^x` within 2 units in the last place for x in -87..=88; other x are clamped to these ends.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // Cody-Waite: x = n ln 2 + r with |r| <= ln 2 / 2, then the Taylor polynomial to r^7 / 7!. Its remainder is
        // below 2^-28 in this range.
        let s = self;
        let x = s.min(s.splat(88.0), s.max(s.splat(-87.0), x));
        let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
        let minus_n = s.sub(s.splat(0.0), n);
        let r = s.mul_add(minus_n, s.splat(0.693_359_4), x); // ln 2 to 10 bits, so that n times it is exact
        let r = s.mul_add(minus_n, s.splat(-2.121_944_4e-4), r);
        let mut p = s.splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = s.mul_add(p, r, s.splat(c));
        }
        s.scale2(p, n)
    }
}

/// Plain Rust, for any processor.
#[derive(Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = [f32; LANES];
    const SUMS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::V {
        from.map(f16::to_f32)
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::V {
        from.map(f32::from)
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [f16; LANES]) {
        *to = v.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale2(self, a: Self::V, n: Self::V) -> Self::V {
        zip(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn reduce_add(self, mut v: Self::V) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] += v[i + half];
            }
        }
        v[0]
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
}

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// An instruction set chosen at run time.
#[derive(Clone, Copy)]
pub enum Level {
    /// Any processor.
    Portable(Portable),
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
}

impl Level {
    /// The level that goes with `kernels`.
    pub fn of(kernels: Kernels) -> Self {
        let level = match kernels.isa() {
            Isa::Portable => None,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect().map(Self::Neon),
            _ => None,
        };
        level.unwrap_or(Self::Portable(Portable))
    }
}

/// Defines `$name(level, args)`, which calls the generic `$body(simd, args)` compiled for the level.
///
/// `$body` must be `#[inline(always)]`, or it is not compiled with the instructions of its caller.
macro_rules! vectorize {
    ($(#[$meta:meta])* $vis:vis fn $name:ident = $body:path, ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        $(#[$meta])*
        #[allow(unsafe_code)] // for the calls below; each has its proof
        $vis fn $name(level: $crate::backend::cpu::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(simd: $crate::backend::cpu::simd::Avx2, $($arg: $ty),*) $(-> $ret)? {
                $body(simd, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma,f16c")]
            fn avx512(simd: $crate::backend::cpu::simd::Avx512, $($arg: $ty),*) $(-> $ret)? {
                $body(simd, $($arg),*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            fn neon(simd: $crate::backend::cpu::simd::Neon, $($arg: $ty),*) $(-> $ret)? {
                $body(simd, $($arg),*)
            }
            match level {
                $crate::backend::cpu::simd::Level::Portable(simd) => $body(simd, $($arg),*),
                // SAFETY: the token exists only where these features were detected.
                #[cfg(target_arch = "x86_64")]
                $crate::backend::cpu::simd::Level::Avx2(simd) => unsafe { avx2(simd, $($arg),*) },
                // SAFETY: the token exists only where these features were detected.
                #[cfg(target_arch = "x86_64")]
                $crate::backend::cpu::simd::Level::Avx512(simd) => unsafe { avx512(simd, $($arg),*) },
                // SAFETY: the token exists only where this feature was detected.
                #[cfg(target_arch = "aarch64")]
                $crate::backend::cpu::simd::Level::Neon(simd) => unsafe { neon(simd, $($arg),*) },
            }
        }
    };
}
pub(crate) use vectorize;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Every level of this processor.
    pub(crate) fn levels() -> Vec<(&'static str, Level)> {
        let kernels = Isa::ALL.into_iter().filter_map(|isa| Kernels::new(isa).ok());
        kernels.map(|kernels| (kernels.isa().name(), Level::of(kernels))).collect()
    }

    #[inline(always)]
    fn exp_lanes<S: Simd>(s: S, x: &mut [f32; LANES]) {
        let v = s.load(x);
        s.store(s.exp(v), x);
    }
    vectorize!(fn exp16 = exp_lanes, (x: &mut [f32; LANES]));

    #[inline(always)]
    fn sums<S: Simd>(s: S, x: &[f32; LANES]) -> (f32, f32) {
        (s.reduce_add(s.load(x)), s.reduce_max(s.load(x)))
    }
    vectorize!(fn reduce16 = sums, (x: &[f32; LANES]) -> (f32, f32));

    #[inline(always)]
    fn halves<S: Simd>(s: S, bits: &[f16; LANES]) -> ([f32; LANES], [f16; LANES]) {
        let mut wide = [0.0; LANES];
        s.store(s.load_f16(bits), &mut wide);
        let mut back = [f16::ZERO; LANES];
        s.store_f16(s.load(&wide), &mut back);
        (wide, back)
    }
    vectorize!(fn halves16 = halves, (bits: &[f16; LANES]) -> ([f32; LANES], [f16; LANES]));

    #[test]
    fn exp_is_within_two_units_on_every_level() {
        for (name, level) in levels() {
            for i in (-8_700_000i32..=8_800_000).step_by(997) {
                let x = i as f32 * 1e-5;
                let mut lanes = [x; LANES];
                exp16(level, &mut lanes);
                let want = f64::from(x).exp();
                // Half a unit is at most 2^-24 of the value, at the low end of a binade; two units are 2^-22.
                assert!((f64::from(lanes[3]) - want).abs() <= want * 2f64.powi(-22), "{name} exp({x})");
            }
            let mut ends = [f32::NEG_INFINITY; LANES];
            ends[1] = f32::NAN;
            ends[2] = 1e30;
            exp16(level, &mut ends);
            assert!(
                ends[0] > 0.0 && ends[0] < 1.7e-38 && ends[1].is_nan() && ends[2].is_finite(),
                "{name} {ends:?}"
            );
        }
    }

    #[test]
    fn reductions_agree_bit_for_bit() {
        let x: [f32; LANES] = std::array::from_fn(|i| ((i * 7919 + 13) % 101) as f32 / 7.0 - 5.0);
        let results: Vec<_> = levels().iter().map(|&(_, level)| reduce16(level, &x)).collect();
        assert!(results.iter().all(|&r| r == results[0]), "{results:?}");
        assert_eq!(results[0].1, x.iter().copied().fold(f32::MIN, f32::max));
    }

    #[test]
    fn half_conversions_are_those_of_half_on_every_pattern() {
        for (name, level) in levels() {
            for first in (0..=u16::MAX).step_by(LANES) {
                let bits: [f16; LANES] = std::array::from_fn(|i| f16::from_bits(first + i as u16));
                let (wide, back) = halves16(level, &bits);
                for (i, half) in bits.into_iter().enumerate() {
                    if half.is_nan() {
                        assert!(wide[i].is_nan() && back[i].is_nan(), "{name} {:#x}", half.to_bits());
                    } else {
                        assert_eq!(
                            wide[i].to_bits(),
                            half.to_f32().to_bits(),
                            "{name} {:#x}",
                            half.to_bits()
                        );
                        assert_eq!(back[i].to_bits(), half.to_bits(), "{name} {:#x}", half.to_bits());
                    }
                }
            }
        }
    }
}
