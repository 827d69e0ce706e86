//! The instruction set of the kernels: detected once, passed on as a value.

use std::str::FromStr;

/// Instruction set of a kernel family. Results do not depend on it, because every family sums in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, for any processor.
    Portable,
    /// AVX2 with FMA and F16C: x86-64 processors since 2013.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI: Intel since 2019, AMD since Zen 4.
    Avx512Vnni,
    /// NEON with dot products (`sdot`): Neoverse N1 and later, Apple M1 and later.
    Neon,
}

/// Errors of choosing an instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The processor lacks the instruction set.
    #[error("this processor has no {wanted}; its best instruction set is {best}")]
    Missing {
        /// The requested set.
        wanted: &'static str,
        /// The best available set.
        best: &'static str,
    },
    /// The name is unknown.
    #[error("unknown instruction set {0:?}: give portable, avx2, avx512vnni or neon")]
    Unknown(String),
}

impl Isa {
    /// All of them, plainest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512Vnni, Self::Neon];

    /// Name, as in configuration and `status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512Vnni => "avx512vnni",
            Self::Neon => "neon",
        }
    }

    /// Whether the processor and the operating system support it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            _ => false,
        }
    }

    /// The best instruction set of this processor.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| IsaError::Unknown(name.to_owned()))
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The kernels of one instruction set. A value proves that the processor has that set: the only field is private and
/// set after detection. Every SIMD call relies on this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

impl Kernels {
    /// Kernels of the best available instruction set.
    pub fn detect() -> Self {
        Self { isa: Isa::detect() }
    }

    /// Kernels of `isa`.
    ///
    /// # Errors
    /// [`IsaError::Missing`] when this processor lacks it.
    pub fn new(isa: Isa) -> Result<Self, IsaError> {
        if isa.is_available() {
            Ok(Self { isa })
        } else {
            Err(IsaError::Missing { wanted: isa.name(), best: Isa::detect().name() })
        }
    }

    /// Its instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_unknown_ones_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert_eq!("sse9".parse::<Isa>(), Err(IsaError::Unknown("sse9".to_owned())));
    }

    #[test]
    fn kernels_exist_exactly_for_what_the_processor_has() {
        for isa in Isa::ALL {
            assert_eq!(Kernels::new(isa).is_ok(), isa.is_available(), "{isa}");
        }
        assert!(Kernels::detect().isa().is_available());
    }
}
