//! Converts half-precision numbers to f32 and back, many at a time.
//!
//! Results equal those of `half`, except for the payload of NaNs. f16 to f32 makes a signalling NaN quiet and keeps
//! the rest. f32 to f16 rounds to nearest, ties to even; it makes NaNs quiet and keeps the payload's upper bits.

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::f16;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::isa::Isa;
use super::isa::Kernels;

impl Kernels {
    /// `dst[i] = src[i]`, exact.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn f16_to_f32(self, src: &[f16], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len(), "conversion takes as many values as it gives");
        match self.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512Vnni => x86::f16_to_f32(self, src, dst),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::f16_to_f32(src, dst),
            _ => dst.iter_mut().zip(src).for_each(|(d, s)| *d = s.to_f32()),
        }
    }

    /// `dst[i] = src[i]` rounded to nearest, ties to even.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn f32_to_f16(self, src: &[f32], dst: &mut [f16]) {
        assert_eq!(src.len(), dst.len(), "conversion takes as many values as it gives");
        match self.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512Vnni => x86::f32_to_f16(self, src, dst),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::f32_to_f16(src, dst),
            _ => dst.iter_mut().zip(src).for_each(|(d, s)| *d = f16::from_f32(*s)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::isa::Isa;

    fn each(check: impl Fn(Kernels)) {
        Isa::ALL.into_iter().filter_map(|isa| Kernels::new(isa).ok()).for_each(check);
    }

    #[test]
    fn all_f16_patterns_equal_half() {
        let src: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        each(|kernels| {
            let mut dst = vec![0.0; src.len()];
            kernels.f16_to_f32(&src, &mut dst);
            for (s, d) in src.iter().zip(&dst) {
                assert_eq!(d.to_bits(), s.to_f32().to_bits(), "{:04x} on {}", s.to_bits(), kernels.isa());
            }
            let mut back = vec![f16::ZERO; src.len()];
            kernels.f32_to_f16(&dst, &mut back);
            for (s, b) in src.iter().zip(&back) {
                let quiet = if s.is_nan() { s.to_bits() | 0x200 } else { s.to_bits() };
                assert_eq!(b.to_bits(), quiet, "on {}", kernels.isa());
            }
        });
    }

    /// Tests every f16 number's neighbours in f32, the tie to the next number, and the tie's neighbours.
    #[test]
    fn rounding_to_f16_equals_half_at_every_tie() {
        let mut src = Vec::new();
        for bits in 0..=u16::MAX {
            let at = f16::from_bits(bits).to_f32().to_bits();
            for near in [at, at ^ 0x1000, (at ^ 0x1000).wrapping_add(1), (at ^ 0x1000).wrapping_sub(1)] {
                src.push(f32::from_bits(near));
            }
        }
        src.extend([65519.99, 65520.0, f32::MAX, f32::MIN_POSITIVE, 2.98e-8, 2.9802322e-8, 8.9e-8]);
        each(|kernels| {
            let mut dst = vec![f16::ZERO; src.len()];
            kernels.f32_to_f16(&src, &mut dst);
            for (s, d) in src.iter().zip(&dst) {
                assert_eq!(
                    d.to_bits(),
                    f16::from_f32(*s).to_bits(),
                    "{:08x} on {}",
                    s.to_bits(),
                    kernels.isa()
                );
            }
        });
    }

    #[test]
    fn short_and_ragged_lengths() {
        each(|kernels| {
            for n in 0..40 {
                let src: Vec<f32> = (0..n).map(|i| i as f32 * 0.37 - 3.0).collect();
                let mut half = vec![f16::ZERO; n];
                let mut back = vec![f32::NAN; n];
                kernels.f32_to_f16(&src, &mut half);
                kernels.f16_to_f32(&half, &mut back);
                let want: Vec<f32> = src.iter().map(|&v| f16::from_f32(v).to_f32()).collect();
                assert_eq!(back, want);
            }
        });
    }
}
